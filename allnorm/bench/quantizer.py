"""A kernel that only quantises: what fusing the quantisation saves is measured against it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

import allnorm
from allnorm import reference
from allnorm.quant import Quant

Quantizer = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Takes normed rows [num_tokens, hidden_size]; returns them quantised, and their scales."""


def quantizer(spec: Quant, hidden_size: int, device: torch.device) -> Quantizer:
    """One Triton kernel on GPUs, plain PyTorch on CPUs.

    Args:
        spec: how.
        hidden_size: columns.
        device: where the rows lie.

    Raises:
        ImportError: on a GPU, Triton is not installed.
    """
    if device.type != "cuda":
        return partial(reference.quantize, quant=spec)
    from allnorm.bench import triton_quantizer

    launch = triton_quantizer.plan(spec, hidden_size)

    def quantize(normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        quantized = torch.empty_like(normed, dtype=torch.float8_e4m3fn)
        if isinstance(spec, allnorm.Fp8PerTensor):
            scale = spec.scale
        else:
            rows, columns = normed.shape
            scale = allnorm.quant.empty_scale(spec, rows, columns, normed.device)
        launch(normed, quantized, scale)
        return quantized, scale

    return quantize
