"""A communicator's calls as functions: on the one communicator of the group and the device of `x`.

`Communicator.for_group` makes it, with default settings, when the first call needs it, which is
collective then. Arguments, results and errors are those of the methods.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from allnorm.communicator import Communicator, resolve_group
from allnorm.core import arguments, traced
from allnorm.core.shortcuts import is_traced
from allnorm.quant import DEFAULT_QUANT, Quant, QuantizedNorm

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    Group = dist.ProcessGroup | DeviceMesh | None
_NUMERICS = "rounded"  # of communicators that are made by default


class _Member(NamedTuple):
    """What a traced call needs of a communicator, which need not be there yet."""

    name: str
    rank: int
    world_size: int


def _member(group: Group) -> _Member:
    resolved = resolve_group(group)
    return _Member(resolved.group_name, dist.get_rank(resolved), dist.get_world_size(resolved))


# As torch.compiler.assume_constant_result() says it, for which torch loads all of its compiler.
_member._dynamo_marked_constant = True  # type: ignore[attr-defined]


def all_reduce(
    x: torch.Tensor,
    *,
    algorithm: str = "auto",
    out: torch.Tensor | None = None,
    group: Group = None,
) -> torch.Tensor:
    """Sum of all ranks' `x`: `Communicator.all_reduce`.

    Args:
        x: [..., hidden_size], float32, float16 or bfloat16.
        algorithm: "auto", "one_shot", "two_shot" or "unfused".
        out: result, like `x`; may be `x` itself.
        group: process group, or DeviceMesh of one dimension; None is the default group.
    """
    if is_traced(x):
        return traced.all_reduce(_member(group), x, algorithm, out)
    return _of(group, x).all_reduce(x, algorithm=algorithm, out=out)


def all_reduce_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    *,
    weight_bias: float = 0.0,
    numerics: str | None = None,
    algorithm: str = "auto",
    residual_sharded: bool = False,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    group: Group = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All-reduce, residual add and RMSNorm: `Communicator.all_reduce_add_rms_norm`.

    Args:
        x: [..., hidden_size], float32, float16 or bfloat16, this rank's partial sum.
        residual: like `x`, the same values on every rank; None adds nothing.
        weight: [hidden_size], dtype of `x` or float32.
        eps: added to the mean square, as float32.
        weight_bias: added to the weight in float32.
        numerics: "rounded" (as None), "unrounded", "transformers" or "vllm".
        algorithm: "auto", "one_shot", "two_shot" or "unfused".
        residual_sharded: `residual` and `residual_out` are this rank's rows only.
        out: preallocated `normed`; may be `x` itself.
        residual_out: preallocated `residual_out`; may be `residual` itself.
        group: process group, or DeviceMesh of one dimension; None is the default group.

    Returns:
        (normed, residual_out).
    """
    if is_traced(x):
        norm = (eps, weight_bias, numerics or _NUMERICS, residual_sharded)
        return traced.all_reduce_add_rms_norm(
            _member(group), x, residual, weight, norm, algorithm, out, residual_out
        )
    return _of(group, x).all_reduce_add_rms_norm(
        *(x, residual, weight, eps),
        weight_bias=weight_bias,
        numerics=numerics,
        algorithm=algorithm,
        residual_sharded=residual_sharded,
        out=out,
        residual_out=residual_out,
    )


def all_reduce_add_rms_norm_quant(
    x: torch.Tensor,
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
    quantized_out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    normed_out: torch.Tensor | None = None,
    group: Group = None,
) -> QuantizedNorm:
    """The same with quantisation to FP8: `Communicator.all_reduce_add_rms_norm_quant`.

    Args:
        x: [..., hidden_size], float32, float16 or bfloat16, this rank's partial sum.
        residual: like `x`, the same values on every rank; None adds nothing.
        weight: [hidden_size], dtype of `x` or float32.
        eps: added to the mean square, as float32.
        quant: `Fp8PerGroup`, `Fp8PerToken` or `Fp8PerTensor`.
        return_normed: whether the rows before quantisation are wanted too.
        weight_bias: added to the weight in float32.
        numerics: "rounded" (as None), "unrounded", "transformers" or "vllm".
        algorithm: "auto", "one_shot", "two_shot" or "unfused".
        residual_sharded: `residual` and `residual_out` are this rank's rows only.
        quantized_out: preallocated `quantized`.
        scale_out: preallocated `scale`, as `allnorm.quant.empty_scale` makes it.
        residual_out: preallocated `residual`; may be the given `residual` itself.
        normed_out: preallocated `normed`; may be `x` itself.
        group: process group, or DeviceMesh of one dimension; None is the default group.

    Returns:
        QuantizedNorm(quantized, scale, residual, normed).
    """
    if is_traced(x):
        norm = (eps, weight_bias, numerics or _NUMERICS, residual_sharded)
        memory = (quantized_out, scale_out, residual_out, normed_out)
        wants_normed = return_normed or normed_out is not None
        return traced.all_reduce_add_rms_norm_quant(
            _member(group), x, residual, weight, norm, quant, wants_normed, algorithm, memory
        )
    return _of(group, x).all_reduce_add_rms_norm_quant(
        *(x, residual, weight, eps, quant, return_normed),
        weight_bias=weight_bias,
        numerics=numerics,
        algorithm=algorithm,
        residual_sharded=residual_sharded,
        quantized_out=quantized_out,
        scale_out=scale_out,
        residual_out=residual_out,
        normed_out=normed_out,
    )


def all_gather_rows(
    residual_shard: torch.Tensor,
    num_tokens: int,
    *,
    algorithm: str = "auto",
    out: torch.Tensor | None = None,
    group: Group = None,
) -> torch.Tensor:
    """All ranks' rows of a sharded residual: `Communicator.all_gather_rows`.

    Args:
        residual_shard: this rank's rows, [hi - lo, hidden_size] of `row_shard(num_tokens)`.
        num_tokens: rows in all.
        algorithm: "auto", "two_shot" or "unfused".
        out: result, [num_tokens, hidden_size].
        group: process group, or DeviceMesh of one dimension; None is the default group.
    """
    if is_traced(residual_shard):
        return traced.all_gather_rows(_member(group), residual_shard, num_tokens, algorithm, out)
    comm = _of(group, residual_shard)
    return comm.all_gather_rows(residual_shard, num_tokens, algorithm=algorithm, out=out)


def row_shard(num_tokens: int, *, group: Group = None) -> tuple[int, int]:
    """This rank's rows of a sharded residual, lo to hi - 1. Pure, not collective.

    Args:
        num_tokens: rows in all: the product of the leading dimensions of `x`.
        group: process group, or DeviceMesh of one dimension; None is the default group.
    """
    arguments.check_count("num_tokens", num_tokens)
    member = _member(group)
    return arguments.row_shard(num_tokens, member.world_size, member.rank)


def _of(group: Group, x: Any) -> Communicator:
    """The communicator of a call; one of `x` that is no tensor is refused by the call itself."""
    device = x.device if isinstance(x, torch.Tensor) else None
    return Communicator.for_group(group, device)
