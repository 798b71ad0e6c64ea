"""Determines how a norm must quantize its result for the SGLang linear layer that reads it.

Block-scaled FP8 layers take `(fp8, scale)` instead of a 16-bit tensor. The layout of the scales
depends on the GEMM:

| GEMM | scales | from |
|---|---|---|
| DeepGEMM | float32, column-major, rows padded to 4 (`column_major_tma`) | 0.5.17 |
| DeepGEMM on Blackwell | packed powers of two, the same layout | 0.5.23 |
| CUTLASS | float32, column-major, rows padded to 4 | 0.5.17 |
| Triton | float32, row-major | 0.5.23; in 0.5.17 it takes 16 bits |
| FlashInfer | takes 16 bits | |
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import allnorm

GROUP_SIZE = 128


@dataclass(frozen=True)
class Gemm:
    """Requirements of one of SGLang's block-scaled FP8 linear functions.

    Attributes:
        scale_layout: the layout that the scales of a quantized input must have.
        multiple: the weight's `out_features` must be a multiple of this number. Otherwise the
            function uses a GEMM with a different layout.
        since_ue8m0: whether only newer versions, which have the parameter `act_scale_ue8m0`, take a
            quantized input.
    """

    scale_layout: str
    multiple: int
    since_ue8m0: bool = False


GEMMS = {
    "deepgemm_w8a8_block_fp8_linear_with_fallback": Gemm("column_major_tma", 64),
    "cutlass_w8a8_block_fp8_linear_with_fallback": Gemm("column_major_tma", 128),
    "triton_w8a8_block_fp8_linear": Gemm("row_major", 1, since_ue8m0=True),
}


def quant_of(linear: torch.nn.Module | None) -> allnorm.Fp8PerGroup | None:
    """Returns the quantization that `linear` expects of its input; None if it takes only 16 bits.

    The result depends only on the model and on SGLang's settings, so it is equal on all ranks.
    """
    method = getattr(linear, "quant_method", None)
    function = getattr(method, "w8a8_block_fp8_linear", None)
    if function is None or not getattr(method, "block_quant", False):
        return None
    other = ("use_marlin", "use_mxfp8", "block_fp8_as_mxfp8")
    block = list(getattr(method, "weight_block_size", None) or ())
    if any(getattr(method, name, False) for name in other) or block != [GROUP_SIZE, GROUP_SIZE]:
        return None
    weight = getattr(linear, "weight", None)
    if weight is None or weight.dim() != 2 or weight.shape[1] % GROUP_SIZE:
        return None
    return quant_for(function, weight.shape[0])


def quant_for(function: Callable[..., Any], out_features: int) -> allnorm.Fp8PerGroup | None:
    """Returns the quantization that a function of `dispatch_w8a8_block_fp8_linear` takes, or None.

    `out_features` is the number of rows of the weight.
    """
    bound: dict[str, Any] = {}
    if isinstance(function, functools.partial):
        bound, function = function.keywords, function.func
    gemm = GEMMS.get(function.__name__)
    if gemm is None or out_features % gemm.multiple:
        return None
    knows_ue8m0 = "act_scale_ue8m0" in inspect.signature(function).parameters
    if gemm.since_ue8m0 and not knows_ue8m0:
        return None
    if function.__name__.startswith("deepgemm") and _deepgemm_packs_scales():
        if not knows_ue8m0:
            return None
        return allnorm.Fp8PerGroup(GROUP_SIZE, gemm.scale_layout, "ue8m0_packed")
    scale_format = "ue8m0" if bound.get("act_scale_ue8m0") else "float32"
    return allnorm.Fp8PerGroup(GROUP_SIZE, gemm.scale_layout, scale_format)


def default_quant() -> allnorm.Fp8PerGroup | None:
    """Returns the quantization that SGLang's GEMM takes for an unknown layer, or None."""
    from sglang.srt.layers.quantization.fp8_utils import dispatch_w8a8_block_fp8_linear

    return quant_for(dispatch_w8a8_block_fp8_linear(), GROUP_SIZE)


def _deepgemm_packs_scales() -> bool:
    """Returns whether SGLang's DeepGEMM reads packed powers of two, as on Blackwell."""
    from sglang.srt.layers import deep_gemm_wrapper

    return bool(deep_gemm_wrapper.DEEPGEMM_SCALE_UE8M0)
