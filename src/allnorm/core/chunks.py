"""Calls to the local kernels on part of a bound call: some of its rows or addends."""

from __future__ import annotations

import ctypes

import torch

from allnorm.core import _native
from allnorm.core.prepared_call import PreparedCall
from allnorm.core.tensors import rows_of

# Addresses in the C call that advance from chunk to chunk, and all fields that differ by chunk.
_MOVED = ("residual", "residual_out", "out", "quantized", "scale", "post", "mix")
ROW_FIELDS = (
    *(*_MOVED, "x", "top_k"),
    *("x_stride", "num_tokens", "num_sources", "source_stride", "scale_padding_rows"),
    "first_scale_row",
)


def own_partial(
    prepared: PreparedCall, library: _native.Library, x: torch.Tensor
) -> tuple[int, torch.Tensor]:
    """Sums any rows of experts; returns a status and this rank's partial sums."""
    call = prepared.native
    if not call.top_k:
        return _native.OK, rows_of(x)
    rows = x.new_empty((prepared.num_tokens, call.hidden_size))
    summing = _native.Call.from_buffer_copy(call)
    for name in ("residual", "weight", "post_weight", "residual_out", "quantized", "scale"):
        setattr(summing, name, None)
    summing.op, summing.quant, summing.flags = _native.ALL_REDUCE, 0, 0
    summing.out, summing.out_stride = rows.data_ptr() or call.x, call.hidden_size
    return int(library.local(ctypes.addressof(summing))), rows


def add(library: _native.Library, stream: int, sources: torch.Tensor) -> torch.Tensor:
    """Adds contiguous float32 `[n, rows, hidden_size]` over the first dimension, in order.

    The library adds them, because it keeps denormals whatever torch's settings are.
    """
    count, rows, hidden_size = sources.shape
    total = sources.new_empty((rows, hidden_size))
    if not total.numel():
        return total
    call = _native.Call(
        struct_bytes=ctypes.sizeof(_native.Call),
        op=_native.ALL_REDUCE,
        dtype=_native.DTYPE["float32"],
        weight_dtype=_native.DTYPE["float32"],
        num_tokens=rows,
        hidden_size=hidden_size,
        x=sources.data_ptr(),
        out=total.data_ptr(),
        x_stride=hidden_size,
        out_stride=hidden_size,
        source_stride=rows * hidden_size,
        num_sources=count,
        stream=stream,
    )
    _native.raise_status(library, int(library.local(ctypes.addressof(call))))
    return total


def results_of(call: _native.Call) -> dict[str, int]:
    """Returns the addresses of a call's residual and results, keyed by field."""
    return {name: getattr(call, name) for name in _MOVED}


def move_results(
    prepared: PreparedCall,
    call: _native.Call,
    saved: dict[str, int],
    row: int,
    residual_row: int,
    width: int,
) -> None:
    """Moves a C call's results to start at `row`, and its residual to start at `residual_row`.

    `row` is an index into all rows, `residual_row` into the residual's rows on this rank. `saved`
    holds the addresses of row 0, and `width` is the number of bytes per element of `x`.
    """
    residual_width = 4 if call.flags & _native.FLOAT32_RESIDUAL else width
    moves = [
        ("residual", residual_row, call.residual_stride, residual_width),
        ("residual_out", residual_row, call.residual_out_stride, residual_width),
        ("out", row, call.out_stride, width),
        ("quantized", row, call.quantized_stride, 1),
        ("post", row, call.post_stride, 4),
        ("mix", row, call.mix_stride, 4),
    ]
    if prepared.scale is not None and prepared.scale.tiles:
        call.first_scale_row = row
    elif prepared.scale is not None:
        moves.append(("scale", row, call.scale_row_stride, prepared.scale.dtype.itemsize))
    for name, index, stride, elem_bytes in moves:
        if saved[name]:
            setattr(call, name, saved[name] + index * stride * elem_bytes)
