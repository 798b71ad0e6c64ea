"""Calls as tracers see them: one operator, and a copy into each result that was preallocated.

Under torch.compile, torch.export, make_fx, any other dispatch mode, and for fake tensors; under
torch.jit.trace and in the transforms of torch.func, too. What can
be told from shapes and dtypes is refused; memory that is shared cannot be seen and needs no
refusal, since results are copied after the call.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch

from allnorm.core import arguments, tensors
from allnorm.core.arguments import Like
from allnorm.core.call import Call, join_scale, op_boundary
from allnorm.core.shards import row_shard
from allnorm.quant import (
    Quant,
    QuantizedNorm,
    from_op_results,
    op_arguments,
    quantized_dtype,
    quantized_shape,
)

_Tensor = torch.Tensor
Boundary = tuple[tuple[_Tensor | None, ...], tuple[Any, ...]]
"""The last two results of call.split_boundary()."""


class _Ranks(Protocol):
    """A communicator, as far as a traced call knows it."""

    @property
    def name(self) -> str:
        """That an operator takes."""

    @property
    def rank(self) -> int:
        """Of this process."""

    @property
    def world_size(self) -> int:
        """How many ranks there are."""


def all_reduce(ranks: _Ranks, x: _Tensor, algorithm: str, out: _Tensor | None) -> _Tensor:
    """As `Communicator.all_reduce`."""
    arguments.check_algorithm(algorithm)
    _check("out", out, Like.rows(x, None))
    return _into(out, torch.ops.allnorm.all_reduce(x, ranks.name, algorithm))


def all_reduce_add_rms_norm(
    ranks: _Ranks,
    x: _Tensor,
    residual: _Tensor | None,
    weight: _Tensor | None,
    norm: tuple[Any, ...],
    algorithm: str,
    boundary: Boundary,
    out: _Tensor | None,
    residual_out: _Tensor | None,
) -> tuple[Any, _Tensor]:
    """As the method; `norm`: eps, weight_bias, numerics, residual_sharded."""
    arguments.check_algorithm(algorithm)
    tensors.check_all_fake(x=x, residual=residual, weight=weight)
    like = _like_sum(x, boundary)
    rows = _rows(ranks, like) if norm[3] else None
    _check("out", out, like)
    _check("residual_out", residual_out, _like_residual(like, rows))
    normed, summed = torch.ops.allnorm.all_reduce_add_rms_norm(
        *(x, residual, weight, *norm[:3], ranks.name, norm[3]),
        *(rows if residual is None else None, algorithm, *op_boundary(*boundary)),
    )
    return None if weight is None else _into(out, normed), _into(residual_out, summed)


def all_reduce_add_rms_norm_quant(
    ranks: _Ranks,
    x: _Tensor,
    residual: _Tensor | None,
    weight: Any,
    norm: tuple[Any, ...],
    quant: Quant,
    return_normed: bool,
    algorithm: str,
    boundary: Boundary,
    memory: tuple[_Tensor | None, ...],
) -> QuantizedNorm:
    """As the method; `memory`: for each result, in the order in which they are returned."""
    eps, weight_bias, numerics, sharded = norm
    quantized_out, scale_out, residual_out, normed_out = memory
    arguments.check_algorithm(algorithm)
    if scale_out is not None:
        raise ValueError(
            "scale_out in a call that is traced: expected None, because padding between its "
            "columns is no part of what a tracer sees. Take the scale that is returned."
        )
    tensors.check_all_fake(x=x, residual=residual, weight=weight)
    like = _like_sum(x, boundary)
    rows = _rows(ranks, like) if sharded else None
    quantized_like = like._replace(
        shape=quantized_shape(quant, like.shape), dtype=quantized_dtype(quant)
    )
    _check("quantized_out", quantized_out, quantized_like)
    _check("residual_out", residual_out, _like_residual(like, rows))
    _check("normed_out", normed_out, like)
    results = torch.ops.allnorm.all_reduce_add_rms_norm_quant(
        *(x, residual, weight, eps, *op_arguments(quant), return_normed, weight_bias, numerics),
        *(ranks.name, sharded, rows if residual is None else None, algorithm),
        *op_boundary(*boundary),
    )
    quantized, scale, summed, normed = from_op_results(results, quant, return_normed)
    if normed is not None:
        normed = _into(normed_out, normed)
    return QuantizedNorm(
        _into(quantized_out, quantized), scale, _into(residual_out, summed), normed
    )


def all_gather_rows(
    ranks: _Ranks, shard: _Tensor, num_tokens: int, algorithm: str, out: _Tensor | None
) -> _Tensor:
    """As `Communicator.all_gather_rows`."""
    arguments.check_algorithm(algorithm)
    source = "num_tokens rows as wide as residual_shard"
    _check("out", out, Like((num_tokens, shard.shape[-1]), shard.dtype, shard.device, source))
    return _into(out, torch.ops.allnorm.all_gather_rows(shard, num_tokens, ranks.name, algorithm))


def as_operator(target: Any, call: Call) -> Any:
    """Makes a call as an operator, for a tracer that sees operators only.

    Args:
        target: the Target of a Dispatcher; its name is the communicator's if the call has peers.
        call: of any kind; nothing is checked yet.

    Returns:
        The results as Dispatcher.call returns them.
    """
    for name, tensor in zip(("x", "residual", "weight"), call.inputs, strict=False):
        if not isinstance(tensor, torch.Tensor) and (tensor is not None or name == "x"):
            tensors.check_kind(name, tensor)  # which says what is wrong
    for name, tensor in zip(Call._fields, call.tensors, strict=False):
        if isinstance(tensor, torch.Tensor):
            tensors.check_layout(name, tensor)
    if call.op == "all_reduce":
        return all_reduce(target, call.x, call.algorithm, call.out)
    if call.op == "all_gather_rows":
        return all_gather_rows(target, call.x, call.num_tokens, call.algorithm, call.out)
    arguments.check_norm_constants(call)
    arguments.check_has_norm(call)
    norm = (float(call.eps), float(call.weight_bias), call.numerics, call.residual_sharded)
    change = (float(call.post_eps), float(call.post_weight_bias), float(call.scale), call.experts)
    boundary = (call.inputs[4:], change)
    if call.op == "all_reduce_add_rms_norm":
        return all_reduce_add_rms_norm(
            *(target, call.x, call.residual, call.weight, norm, call.algorithm, boundary),
            *(call.out, call.residual_out),
        )
    if call.op == "add_rms_norm":
        return add_rms_norm(call.x, call.residual, call.weight, norm, boundary)
    quant = join_scale(call.quant, call.static_scale)
    if call.op == "add_rms_norm_quant":
        wanted = call.return_normed
        return add_rms_norm_quant(call.x, call.residual, call.weight, norm, quant, wanted, boundary)
    return all_reduce_add_rms_norm_quant(
        *(target, call.x, call.residual, call.weight, norm, quant, call.return_normed),
        *(call.algorithm, boundary),
        (call.quantized_out, call.scale_out, call.residual_out, call.out),
    )


def add_rms_norm(
    x: Any,
    residual: _Tensor | None,
    weight: _Tensor | None,
    norm: tuple[Any, ...],
    boundary: Boundary,
) -> tuple[Any, _Tensor]:
    """As the function; `norm` as above."""
    tensors.check_all_fake(x=x, residual=residual, weight=weight)
    normed, summed = torch.ops.allnorm.add_rms_norm(
        x, residual, weight, *norm[:3], *op_boundary(*boundary)
    )
    return (None if weight is None else normed), summed


def add_rms_norm_quant(
    x: Any,
    residual: _Tensor | None,
    weight: Any,
    norm: tuple[Any, ...],
    quant: Quant,
    return_normed: bool,
    boundary: Boundary,
) -> QuantizedNorm:
    """As the function; `norm` as above."""
    eps, weight_bias, numerics, _ = norm
    tensors.check_all_fake(x=x, residual=residual, weight=weight)
    results = torch.ops.allnorm.add_rms_norm_quant(
        *(x, residual, weight, eps, *op_arguments(quant), return_normed),
        *(weight_bias, numerics, *op_boundary(*boundary)),
    )
    return from_op_results(results, quant, return_normed)


def _like_sum(x: _Tensor, boundary: Boundary) -> Like:
    """What the reduced sum is like; `x` may be what experts return."""
    (_, index, *_), (*_, experts) = boundary
    if not experts:
        return Like.rows(x, None)
    num_tokens = (x if index is None else index).shape[0]
    return Like((num_tokens, x.shape[-1]), x.dtype, x.device, "[num_tokens, hidden_size]")


def _rows(ranks: _Ranks, like: Like) -> int:
    """How many rows of a sharded residual this rank has; symbolic if those of the sum are."""
    lo, hi = row_shard(math.prod(like.shape[:-1]), ranks.world_size, ranks.rank)
    return hi - lo


def _like_residual(like: Like, rows: int | None) -> Like:
    if rows is None:
        return like
    # Not in numbers: with a symbolic one in its words, a graph would be that of one size.
    source = "this rank's rows, as row_shard() gives them"
    return Like((rows, like.shape[-1]), like.dtype, like.device, source)


def _check(name: str, result: _Tensor | None, like: Like) -> None:
    if result is not None:
        arguments.check_like(name, result, like)


def _into(memory: _Tensor | None, result: _Tensor) -> _Tensor:
    if memory is None:
        return result
    if tensors.is_batched(result) and not tensors.is_batched(memory):
        raise ValueError(
            "memory for a result of a call under torch.vmap, which is not mapped over while the "
            "call's inputs are: expected None. Take the result that is returned."
        )
    return memory.copy_(result)
