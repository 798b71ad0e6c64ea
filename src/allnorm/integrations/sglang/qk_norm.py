"""Fuses the norms of q and k of MiniMax-M2, whose rows are spread over the ranks.

SGLang computes `x * rsqrt(sum of squares / columns + eps) * weight` in float32 and rounds once:
numerics "rounded". It runs a kernel, an all-reduce and another kernel.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from allnorm.integrations.engines import wants_gradient
from allnorm.integrations.sglang.fusion import current
from allnorm.integrations.sglang.norms import DTYPES
from allnorm.integrations.sglang.seams import check_fields

_MODULE, _CLASS = "sglang.srt.models.minimax_m2", "MiniMaxM2QKRMSNorm"
_FIELDS = ("_forward_impl", "_q_norm.weight", "_k_norm.weight", "_world_size", "_eps")
_OWN_KERNEL = "_forward_fused"  # which the user asks for with SGLANG_USE_FUSED_PARALLEL_QKNORM=1

_Pair = tuple[torch.Tensor, torch.Tensor]


def sites(model: torch.nn.Module, world_size: int) -> list[Any]:
    """Returns SGLang's objects that norm q and k over `world_size` ranks; changes nothing.

    Raises UnsupportedError if such an object lacks a field that the plugin reads.
    """
    kind: Any = getattr(sys.modules.get(_MODULE), _CLASS, None)
    found: list[Any] = []
    for module in model.modules():
        norm: Any = vars(module).get("qk_norm_impl")
        if kind is None or not isinstance(norm, kind):
            continue
        check_fields("a norm of q and k", norm, _FIELDS)
        own = getattr(norm._forward_impl, "__name__", "") == _OWN_KERNEL
        if norm._world_size == world_size and not own:
            found.append(norm)
    return found


def wire(norms: Iterable[Any]) -> None:
    """Makes SGLang's objects call `fused`. Only sets attributes, which cannot fail on one rank."""
    for norm in norms:
        norm._forward_impl = functools.partial(fused, norm, norm._forward_impl)


def fused(norm: Any, original: Callable[..., _Pair], q: torch.Tensor, k: torch.Tensor) -> _Pair:
    """Norms q and k in one call, or as SGLang does if no call can take them.

    Args:
        norm: SGLang's object, which has the weights and eps.
        original: SGLang's own function, which reduces the sums of squares itself.
        q: [num_tokens, q_size], this rank's columns; may be a slice of a wider matrix.
        k: [num_tokens, k_size], this rank's columns.
    """
    fusion, weights = current(), (norm._q_norm.weight, norm._k_norm.weight)
    if fusion is None:
        return original(q, k)
    obstacle = _obstacle(q, k, *weights)
    if obstacle:
        if not torch.compiler.is_compiling():
            fusion.say(f"a norm of q and k is not fused: {obstacle}")
        return original(q, k)
    fusion.count(norm)
    results = fusion.communicator.rms_norm_sharded((q, k), weights, norm._eps, numerics="rounded")
    return results[0], results[1]


def _obstacle(q: torch.Tensor, k: torch.Tensor, *weights: torch.Tensor) -> str:
    """Returns why the call cannot take these tensors, or "". Equal on all ranks."""
    if q.dtype not in DTYPES or k.dtype != q.dtype:
        return f"q in {q.dtype} with k in {k.dtype}"
    if any(weight.dtype not in (q.dtype, torch.float32) for weight in weights):
        return f"weights in {weights[0].dtype} and {weights[1].dtype} with rows in {q.dtype}"
    if q.stride(-1) != 1 or k.stride(-1) != 1:
        return "columns that are not contiguous"
    if wants_gradient(q, k, *weights):
        return "a tensor requires gradients: engines run under torch.inference_mode()"
    return ""
