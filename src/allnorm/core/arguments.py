"""Validates the arguments of a call, one by one; core/checks.py validates whole calls.

`check_own` and the checks of preallocated memory cover properties that may differ per rank, such as
strides. A rank that raises there tells its peers (Endpoint.refuse).

Python checks types, shapes and values before ranks exchange anything, and its messages name the
caller's argument. The library validates the C struct (csrc/abi/check.h), so no caller of the C ABI
can make it access invalid memory by passing a bad struct. Python does not re-check values that it
computes itself: alignment, strides and sizes.
"""

from __future__ import annotations

import math
import numbers
import struct
from typing import Any, NamedTuple

import torch

from allnorm.core import _native, tensors
from allnorm.core.call import Call
from allnorm.errors import UnsupportedError
from allnorm.names import NUMERICS, REQUESTS, TOP_K, check_choice
from allnorm.quant import (
    ScaleGeometry,
    check_hidden_size,
    check_quant,
)

DTYPES = {getattr(torch, name): code for name, code in _native.DTYPE.items()}


def check_own(call: Call, shard: tuple[int, int] | None) -> None:
    """Raises for errors that may occur on this rank only: wrong strides or row counts.

    `call` has passed `checks.check_alike`; `shard` is the range of this rank's rows, if rows have
    owners.
    """
    if call.op == "all_gather_rows":
        check_like("residual_shard", call.x, Like.rows(call.x, shard, "num_tokens"))
        return
    if call.experts:
        check_own_experts(call)
    check_last_dim("rows" if call.experts else "x", call.x)
    for name, weight in (("weight", call.weight), ("post_norm.weight", call.post_weight)):
        if weight is not None:
            check_last_dim(name, weight)
    if call.residual is not None:
        check_residual(call, Like.of(call, shard))
    if call.prefetch is not None:
        tensors.check_kind("prefetch", call.prefetch)
        check_device("prefetch", call.prefetch, call.x.device)


def check_residual(call: Call, like: Like) -> None:
    """Raises unless the residual has the properties `like`; it may also be float32."""
    tensors.check_kind("residual", call.residual)
    dtype = call.residual.dtype  # type: ignore[union-attr]
    if dtype not in (like.dtype, torch.float32):
        raise TypeError(
            f"residual has dtype {dtype}: expected {like.dtype}{or_float32(like.dtype)}."
        )
    check_like("residual", call.residual, like._replace(dtype=dtype))


def check_algorithm(algorithm: object) -> None:
    """Raises ValueError unless `algorithm` is "auto" or the name of an algorithm."""
    check_choice("algorithm", algorithm, REQUESTS)


def check_dtype(name: str, dtype: object) -> None:
    """Raises TypeError or UnsupportedError unless `dtype` is one of DTYPES."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name}={dtype!r}: expected a torch.dtype, such as torch.bfloat16.")
    if dtype not in DTYPES:
        raise UnsupportedError(
            f"{name}={dtype}: expected torch.float32, torch.float16 or torch.bfloat16."
        )


def check_count(name: str, value: object, least: int = 0) -> None:
    """Raises TypeError or ValueError unless `value` is an integer >= least, symbolic or not."""
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        raise TypeError(f"{name}={value!r}: expected an int.")
    if value < least:
        raise ValueError(f"{name}={value}: expected >= {least}.")
    if isinstance(value, int) and value > _MAX_COUNT:
        raise ValueError(f"{name}={value}: expected at most {_MAX_COUNT}.")


def check_norm_constants(call: Call) -> None:
    """Raises TypeError or ValueError if any of a norm's constants, except `quant`, is invalid."""
    check_choice("numerics", call.numerics, NUMERICS)
    for name, flag in (
        ("residual_sharded", call.residual_sharded),
        ("gather", call.gather),
        ("return_normed", call.return_normed),
    ):
        if not isinstance(flag, bool):
            raise TypeError(f"{name}={flag!r}: expected True or False.")
    if not call.gather and not call.residual_sharded:
        raise ValueError(
            "gather=False with residual_sharded=False: expected True, because each rank then adds "
            "the residual only to its own rows. Pass the rows of row_shard() as the residual."
        )
    check_numbers(
        {
            "eps": call.eps,
            "weight_bias": call.weight_bias,
            "post_norm.eps": call.post_eps,
            "post_norm.weight_bias": call.post_weight_bias,
            "scale": call.scale,
        }
    )


def check_numbers(values: dict[str, Any]) -> None:
    """Raises unless all values are finite numbers, and those whose name ends with "eps" >= 0."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(f"{name}={value!r}: expected a number.")
        if not _is_float32(value):
            raise ValueError(f"{name}={value!r}: expected a finite number, as float32 too.")
    for name, value in values.items():
        if name.endswith("eps") and value < 0:
            raise ValueError(f"{name}={value!r}: expected a number >= 0.")


def _is_float32(value: numbers.Real) -> bool:
    """Returns whether a number is finite, also after it is rounded to float32."""
    try:
        return math.isfinite(struct.unpack("=f", struct.pack("=f", float(value)))[0])
    except OverflowError:
        return False


def check_input(name: str, x: Any, device: torch.device) -> None:
    """Raises unless `x` is a tensor of rows that the kernels support; does not check its memory."""
    tensors.check_kind(name, x)
    if x.dtype not in DTYPES:
        raise UnsupportedError(
            f"{name} has dtype {x.dtype}: expected float32, float16 or bfloat16. Convert it first."
        )
    check_device(name, x, device)
    if x.dim() < 1 or x.shape[-1] < 1:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}: expected [..., hidden_size] with hidden_size >= 1."
        )
    check_width(name, x.shape[-1])


def check_width(name: str, hidden_size: int) -> None:
    """Raises UnsupportedError for rows that are too wide for any call."""
    if hidden_size > MAX_HIDDEN_SIZE:
        raise UnsupportedError(
            f"{name} has hidden_size {hidden_size}: expected at most {MAX_HIDDEN_SIZE}."
        )


def check_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raises ValueError unless `tensor` is on `device`."""
    if tensor.device != device:
        raise ValueError(
            f"{name} is on {tensor.device}: expected {device}, the communicator's device. Move it "
            "there, or make the communicator with device=."
        )


def check_last_dim(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError unless the last dimension is contiguous; may raise on this rank only."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1 and tensor.numel():
        raise ValueError(
            f"{name} has strides {tensor.stride()}: expected a contiguous last dimension. Call "
            f"{name}.contiguous() first."
        )


class Like(NamedTuple):
    """The required properties of a tensor; `source` explains the shape in messages."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    source: str = "that of x"

    @classmethod
    def of(cls, call: Call, bounds: tuple[int, int] | None) -> Like:
        """Returns the properties of the whole sum, or of its rows in the range `bounds`."""
        if not call.experts:
            return cls.rows(call.x, bounds)
        if bounds is None:
            return cls(call.shape, call.x.dtype, call.x.device, "[num_tokens, hidden_size]")
        return cls.rows(call.x, bounds, str(call.rows))

    @classmethod
    def rows(cls, x: torch.Tensor, bounds: tuple[int, int] | None, total: str = "") -> Like:
        """Returns the properties of the whole of `x`, or of the rows `bounds` out of `total`."""
        if bounds is None:
            return cls(x.shape, x.dtype, x.device)
        (lo, hi), total = bounds, total or str(x.numel() // x.shape[-1])
        source = f"this rank's rows, {lo} up to {hi} of {total}, as row_shard() gives them"
        return cls((hi - lo, x.shape[-1]), x.dtype, x.device, source)


def check_like(name: str, tensor: Any, like: Like) -> None:
    """Raises unless `tensor` has the properties `like` and contiguous rows.

    It may raise on this rank only: for strides, and for a shard with the wrong number of rows.
    """
    tensors.check_kind(name, tensor)
    if tensor.shape != like.shape:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}: expected {tuple(like.shape)}, {like.source}."
        )
    if tensor.dtype != like.dtype:
        raise TypeError(f"{name} has dtype {tensor.dtype}: expected {like.dtype}.")
    check_device(name, tensor, like.device)
    check_last_dim(name, tensor)


def check_quantization(call: Call) -> None:
    """Raises unless a call's rows can be quantized as its `quant` specifies."""
    if call.writes_scale:
        check_quant(call.quant)
        assert call.quant is not None
        check_hidden_size(call.quant, call.x.shape[-1])
    if call.static_scale is not None:
        name = "quant.global_scale" if call.writes_scale else "quant.scale"
        tensors.check_kind(name, call.static_scale)
        check_device(name, call.static_scale, call.x.device)


def check_scale_result(scale: Any, geometry: ScaleGeometry, device: torch.device) -> None:
    """Raises unless `scale` has the layout `geometry`, with memory for its padding.

    It may raise on this rank only.
    """
    tensors.check_kind("scale_out", scale)
    if scale.dtype != geometry.dtype:
        raise TypeError(f"scale_out has dtype {scale.dtype}: expected {geometry.dtype}.")
    check_device("scale_out", scale, device)
    wrong = scale.shape != geometry.shape or any(
        size > 1 and mine != expected
        for size, mine, expected in zip(
            geometry.shape, scale.stride(), geometry.stride, strict=True
        )
    )
    if wrong:
        raise ValueError(
            f"scale_out has shape {tuple(scale.shape)} and strides {scale.stride()}: expected "
            f"{geometry.shape} and {geometry.stride}, as allnorm.quant.empty_scale() makes them."
        )
    if scale.is_neg():
        raise ValueError(
            "scale_out is a negated view of its memory: expected a plain tensor. Make it with "
            "allnorm.quant.empty_scale()."
        )
    check_writable("scale_out", scale)
    if geometry.padded and geometry.padding_rows and scale.numel():
        needed = (scale.storage_offset() + geometry.shape[1] * geometry.stride[1]) * 4
        if scale.untyped_storage().nbytes() < needed:
            raise ValueError(
                "scale_out has no memory after its last row: expected memory for the padding rows "
                "of its last column. Make it with allnorm.quant.empty_scale()."
            )


def check_has_norm(call: Call) -> None:
    """Raises unless the call has a norm, and a second one if it quantizes or `out` is given."""
    if call.weight is None and call.post_weight is None:
        raise TypeError("weight is None: expected a torch.Tensor, or a post_norm.")
    if call.weight is None and call.is_quantized:
        raise TypeError("weight is None: expected a torch.Tensor. Only normed rows are quantized.")
    if call.weight is None and call.out is not None:
        raise ValueError("out without a weight: expected None, because there is no second norm.")


def check_norms(call: Call) -> None:
    """Raises unless the call has a norm and all weights match the rows."""
    check_has_norm(call)
    for name, weight in (("weight", call.weight), ("post_norm.weight", call.post_weight)):
        if weight is not None:
            check_weight(name, weight, call.x)
            check_device(name, weight, call.x.device)


def check_weight(name: str, weight: Any, x: torch.Tensor, size: str = "hidden_size") -> None:
    """Raises unless `weight` is as wide as `x`, and of the dtype of `x` or float32."""
    tensors.check_kind(name, weight)
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"{name} has shape {tuple(weight.shape)}: expected [{size}] = [{x.shape[-1]}]."
        )
    if weight.dtype not in (x.dtype, torch.float32):
        raise TypeError(
            f"{name} has dtype {weight.dtype}: expected {x.dtype}{or_float32(x.dtype)}. Convert "
            "it first."
        )


def or_float32(dtype: torch.dtype) -> str:
    """Returns the rest of a message that names `dtype`, where float32 is allowed too."""
    return "" if dtype is torch.float32 else " or torch.float32"


def check_experts(call: Call, device: torch.device) -> None:
    """Raises for errors in an ExpertSum that all ranks see: wrong types, dtypes, devices, dims."""
    check_input("rows", call.x, device)
    indexed = call.expert_index is not None
    for name, tensor, dtypes, dims in (
        ("rows", call.x, (call.x.dtype,), 2 if indexed else 3),
        ("index", call.expert_index, (torch.int32,), 2),
        ("weights", call.expert_weights, (torch.float32,), 2),
        ("shared", call.shared, (call.x.dtype,), 2),
    ):
        if tensor is None:
            continue
        tensors.check_kind(name, tensor)
        if tensor.dtype not in dtypes:
            raise TypeError(f"{name} has dtype {tensor.dtype}: expected {dtypes[0]}.")
        if tensor.dim() != dims:
            expected = _EXPERT_SHAPES[name] if name != "rows" or indexed else _ROWS_PER_TOKEN
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}: expected {expected}.")
        check_device(name, tensor, device)


def check_own_experts(call: Call) -> None:
    """Raises for errors in an ExpertSum that may occur on this rank only: wrong row counts."""
    num_tokens, hidden_size = call.shape
    if call.top_k not in TOP_K:
        raise ValueError(
            f"top_k is {call.top_k}: expected {TOP_K[0]} to {TOP_K[-1]} choices per token."
        )
    choices = (num_tokens, call.top_k)
    for name, tensor, shape in (
        ("index", call.expert_index, choices),
        ("weights", call.expert_weights, choices),
        ("shared", call.shared, (num_tokens, hidden_size)),
    ):
        if tensor is None:
            continue
        if tensor.shape != shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}: expected {shape}, {_EXPERT_SHAPES[name]}."
            )
        check_last_dim(name, tensor)


_ROWS_PER_TOKEN = "[num_tokens, top_k, hidden_size]; with index [num_rows, hidden_size]"
_EXPERT_SHAPES = {
    "rows": "[num_rows, hidden_size]; without index [num_tokens, top_k, hidden_size]",
    "index": "[num_tokens, top_k]",
    "weights": "[num_tokens, top_k]",
    "shared": "[num_tokens, hidden_size]",
}


def check_result(name: str, result: torch.Tensor, like: Like) -> None:
    """Raises unless a preallocated result has the properties `like`, and its rows do not overlap.

    It may raise on this rank only. It does not check whether the result has memory.
    """
    check_like(name, result, like)
    if not result.is_contiguous() and not _has_distinct_rows(result):
        raise ValueError(
            f"{name} has shape {tuple(result.shape)} and strides {result.stride()}: expected "
            "distinct, contiguous rows."
        )


def check_writable(name: str, result: torch.Tensor) -> None:
    """Raises ValueError unless the result has memory to write to; may raise on this rank only."""
    if result.data_ptr() >= tensors.LOW_ADDRESS:
        return
    if result._is_zerotensor():
        raise ValueError(
            f"{name} is a zero tensor without memory: expected memory to write to. Pass a tensor "
            "of torch.empty()."
        )
    tensors.check_memory(**{name: result})


def _has_distinct_rows(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor's contiguous rows are disjoint, judging by the strides."""
    dims = sorted(
        (stride, size)
        for stride, size in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True)
        if size > 1
    )
    reach = tensor.shape[-1]
    for stride, size in dims:
        if stride < reach:
            return False
        reach += (size - 1) * stride
    return True


def check_overlap(
    name: str, result: torch.Tensor, others: dict[str, torch.Tensor | None], allowed: str
) -> None:
    """Raises if `result` overlaps another of the call's tensors; may raise on this rank only.

    `result` may be the tensor named `allowed` itself: a thread reads each element before it writes
    that element.
    """
    begin, end = _extent(result)
    for other_name, other in others.items():
        if other is None or not other.numel() or not result.numel():
            continue
        other_begin, other_end = _extent(other)
        if begin >= other_end or other_begin >= end:
            continue
        if _alternate(result, other):
            continue
        same = begin == other_begin and result.stride() == other.stride()
        if other_name != allowed or not same:
            raise ValueError(
                f"{name} shares memory with {other_name}. Pass separate memory"
                + (f", or {allowed} itself." if allowed else ".")
            )


def _alternate(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether the rows of two tensors alternate in memory, as columns of one matrix do."""
    if one.dim() != other.dim() or one.element_size() != other.element_size():
        return False
    stride = tensors.row_pitch(one)
    if not stride or tensors.row_pitch(other) != stride:
        return False
    low, high = sorted((one, other), key=torch.Tensor.data_ptr)
    apart = (high.data_ptr() - low.data_ptr()) % (stride * one.element_size())
    columns = apart / one.element_size()
    return columns >= low.shape[-1] and columns + high.shape[-1] <= stride


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    begin = tensor.data_ptr()
    return begin, begin + tensors.span_bytes(tensor)


MAX_HIDDEN_SIZE = (1 << 20) - 1
_MAX_COUNT = (1 << 63) - 1
