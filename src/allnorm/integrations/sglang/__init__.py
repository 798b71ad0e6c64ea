"""The SGLang plugin: its all-reduces and the norms after them run in one launch.

SGLang finds `register` by its entry point, `sglang.srt.plugins`, in every process that it starts.
Nothing of SGLang is imported before that call. docs/sglang.md says what is hooked and what is not.
"""

from __future__ import annotations

import torch

from allnorm.integrations.sglang.log import announcer

_registered: list[str] = []


def register() -> None:
    """Registers the hooks with SGLang, which applies them when this returns.

    Idempotent. Never raises: whatever stands against the fusion, SGLang goes on without it. Whether
    calls are fused is decided later, by all ranks together, when SGLang warms up a model.
    """
    if _registered:
        return
    if torch.version.hip is not None or not torch.cuda.is_available():
        announcer.info("nothing changes in SGLang: this process sees no NVIDIA GPU")
        return
    install()


def install() -> bool:
    """Registers the hooks whatever the hardware; whether that was possible.

    Raises:
        Nothing: what is missing in SGLang is logged as a warning.
    """
    if _registered:
        return True
    try:
        from allnorm.integrations.sglang import seams
        from allnorm.integrations.sglang.hooks import HOOKS

        _registered.extend(seams.register(seams.probe(), HOOKS))
    except Exception as error:  # noqa: BLE001 - the engine goes on without the fusion
        announcer.warning(f"SGLang runs without fused reductions: {error}")
        return False
    return True
