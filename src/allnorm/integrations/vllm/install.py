"""Patches vLLM at its seams."""

from __future__ import annotations

import functools
import logging
import multiprocessing
from collections.abc import Callable
from types import ModuleType
from typing import Any

from allnorm.integrations.engines import Announcer, in_words
from allnorm.integrations.vllm import LOGGER, eager, engine, fusion_pass, seams, switch
from allnorm.integrations.vllm.late import when_imported


def install() -> None:
    """Patches each seam after vLLM imports its module. Logs which required seams vLLM lacks."""
    missing = seams.missing()
    first = multiprocessing.parent_process() is None  # workers do not repeat the messages
    if missing:
        if first:
            _log.warning(
                f"nothing is fused: this vLLM has no {', '.join(missing)}. allnorm is tested with "
                "vLLM 0.26 and 0.33: install one of these, or a newer allnorm."
            )
        return
    for option in seams.OPTIONAL:
        if first and not option.present():
            _log.info(f"{option.unfused}: this vLLM has no {option}")
    when_imported(seams.CONFIG, switch.patch_defaults, _without(_LEFT_ALONE))
    for name, action in (
        (seams.PASS_CONFIG, _patch_hash),
        (seams.PASS_MANAGER, fusion_pass.patch_pass_manager),
        (seams.WORKER, _patch_worker),
    ):
        when_imported(name, action, _without("nothing is fused", needed=name))
    for option in seams.HELPERS:
        for seam in option.present():
            patch = functools.partial(eager.patch_helper, name=seam.name)
            action = functools.partial(patch, weight_bias=option.weight_bias)
            when_imported(seam.module, action, _without(option.unfused))


_log = Announcer(logging.getLogger(LOGGER))
_LEFT_ALONE = (
    "compiled models are fused only if fuse_allreduce_rms is set "
    "(-cc.pass_config.fuse_allreduce_rms=true)"
)


def _without(unfused: str, needed: str = "") -> Callable[[Exception], None]:
    """Returns a handler for a failed patch, which logs the error and lets the engine continue.

    `unfused` is a log message that names what is not fused without the patch. `needed` is the
    module's name if no rank in the group may fuse without the patch; otherwise it is empty.
    """

    def failed(error: Exception) -> None:
        if needed:
            engine.STATE.broken = f"{needed} could not be patched: {in_words(error)}"
        _log.warning(f"{unfused}: {in_words(error)}")

    return failed


def _patch_hash(module: ModuleType) -> None:
    _after(module.PassConfig, "compute_hash", lambda result, *_: f"{result} {engine.key()}")


def _patch_worker(module: ModuleType) -> None:
    def started(result: Any, vllm_config: Any, *_: Any, **__: Any) -> Any:
        engine.start(vllm_config)
        return result

    def ready(result: Any, *_: Any, **__: Any) -> Any:
        engine.ready()
        return result

    _after(module, "init_worker_distributed_environment", started)
    _after(module.Worker, "compile_or_warm_up_model", ready)


def _after(owner: Any, name: str, then: Callable[..., Any]) -> None:
    """Makes a function return `then(result, *arguments)` instead of `result`. Idempotent."""
    stock = getattr(owner, name)
    if hasattr(stock, "allnorm_stock"):
        return

    @functools.wraps(stock)
    def followed(*args: Any, **kwargs: Any) -> Any:
        return then(stock(*args, **kwargs), *args, **kwargs)

    followed.allnorm_stock = stock  # type: ignore[attr-defined]
    setattr(owner, name, followed)
