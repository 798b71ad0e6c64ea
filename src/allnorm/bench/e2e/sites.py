"""The arms: implementations of the sites where a layer's partial sums become normed rows.

The rest of the model is equal in all arms.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import allnorm
from allnorm import config
from allnorm.bench.arms import gather_into, sum_experts
from allnorm.bench.case import Case
from allnorm.bench.e2e.models import Transformer
from allnorm.bench.modes import Mode, Shape
from allnorm.bench.peers import Peers
from allnorm.bench.peers.base import Peer
from allnorm.testing import Batch

Normed = tuple[Tensor, Tensor]
"""Normed rows and the new residual."""

Partial = Tensor | allnorm.ExpertSum
"""This rank's partial sums of the result of an attention or MLP."""

Site = Callable[[Partial, Tensor, Tensor, allnorm.PostNorm | None], Normed]
"""Takes this rank's partial sums, the residual, the weight of the norm, and the post norm or None;
returns normed rows and the new residual. May overwrite the first two."""

Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over all ranks; may overwrite it."""


@dataclass(frozen=True)
class Arm:
    """One implementation of the sites."""

    site: Site  # the implementation
    # Context in which a CUDA graph must be captured.
    capturing: Callable[[], AbstractContextManager[Any]] = nullcontext
    foreign: bool = False  # runs another library, whose failure does not fail the command


def make(name: str, comm: allnorm.Communicator, model: Transformer) -> Arm:
    """Returns the arm with that name.

    Names are "allnorm", or that with ":" and an algorithm; "nccl" or "gloo" with "+torch" or
    "+local"; and "local", which does not communicate.
    """
    if name == "local":
        return Arm(_local(model))
    if name.startswith("allnorm"):
        return Arm(fused(comm, model, name.partition(":")[2] or "auto"))
    return Arm((then_local if name.endswith("+local") else then_torch)(all_reduce, model))


def fused(comm: allnorm.Communicator, model: Transformer, algorithm: str) -> Site:
    """Returns the fused call, which updates the residual in place."""
    eps, bias = model.eps, model.weight_bias

    def site(x: Partial, residual: Tensor, weight: Tensor, post: allnorm.PostNorm | None) -> Normed:
        return comm.all_reduce_add_rms_norm(
            *(x, residual, weight, eps),
            weight_bias=bias,
            algorithm=algorithm,
            post_norm=post,
            residual_out=residual,
        )

    return site


def then_torch(reduce: Reduce, model: Transformer) -> Site:
    """Returns a site: sum over experts (if any), all-reduce, PyTorch's add and RMSNorms."""
    eps, bias = model.eps, model.weight_bias
    biased: dict[Tensor, Tensor] = {}

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        if bias:
            if weight not in biased:
                biased[weight] = weight + bias
            weight = biased[weight]
        return F.rms_norm(x, weight.shape, weight, eps)

    def site(x: Partial, residual: Tensor, weight: Tensor, post: allnorm.PostNorm | None) -> Normed:
        reduced = reduce(_summed(x))
        summed = residual.add_(norm(reduced, post.weight) if post else reduced)
        return norm(summed, weight), summed

    return site


def then_local(reduce: Reduce, model: Transformer) -> Site:
    """Returns a site: sum over experts (if any), all-reduce, allnorm's add + norm kernel."""
    local = _local(model)

    def site(x: Partial, residual: Tensor, weight: Tensor, post: allnorm.PostNorm | None) -> Normed:
        return local(reduce(_summed(x)), residual, weight, post)

    return site


def _local(model: Transformer) -> Site:
    """Returns a site without communication: only allnorm's add + norm kernel."""
    eps, bias = model.eps, model.weight_bias

    def site(x: Partial, residual: Tensor, weight: Tensor, post: allnorm.PostNorm | None) -> Normed:
        return allnorm.add_rms_norm(x, residual, weight, eps, weight_bias=bias, post_norm=post)

    return site


def _summed(x: Partial) -> Tensor:
    """Returns this rank's partial sums; the rows of experts are summed by a separate kernel."""
    return x if isinstance(x, Tensor) else sum_experts(x)


def all_reduce(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Sums a tensor in place by `torch.distributed.all_reduce`."""
    dist.all_reduce(x, group=group)
    return x


def yardstick(device: torch.device) -> tuple[str, tuple[Reduce, Reduce]]:
    """Returns two all-reduces that differ only in rounding order, and their description.

    On GPUs they are NCCL's ring and tree. On CPU they are gloo's all-reduce and a sum from the last
    rank to the first, rounded at every step. Collective.
    """
    if device.type == "cpu":
        return "gloo, and a sum in reversed order", (all_reduce, _reversed_sum)
    groups = [_nccl_group(algorithm, device) for algorithm in ("Ring", "Tree")]

    def over(group: dist.ProcessGroup) -> Reduce:
        return lambda x: all_reduce(x, group)

    return "NCCL's ring and tree", (over(groups[0]), over(groups[1]))


def _reversed_sum(x: Tensor) -> Tensor:
    parts = x.new_empty((dist.get_world_size(), *x.shape))
    # As bytes, because not every gloo supports bfloat16.
    gather_into(parts.flatten(0, 1).view(torch.uint8), x.contiguous().view(torch.uint8))
    total = parts[-1]
    for part in reversed(parts[:-1]):
        total = total + part
    return total


def _nccl_group(algorithm: str, device: torch.device) -> dist.ProcessGroup:
    """Creates a group of all ranks with one NCCL algorithm; NCCL reads it at its first call."""
    with config.variable("NCCL_ALGO", algorithm):
        group = dist.new_group(backend="nccl")
        assert group is not None
        all_reduce(torch.ones(1, device=device), group)
        torch.cuda.synchronize(device)
    return group


def peer_arms(
    names: list[str], device: torch.device, dtype: torch.dtype, model: Transformer, max_tokens: int
) -> tuple[Peers, dict[str, Arm], dict[str, str]]:
    """Opens installed libraries. Collective: every rank calls it with equal arguments.

    `names` are of models.PEER_ARMS. `max_tokens` is the number of rows of the largest prefill.

    Returns:
        The libraries, to be closed; the arms that can run; the reason why each other arm cannot.
    """
    fused = [name for name in names if model.post_norm and not name.endswith("+local")]
    missing = dict.fromkeys(fused, "its fused kernel does not support post norms")
    libraries = dict.fromkeys(name.partition("+")[0] for name in names if name not in missing)
    peers = Peers(list(libraries), device, dtype, [Shape(max_tokens, model.hidden_size)])
    arms = {}
    for name in names:
        library, _, local = name.partition("+")
        if library in peers.missing:
            missing.setdefault(name, peers.missing[library])
        elif name not in missing:
            arms[name] = _arm(peers.peer(library), bool(local), model)
    return peers, arms, missing


def _arm(peer: Peer, local: bool, model: Transformer) -> Arm:
    """Returns the arm of one library; for unsupported shapes it runs `nccl+local`."""
    fallback, setting = Arm(then_local(all_reduce, model)), peer.setting
    by_rows: dict[int, Arm] = {}

    def site(x: Partial, residual: Tensor, weight: Tensor, post: allnorm.PostNorm | None) -> Normed:
        x = _summed(x)
        rows = x.shape[0]
        if rows not in by_rows:
            shape = Shape(rows, model.hidden_size, model.eps, model.weight_bias)
            # The tensors of this case are replaced; it has no expected results.
            batches = cast(tuple[Batch, ...], [Batch((x,) * setting.world_size, residual, weight)])
            place = (setting.rank, setting.world_size, setting.dtype, setting.device)
            case = Case(shape, *place, "rounded", batches, ())
            by_rows[rows] = _at_shape(peer, case, local, model) or fallback
        return by_rows[rows].site(x, residual, weight, post)

    def capturing() -> AbstractContextManager[Any]:
        # One context serves all shapes, because it belongs to the library's communicator.
        known = [arm for arm in by_rows.values() if arm is not fallback]
        return known[-1].capturing() if known else fallback.capturing()

    return Arm(site, capturing, foreign=True)


def _at_shape(peer: Peer, case: Case, local: bool, model: Transformer) -> Arm | None:
    """Returns the arm with the library's own choice for this shape; None if unsupported."""
    reason = peer.supports(case, Mode())
    found = [] if reason else peer.reductions(case) if local else peer.fused(case)
    if not found:
        return None
    call, batches = found[0].call, cast(list[Batch], case.batches)

    def reduce(x: Tensor) -> Tensor:
        case.xs[0] = x
        return cast(Tensor, call(0))

    def fused(
        x: Partial, residual: Tensor, weight: Tensor, post: allnorm.PostNorm | None
    ) -> Normed:
        assert post is None
        case.xs[0], batches[0] = x, Batch((), residual, weight)
        normed, summed = call(0)
        return normed, summed

    return Arm(then_local(reduce, model) if local else fused, found[0].capturing)
