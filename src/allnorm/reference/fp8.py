"""Step 6: quantization to float8_e4m3fn; e2m1 is in fp4.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from allnorm.expert_sum import ExpertSum
from allnorm.names import SWIZZLED
from allnorm.quant import (
    DEFAULT_QUANT,
    DTYPE,
    TILE_GROUPS,
    TILE_ROWS,
    Fp8PerGroup,
    Fp8PerTensor,
    Fp8PerToken,
    NvFp4,
    Quant,
    QuantizedNorm,
    check_hidden_size,
    check_quant,
    scale_geometry,
    swizzle,
)
from allnorm.reference.arithmetic import DTYPES, float32
from allnorm.reference.fp4 import to_e4m3, to_nvfp4
from allnorm.reference.norm import add_rms_norm, all_reduce_add_rms_norm

_MAX = 448.0  # largest float8_e4m3fn
_MIN_AMAX = 1e-10
_BYTES_PER_WORD = 4


def quantize(y: Tensor, quant: Quant = DEFAULT_QUANT) -> tuple[Tensor, Tensor]:
    """Quantizes rows that have been rounded to their dtype.

    With one scale per row, equivalent to ``scale = y.float().abs().amax(-1, keepdim=True) / 448``
    and ``quantized = (y.float() / scale).to(torch.float8_e4m3fn)``.

    Args:
        y: `[..., hidden_size]`, float32, float16 or bfloat16.
        quant: an `allnorm.Fp8PerGroup`, `MxFp8()`, `Fp8PerToken`, `Fp8PerTensor` or `NvFp4`.

    Returns:
        `(quantized, scale)`. `quantized` is float8_e4m3fn in the shape of `y`; for `NvFp4` it is
        uint8 of half the width. `scale` has the layout of `quant`, with zeros as padding.

    Raises:
        TypeError: the dtype of `y` is not one of the three, or `quant` is not a spec.
        ValueError: `y` has no columns, its width is not a multiple of the group size, or the given
            scale is on a different device.
    """
    check_quant(quant)
    if y.dtype not in DTYPES:
        raise TypeError(f"y is {y.dtype}: expected float32, float16 or bfloat16")
    if y.ndim < 1 or y.shape[-1] < 1:
        raise ValueError(f"y has shape {list(y.shape)}: expected [..., hidden_size]")
    hidden_size = y.shape[-1]
    check_hidden_size(quant, hidden_size)
    values = y.float()
    if isinstance(quant, NvFp4):
        if quant.global_scale.device != y.device:
            raise ValueError(
                f"global_scale is on {quant.global_scale.device}: expected {y.device}, as y"
            )
        quantized, scale = to_nvfp4(values, quant.global_scale.reshape(1))
        return quantized, _lay_out(scale, quant, hidden_size)
    if isinstance(quant, Fp8PerTensor):
        if quant.scale.device != y.device:
            raise ValueError(f"scale is on {quant.scale.device}: expected {y.device}, as y")
        return to_e4m3(values / quant.scale.reshape(1)), quant.scale
    size = quant.group_size if isinstance(quant, Fp8PerGroup) else hidden_size
    groups = values.unflatten(-1, (hidden_size // size, size))
    scale = torch.maximum(groups.abs().amax(-1), float32(_MIN_AMAX, y)) / float32(_MAX, y)
    if isinstance(quant, Fp8PerGroup) and quant.scale_format != "float32":
        scale = _round_up_to_power_of_two(scale)
    quantized = to_e4m3(groups / scale.unsqueeze(-1)).view(y.shape)
    return quantized, _lay_out(scale, quant, hidden_size)


def _round_up_to_power_of_two(scale: Tensor) -> Tensor:
    """Rounds positive normal float32 values up to a power of two; keeps NaN and infinity."""
    bits = (scale.view(torch.int32) + 0x007FFFFF) & 0x7F800000
    return torch.where(scale.isnan(), scale, bits.view(torch.float32))


def _lay_out(scale: Tensor, quant: Quant, hidden_size: int) -> Tensor:
    """Converts scales `[..., groups]` to the format and memory layout of the spec."""
    rows = scale.reshape(scale.shape[:-1].numel(), scale.shape[-1])
    if not isinstance(quant, Fp8PerToken | Fp8PerTensor) and quant.scale_layout == SWIZZLED:
        if isinstance(quant, NvFp4):
            return _in_tiles(rows.view(torch.uint8)).view(DTYPE)
        return _in_tiles(_exponents(rows))
    if isinstance(quant, Fp8PerGroup) and quant.scale_format == "ue8m0_packed":
        rows = _pack_exponents(rows)
    geometry = scale_geometry(quant, rows.shape[0], hidden_size)
    assert geometry is not None
    result = geometry.empty(scale.device)
    everything = torch.empty(0, dtype=result.dtype, device=result.device)
    everything.set_(result.untyped_storage())
    everything.zero_()  # padding rows too
    return result.copy_(rows)


def _pack_exponents(scale: Tensor) -> Tensor:
    """Packs exponent bytes of powers of two `[T, groups]`, four per int32, lowest byte first."""
    exponents = _exponents(scale)
    missing = -exponents.shape[1] % _BYTES_PER_WORD
    padded = torch.nn.functional.pad(exponents, (0, missing)).contiguous()
    return padded.view(torch.int32)  # host and GPUs are little endian


def _exponents(scale: Tensor) -> Tensor:
    """Returns the exponent bytes of powers of two; 255 for infinity and NaN."""
    return (scale.view(torch.int32) >> 23 & 0xFF).to(torch.uint8)


def _in_tiles(scale: Tensor) -> Tensor:
    """Arranges bytes `[T, groups]` in tiles of 128 rows by 4 groups, padded with zeros."""
    rows, groups = scale.shape
    missing = (0, -groups % TILE_GROUPS, 0, -rows % TILE_ROWS)
    return swizzle(torch.nn.functional.pad(scale, missing))


def _check_normed(normed: Tensor | None) -> None:
    if normed is None:
        raise ValueError(
            "weight is None: expected a tensor, because only normed rows are quantized"
        )


def add_rms_norm_quant(
    x: Tensor | ExpertSum,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    quant: Quant = DEFAULT_QUANT,
    return_normed: bool = False,
    **options: Any,
) -> QuantizedNorm:
    """Runs `add_rms_norm`, then `quantize` of its first result: steps 2 to 6 for a reduced `x`.

    The docstrings of these two functions describe arguments, options and errors. With
    `return_normed`, the rows before quantization are also returned.
    """
    normed, total = add_rms_norm(x, residual, weight, eps, **options)
    _check_normed(normed)
    return QuantizedNorm(*quantize(normed, quant), total, normed if return_normed else None)


def all_reduce_add_rms_norm_quant(
    inputs: Sequence[Tensor | ExpertSum],
    residual: Any,
    weight: Tensor,
    eps: float,
    quant: Quant = DEFAULT_QUANT,
    return_normed: bool = False,
    *,
    quantized_out: Any = None,
    scale_out: Any = None,
    normed_out: Any = None,
    **options: Any,
) -> QuantizedNorm:
    """Runs `all_reduce_add_rms_norm`, then `quantize` of its first result: all steps.

    The docstrings of these two functions describe arguments, options and errors. With
    `return_normed` or `normed_out`, the rows before quantization are also returned.
    `quantized_out`, `scale_out` and `normed_out` receive the results.

    Returns:
        `QuantizedNorm(quantized, scale, residual, normed)`. With `residual_sharded`, `residual` is
        the list of all ranks' shards. With `gather=False` all results are such lists.
    """
    check_quant(quant)
    normed, total = all_reduce_add_rms_norm(inputs, residual, weight, eps, **options)
    _check_normed(normed)
    if isinstance(normed, list):
        outs = (quantized_out, scale_out, normed_out)
        stores = [[None] * len(normed) if out is None else list(out) for out in outs]
        parts: Any = [
            _quantized_into(rows, quant, return_normed, *own)
            for rows, *own in zip(normed, *stores, strict=True)
        ]
        lists: Any = [list(part) for part in zip(*parts, strict=True)]
        return QuantizedNorm(lists[0], lists[1], total, None if lists[2][0] is None else lists[2])
    quantized, scales, kept = _quantized_into(
        normed, quant, return_normed, quantized_out, scale_out, normed_out
    )
    return QuantizedNorm(quantized, scales, total, kept)


def _quantized_into(
    normed: Tensor,
    quant: Quant,
    return_normed: bool,
    quantized_out: Tensor | None,
    scale_out: Tensor | None,
    normed_out: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns quantized rows, their scales and, if wanted, the rows; stores what has memory."""
    quantized, scales = quantize(normed, quant)
    kept = normed if return_normed else None
    if normed_out is not None:
        kept = normed_out.copy_(normed)
    return (
        quantized if quantized_out is None else quantized_out.copy_(quantized),
        scales if scale_out is None else scale_out.copy_(scales),
        kept,
    )
