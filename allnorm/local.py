"""The library's own add + RMSNorm of a tensor that is already reduced. Not collective."""

from __future__ import annotations

import torch

from allnorm import _native, arguments
from allnorm.arguments import NormArguments
from allnorm.launch import Launch, raise_status


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
    norm = NormArguments(eps, weight_bias, numerics)
    arguments.check_norm_arguments(norm)
    arguments.check_input("x", x, getattr(x, "device", torch.device("cpu")))
    arguments.check_weight(weight, x)
    if residual is not None:
        arguments.check_like("residual", residual, x)
    library = _native.library(x.device.type)
    launch = Launch(x, residual, weight, norm, "unfused")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    residual_out = torch.empty_like(out)
    temporaries = launch.bind(x, residual, weight, out, residual_out)
    raise_status(library, launch.local(library))
    del temporaries
    return out, residual_out
