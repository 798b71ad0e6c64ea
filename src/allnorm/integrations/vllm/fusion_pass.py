"""Stands where vLLM's pass manager looks for its own all-reduce fusion."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from allnorm.integrations.engines import in_words
from allnorm.integrations.vllm import engine, switch

NAME = "AllReduceFusionPass"


def patch_pass_manager(module: ModuleType) -> None:
    """Replaces the pass by a choice between it and allnorm's. Idempotent."""
    stock = getattr(module, NAME, None)  # vLLM imports it on CUDA only
    if stock is not None and not isinstance(stock, _Choice):
        setattr(module, NAME, _Choice(stock))


class _Choice:
    """Makes the pass: vLLM's own where allnorm cannot and vLLM would, else allnorm's."""

    def __init__(self, stock: Callable[[Any], Any]) -> None:
        self.stock = stock

    def __call__(self, vllm_config: Any) -> Any:
        try:
            if engine.communicator() is not None or not switch.stock_default(vllm_config):
                return self._own(vllm_config)
        except Exception as error:  # noqa: BLE001 - the engine goes on with its own
            engine.STATE.announcer.warning(
                f"graphs are left to vLLM's own pass, {NAME}: {in_words(error)}"
            )
        return self.stock(vllm_config)

    def _own(self, vllm_config: Any) -> Any:
        # Where there is a communicator, all ranks have imported it before they agreed.
        from allnorm.integrations.vllm.graph_pass import AllnormFusionPass

        return AllnormFusionPass(vllm_config)
