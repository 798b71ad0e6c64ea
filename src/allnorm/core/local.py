"""Calls to the local kernel: residual add and RMSNorm of a tensor that is already reduced."""

from __future__ import annotations

import threading
from typing import Any

import torch

from allnorm.core import backends, tensors, traced
from allnorm.core.call import Runner
from allnorm.core.dispatch import Dispatcher, Target
from allnorm.core.shortcuts import is_traced
from allnorm.errors import UnsupportedError
from allnorm.expert_sum import ExpertSum
from allnorm.post_norm import PostNorm
from allnorm.quant import DEFAULT_QUANT, Quant, QuantizedNorm


def add_rms_norm(
    x: torch.Tensor | ExpertSum,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    *,
    weight_bias: float = 0.0,
    numerics: str = "rounded",
    post_norm: PostNorm | None = None,
    scale: float = 1.0,
) -> tuple[Any, torch.Tensor]:
    """Adds the residual and applies RMSNorm, bit-identical to steps 2 to 5 of the fused call.

    PyTorch equivalent, up to the order of sums:

        residual_out = x + residual
        normed = F.rms_norm(residual_out, weight.shape, weight_bias + weight, eps)

    Args:
        x: [..., hidden_size] with any hidden_size, float32, float16 or bfloat16; rows may be
            strided. Or an `ExpertSum`.
        residual: like `x`, or None. It may be float32 while `x` is float16 or bfloat16: then
            `residual_out` is float32 too, and is normed without being rounded.
        weight: [hidden_size], dtype of `x` or float32. With `post_norm` it may be None: no second
            norm.
        eps: added to the mean square, as float32.
        weight_bias: added to the weight in float32.
        numerics: "rounded", "unrounded", "transformers" or "vllm".
        post_norm: norm of `x` before the residual add.
        scale: factor of `x`, or of its post norm.

    Returns:
        (normed, residual_out), contiguous, in the shape of `x`; `normed` is None without a weight.

    Raises:
        ValueError, TypeError, UnsupportedError: wrong arguments.
        NativeLibraryError: the backend's library is missing.

    Not collective. Safe in CUDA graphs and under torch.compile.
    """
    results: tuple[Any, torch.Tensor] = _runner(x).call(
        op="add_rms_norm",
        source=x,
        residual=residual,
        weight=weight,
        eps=eps,
        weight_bias=weight_bias,
        numerics=numerics,
        post_norm=post_norm,
        scale=scale,
    )
    return results


def add_rms_norm_quant(
    x: torch.Tensor | ExpertSum,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    quant: Quant = DEFAULT_QUANT,
    return_normed: bool = False,
    *,
    weight_bias: float = 0.0,
    numerics: str = "rounded",
    post_norm: PostNorm | None = None,
    scale: float = 1.0,
) -> QuantizedNorm:
    """Runs `add_rms_norm` and quantizes its result: steps 2 to 6 of the fused call.

    PyTorch equivalent with one scale per row, up to the order of sums:

        normed, residual_out = allnorm.add_rms_norm(x, residual, weight, eps)
        scale = normed.float().abs().amax(-1, keepdim=True) / 448
        quantized = (normed.float() / scale).to(torch.float8_e4m3fn)

    `quant`, `return_normed` and the results are as for
    `Communicator.all_reduce_add_rms_norm_quant`; other arguments and errors as for `add_rms_norm`.

    Not collective. Safe in CUDA graphs and under torch.compile.
    """
    results = _runner(x).call(
        op="add_rms_norm_quant",
        source=x,
        residual=residual,
        weight=weight,
        eps=eps,
        weight_bias=weight_bias,
        numerics=numerics,
        post_norm=post_norm,
        scale=scale,
        quant=quant,
        return_normed=return_normed,
    )
    return QuantizedNorm(*results)


def quantize(x: torch.Tensor, quant: Quant = DEFAULT_QUANT) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes rows with the bits of step 6 of the fused call, in one launch.

    It quantizes what is normed by a different function, such as `hyper_connection_input`.

    PyTorch equivalent with one scale per row:

        scale = x.float().abs().amax(-1, keepdim=True) / 448
        quantized = (x.float() / scale).to(torch.float8_e4m3fn)

    Args:
        x: [..., hidden_size] with any hidden_size of whole groups, float32, float16 or bfloat16;
            rows may be strided.
        quant: an `Fp8PerGroup`, `MxFp8()`, `Fp8PerToken`, `Fp8PerTensor` or `NvFp4`.

    Returns:
        (quantized, scale). `quantized` is contiguous, float8_e4m3fn in the shape of `x`; for
        `NvFp4` it is uint8 of half the width. `scale` has the layout of `quant`, with zeros as
        padding; for `Fp8PerTensor` it is the given tensor.

    Raises:
        ValueError, TypeError, UnsupportedError: wrong arguments.
        NativeLibraryError: the backend's library is missing.

    Not collective. Safe in CUDA graphs and under torch.compile. Bits: the numerics page.
    """
    results: tuple[torch.Tensor, torch.Tensor] = _runner(x).call(
        op="quantize", source=x, quant=quant
    )
    return results


class _Threads(threading.local):
    """Each thread's dispatchers, keyed by device, so that threads do not wait for each other."""

    def __init__(self) -> None:
        self.dispatchers: dict[torch.device, Dispatcher] = {}


_threads = _Threads()


def _runner(x: Any) -> Runner:
    """Returns the runner for calls on `x`: this thread's dispatcher, or operators while tracing."""
    return traced.Operators() if is_traced(x) else dispatcher(x)


def dispatcher(x: Any) -> Dispatcher:
    """Returns this thread's dispatcher for the device of `x`, a tensor or an ExpertSum."""
    if isinstance(x, ExpertSum):
        x = x.rows
    try:
        return _threads.dispatchers[x.device]
    except (AttributeError, KeyError):
        pass
    tensors.check_kind("x", x)
    if x.device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"x is on {x.device}: expected a CUDA device or the CPU.")
    local = backends.library(x.device.type).local
    made = _threads.dispatchers[x.device] = Dispatcher(Target(x.device), local)
    return made
