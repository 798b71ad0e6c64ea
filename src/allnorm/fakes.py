"""The operators' fakes: what their results are like, from their arguments alone.

Whether the shapes of the arguments fit is checked when the call is made.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from allnorm.quant import from_op_arguments, quantized_dtype, quantized_shape, scale_geometry

_Tensor = torch.Tensor
_Four = tuple[_Tensor, _Tensor, _Tensor, _Tensor]


def _like(x: _Tensor) -> _Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _fake_sum(
    x: _Tensor,
    post_weight: _Tensor | None = None,
    post_eps: float = 0.0,
    post_weight_bias: float = 0.0,
    scale: float = 1.0,
    experts: bool = False,
    expert_index: _Tensor | None = None,
    expert_weights: _Tensor | None = None,
    shared: _Tensor | None = None,
) -> _Tensor:
    """What the sum is like; `x` may be what experts return."""
    if not experts:
        return x
    return x.new_empty(((x if expert_index is None else expert_index).shape[0], x.shape[-1]))


def _fake_residual(
    x: _Tensor, residual: _Tensor | None, residual_sharded: bool, residual_rows: int | None
) -> _Tensor:
    if not residual_sharded:
        return _like(x)
    if residual is not None:
        return _like(residual)
    if residual_rows is None:
        raise ValueError(
            "residual_sharded without a residual, traced: expected residual_rows, the number of "
            "this rank's rows, hi - lo of row_shard()."
        )
    return x.new_empty((residual_rows, x.shape[-1]))


def _fake_quantized(
    x: _Tensor,
    residual: _Tensor,
    quant: tuple[str, int, str, str, _Tensor | None],
    return_normed: bool,
) -> _Four:
    spec = from_op_arguments(*quant)
    geometry = scale_geometry(spec, math.prod(x.shape[:-1]), x.shape[-1])
    rows = torch.empty(quantized_shape(spec, x.shape), dtype=quantized_dtype(spec), device=x.device)
    scale = (
        torch.empty(0, dtype=torch.float32, device=x.device)
        if geometry is None
        else geometry.empty(x.device)
    )
    return rows, scale, residual, _like(x) if return_normed else x.new_empty(0)


def all_reduce(x: _Tensor, comm_name: str, algorithm: str = "auto") -> _Tensor:
    """Of `allnorm::all_reduce`."""
    return _like(x)


def all_reduce_add_rms_norm(
    x: _Tensor,
    residual: _Tensor | None,
    weight: _Tensor | None,
    eps: float,
    weight_bias: float,
    numerics: str,
    comm_name: str,
    residual_sharded: bool = False,
    residual_rows: int | None = None,
    algorithm: str = "auto",
    *boundary: Any,
) -> tuple[_Tensor, _Tensor]:
    """Of `allnorm::all_reduce_add_rms_norm`."""
    x = _fake_sum(x, *boundary)
    summed = _fake_residual(x, residual, residual_sharded, residual_rows)
    return x.new_empty(0) if weight is None else _like(x), summed


def all_reduce_add_rms_norm_quant(
    x: _Tensor,
    residual: _Tensor | None,
    weight: _Tensor,
    eps: float,
    quant_kind: str,
    group_size: int,
    scale_layout: str,
    scale_format: str,
    static_scale: _Tensor | None,
    return_normed: bool,
    weight_bias: float,
    numerics: str,
    comm_name: str,
    residual_sharded: bool = False,
    residual_rows: int | None = None,
    algorithm: str = "auto",
    *boundary: Any,
) -> _Four:
    """Of `allnorm::all_reduce_add_rms_norm_quant`."""
    x = _fake_sum(x, *boundary)
    summed = _fake_residual(x, residual, residual_sharded, residual_rows)
    quant = (quant_kind, group_size, scale_layout, scale_format, static_scale)
    return _fake_quantized(x, summed, quant, return_normed)


def all_gather_rows(
    shard: _Tensor, num_tokens: int, comm_name: str, algorithm: str = "auto"
) -> _Tensor:
    """Of `allnorm::all_gather_rows`."""
    return shard.new_empty((num_tokens, shard.shape[-1]))


def add_rms_norm(
    x: _Tensor,
    residual: _Tensor | None,
    weight: _Tensor | None,
    eps: float,
    weight_bias: float,
    numerics: str,
    *boundary: Any,
) -> tuple[_Tensor, _Tensor]:
    """Of `allnorm::add_rms_norm`."""
    x = _fake_sum(x, *boundary)
    return x.new_empty(0) if weight is None else _like(x), _like(x)


def add_rms_norm_quant(
    x: _Tensor,
    residual: _Tensor | None,
    weight: _Tensor,
    eps: float,
    quant_kind: str,
    group_size: int,
    scale_layout: str,
    scale_format: str,
    static_scale: _Tensor | None,
    return_normed: bool,
    weight_bias: float,
    numerics: str,
    *boundary: Any,
) -> _Four:
    """Of `allnorm::add_rms_norm_quant`."""
    x = _fake_sum(x, *boundary)
    quant = (quant_kind, group_size, scale_layout, scale_format, static_scale)
    return _fake_quantized(x, _like(x), quant, return_normed)
