"""Validates calls and plans, each by the checks of its operator.

`check_alike` checks only properties that are equal on all ranks. Hence either every rank raises or
none does. The functions called `check_own_...` cover properties that may differ per rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from allnorm.core import _native, tensors
from allnorm.core.arguments import (
    MAX_HIDDEN_SIZE,
    Like,
    check_algorithm,
    check_count,
    check_device,
    check_dtype,
    check_experts,
    check_input,
    check_last_dim,
    check_norm_constants,
    check_norms,
    check_own_experts,
    check_quantization,
    check_result,
    check_weight,
    check_width,
    or_float32,
)
from allnorm.core.call import Call
from allnorm.core.slices import Slices
from allnorm.errors import UnsupportedError
from allnorm.expert_sum import ExpertSum
from allnorm.hyper_connection import HyperConnection
from allnorm.quant import check_hidden_size, check_quant


def check_alike(call: Call, device: torch.device) -> None:
    """Raises for errors that all ranks see: wrong constants, dtypes, shapes or devices."""
    if call.op == "all_gather_rows":
        check_count("num_tokens", call.num_tokens)
        check_input("residual_shard", call.x, device)
        return
    if call.slices is not None:
        check_slices(call, device)
        return
    if call.connection is not None:
        check_streams(call, device)
        return
    if call.experts:
        check_experts(call, device)
    else:
        check_input("x", call.x, device)
    if call.has_norm:
        check_norm_constants(call)
        check_norms(call)
    if call.is_quantized:
        check_quantization(call)


def check_slices(call: Call, device: torch.device) -> None:
    """Raises for errors in the tensors of rms_norm_sharded that all ranks see."""
    assert call.slices is not None
    check_norm_constants(call)
    first, total = call.slices.tensors[0], 0
    for number, (x, weight) in enumerate(
        zip(call.slices.tensors, call.slices.weights, strict=True)
    ):
        name = f"tensors[{number}]"
        check_input(name, x, device)
        if x.dtype != first.dtype:
            raise TypeError(f"{name} has dtype {x.dtype}: expected {first.dtype}, as tensors[0].")
        if math.prod(x.shape[:-1]) != math.prod(first.shape[:-1]):
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}: expected as many rows as tensors[0], which "
                f"has shape {tuple(first.shape)}."
            )
        check_weight(f"weights[{number}]", weight, x, "local_size")
        check_device(f"weights[{number}]", weight, device)
        total += x.shape[-1]
    if total > MAX_HIDDEN_SIZE:
        raise UnsupportedError(
            f"tensors with {total} columns in all: expected at most {MAX_HIDDEN_SIZE}. Make one "
            "call for each."
        )


def check_own_slices(call: Call) -> None:
    """Raises for errors in the tensors of rms_norm_sharded that may occur on this rank only."""
    assert call.slices is not None
    for number, (x, weight) in enumerate(
        zip(call.slices.tensors, call.slices.weights, strict=True)
    ):
        check_last_dim(f"tensors[{number}]", x)
        check_last_dim(f"weights[{number}]", weight)
        if call.slices.outs is not None:
            like = Like(x.shape, x.dtype, x.device, f"that of tensors[{number}]")
            check_result(f"out[{number}]", call.slices.outs[number], like)


def check_whole_rows(call: Call, world_size: int) -> None:
    """Raises UnsupportedError for rows of rms_norm_sharded that are too wide in all."""
    assert call.slices is not None
    for number, x in enumerate(call.slices.tensors):
        if x.shape[-1] * world_size > MAX_HIDDEN_SIZE:
            raise UnsupportedError(
                f"tensors[{number}] has {x.shape[-1]} columns on each of {world_size} ranks: "
                f"expected at most {MAX_HIDDEN_SIZE} in all."
            )


def check_streams(call: Call, device: torch.device) -> None:
    """Raises for errors in the tensors of a hyper-connection that all ranks see."""
    if call.experts:
        check_experts(call, device)
    else:
        check_input("x", call.x, device)
    check_stream_kinds(call)
    for name, tensor, dtypes in (
        ("residual", call.residual, {call.x.dtype, torch.float32}),
        ("post", call.post, {torch.float32}),
        ("mix", call.mix, {torch.float32}),
    ):
        assert tensor is not None
        if tensor.dtype not in dtypes:
            expected = "torch.float32"
            if name == "residual":
                expected = f"{call.x.dtype}{or_float32(call.x.dtype)}"
            raise TypeError(f"{name} has dtype {tensor.dtype}: expected {expected}.")
        check_device(name, tensor, device)


def check_stream_kinds(call: Call) -> None:
    """Raises unless all tensors of a hyper-connection are plain tensors."""
    for name, tensor in (("residual", call.residual), ("post", call.post), ("mix", call.mix)):
        tensors.check_kind(name, tensor)


def check_own_streams(call: Call) -> None:
    """Raises for errors in the tensors of a hyper-connection that may occur on this rank only."""
    residual, post, mix = call.residual, call.post, call.mix
    assert residual is not None
    assert post is not None
    assert mix is not None
    if call.experts:
        check_own_experts(call)
    *leading, hidden_size = call.shape
    streams = residual.shape[-2] if residual.dim() > 1 else 0
    if streams not in STREAMS or residual.shape != (*leading, streams, hidden_size):
        raise ValueError(
            f"residual has shape {tuple(residual.shape)}: expected [..., streams, hidden_size] = "
            f"{(*leading, 'streams', hidden_size)} with {STREAMS[0]} to {STREAMS[-1]} streams."
        )
    for name, tensor, shape in (
        ("post", post, (*leading, streams)),
        ("mix", mix, (*leading, streams, streams)),
    ):
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}: expected {shape}.")
    check_last_dim("rows" if call.experts else "x", call.x)
    check_last_dim("residual", residual)
    if call.residual_out is not None:
        like = Like(residual.shape, residual.dtype, residual.device, "that of residual")
        check_result("residual_out", call.residual_out, like)


STREAMS = range(2, _native.MAX_STREAMS + 1)
"""Supported numbers of residual streams."""


def check_planned(
    num_tokens: object,
    hidden_size: Any,
    dtype: torch.dtype,
    residual_dtype: object,
    experts: object,
    streams: object,
    **fields: Any,
) -> Call:
    """Checks the arguments of `Communicator.plan`; returns their call, on the meta device."""
    check_count("num_tokens", num_tokens)
    if streams is not None:
        check_count("streams", streams)
        if streams not in STREAMS:
            raise ValueError(f"streams={streams}: expected {STREAMS[0]} to {STREAMS[-1]}, or None.")
    if isinstance(hidden_size, list | tuple):
        return _check_planned_slices(
            num_tokens, hidden_size, dtype, residual_dtype, experts, streams, fields
        )
    check_count("hidden_size", hidden_size, least=1)
    check_dtype("dtype", dtype)
    check_algorithm(fields["algorithm"])
    check_width("x", hidden_size)
    # An array would compare element by element.
    if residual_dtype is not None and (
        not isinstance(residual_dtype, torch.dtype) or residual_dtype not in (dtype, torch.float32)
    ):
        raise TypeError(
            f"residual_dtype={residual_dtype!r}: expected None, {dtype}{or_float32(dtype)}."
        )
    if not isinstance(experts, bool):
        raise TypeError(f"experts={experts!r}: expected True or False.")
    quant = fields["quant"]
    shape: Any = (num_tokens, 1, hidden_size) if experts else (num_tokens, hidden_size)
    x = torch.empty(shape, dtype=dtype, device="meta")
    residual = None
    if isinstance(residual_dtype, torch.dtype):
        residual = x.new_empty((num_tokens, hidden_size), dtype=residual_dtype)  # type: ignore[arg-type]
    if streams is not None:
        return _planned_streams(x, streams, residual_dtype, fields)
    call = Call(
        op="all_reduce_add_rms_norm" + ("" if quant is None else "_quant"),
        source=ExpertSum(x) if experts else x,
        residual=residual,
        weight=x.new_empty(hidden_size),
        **fields,
    )
    if call.post_weight is not None:
        check_weight("post_norm.weight", call.post_weight, x)
    check_norm_constants(call)
    if quant is not None:
        check_quant(quant)
        check_hidden_size(quant, hidden_size)
    return call


def _planned_streams(
    x: torch.Tensor, streams: Any, residual_dtype: Any, fields: dict[str, Any]
) -> Call:
    """Returns the planned call of a hyper-connection; experts' rows `x` have three dimensions."""
    if any(fields.get(name, usual) != usual for name, usual in _ONLY_OF_NORMS.items()):
        raise ValueError(
            "streams with a quant, a sharded residual, a post norm or a scale: expected none, "
            "because a hyper-connection has no norm and every rank has its streams."
        )
    residual = x.new_empty((x.shape[0], streams, x.shape[-1]), dtype=residual_dtype or x.dtype)
    coefficients = x.new_empty((x.shape[0], streams), dtype=torch.float32)
    return Call(
        op="all_reduce_hyper_connection",
        source=ExpertSum(x) if x.dim() > 2 else x,
        residual=residual,
        algorithm=fields["algorithm"],
        connection=HyperConnection(
            coefficients, coefficients.unsqueeze(-1).expand(-1, -1, streams)
        ),
    )


def _check_planned_slices(
    num_tokens: Any,
    sizes: Sequence[Any],
    dtype: torch.dtype,
    residual_dtype: object,
    experts: object,
    streams: object,
    fields: dict[str, Any],
) -> Call:
    check_dtype("dtype", dtype)
    check_algorithm(fields["algorithm"])
    for number, size in enumerate(sizes):
        check_count(f"hidden_size[{number}]", size, least=1)
        check_width(f"tensors[{number}]", size)
    given = {**fields, "experts": experts, "residual_dtype": residual_dtype, "streams": streams}
    usual = {**_ONLY_OF_NORMS, "experts": False, "residual_dtype": None, "streams": None}
    if any(given.get(name, value) != value for name, value in usual.items()):
        raise ValueError(
            "several hidden sizes with a quant, a residual, a post norm, a scale or experts: "
            "expected none, because these are the tensors of rms_norm_sharded."
        )
    tensors = [torch.empty((num_tokens, size), dtype=dtype, device="meta") for size in sizes]
    slices = Slices.of(tensors, [x.new_empty(x.shape[-1]) for x in tensors], None)
    call = Call(
        op="rms_norm_sharded", source=tensors[0], slices=slices, algorithm=fields["algorithm"]
    )
    check_slices(call, tensors[0].device)
    return call


# Arguments of `plan` that only calls with a norm have, and their defaults.
_ONLY_OF_NORMS = {
    "quant": None,
    "residual_sharded": False,
    "gather": True,
    "return_normed": False,
    "post_norm": None,
    "scale": 1.0,
}
