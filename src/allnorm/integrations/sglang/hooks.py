"""The hooks: the gate, the two norm functions that it enables, and the start before graph capture.

A hook that receives a `Probe` returns it. Otherwise it runs SGLang's own function, unless the ranks
have agreed to fuse.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from allnorm.errors import UnsupportedError
from allnorm.integrations.sglang import seams, start
from allnorm.integrations.sglang.fusion import current
from allnorm.integrations.sglang.handoff import GROUP_SIZE, default_quant
from allnorm.integrations.sglang.seams import Probe

_Original = Callable[..., Any]


def gate(original: _Original, batch_size: Any, *more: Any, **named: Any) -> Any:
    """Returns whether SGLang leaves a sum of `batch_size` rows to the norm after it."""
    if isinstance(batch_size, Probe):
        return batch_size
    if current() is None or seams.unknown(original, 1, more, named):
        return original(batch_size, *more, **named)
    # No upper bound: allnorm splits large calls into chunks, with bit-identical results.
    return batch_size > 0


def norm(
    original: _Original,
    norm_module: Any,
    x: Any,
    residual: torch.Tensor | None,
    post_residual_addition: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    use_attn_tp_group: bool = True,
    *more: Any,
    **named: Any,
) -> Any:
    """Completes a sum, adds it to the residual and norms it. Never returns None.

    Raises UnsupportedError if SGLang passes an unknown argument. It does not fall back to SGLang's
    own function, which could run the norm without any all-reduce.
    """
    if isinstance(norm_module, Probe):
        return norm_module
    fusion = current()
    if fusion is None or residual is None:
        known = (norm_module, x, residual, post_residual_addition, weight, use_attn_tp_group)
        return original(*known, *more, **named)
    unknown = seams.unknown(original, 6, more, named)
    if unknown:
        raise UnsupportedError(
            f"SGLang passes {unknown} to a fused reduction, which this version of the plugin does "
            "not support. Set ALLNORM_DISABLE=1 to run without the plugin, or try a newer allnorm."
        )
    if post_residual_addition is not None:
        residual = residual + post_residual_addition
    return fusion.norm(norm_module, x, residual)


def quantized_norm(
    original: _Original,
    norm_module: Any,
    x: Any,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    group_size: int = GROUP_SIZE,
    use_attn_tp_group: bool = True,
    keep_bf16: bool = False,
    *more: Any,
    **named: Any,
) -> Any:
    """Completes a sum, adds it to the residual, norms and quantizes it for a layer that reads FP8.

    Returns None, without any communication, if the GEMM after the norm does not take the result, or
    if SGLang passes an unknown argument. SGLang then calls `norm`.
    """
    if isinstance(norm_module, Probe):
        return norm_module
    fusion = current()
    if fusion is None or residual is None:
        known = (norm_module, x, residual, weight, group_size, use_attn_tp_group, keep_bf16)
        return original(*known, *more, **named)
    if seams.unknown(original, 7, more, named):
        return None
    quant = default_quant() if group_size == GROUP_SIZE and x.dtype == torch.bfloat16 else None
    if quant is None:
        return None
    return fusion.quantized_norm(norm_module, x, residual, quant, keep_bf16)


def before_graphs(original: _Original, runner: Any, *more: Any, **named: Any) -> Any:
    """Starts the plugin after SGLang creates its own workspace and before it captures graphs."""
    if isinstance(runner, Probe):
        return runner
    result = original(runner, *more, **named)
    start.start(runner)
    return result


HOOKS: dict[str, Callable[..., Any]] = {
    "gate": gate,
    "norm": norm,
    "quantized norm": quantized_norm,
    "start": before_graphs,
}
