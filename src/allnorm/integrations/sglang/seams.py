"""Lists the SGLang functions that the plugin hooks, and checks that they are as expected.

The hooks replace a gate and the functions that it enables. If only some of the hooks were
installed, an all-reduce would be lost. The hooks are therefore registered all together or not at
all, and `obstacle` calls each of them with a probe before anything is fused.
"""

from __future__ import annotations

import enum
import inspect
import operator
import pkgutil
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from allnorm.errors import UnsupportedError

VERSIONS = "0.5.17 and 0.5.23"
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Probe:
    """An argument that hooks return, which shows that they are installed."""


PROBE = Probe()


@dataclass(frozen=True)
class Seam:
    """An SGLang function that is hooked.

    Attributes:
        role: the key of the hook in `HOOKS`.
        targets: dotted paths for different SGLang versions; the first that exists is hooked.
        parameters: the function's first parameters, on which the hook relies. All later parameters
            must have defaults.
    """

    role: str
    targets: tuple[str, ...]
    parameters: tuple[str, ...]


_NORM = "sglang.srt.layers.layernorm."
_RUNNER = "sglang.srt.model_executor.runner.base_runner.BaseRunner."

SEAMS = (
    Seam(
        "gate",
        (
            "sglang.srt.layers.layer_boundary.residual.add_norm.flashinfer_ar_fusion_applies",
            "sglang.srt.layers.communicator.apply_flashinfer_allreduce_fusion",
        ),
        ("batch_size",),
    ),
    Seam(
        "norm",
        (_NORM + "_forward_with_allreduce_fusion",),
        (
            *("norm_module", "x", "residual", "post_residual_addition", "weight"),
            "use_attn_tp_group",
        ),
    ),
    Seam(
        "quantized norm",
        (_NORM + "_forward_with_allreduce_fusion_quant_per_group",),
        (
            *("norm_module", "x", "residual", "weight", "group_size", "use_attn_tp_group"),
            "keep_bf16",
        ),
    ),
    Seam("start", (_RUNNER + "_pre_initialize_flashinfer_allreduce_workspace",), ("self",)),
)

# Names that the plugin reads but does not hook: SGLang's groups, settings and layers.
_READ = (
    "sglang.srt.runtime_context.get_parallel",
    "sglang.srt.runtime_context.get_exec",
    "sglang.srt.layers.dp_attention.is_dp_attention_enabled",
    _NORM + "RMSNorm",
    _NORM + "GemmaRMSNorm",
    "sglang.srt.layers.linear.RowParallelLinear",
)


def probe() -> dict[str, str]:
    """Returns the dotted path to hook for each role. Imports SGLang's modules.

    Raises:
        UnsupportedError: a seam is missing or has different parameters; the message names it.
    """
    found = {}
    for seam in SEAMS:
        target = next((name for name in seam.targets if _resolve(name) is not None), None)
        if target is None:
            raise _refusal(f"has no {' or '.join(seam.targets)}")
        signature = inspect.signature(_resolve(target))
        if not _takes(signature, seam.parameters):
            raise _refusal(
                f"has {target}({', '.join(signature.parameters)}), expected "
                f"({', '.join(seam.parameters)}), followed only by parameters with defaults"
            )
        found[seam.role] = target
    missing = [name for name in _READ if _resolve(name) is None]
    if missing:
        raise _refusal(f"has no {' and no '.join(missing)}")
    return found


def check_fields(what: str, thing: object, fields: tuple[str, ...]) -> None:
    """Raises UnsupportedError if one of SGLang's objects lacks fields; the message names them.

    `what` describes the object. Field names can be dotted.
    """
    missing = [field for field in fields if not _has(thing, field)]
    if missing:
        names = ", ".join(missing)
        raise _refusal(f"has {what} of class {type(thing).__name__} without {names}")


def unknown(
    original: Callable[..., Any], known: int, more: tuple[Any, ...], named: Mapping[str, Any]
) -> str:
    """Returns a list, as text, of unknown arguments that differ from their defaults; or "".

    The hook knows the first `known` parameters of SGLang's own function `original`. `more` has the
    positional arguments after these, and `named` has the keyword arguments.
    """
    if not more and not named:
        return ""
    parameters = list(inspect.signature(original).parameters.values())[known:]
    by_position = [each.name for each in parameters if each.kind in _BY_POSITION]
    extra = [f"argument {i}" for i in range(known + len(by_position), known + len(more))]
    defaults = {each.name: each.default for each in parameters}
    given = {**dict(zip([*by_position, *extra], more, strict=False)), **named}
    return ", ".join(
        f"{name}={value!r}"
        for name, value in given.items()
        if name not in defaults or not _same(value, defaults[name])
    )


def _same(value: Any, default: Any) -> bool:
    """Returns whether two values are the same object or equal constants. Never compares tensors."""
    if value is default:
        return True
    is_constant = isinstance(value, bool | int | float | str | enum.Enum)
    return is_constant and type(value) is type(default) and value == default


def _has(thing: object, field: str) -> bool:
    try:
        operator.attrgetter(field)(thing)
    except AttributeError:
        return False
    return True


def _takes(signature: inspect.Signature, known: tuple[str, ...]) -> bool:
    """Returns whether a function can be called with only the known positional arguments."""
    given = list(signature.parameters.values())
    if tuple(parameter.name for parameter in given[: len(known)]) != known:
        return False
    left_out = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return all(parameter.kind in _BY_POSITION for parameter in given[: len(known)]) and all(
        parameter.default is not inspect.Parameter.empty or parameter.kind in left_out
        for parameter in given[len(known) :]
    )


def register(targets: Mapping[str, str], hooks: Mapping[str, Callable[..., Any]]) -> list[str]:
    """Registers hooks with SGLang's registry, which applies them later; returns the hooked paths.

    `targets` is the result of `probe`. Both mappings are keyed by role.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for seam in SEAMS:
        HookRegistry.register(targets[seam.role], hooks[seam.role], HookType.AROUND)
    return list(targets.values())


def obstacle(targets: Mapping[str, str]) -> str:
    """Returns which hook is not installed, or can be bypassed; empty if all hooks are reliable.

    SGLang's registry also replaces a function in the modules that have imported it. A reference
    that the registry missed, or that another plugin restored, would bypass the hook and lose an
    all-reduce.
    """
    for seam in SEAMS:
        target = targets[seam.role]
        hooked = _resolve(target)
        if not _answers(hooked, seam):
            return f"the hook on {target} is not installed"
        holders = _holders(inspect.unwrap(hooked))
        if holders:
            return f"{', '.join(holders)} still refer to {target} without the hook"
    return ""


def _resolve(name: str) -> Any:
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError):
        return None


def _answers(hooked: Any, seam: Seam) -> bool:
    try:
        return hooked(*(PROBE for _ in seam.parameters)) is PROBE
    except Exception:  # noqa: BLE001 - SGLang's own function may raise anything for a probe
        return False


def _holders(original: object) -> list[str]:
    """Returns the names in SGLang's modules that still refer to a function without its hook."""
    found = []
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "sglang" and isinstance(module, types.ModuleType):
            names = [key for key, value in list(vars(module).items()) if value is original]
            found += [f"{name}.{key}" for key in names]
    return found


def _refusal(what: str) -> UnsupportedError:
    version = getattr(sys.modules.get("sglang"), "__version__", "of this version")
    return UnsupportedError(
        f"SGLang {version} {what}. The plugin supports SGLang {VERSIONS}: install one of these, or "
        "a newer allnorm."
    )
