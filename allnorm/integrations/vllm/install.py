"""Puts allnorm at vLLM's seams."""

from __future__ import annotations

import functools
import logging
import multiprocessing
from collections.abc import Callable
from types import ModuleType
from typing import Any

from allnorm.integrations.engines import Announcer
from allnorm.integrations.vllm import LOGGER, eager, engine, fusion_pass, seams, switch
from allnorm.integrations.vllm.late import when_imported


def install() -> None:
    """Arranges for each seam to be changed when vLLM imports it; or says what is missing."""
    missing = seams.missing()
    if missing:
        if multiprocessing.parent_process() is None:  # the workers of an engine say no more
            Announcer(logging.getLogger(LOGGER)).warning(
                f"nothing is fused: this vLLM has no {', '.join(missing)}. It is tested with 0.26 "
                "and 0.33: install one of these, or an allnorm that knows this one."
            )
        return
    when_imported(seams.CONFIG, switch.patch_defaults)
    when_imported(seams.PASS_CONFIG, _patch_hash)
    when_imported(seams.PASS_MANAGER, fusion_pass.patch_pass_manager)
    when_imported(seams.WORKER, _patch_worker)
    gemma = functools.partial(
        eager.patch_helper, name="fused_allreduce_gemma_rms_norm", weight_bias=1.0
    )
    when_imported(seams.GEMMA_HELPER, gemma)
    plain = functools.partial(eager.patch_helper, name="fused_allreduce_rms_norm", weight_bias=0.0)
    for module in seams.HELPERS:
        when_imported(module, plain)


def _patch_hash(module: ModuleType) -> None:
    """Lets vLLM's compile cache know what was fused with what."""
    _after(module.PassConfig, "compute_hash", lambda result, _: f"{result} {engine.key()}")


def _patch_worker(module: ModuleType) -> None:
    def started(result: Any, vllm_config: Any, *_: Any, **__: Any) -> Any:
        engine.start(vllm_config)
        return result

    def ready(result: Any, _: Any) -> Any:
        engine.summarise()
        return result

    _after(module, "init_worker_distributed_environment", started)
    _after(module.Worker, "compile_or_warm_up_model", ready)


def _after(owner: Any, name: str, then: Callable[..., Any]) -> None:
    """Lets `then(result, *arguments)` follow a function, and give its result. Idempotent."""
    stock = getattr(owner, name)
    if hasattr(stock, "allnorm_stock"):
        return

    @functools.wraps(stock)
    def followed(*args: Any, **kwargs: Any) -> Any:
        return then(stock(*args, **kwargs), *args, **kwargs)

    followed.allnorm_stock = stock  # type: ignore[attr-defined]
    setattr(owner, name, followed)
