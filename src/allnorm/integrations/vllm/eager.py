"""The helpers that models without compilation call between a row-parallel linear and a norm."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from allnorm.integrations.engines import in_words, wants_gradient
from allnorm.integrations.vllm import engine
from allnorm.integrations.vllm.norms import mode_of

_Helper = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def patch_helper(module: ModuleType, name: str, weight_bias: float) -> None:
    """Replaces a helper by one that fuses where it can. Idempotent.

    Arguments beyond those that are known are passed on to vLLM's own, which then computes it.

    Args:
        module: the one that defines it; others import it from there later.
        name: of the helper, `(hidden_states, residual, norm) -> (normed, residual)`.
        weight_bias: what its norm adds to the weight.
    """
    stock = getattr(module, name, None)
    if stock is not None and not hasattr(stock, "allnorm_stock"):
        setattr(module, name, _fused(stock, weight_bias))


def _fused(stock: _Helper, weight_bias: float) -> _Helper:
    @functools.wraps(stock)
    def helper(
        hidden_states: torch.Tensor, residual: torch.Tensor, norm: Any, *more: Any, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        communicator = engine.communicator_for_eager()
        mode = ""
        if communicator is not None and not more and not named:
            mode = _mode_if_known(hidden_states, residual, norm, weight_bias)
        if communicator is None or not mode:
            return stock(hidden_states, residual, norm, *more, **named)
        return communicator.all_reduce_add_rms_norm(
            hidden_states,
            residual,
            norm.weight,
            norm.variance_epsilon,
            weight_bias=weight_bias,
            numerics=mode,
        )

    helper.allnorm_stock = stock  # type: ignore[attr-defined]
    return helper


def _mode_if_known(
    hidden_states: torch.Tensor, residual: torch.Tensor | None, norm: Any, weight_bias: float
) -> str:
    """As `_mode`; empty, and said once, if vLLM is not as expected here.

    Asked of the model and its shapes alone: the answer is the same on every rank.
    """
    try:
        return _mode(hidden_states, residual, norm, weight_bias)
    except Exception as error:  # noqa: BLE001 - the norm is computed by vLLM's own helper
        engine.STATE.announcer.warning(
            f"norms of class {type(norm).__name__} are not fused: {in_words(error)}"
        )
        return ""


def _mode(
    hidden_states: torch.Tensor, residual: torch.Tensor | None, norm: Any, weight_bias: float
) -> str:
    """Returns the rounding mode of the norm by itself; empty if it is none that allnorm computes."""
    if residual is None or residual.shape != hidden_states.shape:
        return ""
    if residual.dtype != hidden_states.dtype or hidden_states.stride(-1) != 1:
        return ""
    if getattr(norm, "variance_size_override", None) is not None:
        return ""
    if not getattr(norm, "has_weight", True):
        return ""
    if norm.weight.dtype not in (hidden_states.dtype, torch.float32):
        return ""
    if wants_gradient(hidden_states, residual, norm.weight):
        return ""
    # Norms with a bias multiply by a float32 weight.
    float32_weight = weight_bias != 0.0 or norm.weight.dtype == torch.float32
    return mode_of(
        _provider(hidden_states, residual, norm, float32_weight), float32_weight=float32_weight
    )


def _provider(
    hidden_states: torch.Tensor, residual: torch.Tensor, norm: Any, float32_weight: bool
) -> str:
    """Who computes the norm when it is not fused."""
    from vllm.ir.op import IrOp

    weight = norm.weight.float() if float32_weight else norm.weight
    chosen = IrOp.registry["fused_add_rms_norm"].dispatch(
        hidden_states, residual, weight, norm.variance_epsilon
    )
    return str(chosen.provider)
