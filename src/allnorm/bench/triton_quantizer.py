"""A quantization kernel in Triton. Import only with a GPU.

A program handles some groups of one row: it loads them once, finds the largest magnitude of each
group, and stores the values divided by the group's scale. A static scale skips the search. A scale
per row is a single group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

import allnorm
from allnorm.quant import Quant

_ELEMS_PER_PROGRAM = 1024
_ELEMS_PER_THREAD = 8
_MAX_WARPS = 16

Launch = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Takes the rows [num_tokens, hidden_size], their float8_e4m3fn result and their scales."""


@triton.jit
def _quantize(  # type: ignore[no-untyped-def]
    y,
    quantized,
    scale,
    hidden_size,
    num_groups,
    group_size,
    row_stride,
    group_stride,
    GROUPS: tl.constexpr,  # noqa: N803
    SIZE: tl.constexpr,  # noqa: N803
    STATIC: tl.constexpr,  # noqa: N803
    POWER_OF_TWO: tl.constexpr,  # noqa: N803
    PACKED: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    columns = tl.arange(0, SIZE)
    offsets = groups[:, None] * group_size + columns[None, :]
    inside = (columns[None, :] < group_size) & (offsets < hidden_size)
    start = row.to(tl.int64) * hidden_size
    values = tl.load(y + start + offsets, mask=inside, other=0.0).to(tl.float32)
    if STATIC:
        result = values / tl.load(scale)
    else:
        largest = tl.max(tl.abs(values), axis=1)
        scales = tl.maximum(largest, 1e-10) / 448.0
        if POWER_OF_TWO:
            bits = (scales.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
            scales = bits.to(tl.float32, bitcast=True)
        result = values / scales[:, None]
        if PACKED:  # four exponents per word; the strides count words, `scale` points to bytes
            exponents = tl.where(groups < num_groups, bits >> 23, 0).to(tl.uint8)
            place = row * row_stride + (groups // 4) * group_stride
            whole = groups < (num_groups + 3) // 4 * 4
            tl.store(scale + place * 4 + groups % 4, exponents, mask=whole)
        else:
            place = row * row_stride + groups * group_stride
            tl.store(scale + place, scales, mask=groups < num_groups)
    result = tl.minimum(tl.maximum(result, -448.0), 448.0)
    tl.store(quantized + start + offsets, result.to(tl.float8e4nv), mask=inside)


def plan(spec: Quant, hidden_size: int) -> Launch:
    """Returns a launcher of the kernel for rows of one width."""
    static = isinstance(spec, allnorm.Fp8PerTensor)
    group_size = _ELEMS_PER_PROGRAM if static else hidden_size
    power_of_two = packed = False
    if isinstance(spec, allnorm.Fp8PerGroup):
        group_size = spec.group_size
        power_of_two = spec.scale_format != "float32"
        packed = spec.scale_format == "ue8m0_packed"
    num_groups = triton.cdiv(hidden_size, group_size)
    size = triton.next_power_of_2(group_size)
    groups = max(1, _ELEMS_PER_PROGRAM // size)
    warps = min(_MAX_WARPS, max(1, groups * size // (32 * _ELEMS_PER_THREAD)))
    constants: dict[str, Any] = {
        "GROUPS": groups,
        "SIZE": size,
        "STATIC": static,
        "POWER_OF_TWO": power_of_two,
        "PACKED": packed,
        "num_warps": warps,
    }
    # Exponents of missing groups in the last word of a row are written as zeros.
    blocks = triton.cdiv(triton.cdiv(num_groups, 4) * 4 if packed else num_groups, groups)

    def launch(rows: torch.Tensor, quantized: torch.Tensor, scale: torch.Tensor) -> None:
        strides = (0, 0) if static else scale.stride()
        if packed:
            scale = torch.empty(0, dtype=torch.uint8, device=scale.device).set_(
                scale.untyped_storage()
            )
        _quantize[(rows.shape[0], blocks)](
            *(rows, quantized, scale, hidden_size, num_groups, group_size, *strides), **constants
        )

    return launch
