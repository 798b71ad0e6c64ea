"""Decompositions of vLLM's norm operators, for the graph pass.

vLLM lowers a norm operator to one of multiple implementations, which round differently. "native" is
a PyTorch function, and is traced. The kernels of vLLM's C extension round the sum, and multiply by
the weight in float32. Norms with other implementations are not fused.

Inductor's kernels compute in float32 from their loads to their stores. Unless
`emulate_precision_casts` is set, compiled code therefore does not round before the weight, unlike
the native function. benchmarks/engines/vllm_rounding.py measures the difference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_NAMES = ("rms_norm", "fused_add_rms_norm")


def decompositions() -> dict[str, Callable[..., Any]]:
    """Returns the decompositions, keyed by operator name; empty if vLLM lacks these operators."""
    try:
        from vllm.ir.op import IrOp
    except ImportError:
        return {}
    known = [name for name in _NAMES if name in IrOp.registry]
    return {f"vllm_ir::{name}": _Lowered(IrOp.registry[name]) for name in known}


class _Lowered:
    """An operator's decomposition: calls the implementation to which vLLM will lower it."""

    def __init__(self, operator: Any) -> None:
        self._operator = operator

    def __call__(self, *args: Any) -> Any:
        chosen = self._operator.dispatch(*args)
        if chosen.provider == "native":
            return chosen.impl_fn(*_as_compiled(self._operator.name, args))
        if chosen.provider == "vllm_c":
            return _KERNELS[self._operator.name](*args)
        raise NotImplementedError(f"it is computed by {chosen.provider!r}")


def _as_compiled(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns arguments that make the native function round like its compiled version.

    If the weight is float32, the native function multiplies in float32 and rounds once.
    """
    from torch._inductor import config

    at = _NAMES.index(name) + 1  # index of the weight
    if config.emulate_precision_casts or args[at] is None:
        return args
    return (*args[:at], args[at].float(), *args[at + 1 :])


def _rms_norm(x: Tensor, weight: Tensor | None, eps: float, variance_size: None = None) -> Tensor:
    z = x.float()
    normed = z * torch.rsqrt(z.pow(2).mean(dim=-1, keepdim=True) + eps)
    return (normed if weight is None else normed * weight.float()).to(x.dtype)


def _fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, variance_size: None = None
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _rms_norm(total, weight, eps), total


_KERNELS: dict[str, Callable[..., Any]] = {
    "rms_norm": _rms_norm,
    "fused_add_rms_norm": _fused_add_rms_norm,
}


def mode_of(provider: str, *, float32_weight: bool) -> str:
    """Returns an implementation's rounding mode in eager mode; empty if unknown."""
    if provider == "native":
        return "unrounded" if float32_weight else "vllm"
    return "rounded" if provider == "vllm_c" else ""
