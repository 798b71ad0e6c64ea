"""Translates SGLang's norms to arguments of the fused calls."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

import allnorm
from allnorm.integrations.engines import wants_gradient

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# The attribute in which a norm module keeps its `NormArithmetic`.
ATTRIBUTE = "_allnorm"


@dataclass(frozen=True)
class NormArithmetic:
    """The arithmetic of one of SGLang's norms.

    Attributes:
        weight_bias: 1.0 for Gemma's norms, which multiply by 1 + weight.
        numerics: the rounding mode.
        quant: the quantization that the layer after the norm reads; None if it reads 16 bits.
        next_gemm: the linear layer that runs first after the norm; None if it is unknown.
        float32_residual: whether the residual is float32 while the sum has 16 bits.
        obstacle: why the fused call cannot compute this norm; empty if it can.
    """

    weight_bias: float = 0.0
    numerics: str = "unrounded"
    quant: allnorm.Fp8PerGroup | None = None
    next_gemm: torch.nn.Module | None = None
    float32_residual: bool = False
    obstacle: str = ""


@functools.cache
def classes() -> tuple[Any, ...]:
    """Returns SGLang's classes RMSNorm, GemmaRMSNorm and, if it exists, Gemma3RMSNorm."""
    from sglang.srt.layers import layernorm

    names = ("RMSNorm", "GemmaRMSNorm", "Gemma3RMSNorm")
    return tuple(getattr(layernorm, name) for name in names if hasattr(layernorm, name))


def eps_of(module: Any) -> float:
    """Returns a norm's eps, which has a different name in Gemma3RMSNorm."""
    eps: float = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    return eps


def arithmetic(module: Any, *, is_rounded: bool = False) -> NormArithmetic:
    """Returns the arithmetic of a norm module, which depends on its class and settings.

    `is_rounded` means that all readers of a float32 result first round it to 16 bits.
    """
    plain, *gemma = classes()
    if isinstance(module, tuple(gemma)):
        # SGLang's fused calls add the 1 in the weight's dtype; its other calls add it in float32,
        # as allnorm does.
        return NormArithmetic(weight_bias=1.0)
    if not isinstance(module, plain):
        return NormArithmetic(obstacle=f"a norm of unknown class {type(module).__name__}")
    if module.variance_size_override is not None:
        return NormArithmetic(obstacle="the variance of a part of the row")
    if not module.has_weight:
        return NormArithmetic(obstacle="a norm without weight")
    if module.fp32_residual or module.override_orig_dtype is not None:
        is_float32 = module.override_orig_dtype == module.weight.dtype == torch.float32
        if is_rounded and is_float32 and module.fp32_residual:
            # The result is never rounded, so `cast_x_before_out_mul` has no effect.
            return NormArithmetic(float32_residual=True)
        return NormArithmetic(obstacle="a result in a different dtype than its input")
    if not module.cast_x_before_out_mul:
        return NormArithmetic()
    if module.weight.dtype == torch.float32:
        return NormArithmetic(obstacle="a weight in float32 that is multiplied last")
    return NormArithmetic(numerics="vllm")


def post_norm(
    module: Any, numerics: str, dtype: torch.dtype
) -> tuple[allnorm.PostNorm | None, str]:
    """Returns the fused call's `post_norm` and ""; or None and why the call cannot include it.

    `module` is SGLang's norm that is applied to the reduced sum before the residual add. `numerics`
    is the rounding mode of the norm after the residual add, and `dtype` is the sum's dtype.
    """
    how: NormArithmetic = getattr(module, ATTRIBUTE, None) or arithmetic(module)
    if how.obstacle:
        return None, how.obstacle
    if how.numerics != numerics:
        return None, "two norms that round differently"
    if module.weight.dtype not in (dtype, torch.float32):
        return None, f"a weight in {module.weight.dtype} with a sum in {dtype}"
    return allnorm.PostNorm(module.weight, eps_of(module), weight_bias=how.weight_bias), ""


def next_weight(how: NormArithmetic, device: torch.device) -> torch.Tensor | None:
    """Returns the weight that the next GEMM reads, which the fused call can prefetch; or None.

    The weight is looked up at every call, because SGLang replaces weights that it loads again. A
    call refuses a hint that is not a plain tensor on its device, so such a weight is left out.
    """
    weight = getattr(how.next_gemm, "weight", None)
    if not isinstance(weight, torch.Tensor):  # other quantizations have no `weight`
        return None
    weight = weight.data
    plain = type(weight) is torch.Tensor and weight.layout is torch.strided
    return weight if plain and weight.device == device else None


def tensor_obstacle(
    weight: torch.Tensor,
    x: torch.Tensor,
    residual: torch.Tensor,
    *,
    float32_residual: bool = False,
) -> str:
    """Returns why the fused call cannot take these tensors, or "". Equal on all ranks."""
    dtype, shape = x.dtype, x.shape
    if dtype not in DTYPES or residual.dtype != (torch.float32 if float32_residual else dtype):
        return f"a sum in {dtype} with a residual in {residual.dtype}"
    if weight.dtype not in (dtype, torch.float32):
        return f"a weight in {weight.dtype} with a sum in {dtype}"
    if shape != residual.shape or weight.shape != shape[-1:]:
        return "a residual or a weight that does not have the sum's shape"
    if x.stride(-1) != 1 or residual.stride(-1) != 1:
        return "columns that are not contiguous"
    if wants_gradient(weight, x, residual):
        return "a tensor requires gradients: engines run under torch.inference_mode()"
    return ""
