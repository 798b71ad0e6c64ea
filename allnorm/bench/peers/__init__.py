"""Other libraries' kernels as arms, each where it is installed.

A rank that goes into a collective alone hangs. So what can fail for reasons of one rank's own
(an import, a compilation) comes first and is agreed upon; then the collective part, whose
exchanges have a time limit; then that is agreed upon. What fails is missing on every rank, with
the reason of the first one that failed.
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

from allnorm.cli.bench_modes import Mode
from allnorm.cli.ranks import arms
from allnorm.cli.ranks.arms import Arm, Reduction
from allnorm.cli.ranks.case import Case
from allnorm.cli.ranks.peers.base import Peer, Setting, first_line
from allnorm.cli.ranks.peers.flashinfer import FlashInfer
from allnorm.cli.ranks.peers.sglang import Sglang
from allnorm.cli.ranks.peers.symm_mem import SymmMem
from allnorm.cli.ranks.peers.vllm import Vllm

REGISTRY: Mapping[str, type[Peer]] = {
    peer.name: peer for peer in (FlashInfer, Sglang, Vllm, SymmMem)
}

_EXCHANGE_SECONDS = 120.0


def agree(text: str) -> str:
    """The first words that any rank has to say, the same on all ranks. Collective."""
    texts: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    return next((f"rank {rank}: {said}" for rank, said in enumerate(texts) if said), "")


class Peers:
    """The peers of a benchmark. Collective: every rank makes them with the same arguments.

    Args:
        names: of REGISTRY.
        device: of the tensors.
        dtype: of the tensors.
        max_elems: elements of the largest input.
        max_tokens: rows of the longest one.
        max_hidden_size: columns of the widest one.

    Attributes:
        missing: why a peer cannot take part, by name.
    """

    def __init__(
        self,
        names: Sequence[str],
        device: torch.device,
        dtype: torch.dtype,
        max_elems: int,
        max_tokens: int,
        max_hidden_size: int,
    ) -> None:
        self.missing: dict[str, str] = {}
        self._open: dict[str, Peer] = {}
        self._kept: list[list[torch.Tensor]] = []
        if not names:
            return
        group = dist.new_group(
            backend="gloo", timeout=datetime.timedelta(seconds=_EXCHANGE_SECONDS)
        )
        setting = Setting(
            dist.get_rank(),
            dist.get_world_size(),
            device,
            dtype,
            group,
            max_elems,
            max_tokens,
            max_hidden_size,
        )
        for name in names:
            peer = REGISTRY[name](setting)
            reason = agree(_words_of(peer.missing)) or agree(_words_of(peer.open))
            if reason:
                self.missing[name] = reason
            else:
                self._open[name] = peer

    def peer(self, name: str) -> Peer:
        """One that is not missing."""
        return self._open[name]

    def arms(self, name: str, case: Case, mode: Mode) -> list[Arm] | str:
        """The arms of one peer, or why it has none here. The same on every rank."""
        if name in self.missing:
            return f"missing: {self.missing[name]}"
        peer = self._open[name]
        reason = peer.supports(case, mode)
        if reason:
            return reason
        suffix = "+quant" if mode.quant else ""
        found = peer.fused_quant(case, mode) if mode.quant else []
        for arm in peer.fused(case):
            found.append(
                arms.then_quantize(arm, case, mode, f"{arm.name}+quant") if mode.quant else arm
            )
        for reduction in self._reductions(peer, case):
            name = f"{reduction.name}+local{suffix}"
            found.append(arms.then_norm(reduction, case, mode, name))
        return found or "it has no kernel for this"

    def _reductions(self, peer: Peer, case: Case) -> list[Reduction]:
        """Those of a peer, on inputs of its own if it overwrites them.

        These live as long as the peer, which may keep them mapped. In graphs they are zeros: sums
        of sums would soon be infinite, and a norm of them takes longer.
        """
        if not peer.overwrites_inputs:
            return peer.reductions(case)
        batches = tuple(
            replace(b, xs=tuple(x.clone() if r == case.rank else x for r, x in enumerate(b.xs)))
            for b in case.batches
        )
        own = replace(case, batches=batches)
        self._kept.append(own.xs)
        return [
            replace(reduction, capturing=partial(_zeroed, own.xs, reduction.capturing))
            for reduction in peer.reductions(own)
        ]

    def close(self) -> None:
        """Releases what the peers hold. Collective."""
        for peer in self._open.values():
            with contextlib.suppress(Exception):  # what was measured is worth more than their end
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


def _words_of(step: Callable[[], str | None]) -> str:
    """What a step has to say, or the exception that it raised, in words."""
    try:
        return step() or ""
    except Exception as error:  # noqa: BLE001 - whatever a foreign library raises is its absence
        return first_line(error)
