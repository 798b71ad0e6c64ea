"""Fuses the helpers that eager models call between a row-parallel linear layer and a norm."""

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
    """Replaces a helper with one that makes a fused call where possible. Idempotent.

    Args:
        module: the module that defines the helper, from which other modules import it later.
        name: the name of the helper, `(hidden_states, residual, norm) -> (normed, residual)`.
        weight_bias: the number that its norm adds to the weight.
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
        if communicator is not None and not more and not named:  # others are unknown
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
    """Returns the norm's rounding mode; empty if allnorm cannot compute the norm.

    The result depends only on the model and its shapes, so it is equal on every rank. Logs one
    warning if vLLM's objects are not as expected.
    """
    try:
        if residual is None or not _can_fuse(hidden_states, residual, norm):
            return ""
        # Norms with a bias multiply by a float32 weight.
        float32_weight = weight_bias != 0.0 or norm.weight.dtype == torch.float32
        provider = _provider(hidden_states, residual, norm, float32_weight)
        return mode_of(provider, float32_weight=float32_weight)
    except Exception as error:  # noqa: BLE001 - vLLM's own helper then computes the norm
        engine.STATE.announcer.warning(
            f"norms of class {type(norm).__name__} are not fused: {in_words(error)}"
        )
        return ""


def _can_fuse(hidden_states: torch.Tensor, residual: torch.Tensor, norm: Any) -> bool:
    return bool(
        residual.shape == hidden_states.shape
        and residual.dtype == hidden_states.dtype
        and hidden_states.stride(-1) == 1
        and getattr(norm, "variance_size_override", None) is None
        and getattr(norm, "has_weight", True)
        and norm.weight.dtype in (hidden_states.dtype, torch.float32)
        and not wants_gradient(hidden_states, residual, norm.weight)
    )


def _provider(
    hidden_states: torch.Tensor, residual: torch.Tensor, norm: Any, float32_weight: bool
) -> str:
    """Returns the name of the implementation that computes the unfused norm."""
    from vllm.ir.op import IrOp

    weight = norm.weight.float() if float32_weight else norm.weight
    operator = IrOp.registry["fused_add_rms_norm"]
    chosen = operator.dispatch(hidden_states, residual, weight, norm.variance_epsilon)
    return str(chosen.provider)
