"""Arms for the kernels of other libraries, if they are installed.

A rank that enters a collective alone hangs. Hence every peer opens in two phases: first the steps
that may fail on one rank only, such as imports and compilations, then the collective step, whose
messages have a time limit. Ranks compare the outcome after each phase. A peer that fails on any
rank is missing on all ranks, with the reason of the first rank that failed.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from allnorm.bench import arms
from allnorm.bench.arms import Arm, Reduction
from allnorm.bench.case import Case
from allnorm.bench.modes import Mode, Shape
from allnorm.bench.peers.base import Peer, Setting
from allnorm.bench.peers.flashinfer import FlashInfer
from allnorm.bench.peers.sglang import Sglang
from allnorm.bench.peers.symm_mem import SymmMem
from allnorm.bench.peers.vllm import Vllm
from allnorm.testing import RankFailedError, agree, all_or_none

REGISTRY: Mapping[str, type[Peer]] = {
    peer.name: peer for peer in (FlashInfer, Sglang, Vllm, SymmMem)
}

_EXCHANGE_SECONDS = 120.0


class Peers:
    """The peers of a benchmark. Collective: every rank creates it with the same arguments.

    `names` are keys of REGISTRY. `device`, `dtype` and `shapes` describe all inputs.

    Attributes:
        missing: reason per peer that cannot be used, by name.
    """

    def __init__(
        self,
        names: Sequence[str],
        device: torch.device,
        dtype: torch.dtype,
        shapes: Sequence[Shape],
    ) -> None:
        self.missing: dict[str, str] = {}
        self._open: dict[str, Peer] = {}
        self._kept: list[list[torch.Tensor]] = []
        if not names:
            return
        group = dist.new_group(
            backend="gloo", timeout=datetime.timedelta(seconds=_EXCHANGE_SECONDS)
        )
        place = (dist.get_rank(), dist.get_world_size(), device)
        setting = Setting(*place, dtype, group, tuple(shapes))
        for name in names:
            peer = REGISTRY[name](setting)
            try:
                reason = agree(all_or_none(peer.missing)) or agree(all_or_none(peer.open) or "")
            except RankFailedError as error:
                reason = str(error)
            if reason:
                self.missing[name] = reason
            else:
                self._open[name] = peer

    def peer(self, name: str) -> Peer:
        """Returns a peer that is not missing."""
        return self._open[name]

    def arms(self, name: str, case: Case, mode: Mode) -> list[Arm] | str:
        """Returns the arms of one peer, or the reason why it has none; equal on every rank."""
        if name in self.missing:
            return f"missing: {self.missing[name]}"
        peer = self._open[name]
        reason = peer.supports(case, mode)
        if reason:
            return reason
        if mode.streams:
            return peer.streams(case, mode) or "no kernel for this mode"
        suffix = "+quant" if mode.quant else ""
        found = peer.fused_quant(case, mode) if mode.quant else []
        for arm in peer.fused(case):
            name = f"{arm.name}+quant"
            then = arms.then_quantize(arm, case, mode, name) if mode.quant else arm
            if not isinstance(then, str):
                found.append(then)
        for reduction in self._reductions(peer, case):
            name = f"{reduction.name}+local{suffix}"
            found.append(arms.then_local_norm(reduction, case, mode, name))
        return found or "no kernel for this mode"

    def _reductions(self, peer: Peer, case: Case) -> list[Reduction]:
        """Returns a peer's all-reduces; if they overwrite inputs, on copies of the inputs.

        The copies live as long as the peer, which may keep them mapped. In graphs they are zeros:
        replays sum sums, which would soon overflow to infinity and slow the norm down.
        """
        if not peer.overwrites_inputs:
            return peer.reductions(case)
        batches = tuple(
            replace(b, xs=tuple(x.clone() if r == case.rank else x for r, x in enumerate(b.xs)))
            for b in case.batches
        )
        copy = replace(case, batches=batches)
        self._kept.append(copy.xs)
        return [
            replace(
                reduction,
                capturing=partial(_zeroed, copy.xs, reduction.capturing),
                inputs=copy.xs,
            )
            for reduction in peer.reductions(copy)
        ]

    def close(self) -> None:
        """Releases what the peers hold. Collective."""
        for peer in self._open.values():
            with contextlib.suppress(Exception):  # an error here must not lose the measurements
                peer.close()
        self._open.clear()
        self._kept.clear()


@contextlib.contextmanager
def _zeroed(
    tensors: Sequence[torch.Tensor], capturing: Callable[[], AbstractContextManager[Any]]
) -> Iterator[None]:
    for tensor in tensors:
        tensor.zero_()
    with capturing():
        yield
