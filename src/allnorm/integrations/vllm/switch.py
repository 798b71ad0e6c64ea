"""Changes the default of vLLM's own switch, `PassConfig.fuse_allreduce_rms`.

The process that the user starts creates the engine's configuration and sends it to the workers.
vLLM takes the defaults for unset fields from a table. The plugin replaces the default in that
table, so values that the user sets explicitly still apply. The decision is stored in
`additional_config`, which the workers and vLLM's compile cache read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

import allnorm
from allnorm.integrations.engines import Announcer, disabled_reason, in_words
from allnorm.integrations.vllm import LOGGER

FIELD = "fuse_allreduce_rms"
KEY = "allnorm"

# vLLM compiles a second time for batches above this many MiB, which its own fusion cannot handle.
_NO_LIMIT_MB = 1e6

_announcer = Announcer(logging.getLogger(LOGGER))


def patch_defaults(config: ModuleType) -> None:
    """Sets the plugin's default in vLLM's tables, one per optimization level. Idempotent.

    Raises KeyError, without changing anything, if a table has no default for the switch.
    """
    levels = config.OPTIMIZATION_LEVEL_TO_CONFIG.values()
    tables = [defaults["compilation_config"]["pass_config"] for defaults in levels]
    for pass_config in [table for table in tables if not isinstance(table[FIELD], _Default)]:
        pass_config[FIELD] = _Default(pass_config[FIELD])


class _Default:
    """A callable default, which vLLM calls if the user did not set the field."""

    def __init__(self, stock: bool | Callable[[Any], bool]) -> None:
        self._stock = stock

    def __call__(self, vllm_config: Any) -> bool:
        stock = bool(self._stock(vllm_config) if callable(self._stock) else self._stock)
        try:
            return self._decide(vllm_config, stock)
        except Exception as error:  # noqa: BLE001 - an engine must start without its plugins
            _announcer.warning(f"nothing is fused, vLLM runs without allnorm: {in_words(error)}")
            return stock

    def _decide(self, vllm_config: Any, stock: bool) -> bool:
        reason = disabled_reason() or obstacle(vllm_config)
        if reason:
            _announcer.info(f"not used: {reason}")
            return stock
        additional = vllm_config.additional_config
        if not isinstance(additional, dict):
            kind = type(additional).__name__
            _announcer.warning(f"nothing is fused: additional_config is a {kind}, expected a dict")
            return stock
        decision = {"version": allnorm.__version__, "stock": stock}
        vllm_config.additional_config = {**additional, KEY: decision}
        if not callable(self._stock):  # vLLM fuses nothing at this optimization level
            return stock
        pass_config = vllm_config.compilation_config.pass_config
        if not stock and pass_config.fi_allreduce_fusion_max_size_mb is None:
            pass_config.fi_allreduce_fusion_max_size_mb = _NO_LIMIT_MB
        return True


def obstacle(vllm_config: Any) -> str:
    """Returns why an engine with this configuration cannot fuse; empty if it can."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return f"the platform is {current_platform.device_name or 'unknown'}, expected CUDA"
    parallel = vllm_config.parallel_config
    if parallel.tensor_parallel_size == 1:
        return "tensor_parallel_size is 1: nothing is reduced"
    if parallel.use_ubatching:
        return "dual batch overlap runs two batches at once, but calls need one order on all ranks"
    return ""


def was_left_alone(vllm_config: Any) -> bool:
    """Returns whether the switch has the plugin's default, because the user did not set it."""
    additional = vllm_config.additional_config
    return isinstance(additional, dict) and KEY in additional


def stock_default(vllm_config: Any) -> bool:
    """Returns whether vLLM's own fusion would run if allnorm were not installed."""
    if was_left_alone(vllm_config):
        return bool(vllm_config.additional_config[KEY]["stock"])
    return bool(vllm_config.compilation_config.pass_config.fuse_allreduce_rms)


def is_on(vllm_config: Any) -> bool:
    """Returns whether compiled graphs are fused."""
    return bool(vllm_config.compilation_config.pass_config.fuse_allreduce_rms)


def is_on_for_eager(vllm_config: Any) -> bool:
    """Returns whether eager models' helpers fuse: yes, unless the user set the switch to off."""
    return is_on(vllm_config) or was_left_alone(vllm_config)
