"""Fuses the reductions of transformers models that are loaded with a tensor-parallel plan.

    from allnorm.integrations import transformers as fused

    fused.enable()
    model = AutoModelForCausalLM.from_pretrained(name, tp_plan="auto")
    print(fused.report(model))

docs/transformers.md describes how it works and what stays unfused.
"""

from __future__ import annotations

import contextlib

from packaging.version import InvalidVersion, Version

from allnorm.errors import UnsupportedError
from allnorm.integrations.transformers.families import FAMILIES, GPT_OSS_TP_PLAN, Family
from allnorm.integrations.transformers.report import Report, SiteReport
from allnorm.integrations.transformers.report import report as report
from allnorm.integrations.transformers.sites import SWITCH
from allnorm.names import REQUESTS

__all__ = [
    "FAMILIES",
    "GPT_OSS_TP_PLAN",
    "Family",
    "Report",
    "SiteReport",
    "disable",
    "enable",
    "is_enabled",
    "report",
]


# Earlier versions have different classes for tensor-parallel styles.
MINIMUM_VERSION = (5, 23)

# Restores the transformers attributes that `enable` replaced.
_stock = contextlib.ExitStack()


def enable(*, algorithm: str = "auto") -> None:
    """Makes models that are loaded from now on fuse each reduction with the norm after it.

    Call it on every rank, before `from_pretrained(..., tp_plan="auto")`. Models that were loaded
    after an earlier `enable()` fuse again too. Idempotent; a second call changes the algorithm.

    Args:
        algorithm: the algorithm of every call: "auto", "one_shot", "two_shot" or "unfused"; equal
            on every rank. It does not affect the bits of the results. Under torch.compile,
            algorithms other than "auto" cause graph breaks.

    Raises:
        ValueError: `algorithm` is not one of these names.
        UnsupportedError: transformers is missing or too old.

    Not collective, but loading a model is: it opens one communicator for the plan's process group.
    Graph-safe: torch.compile recompiles a model after a change.
    """
    if algorithm not in REQUESTS:
        raise ValueError(f"algorithm={algorithm!r}: expected one of {', '.join(REQUESTS)}.")
    _check_version()
    from allnorm.integrations.transformers import styles, wiring

    if not SWITCH.enabled:
        for model, constructor in wiring.wired_constructors():
            _stock.callback(setattr, model, "__init__", model.__init__)
            model.__init__ = constructor
        for registry, replacements in styles.registries():
            for name, replacement in replacements.items():
                _stock.callback(registry.register, name, registry[name])
                registry.register(name, replacement)
    SWITCH.algorithm = algorithm
    SWITCH.enabled = True


def disable() -> None:
    """Undoes `enable()`: all models, whenever they were loaded, run without allnorm. Idempotent.

    Not collective; every rank must call it between the same two forward passes. torch.compile then
    recompiles the models. CUDA graphs that the caller captured do not change.
    """
    SWITCH.enabled = False
    _stock.close()


def is_enabled() -> bool:
    """Returns whether models currently fuse their reductions."""
    return SWITCH.enabled


def _check_version() -> None:
    wanted = ".".join(map(str, MINIMUM_VERSION))
    try:
        import transformers
    except ImportError as error:
        raise UnsupportedError(
            f"transformers is not installed: pip install 'transformers>={wanted}'."
        ) from error
    version = str(transformers.__version__)
    try:
        new_enough = Version(version).release >= MINIMUM_VERSION  # accepts release candidates
    except InvalidVersion:
        new_enough = False
    if not new_enough:
        raise UnsupportedError(
            f"transformers {version}: expected {wanted} or later. Run pip install "
            f"'transformers>={wanted}'."
        )
