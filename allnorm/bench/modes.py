"""What `bench` can time: kinds of results, and the arms of each of them by name."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
import typer

import allnorm
from allnorm.cli import options

PEERS = ("flashinfer", "sglang", "vllm", "symm_mem")
RESIDUALS = ("replicated", "sharded")

_LAYOUTS = ("row_major", "column_major", "column_major_tma")
_FORMATS = ("float32", "ue8m0", "ue8m0_packed")
# Rows of a norm with weights around 1 stay below 7 = 448 / 64 but for one element in 1e11.
_STATIC_SCALE = 1 / 64

Quant = allnorm.Fp8PerGroup | allnorm.Fp8PerToken | allnorm.Fp8PerTensor


@dataclass(frozen=True)
class Mode:
    """What a call returns, and where the residual is.

    Attributes:
        quant: the spec as `quant_name` writes it, "" for results in the dtype of the input.
        residual_sharded: each rank holds its own rows of the residual only.
        return_normed: a quantised call returns the normed rows too.
    """

    quant: str = ""
    residual_sharded: bool = False
    return_normed: bool = False

    def __str__(self) -> str:
        parts = [self.quant] if self.quant else []
        parts += ["with normed"] if self.quant and self.return_normed else []
        parts += ["sharded residual"] if self.residual_sharded else []
        return ", ".join(parts)


def modes(quant: str, residual: str, return_normed: bool) -> list[Mode]:
    """The modes that the options ask for: each kind of result with each kind of residual.

    Args:
        quant: specs separated by commas, of which "none" stands for no quantisation; "" is "none".
        residual: some of RESIDUALS.
        return_normed: for the quantised ones.

    Raises:
        typer.BadParameter: an unknown word, or a spec that allnorm refuses.
    """
    names = [quant_name(text) for text in options.words(quant)] or [""]
    kinds = options.choices(residual, "--residual", RESIDUALS)
    return [
        Mode(name, kind == "sharded", bool(name) and return_normed)
        for kind in kinds
        for name in dict.fromkeys(names)
    ]


def quant_name(text: str) -> str:
    """A spec as rows and tables name it, without what is the default; "" for "none".

    Raises:
        typer.BadParameter: `text` is no spec.
    """
    kind, *words = text.split(":")
    if text == "none":
        return ""
    if kind in ("per_token", "per_tensor") and not words:
        return kind
    if kind != "per_group":
        raise typer.BadParameter(
            f"{text!r}: expected per_group:128, per_group:GROUP_SIZE:LAYOUT:FORMAT, per_token, "
            "per_tensor or none",
            param_hint="--quant",
        )
    group_size, layout, scale_format = _group_parts(text, words)
    name = f"per_group:{group_size}"
    name += f":{layout}" if layout != _LAYOUTS[0] else ""
    return name + (f":{scale_format}" if scale_format != _FORMATS[0] else "")


def quant_of(name: str, device: torch.device | str = "cpu") -> Quant | None:
    """The spec of a mode; None for no quantisation.

    Args:
        name: as `quant_name` wrote it.
        device: where the static scale of a per_tensor spec lies.
    """
    if not name:
        return None
    if name == "per_token":
        return allnorm.Fp8PerToken()
    if name == "per_tensor":
        return allnorm.Fp8PerTensor(torch.tensor([_STATIC_SCALE], device=device))
    return allnorm.Fp8PerGroup(*_group_parts(name, name.split(":")[1:]))


def arm_names(device: str, mode: Mode) -> list[str]:
    """The arms that do not depend on what is installed, in the order of the table.

    Args:
        device: "cuda" or "cpu"; what is called "nccl" on GPUs is "gloo" there.
        mode: what the calls return.
    """
    library = "nccl" if device == "cuda" else "gloo"
    own = ["allnorm", "allnorm:one_shot", "allnorm:two_shot", "allnorm:unfused"]
    if not mode.quant:
        return [*own, f"{library}+torch", f"{library}+local"]
    unfused = [f"{library}+torch+quant", f"{library}+local+quant"]
    return [*own, "allnorm16", "allnorm16+quant", *unfused]


def peer_names(device: str, mode: Mode) -> list[str]:
    """The peers that take part in a mode. They run on GPUs and know no sharded residual."""
    return [] if device == "cpu" or mode.residual_sharded else list(PEERS)


def select(text: str, device: str, wanted: list[Mode]) -> list[str]:
    """The arms and peers that `--arms` names; "" stands for all of them.

    A quantised call is shown beside the 16-bit one, which is therefore taken along.

    Raises:
        typer.BadParameter: a name that no mode has.
    """
    names = [name for mode in wanted for name in arm_names(device, mode)]
    known = tuple(dict.fromkeys([*names, *(PEERS if device == "cuda" else ())]))
    if not text:
        return list(known)
    chosen = options.choices(text, "--arms", known)
    quantised = any(mode.quant for mode in wanted) and "allnorm" in chosen
    return list(dict.fromkeys([*chosen, *(["allnorm16"] if quantised else [])]))


def family(arm: str) -> str:
    """The column of an arm: a peer's algorithms share one, allnorm's have one each."""
    return arm if arm.startswith("allnorm") else re.sub(r":\w+", "", arm)


def _group_parts(text: str, words: list[str]) -> tuple[int, str, str]:
    """Group size, layout and format out of what follows "per_group", in any order."""
    sizes = [word for word in words if word.isdecimal()]
    layouts = [word for word in words if word in _LAYOUTS]
    formats = [word for word in words if word in _FORMATS]
    if len(sizes) + len(layouts) + len(formats) != len(words) or any(
        len(found) > 1 for found in (sizes, layouts, formats)
    ):
        raise typer.BadParameter(
            f"{text!r}: expected a group size, one of {', '.join(_LAYOUTS)} and one of "
            f"{', '.join(_FORMATS)} after per_group, separated by colons",
            param_hint="--quant",
        )
    scale_format = formats[0] if formats else _FORMATS[0]
    packed = scale_format == "ue8m0_packed"
    layout = layouts[0] if layouts else "column_major_tma" if packed else _LAYOUTS[0]
    group_size = int(sizes[0]) if sizes else 128
    try:
        allnorm.Fp8PerGroup(group_size, layout, scale_format)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--quant") from None
    return group_size, layout, scale_format
