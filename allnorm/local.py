"""The library's own add + RMSNorm of a tensor that is already reduced. Not collective."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import torch

from allnorm import _native, arguments, fast_call, tensors
from allnorm.arguments import Like, NormArguments
from allnorm.errors import UnsupportedError
from allnorm.keys import constants_of, geometry_of
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
from allnorm.shortcuts import is_traced, new_tensors

_ALGORITHM = "local"  # none of those of ranks
# Prepared calls kept per thread and device.
_MAX_LAUNCHES = 4096


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
    if is_traced(x):
        traced: tuple[torch.Tensor, torch.Tensor] = torch.ops.allnorm.add_rms_norm(
            x, residual, weight, eps, weight_bias, numerics
        )
        return traced
    norm = (eps, weight_bias, numerics, False)
    made = _call_again(x, residual, weight, norm)
    if made is not None:
        normed, summed = made
        return normed, summed
    calls, launch = _find(x, residual, weight, norm, None)
    new = calls.new()
    out, residual_out = new(*launch.out), new(*launch.residual_out)
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
    if is_traced(x):
        traced = torch.ops.allnorm.add_rms_norm_quant(
            *(x, residual, weight, eps, *op_arguments(quant), return_normed),
            *(weight_bias, numerics),
        )
        return from_op_results(traced, quant, return_normed)
    # A scale that is given is no part of what is prepared, only where it is.
    key = (Fp8PerTensor, quant.scale.device) if type(quant) is Fp8PerTensor else quant
    norm = (eps, weight_bias, numerics, False, key, return_normed)
    made = _call_again(x, residual, weight, norm)
    if made is not None:
        return QuantizedNorm(*made)
    calls, launch = _find(x, residual, weight, norm, quant)
    new = calls.new()
    quantized, residual_out = new(*launch.quantized), new(*launch.residual_out)
    normed = new(*launch.out) if return_normed else None
    if isinstance(quant, Fp8PerTensor):
        scale = tensors.in_memory(quant.scale)
    else:
        assert launch.scale is not None
        scale = launch.scale.empty(x.device)
    _run(launch, x, residual, weight, normed, residual_out, quantized, scale)
    if isinstance(quant, Fp8PerTensor):
        scale = quant.scale
    return QuantizedNorm(quantized, scale, residual_out, normed)


class _Calls:
    """A thread's calls on one device, and how they are made again."""

    def __init__(self, device: torch.device) -> None:
        self.library = _native.library(device.type)
        self.new = new_tensors(device)
        self.fast = fast_call.of_thread(self.library, device)
        self.launches: dict[Any, Launch] = {}


class _Threads(threading.local):
    """Each thread's own, so that none waits for another."""

    def __init__(self) -> None:
        self.calls: dict[torch.device, _Calls] = {}


_threads = _Threads()


def _call_again(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, norm: tuple[Any, ...]
) -> tuple[Any, ...] | None:
    """The results of a call that is prepared, and is made without Python; else None."""
    try:
        calls = _threads.calls[x.device]
    except (AttributeError, KeyError):
        return None
    made = calls.fast.make(x, residual, weight, norm, _ALGORITHM, None, None)
    if made.__class__ is int:
        raise_status(calls.library, made)
    result: tuple[Any, ...] | None = made
    return result


def _find(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    norm: tuple[Any, ...],
    quant: Quant | None,
) -> tuple[_Calls, Launch]:
    """What is prepared for tensors of this geometry; checks all that it decides, the first time."""
    given = (x, weight) if residual is None else (x, residual, weight)
    if type(quant) is Fp8PerTensor:
        given = (*given, quant.scale)
    key = None
    try:
        key = (*map(geometry_of, given), constants_of(norm))
        calls = _threads.calls[x.device]
        launch = calls.launches[key]
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError, OverflowError):
        pass  # not seen before, or not what it should be: the checks say so
    else:
        if launch.takes(given):
            fast_call.keep(calls.fast, launch, (x, residual, weight, None, None), norm, _ALGORITHM)
            return calls, launch
        key = None
    eps, weight_bias, numerics, sharded = norm[:4]
    checked = NormArguments(eps, weight_bias, numerics, sharded)
    if len(norm) > 4:
        check_quant(quant)
        checked = dataclasses.replace(checked, quant=quant, return_normed=norm[5])
    launch = _prepare(x, residual, weight, checked)
    calls = _threads.calls.get(x.device) or _threads.calls.setdefault(x.device, _Calls(x.device))
    if key is not None and not launch.is_virtual:
        if len(calls.launches) >= _MAX_LAUNCHES:
            calls.launches.clear()
        calls.launches[key] = launch
    return calls, launch


def _prepare(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, norm: NormArguments
) -> Launch:
    arguments.check_norm_arguments(norm)
    arguments.check_input("x", x, getattr(x, "device", torch.device("cpu")))
    if x.device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"x is on {x.device}: expected a CUDA device or the CPU.")
    arguments.check_last_dim("x", x)
    arguments.check_weight(weight, x)
    arguments.check_last_dim("weight", weight)
    if norm.quant is not None:
        arguments.check_quantization(norm.quant, x)
    if residual is not None:
        arguments.check_like("residual", residual, Like.rows(x, None))
    return Launch(x, residual, weight, norm, _ALGORITHM)


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
