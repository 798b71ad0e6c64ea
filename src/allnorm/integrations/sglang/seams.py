"""Where the plugin holds on to SGLang, and whether those places are as it knows them.

The hooks take the places of a gate and of the functions behind it. One without the others would
lose an all-reduce, so they are registered together or not at all, and `obstacle` asks each of them
for a sign of life before anything is fused.
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
    """An argument that tells a hook to answer, with the probe itself, that it is in place."""


PROBE = Probe()


@dataclass(frozen=True)
class Seam:
    """A function of SGLang that is hooked.

    Attributes:
        role: what the hook is there for; the key of its hook.
        targets: dotted paths, one per generation of SGLang; the first that exists is hooked.
        parameters: the names that the hook relies on, in order: the first of all. Those that
            follow have defaults, and are passed on.
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

# Read, not hooked: the plugin asks SGLang for its groups, its switches and its norms.
_READ = (
    "sglang.srt.runtime_context.get_parallel",
    "sglang.srt.runtime_context.get_exec",
    "sglang.srt.layers.dp_attention.is_dp_attention_enabled",
    _NORM + "RMSNorm",
    _NORM + "GemmaRMSNorm",
    "sglang.srt.layers.linear.RowParallelLinear",
)


def probe() -> dict[str, str]:
    """Finds every seam in the installed SGLang; imports the modules they are in.

    Returns:
        The role of each seam and the dotted path that is to be hooked.

    Raises:
        UnsupportedError: a seam is missing or takes other parameters; says which.
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
                f"({', '.join(seam.parameters)}), and after these only what has a default"
            )
        found[seam.role] = target
    missing = [name for name in _READ if _resolve(name) is None]
    if missing:
        raise _refusal(f"has no {' and no '.join(missing)}")
    return found


def check_fields(what: str, thing: object, fields: tuple[str, ...]) -> None:
    """Checks that an object of SGLang has the fields that are read of it.

    Args:
        what: it is, in words.
        thing: the object.
        fields: dotted where they are fields of a field.

    Raises:
        UnsupportedError: it lacks some; says which.
    """
    missing = [field for field in fields if not _has(thing, field)]
    if missing:
        names = ", ".join(missing)
        raise _refusal(f"has {what} of class {type(thing).__name__} without {names}")


def unknown(
    original: Callable[..., Any], known: int, more: tuple[Any, ...], named: Mapping[str, Any]
) -> str:
    """What SGLang asks of a hooked function beyond what this plugin knows, in words.

    Args:
        original: SGLang's own function.
        known: how many of its parameters the hook knows.
        more: arguments after these.
        named: the same, by name.

    Returns:
        The arguments that are not what they are by default; empty if there are none.
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
    """Returns whether they are one constant; a tensor, for one, is not compared."""
    constants = (bool, int, float, str, enum.Enum)
    return value is default or (
        isinstance(value, constants) and type(value) is type(default) and value == default
    )


def _has(thing: object, field: str) -> bool:
    try:
        operator.attrgetter(field)(thing)
    except AttributeError:
        return False
    return True


def _takes(signature: inspect.Signature, known: tuple[str, ...]) -> bool:
    """Returns whether a function can be called with the known arguments, by their positions, alone."""
    given = list(signature.parameters.values())
    if tuple(parameter.name for parameter in given[: len(known)]) != known:
        return False
    left_out = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return all(parameter.kind in _BY_POSITION for parameter in given[: len(known)]) and all(
        parameter.default is not inspect.Parameter.empty or parameter.kind in left_out
        for parameter in given[len(known) :]
    )


def register(targets: Mapping[str, str], hooks: Mapping[str, Callable[..., Any]]) -> list[str]:
    """Registers the hook of every role at SGLang's registry, which applies them later.

    Args:
        targets: as `probe` returns them.
        hooks: one for every role.

    Returns:
        The hooked paths.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for seam in SEAMS:
        HookRegistry.register(targets[seam.role], hooks[seam.role], HookType.AROUND)
    return list(targets.values())


def obstacle(targets: Mapping[str, str]) -> str:
    """Returns why the hooks cannot be relied on: one is not in place, or is passed by; empty if they can.

    A name that a module imported earlier is put right by SGLang's registry; one that it missed, or
    that another plugin put back, would skip the hook, and with it an all-reduce.
    """
    for seam in SEAMS:
        target = targets[seam.role]
        hooked = _resolve(target)
        if not _answers(hooked, seam):
            return f"the hook on {target} is not in place"
        holders = _holders(inspect.unwrap(hooked))
        if holders:
            return f"{', '.join(holders)} still hold {target} as it was before the hook"
    return ""


def _resolve(name: str) -> Any:
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError):
        return None


def _answers(hooked: Any, seam: Seam) -> bool:
    try:
        return hooked(*(PROBE for _ in seam.parameters)) is PROBE
    except Exception:  # noqa: BLE001 - whatever SGLang's own function says to a probe
        return False


def _holders(original: object) -> list[str]:
    """Names in modules of SGLang that are still bound to a function from before the hook."""
    found = []
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "sglang" or not isinstance(module, types.ModuleType):
            continue
        found += [f"{name}.{key}" for key, value in list(vars(module).items()) if value is original]
    return found


def _refusal(what: str) -> UnsupportedError:
    version = getattr(sys.modules.get("sglang"), "__version__", "of this version")
    return UnsupportedError(
        f"SGLang {version} {what}. This plugin is written for {VERSIONS}; install one of these, or "
        "a newer allnorm."
    )
