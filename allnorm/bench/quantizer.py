"""A kernel that only quantises: what fusing the quantisation saves is measured against it."""

from __future__ import annotations

import torch

import allnorm
from allnorm import reference
from allnorm.quant import Quant


class Quantizer:
    """Quantises normed rows: one Triton kernel on GPUs, plain PyTorch on CPUs.

    Args:
        spec: how.
        hidden_size: columns.
        device: where the rows lie.

    Raises:
        ImportError: on a GPU, Triton is not installed.
    """

    def __init__(self, spec: Quant, hidden_size: int, device: torch.device) -> None:
        self._spec = spec
        self._on_gpu = device.type == "cuda"
        if self._on_gpu:
            from allnorm.bench import triton_quantizer

            self._launch = triton_quantizer.plan(spec, hidden_size)

    def __call__(self, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantises [num_tokens, hidden_size] rows; returns them and their scales."""
        if not self._on_gpu:
            return reference.quantize(normed, self._spec)
        quantized = torch.empty_like(normed, dtype=torch.float8_e4m3fn)
        if isinstance(self._spec, allnorm.Fp8PerTensor):
            scale = self._spec.scale
        else:
            rows, columns = normed.shape
            scale = allnorm.quant.empty_scale(self._spec, rows, columns, normed.device)
        self._launch(normed, quantized, scale)
        return quantized, scale
