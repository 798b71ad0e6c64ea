"""What vLLM's FP8 quantisation kernels compute, for the graph pass.

They are nodes of the graph where the custom operator `quant_fp8` is on, each a mutating operator of
the C extension inside `auto_functionalized`. A function here returns what the operator stores.

Groups are quantised with the same operations as here. With a static scale, vLLM's kernel multiplies
by the reciprocal, and with a scale for each token it keeps that above 1 / (448 * 512): a float32
ulp before the rounding to FP8, and rows without a value above 1 / 512, can differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_MAX = 448.0
_FP8 = torch.float8_e4m3fn
_LEAST_AMAX = 1e-10


def decompositions() -> dict[str, Callable[..., Any]]:
    """By the name of the operator."""
    return {
        "_C::static_scaled_fp8_quant": _static,
        "_C::dynamic_per_token_scaled_fp8_quant": _per_token,
        "_C::per_token_group_fp8_quant": _per_group,
    }


def _static(*, result: Tensor, input: Tensor, scale: Tensor, group_shape: Any = None) -> Tensor:
    if scale.numel() != 1:
        raise NotImplementedError("it has several static scales")
    return (input.float() / scale).clamp(-_MAX, _MAX).to(_FP8)


def _per_token(
    *, result: Tensor, input: Tensor, scale: Tensor, scale_ub: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    if scale_ub is not None:
        raise NotImplementedError("its scale has an upper bound")
    return _quantised(input)


def _per_group(
    *, input: Tensor, output_q: Tensor, output_s: Tensor, group_size: int, eps: float, **more: Any
) -> tuple[Tensor, Tensor]:
    if eps != _LEAST_AMAX or more.get("scale_ue8m0"):
        raise NotImplementedError("its scales are not float32 quotients, at least 1e-10 / 448")
    groups = input.view(*input.shape[:-1], input.shape[-1] // group_size, group_size)
    quantized, scale = _quantised(groups)
    return quantized.view(input.shape), scale.squeeze(-1)


def _quantised(rows: Tensor) -> tuple[Tensor, Tensor]:
    y = rows.float()
    scale = y.abs().amax(dim=-1, keepdim=True).clamp(min=_LEAST_AMAX) / _MAX
    return (y / scale).clamp(-_MAX, _MAX).to(_FP8), scale
