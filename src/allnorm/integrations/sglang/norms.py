"""How SGLang's norms compute, in the terms of the fused calls."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch

import allnorm
from allnorm.integrations.engines import wants_gradient

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Where a norm module of SGLang keeps its `NormArithmetic`.
ATTRIBUTE = "_allnorm"


@dataclass(frozen=True)
class NormArithmetic:
    """How a norm of SGLang computes.

    Attributes:
        weight_bias: 1.0 for Gemma's, whose weight is stored without it.
        numerics: rounding mode.
        quant: what the layer after it reads; None: 16 bits.
        obstacle: why the fused call cannot compute the same; empty if it can.
    """

    weight_bias: float = 0.0
    numerics: str = "unrounded"
    quant: allnorm.Fp8PerGroup | None = None
    obstacle: str = ""

    def reading(self, quant: allnorm.Fp8PerGroup | None) -> NormArithmetic:
        """Returns the same norm before a layer that reads `quant`."""
        return replace(self, quant=quant)


@functools.cache
def classes() -> tuple[Any, ...]:
    """SGLang's classes RMSNorm, GemmaRMSNorm and, where there is one, Gemma3RMSNorm."""
    from sglang.srt.layers import layernorm

    names = ("RMSNorm", "GemmaRMSNorm", "Gemma3RMSNorm")
    return tuple(getattr(layernorm, name) for name in names if hasattr(layernorm, name))


def eps_of(module: Any) -> float:
    """What a norm adds to its mean square; Gemma3RMSNorm calls it otherwise."""
    eps: float = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    return eps


def arithmetic(module: Any) -> NormArithmetic:
    """How a norm module computes, by its class and its settings."""
    plain, *gemma = classes()
    if isinstance(module, tuple(gemma)):
        # For its fused calls SGLang adds the 1 in the weight's dtype, for the others in float32.
        # Here it is added in float32.
        return NormArithmetic(weight_bias=1.0)
    if not isinstance(module, plain):
        return NormArithmetic(obstacle=f"a norm of class {type(module).__name__}")
    if module.variance_size_override is not None:
        return NormArithmetic(obstacle="the variance of a part of the row")
    if module.fp32_residual or module.override_orig_dtype is not None:
        return NormArithmetic(obstacle="a result of another dtype than its input")
    if not module.has_weight:
        return NormArithmetic(obstacle="a norm without weight")
    if not module.cast_x_before_out_mul:
        return NormArithmetic()
    if module.weight.dtype == torch.float32:
        return NormArithmetic(obstacle="a weight in float32 that is multiplied last")
    return NormArithmetic(numerics="vllm")


def post_norm(
    module: Any, numerics: str, dtype: torch.dtype
) -> tuple[allnorm.PostNorm | None, str]:
    """Returns a norm of the reduced sum before the residual add, as the fused call takes it.

    Args:
        module: a norm of SGLang.
        numerics: the mode of the norm behind the residual.
        dtype: of the sum.

    Returns:
        None and why there is none, or the post norm and an empty string.
    """
    how: NormArithmetic = getattr(module, ATTRIBUTE, None) or arithmetic(module)
    if how.obstacle:
        return None, how.obstacle
    if how.numerics != numerics:
        return None, "two norms that round differently"
    if module.weight.dtype not in (dtype, torch.float32):
        return None, f"a weight in {module.weight.dtype} beside a sum in {dtype}"
    return allnorm.PostNorm(module.weight, eps_of(module), weight_bias=how.weight_bias), ""


def tensor_obstacle(weight: torch.Tensor, x: torch.Tensor, residual: torch.Tensor) -> str:
    """What of the tensors the fused call does not take; all ranks have the same kinds."""
    if x.dtype not in _DTYPES or residual.dtype != x.dtype:
        return f"a sum in {x.dtype} beside a residual in {residual.dtype}"
    if weight.dtype not in (x.dtype, torch.float32):
        return f"a weight in {weight.dtype} beside a sum in {x.dtype}"
    if x.shape != residual.shape or weight.shape != x.shape[-1:]:
        return "a residual or a weight of another shape than the sum"
    if x.stride(-1) != 1 or residual.stride(-1) != 1:
        return "columns that are not contiguous"
    if wants_gradient(weight, x, residual):
        return "gradients are enabled and wanted: engines run under torch.inference_mode()"
    return ""
