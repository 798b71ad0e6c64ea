"""The library's own add + RMSNorm of a tensor that is already reduced. Not collective."""

from __future__ import annotations

import torch

from allnorm import _native, arguments
from allnorm.arguments import Like, NormArguments
from allnorm.launch import Launch, raise_status
from allnorm.quant import (
    DEFAULT_QUANT,
    Fp8PerTensor,
    Quant,
    QuantizedNorm,
    check_quant,
    from_op_results,
    op_arguments,
)
from allnorm.quant import DTYPE as FP8


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    weight_bias: float = 0.0,
    numerics: str = "rounded",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Residual add and RMSNorm, with the bits of the fused op's steps 2 to 5.

    PyTorch equivalent, up to the order of sums::

        residual_out = x + residual
        normed = F.rms_norm(residual_out, weight.shape, weight_bias + weight, eps)

    Args:
        x: [..., hidden_size], float32, float16 or bfloat16; rows may be strided; any hidden_size.
        residual: like `x`, or None.
        weight: [hidden_size], dtype of `x` or float32.
        eps: added to the mean square, as float32.
        weight_bias: added to the weight in float32.
        numerics: "rounded", "unrounded", "transformers" or "vllm".

    Returns:
        (normed, residual_out), contiguous, of the shape of `x`.

    Raises:
        ValueError, TypeError, UnsupportedError: wrong arguments.
        NativeLibraryError: the backend's library is missing.

    Not collective. Safe in CUDA graphs and under torch.compile.
    """
    if torch.compiler.is_compiling():
        traced: tuple[torch.Tensor, torch.Tensor] = torch.ops.allnorm.add_rms_norm(
            x, residual, weight, eps, weight_bias, numerics
        )
        return traced
    launch, out, residual_out = _prepare(
        x, residual, weight, NormArguments(eps, weight_bias, numerics)
    )
    _run(launch, x, residual, weight, out, residual_out)
    return out, residual_out


def add_rms_norm_quant(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float = 1e-6,
    quant: Quant = DEFAULT_QUANT,
    return_normed: bool = False,
    *,
    weight_bias: float = 0.0,
    numerics: str = "rounded",
) -> QuantizedNorm:
    """Residual add, RMSNorm and quantisation to FP8, with the bits of the fused op's steps 2 to 6.

    PyTorch equivalent for one scale a row, up to the order of sums::

        normed, residual_out = allnorm.add_rms_norm(x, residual, weight, eps)
        scale = normed.float().abs().amax(-1, keepdim=True) / 448
        quantized = (normed.float() / scale).to(torch.float8_e4m3fn)

    Args:
        x: [..., hidden_size], float32, float16 or bfloat16; rows may be strided; any hidden_size.
        residual: like `x`, or None.
        weight: [hidden_size], dtype of `x` or float32.
        eps: added to the mean square, as float32.
        quant: `Fp8PerGroup`, `Fp8PerToken` or `Fp8PerTensor`.
        return_normed: whether the rows before quantisation are wanted too.
        weight_bias: added to the weight in float32.
        numerics: "rounded", "unrounded", "transformers" or "vllm".

    Returns:
        QuantizedNorm(quantized, scale, residual, normed).

    Raises:
        ValueError, TypeError, UnsupportedError: wrong arguments.
        NativeLibraryError: the backend's library is missing.

    Not collective. Safe in CUDA graphs and under torch.compile.
    """
    if torch.compiler.is_compiling():
        traced = torch.ops.allnorm.add_rms_norm_quant(
            *(x, residual, weight, eps, *op_arguments(quant), return_normed),
            *(weight_bias, numerics),
        )
        return from_op_results(traced, quant, return_normed)
    check_quant(quant)
    norm = NormArguments(eps, weight_bias, numerics, False, quant, return_normed)
    launch, out, residual_out = _prepare(x, residual, weight, norm)
    normed = out if return_normed else None
    quantized = torch.empty_like(out, dtype=FP8)
    if isinstance(quant, Fp8PerTensor):
        scale = quant.scale
    else:
        assert launch.scale is not None
        scale = launch.scale.empty(x.device)
    _run(launch, x, residual, weight, normed, residual_out, quantized, scale)
    return QuantizedNorm(quantized, scale, residual_out, normed)


def _prepare(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, norm: NormArguments
) -> tuple[Launch, torch.Tensor, torch.Tensor]:
    """Checks the arguments; returns the call, and memory for two results like `x`."""
    arguments.check_norm_arguments(norm)
    arguments.check_input("x", x, getattr(x, "device", torch.device("cpu")))
    arguments.check_weight(weight, x)
    if norm.quant is not None:
        arguments.check_quantization(norm.quant, x)
    if residual is not None:
        arguments.check_like("residual", residual, Like.rows(x, None))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return Launch(x, residual, weight, norm, "unfused"), out, torch.empty_like(out)


def _run(
    launch: Launch,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    *results: torch.Tensor | None,
) -> None:
    library = _native.library(x.device.type)
    temporaries = launch.bind(x, residual, weight, *results)  # type: ignore[arg-type]
    raise_status(library, launch.local(library))
    del temporaries
