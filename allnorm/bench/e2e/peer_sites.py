"""Other libraries' kernels at the sites of a model, through the adapters of `bench`.

An adapter binds its calls to the tensors of a `Case`, once per shape. Here every site has tensors
of its own, so the case of a shape holds them in lists, and each call puts its own ones there first.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor

from allnorm.bench.case import Case
from allnorm.bench.e2e import sites
from allnorm.bench.e2e.sites import Arm, Normed
from allnorm.bench.modes import Mode
from allnorm.bench.peers import Peers
from allnorm.bench.peers.base import Peer
from allnorm.bench.shapes import Shape
from allnorm.testing import Batch


class PeerSites:
    """The arms of libraries that can be imported. Collective: the same on every rank.

    `names` are of job.PEER_ARMS, `max_tokens` the rows of the largest prefill.

    Attributes:
        arms: those that can run, by name.
        missing: why an arm cannot, by name.
    """

    def __init__(
        self,
        names: list[str],
        device: torch.device,
        dtype: torch.dtype,
        hidden_size: int,
        max_tokens: int,
        eps: float,
    ) -> None:
        self.arms: dict[str, Arm] = {}
        self.missing: dict[str, str] = {}
        libraries = list(dict.fromkeys(name.partition("+")[0] for name in names))
        self._peers = Peers(libraries, device, dtype, [Shape(max_tokens, hidden_size)])
        for name in names:
            library, _, local = name.partition("+")
            if library in self._peers.missing:
                self.missing[name] = self._peers.missing[library]
            else:
                self.arms[name] = _arm(self._peers.peer(library), bool(local), hidden_size, eps)

    def close(self) -> None:
        """Releases what the libraries hold. Collective."""
        self._peers.close()


def _arm(peer: Peer, local: bool, hidden_size: int, eps: float) -> Arm:
    """One library at the sites; where it has no kernel for so many rows, as `nccl+local`."""
    fallback = Arm(sites.then_local(sites.all_reduce, eps))
    by_rows: dict[int, Arm] = {}

    def site(x: Tensor, residual: Tensor, weight: Tensor) -> Normed:
        rows = x.shape[0]
        if rows not in by_rows:
            shape = Shape(rows, hidden_size, eps)
            case = _case(peer, shape, Batch((x,) * peer.setting.world_size, residual, weight))
            by_rows[rows] = _at_shape(peer, case, local) or fallback
        return by_rows[rows].site(x, residual, weight)

    def capturing() -> AbstractContextManager[Any]:
        # One context for all shapes: it belongs to the library's communicator.
        known = [arm for arm in by_rows.values() if arm is not fallback]
        return known[-1].capturing() if known else fallback.capturing()

    return Arm(site, capturing, foreign=True)


def _case(peer: Peer, shape: Shape, batch: Batch) -> Case:
    """A case whose tensors can be replaced; it has no expected results."""
    setting = peer.setting
    batches = cast(tuple[Batch, ...], [batch])
    place = (setting.rank, setting.world_size, setting.dtype, setting.device)
    return Case(shape, *place, "rounded", batches, ())


def _at_shape(peer: Peer, case: Case, local: bool) -> Arm | None:
    """What the library would choose for this shape; None if it has no kernel for it."""
    reason = peer.supports(case, Mode())
    found = [] if reason else peer.reductions(case) if local else peer.fused(case)
    if not found:
        return None
    call, batches = found[0].call, cast(list[Batch], case.batches)

    def reduce(x: Tensor) -> Tensor:
        case.xs[0] = x
        return cast(Tensor, call(0))

    def fused(x: Tensor, residual: Tensor, weight: Tensor) -> Normed:
        case.xs[0], batches[0] = x, Batch((), residual, weight)
        normed, summed = call(0)
        return normed, summed

    return Arm(sites.then_local(reduce, case.shape.eps) if local else fused, found[0].capturing)
