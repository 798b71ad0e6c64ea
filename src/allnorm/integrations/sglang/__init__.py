"""The SGLang plugin: fuses SGLang's all-reduces with the norms after them.

SGLang calls `register` through the entry point `sglang.srt.plugins`, in every process that it
starts. None of SGLang's modules are imported before that. docs/sglang.md lists the hooked
functions.
"""

from __future__ import annotations

import logging

import torch

from allnorm.integrations.engines import Announcer

logger = logging.getLogger("allnorm.integrations.sglang")
announcer = Announcer(logger)
_registered: list[str] = []


def register() -> None:
    """Registers the hooks with SGLang, which applies them after this function returns.

    Idempotent. Never raises: if something prevents the fusion, SGLang runs without it. The ranks
    decide together whether to fuse when SGLang warms up a model.
    """
    if _registered:
        return
    if torch.version.hip is not None or not torch.cuda.is_available():
        announcer.info("SGLang runs without fused reductions: this process sees no NVIDIA GPU")
        return
    install()


def install() -> bool:
    """Registers the hooks on any hardware; returns whether it succeeded, and logs why if not."""
    if _registered:
        return True
    try:
        from allnorm.integrations.sglang import seams
        from allnorm.integrations.sglang.hooks import HOOKS

        _registered.extend(seams.register(seams.probe(), HOOKS))
    except Exception as error:  # noqa: BLE001 - the engine continues without fused calls
        announcer.warning(f"SGLang runs without fused reductions: {error}")
        return False
    return True
