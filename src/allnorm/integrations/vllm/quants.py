"""Decompositions of vLLM's quantization kernels, for the graph pass.

If the custom operator `quant_fp8` is enabled, each quantization is one of the C extension's
mutating operators inside `auto_functionalized`. The functions here return the values that the
operator stores. If `quant_fp8` is disabled, the graph contains PyTorch operators, which the pass
evaluates.

vLLM quantizes groups with the same operations as allnorm. With a static scale it multiplies by the
reciprocal, and its per-token scales are at least 1 / (448 * 512). These two kinds need
`approximate_quant`; the documentation of that argument describes the differences.

NVFP4 and MXFP8 are always operators. MXFP8 is fused only with tiled scales, NVFP4 with both
layouts. vLLM's NVFP4 multiplies by an approximate reciprocal, so a few of its scales are the
adjacent number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import allnorm
from allnorm.compile import block_scaled

_MAX = 448.0
_FP8 = torch.float8_e4m3fn
_LEAST_AMAX = 1e-10
_LEAST_SCALE = 1 / (_MAX * 512)


def decompositions() -> dict[str, Callable[..., Any]]:
    """Returns the decompositions, keyed by operator name."""
    return {
        "_C::static_scaled_fp8_quant": _static,
        "_C::dynamic_per_token_scaled_fp8_quant": _per_token,
        "_C::per_token_group_fp8_quant": _per_group,
        "_C::scaled_fp4_quant": _nvfp4,
        "vllm::mxfp8_quantize": _mxfp8,
    }


def _static(*, result: Tensor, input: Tensor, scale: Tensor, group_shape: Any = None) -> Tensor:
    if scale.numel() != 1:
        raise NotImplementedError("it has several static scales")
    return _cast(input.float() * scale.reciprocal())


def _per_token(
    *, result: Tensor, input: Tensor, scale: Tensor, scale_ub: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    if scale_ub is not None:
        raise NotImplementedError("its scale has an upper bound")
    y = input.float()
    scale = (y.abs().amax(dim=-1, keepdim=True) / _MAX).clamp(min=_LEAST_SCALE)
    return _cast(y / scale), scale


def _per_group(
    *, input: Tensor, output_q: Tensor, output_s: Tensor, group_size: int, eps: float, **more: Any
) -> tuple[Tensor, Tensor]:
    if eps != _LEAST_AMAX or more.get("scale_ue8m0"):
        raise NotImplementedError("its scales are not float32 quotients, at least 1e-10 / 448")
    groups = input.view(*input.shape[:-1], input.shape[-1] // group_size, group_size).float()
    scale = groups.abs().amax(dim=-1, keepdim=True).clamp(min=_LEAST_AMAX) / _MAX
    return _cast(groups / scale).view(input.shape), scale.squeeze(-1)


def _nvfp4(
    input: Tensor,
    input_scale: Tensor,
    is_sf_swizzled_layout: bool,
    output: Tensor | None = None,
    output_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    layout = "swizzled_128x4" if is_sf_swizzled_layout else "row_major"
    if output_scale is None:  # the functional overload allocates int32 words of four scales
        tokens, groups = input.shape[0], input.shape[1] // 16
        shape, dtype = (tokens, groups), torch.uint8
        if is_sf_swizzled_layout:
            shape, dtype = ((tokens + 127) // 128 * 128, (groups + 3) // 4), torch.int32
        output_scale = torch.empty(shape, dtype=dtype, device=input.device)
    return block_scaled(input, allnorm.NvFp4(input_scale, layout), output, output_scale)


def _mxfp8(
    x: Tensor, is_sf_swizzled_layout: bool = False, alignment: int = 0
) -> tuple[Tensor, Tensor]:
    if not is_sf_swizzled_layout:
        raise NotImplementedError("its scales are row-major bytes, a layout allnorm does not write")
    if alignment > 0 and x.shape[-1] % alignment:
        raise NotImplementedError(f"its rows are padded to a multiple of {alignment} elements")
    return block_scaled(x, allnorm.MxFp8())


def _cast(quotient: Tensor) -> Tensor:
    return quotient.clamp(-_MAX, _MAX).to(_FP8)
