"""Replaces vLLM's own all-reduce fusion in its pass manager."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from allnorm.integrations.engines import in_words
from allnorm.integrations.vllm import engine, switch

NAME = "AllReduceFusionPass"


def patch_pass_manager(module: ModuleType) -> None:
    """Replaces vLLM's pass with a choice between vLLM's and allnorm's pass. Idempotent."""
    stock = getattr(module, NAME, None)  # vLLM imports it only on CUDA
    if stock is not None and not isinstance(stock, _Choice):
        setattr(module, NAME, _Choice(stock))


class _Choice:
    """Creates passes: vLLM's own if vLLM would fuse and allnorm cannot; otherwise allnorm's."""

    def __init__(self, stock: Callable[[Any], Any]) -> None:
        self.stock = stock

    def __call__(self, vllm_config: Any) -> Any:
        try:
            if engine.communicator() is not None or not switch.stock_default(vllm_config):
                # If a communicator exists, every rank has imported this module before the
                # agreement.
                from allnorm.integrations.vllm.graph_pass import AllnormFusionPass

                return AllnormFusionPass(vllm_config)
        except Exception as error:  # noqa: BLE001 - the engine continues with its own pass
            engine.STATE.announcer.warning(
                f"graphs are fused by vLLM's own pass, {NAME}: {in_words(error)}"
            )
        return self.stock(vllm_config)
