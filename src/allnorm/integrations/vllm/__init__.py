"""The vLLM plugin: fuses tensor-parallel engines' reductions wherever allnorm is installed.

vLLM calls `register()` in every process, through the entry point "allnorm" of the group
`vllm.general_plugins`. It patches vLLM at the seams in `allnorm.integrations.vllm.seams`. Each
patch is applied after vLLM imports the module, so none of vLLM's modules is imported early.

docs/vllm.md lists what is fused, how to switch it off, and the log messages.
"""

from __future__ import annotations

import logging

LOGGER = "vllm.allnorm"  # a child of vLLM's logger, so its users see the messages
_registered = False


def register() -> None:
    """Installs the plugin's patches, or logs once why it does not. Idempotent.

    Never raises, and imports none of vLLM's modules. Not collective.
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
            "allnorm: nothing is fused, vLLM runs without allnorm: %s: %s",
            type(error).__name__,
            error,
        )
