"""Fused reductions in transformers models that are loaded with a tensor-parallel plan.

    from allnorm.integrations import transformers as fused

    fused.enable()
    model = AutoModelForCausalLM.from_pretrained(name, tp_plan="auto")
    print(fused.report(model))

docs/transformers.md says how it works and what it leaves alone.
"""

from __future__ import annotations

from typing import Any

from packaging.version import InvalidVersion, Version

from allnorm.errors import UnsupportedError
from allnorm.integrations.transformers.families import FAMILIES, Family
from allnorm.integrations.transformers.plans import GPT_OSS_TP_PLAN
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


# What this is written against and tested with; earlier ones have other classes behind their styles.
MINIMUM_VERSION = (5, 23)

# A registry of transformers, a name in it, and what it held.
_replaced: list[tuple[Any, str, Any]] = []
# A model class, and its own constructor.
_constructors: list[tuple[Any, Any]] = []


def enable(*, algorithm: str = "auto") -> None:
    """Lets models that are loaded from now on fuse each reduction with the norm after it.

    Call it before `from_pretrained(..., tp_plan="auto")`, on every rank alike. Models that were
    loaded while it was enabled, and stock since `disable()`, fuse again. Idempotent; a second call
    changes the algorithm.

    Args:
        algorithm: of every call: "auto", "one_shot", "two_shot" or "unfused"; the same on every
            rank. The bits are the same. Under torch.compile only "auto" is traced without a graph
            break.

    Raises:
        ValueError: algorithm is none of these.
        UnsupportedError: transformers is missing or too old.

    Not collective, but the loading of a model is: it opens one communicator for the group of the
    plan. Graph-safe: a compiled model is compiled anew after a change.
    """
    if algorithm not in REQUESTS:
        raise ValueError(f"algorithm={algorithm!r}: expected one of {', '.join(REQUESTS)}.")
    _check_version()
    from allnorm.integrations.transformers.wiring import wired_constructors

    if not _replaced:
        for stock, constructor in wired_constructors():
            _constructors.append((stock, stock.__init__))
            stock.__init__ = constructor
        for registry, replacements in _registries():
            for name, replacement in replacements.items():
                _replaced.append((registry, name, registry[name]))
                registry.register(name, replacement)
    SWITCH.algorithm = algorithm
    SWITCH.enabled = True


def disable() -> None:
    """Undoes `enable()`: models, loaded already or from now on, run as without allnorm. Idempotent.

    Not collective; every rank calls it between the same two forward passes. A CUDA graph that was
    captured by hand keeps what it captured; a compiled model is compiled anew.
    """
    SWITCH.enabled = False
    if not _replaced:
        return
    for registry, name, stock in _replaced:
        registry.register(name, stock)
    for model, constructor in _constructors:
        model.__init__ = constructor
    _replaced.clear()
    _constructors.clear()


def is_enabled() -> bool:
    """Returns whether models fuse now."""
    return SWITCH.enabled


def _registries() -> list[tuple[Any, dict[str, Any]]]:
    """Returns the registries of transformers, and what goes into them."""
    from transformers.distributed import expert_parallel
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    from allnorm.integrations.transformers.experts import fused_implementations
    from allnorm.integrations.transformers.styles import fused_styles

    return [
        (ALL_PARALLEL_STYLES, fused_styles()),
        (expert_parallel.EPImplementationInterface(), fused_implementations()),
    ]


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
        new_enough = Version(version).release >= MINIMUM_VERSION  # candidates of a release too
    except InvalidVersion:
        new_enough = False
    if not new_enough:
        raise UnsupportedError(
            f"transformers {version}: expected {wanted} or later, whose tensor-parallel styles can "
            "be registered. Upgrade it."
        )
