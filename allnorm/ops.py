"""The torch operators: schemas, implementations and fakes.

Functional: they return new tensors and alias nothing. What a call does not produce is a tensor of
no elements. A communicator is passed by its name, and a spec of quantisation by its fields, since
an operator's arguments must be traceable.
"""

from __future__ import annotations

import math

import torch

from allnorm.arguments import row_shard
from allnorm.communicator import communicator
from allnorm.local import add_rms_norm, add_rms_norm_quant
from allnorm.quant import DTYPE as FP8
from allnorm.quant import QuantizedNorm, from_op_arguments, scale_geometry

_Tensor = torch.Tensor
_Four = tuple[_Tensor, _Tensor, _Tensor, _Tensor]

_QUANT = (
    "str quant_kind, int group_size, str scale_layout, str scale_format, Tensor? static_scale, "
    "bool return_normed"
)
_library = torch.library.Library("allnorm", "DEF")
_library.define("all_reduce(Tensor x, str comm_name) -> Tensor")
_library.define(
    "all_reduce_add_rms_norm(Tensor x, Tensor? residual, Tensor weight, float eps, "
    "float weight_bias, str numerics, str comm_name, bool residual_sharded=False) "
    "-> (Tensor, Tensor)"
)
_library.define(
    f"all_reduce_add_rms_norm_quant(Tensor x, Tensor? residual, Tensor weight, float eps, {_QUANT},"
    " bool residual_sharded, float weight_bias, str numerics, str comm_name) "
    "-> (Tensor quantized, Tensor scale, Tensor residual, Tensor normed)"
)
_library.define("all_gather_rows(Tensor shard, SymInt num_tokens, str comm_name) -> Tensor")
_library.define(
    "add_rms_norm(Tensor x, Tensor? residual, Tensor weight, float eps, float weight_bias, "
    "str numerics) -> (Tensor, Tensor)"
)
_library.define(
    f"add_rms_norm_quant(Tensor x, Tensor? residual, Tensor weight, float eps, {_QUANT}, "
    "float weight_bias, str numerics) "
    "-> (Tensor quantized, Tensor scale, Tensor residual, Tensor normed)"
)


def _all_reduce(x: _Tensor, comm_name: str) -> _Tensor:
    return communicator(comm_name).all_reduce(x)


def _all_reduce_add_rms_norm(
    x: _Tensor,
    residual: _Tensor | None,
    weight: _Tensor,
    eps: float,
    weight_bias: float,
    numerics: str,
    comm_name: str,
    residual_sharded: bool = False,
) -> tuple[_Tensor, _Tensor]:
    norm = (eps, weight_bias, numerics, residual_sharded)
    normed, summed = communicator(comm_name)._call(x, residual, weight, norm, "auto", None, None)
    assert summed is not None
    return normed, summed


def _all_reduce_add_rms_norm_quant(
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
    residual_sharded: bool,
    weight_bias: float,
    numerics: str,
    comm_name: str,
) -> _Four:
    result = communicator(comm_name).all_reduce_add_rms_norm_quant(
        x,
        residual,
        weight,
        eps,
        from_op_arguments(quant_kind, group_size, scale_layout, scale_format, static_scale),
        return_normed,
        weight_bias=weight_bias,
        numerics=numerics,
        residual_sharded=residual_sharded,
    )
    return _four(result, static_scale)


def _add_rms_norm(
    x: _Tensor,
    residual: _Tensor | None,
    weight: _Tensor,
    eps: float,
    weight_bias: float,
    numerics: str,
) -> tuple[_Tensor, _Tensor]:
    return add_rms_norm(x, residual, weight, eps, weight_bias=weight_bias, numerics=numerics)


def _add_rms_norm_quant(
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
) -> _Four:
    quant = from_op_arguments(quant_kind, group_size, scale_layout, scale_format, static_scale)
    result = add_rms_norm_quant(
        x, residual, weight, eps, quant, return_normed, weight_bias=weight_bias, numerics=numerics
    )
    return _four(result, static_scale)


def _all_gather_rows(shard: _Tensor, num_tokens: int, comm_name: str) -> _Tensor:
    return communicator(comm_name).all_gather_rows(shard, num_tokens)


def _four(result: QuantizedNorm, static_scale: _Tensor | None) -> _Four:
    """An operator may not return an input, nor None."""
    quantized, scale, residual, normed = result
    if static_scale is not None:
        scale = static_scale.new_empty(0)
    return quantized, scale, residual, residual.new_empty(0) if normed is None else normed


for _key in ("CPU", "CUDA"):
    _library.impl("all_reduce", _all_reduce, _key)
    _library.impl("all_reduce_add_rms_norm", _all_reduce_add_rms_norm, _key)
    _library.impl("all_reduce_add_rms_norm_quant", _all_reduce_add_rms_norm_quant, _key)
    _library.impl("all_gather_rows", _all_gather_rows, _key)
    _library.impl("add_rms_norm", _add_rms_norm, _key)
    _library.impl("add_rms_norm_quant", _add_rms_norm_quant, _key)


# ---- fakes ---------------------------------------------------------------------------------------


def _like(x: _Tensor, dtype: torch.dtype | None = None) -> _Tensor:
    return torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)


def _fake_residual(
    x: _Tensor, residual: _Tensor | None, residual_sharded: bool, comm_name: str
) -> _Tensor:
    if not residual_sharded:
        return _like(x)
    if residual is not None:
        return _like(residual)
    comm = communicator(comm_name)
    lo, hi = row_shard(math.prod(x.shape[:-1]), comm.world_size, comm.rank)
    return x.new_empty((hi - lo, x.shape[-1]))


def _fake_quantized(
    x: _Tensor,
    residual: _Tensor,
    quant: tuple[str, int, str, str, _Tensor | None],
    return_normed: bool,
) -> _Four:
    geometry = scale_geometry(from_op_arguments(*quant), math.prod(x.shape[:-1]), x.shape[-1])
    scale = (
        torch.empty(0, dtype=torch.float32, device=x.device)
        if geometry is None
        else geometry.empty(x.device)
    )
    return _like(x, FP8), scale, residual, _like(x) if return_normed else x.new_empty(0)


@torch.library.register_fake("allnorm::all_reduce", lib=_library)
def _(x: _Tensor, comm_name: str) -> _Tensor:
    return _like(x)


@torch.library.register_fake("allnorm::all_reduce_add_rms_norm", lib=_library)
def _(
    x: _Tensor,
    residual: _Tensor | None,
    weight: _Tensor,
    eps: float,
    weight_bias: float,
    numerics: str,
    comm_name: str,
    residual_sharded: bool = False,
) -> tuple[_Tensor, _Tensor]:
    return _like(x), _fake_residual(x, residual, residual_sharded, comm_name)


@torch.library.register_fake("allnorm::all_reduce_add_rms_norm_quant", lib=_library)
def _(
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
    residual_sharded: bool,
    weight_bias: float,
    numerics: str,
    comm_name: str,
) -> _Four:
    summed = _fake_residual(x, residual, residual_sharded, comm_name)
    quant = (quant_kind, group_size, scale_layout, scale_format, static_scale)
    return _fake_quantized(x, summed, quant, return_normed)


@torch.library.register_fake("allnorm::all_gather_rows", lib=_library)
def _(shard: _Tensor, num_tokens: int, comm_name: str) -> _Tensor:
    return shard.new_empty((num_tokens, shard.shape[-1]))


@torch.library.register_fake("allnorm::add_rms_norm", lib=_library)
def _(
    x: _Tensor,
    residual: _Tensor | None,
    weight: _Tensor,
    eps: float,
    weight_bias: float,
    numerics: str,
) -> tuple[_Tensor, _Tensor]:
    return _like(x), _like(x)


@torch.library.register_fake("allnorm::add_rms_norm_quant", lib=_library)
def _(
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
) -> _Four:
    quant = (quant_kind, group_size, scale_layout, scale_format, static_scale)
    return _fake_quantized(x, _like(x), quant, return_normed)
