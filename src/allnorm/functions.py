"""A communicator's calls as functions, which use the communicator of the group of `x`.

The first call creates the communicator with `Communicator.for_group` and default settings, so it is
collective. Arguments, results, errors and help() are those of the methods.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from allnorm.communicator import Communicator
from allnorm.core import arguments, shards, traced
from allnorm.core.call import Runner
from allnorm.core.resolve import resolve_group
from allnorm.core.shortcuts import is_intercepted, is_traced
from allnorm.expert_sum import ExpertSum
from allnorm.hyper_connection import HyperConnection, HyperConnectionProjection
from allnorm.post_norm import PostNorm
from allnorm.quant import DEFAULT_QUANT, Quant, QuantizedNorm

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    Group = dist.ProcessGroup | DeviceMesh | None

_Function = TypeVar("_Function", bound=Callable[..., Any])
_GROUP = "    group: process group, or DeviceMesh of one dimension; None: the default group.\n"


def _documented(function: _Function) -> _Function:
    """Copies the docstring of the method with the same name, and adds the argument `group`."""
    text = inspect.getdoc(getattr(Communicator, function.__name__)) or ""
    before, arguments, after = text.partition("Args:\n")
    listed, blank, rest = after.partition("\n\n")
    function.__doc__ = f"{before}{arguments}{listed}\n{_GROUP.rstrip()}{blank}{rest}"
    return function


@_documented
def all_reduce(
    x: torch.Tensor,
    *,
    algorithm: str = "auto",
    out: torch.Tensor | None = None,
    group: Group = None,
) -> torch.Tensor:
    """Calls `Communicator.all_reduce` on the group's communicator."""
    return Communicator.all_reduce(_communicator_of(group, x), x, algorithm=algorithm, out=out)


@_documented
def all_reduce_add_rms_norm(
    x: torch.Tensor | ExpertSum,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    *,
    weight_bias: float = 0.0,
    numerics: str | None = None,
    algorithm: str = "auto",
    residual_sharded: bool = False,
    gather: bool = True,
    post_norm: PostNorm | None = None,
    scale: float = 1.0,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    prefetch: torch.Tensor | None = None,
    group: Group = None,
) -> tuple[Any, torch.Tensor]:
    """Calls `Communicator.all_reduce_add_rms_norm` on the group's communicator."""
    return Communicator.all_reduce_add_rms_norm(
        *(_communicator_of(group, x), x, residual, weight, eps),
        weight_bias=weight_bias,
        numerics=numerics,
        algorithm=algorithm,
        residual_sharded=residual_sharded,
        gather=gather,
        post_norm=post_norm,
        scale=scale,
        out=out,
        residual_out=residual_out,
        prefetch=prefetch,
    )


@_documented
def all_reduce_add_rms_norm_quant(
    x: torch.Tensor | ExpertSum,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    quant: Quant = DEFAULT_QUANT,
    return_normed: bool = False,
    *,
    weight_bias: float = 0.0,
    numerics: str | None = None,
    algorithm: str = "auto",
    residual_sharded: bool = False,
    gather: bool = True,
    post_norm: PostNorm | None = None,
    scale: float = 1.0,
    quantized_out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    normed_out: torch.Tensor | None = None,
    prefetch: torch.Tensor | None = None,
    group: Group = None,
) -> QuantizedNorm:
    """Calls `Communicator.all_reduce_add_rms_norm_quant` on the group's communicator."""
    return Communicator.all_reduce_add_rms_norm_quant(
        *(_communicator_of(group, x), x, residual, weight, eps, quant, return_normed),
        weight_bias=weight_bias,
        numerics=numerics,
        algorithm=algorithm,
        residual_sharded=residual_sharded,
        gather=gather,
        post_norm=post_norm,
        scale=scale,
        quantized_out=quantized_out,
        scale_out=scale_out,
        residual_out=residual_out,
        normed_out=normed_out,
        prefetch=prefetch,
    )


@_documented
def all_gather_rows(
    residual_shard: torch.Tensor,
    num_tokens: int,
    *,
    algorithm: str = "auto",
    out: torch.Tensor | None = None,
    group: Group = None,
) -> torch.Tensor:
    """Calls `Communicator.all_gather_rows` of the group's communicator."""
    comm = _communicator_of(group, residual_shard)
    return Communicator.all_gather_rows(
        comm, residual_shard, num_tokens, algorithm=algorithm, out=out
    )


@_documented
def rms_norm_sharded(
    tensors: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    eps: float,
    weight_bias: float = 0.0,
    out: Sequence[torch.Tensor] | None = None,
    *,
    numerics: str | None = None,
    algorithm: str = "auto",
    group: Group = None,
) -> list[torch.Tensor]:
    """Calls `Communicator.rms_norm_sharded` of the group's communicator."""
    first = tensors[0] if isinstance(tensors, list | tuple) and tensors else None
    return Communicator.rms_norm_sharded(
        *(_communicator_of(group, first), tensors, weights, eps, weight_bias, out),
        numerics=numerics,
        algorithm=algorithm,
    )


@_documented
def all_reduce_hyper_connection(
    x: torch.Tensor | ExpertSum,
    residual: torch.Tensor,
    connection: HyperConnection,
    *,
    algorithm: str = "auto",
    residual_out: torch.Tensor | None = None,
    group: Group = None,
) -> torch.Tensor:
    """Calls `Communicator.all_reduce_hyper_connection` of the group's communicator."""
    return Communicator.all_reduce_hyper_connection(
        *(_communicator_of(group, x), x, residual, connection),
        algorithm=algorithm,
        residual_out=residual_out,
    )


@_documented
def all_reduce_hyper_connection_input(
    x: torch.Tensor | ExpertSum,
    residual: torch.Tensor,
    connection: HyperConnection,
    projection: HyperConnectionProjection,
    weight: torch.Tensor,
    eps: float,
    *,
    weight_bias: float = 0.0,
    numerics: str | None = None,
    algorithm: str = "auto",
    residual_out: torch.Tensor | None = None,
    group: Group = None,
) -> tuple[torch.Tensor, torch.Tensor, HyperConnection]:
    """Calls `Communicator.all_reduce_hyper_connection_input` of the group's communicator."""
    return Communicator.all_reduce_hyper_connection_input(
        *(_communicator_of(group, x), x, residual, connection, projection, weight, eps),
        weight_bias=weight_bias,
        numerics=numerics,
        algorithm=algorithm,
        residual_out=residual_out,
    )


@_documented
def row_shard(num_tokens: int, *, group: Group = None) -> tuple[int, int]:
    """Returns `Communicator.row_shard` for the group; the communicator need not exist."""
    arguments.check_count("num_tokens", num_tokens)
    ranks = _ranks(group)
    return shards.row_shard(num_tokens, ranks.world_size, ranks.rank)


class _Ranks(NamedTuple):
    """The communicator properties that traced calls need; the communicator need not exist."""

    name: str
    rank: int
    world_size: int
    numerics: str = "rounded"  # the default of Communicator

    def _runner(self, x: object) -> Runner:
        """Returns the runner for methods of Communicator that are called on this object."""
        return traced.Operators(self.name, self.rank, self.world_size)


def _ranks(group: Group) -> _Ranks:
    resolved = resolve_group(group)
    return _Ranks(resolved.group_name, dist.get_rank(resolved), dist.get_world_size(resolved))


# Has the effect of torch.compiler.assume_constant_result(), which would import torch's compiler.
_ranks._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _communicator_of(group: Group, x: Any) -> Any:
    """Returns the communicator for a call, or a stand-in while tracing."""
    if isinstance(x, ExpertSum):
        x = x.rows
    if is_traced(x):
        return _ranks(group)
    device = x.device if isinstance(x, torch.Tensor) else None  # the call rejects other types
    return Communicator._for_group(group, device, unless=is_intercepted) or _ranks(group)
