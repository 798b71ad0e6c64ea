"""The plugin for vLLM: `pip install allnorm` beside it, and tensor-parallel engines are fused.

vLLM calls `register()` in every process, through the entry point "allnorm" of the group
`vllm.general_plugins`. It puts allnorm at the seams of `allnorm.integrations.vllm.seams`; each of
them acts when vLLM imports that module, so that nothing of vLLM is imported early.

docs/vllm.md says what is fused, how it is switched off, and what it says in the log.
"""

from __future__ import annotations

import logging

from allnorm.integrations.vllm.log import LOGGER

_registered = False


def register() -> None:
    """Returns the entry point: puts allnorm at vLLM's seams, or says once why it does not. Idempotent.

    Never raises, and imports no module of vLLM. Not collective.
    """
    global _registered
    if _registered:
        return
    _registered = True
    try:
        from allnorm.integrations.vllm.install import install

        install()
    except Exception as error:  # noqa: BLE001 - an engine must start without its plugins
        logging.getLogger(LOGGER).warning(
            "allnorm: nothing is fused: %s: %s", type(error).__name__, error
        )
