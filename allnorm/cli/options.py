"""The options that commands share: how they are written and what is refused."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from allnorm import topology
from allnorm.cli import models

DTYPES = ("float32", "float16", "bfloat16")
ALGORITHMS = ("one_shot", "two_shot", "unfused")
NUMERICS = ("rounded", "unrounded", "transformers", "vllm")

Tp = Annotated[
    str,
    typer.Option(
        "--tp",
        help="Ranks, or a list such as 2,4,8. Default: all GPUs (bench: 2, then all), else 2 CPU "
        "processes.",
    ),
]
Device = Annotated[str, typer.Option("--device", help="cuda, cpu or auto (cuda if there is one).")]
Json = Annotated[
    Path | None, typer.Option("--json", help="Append the results to this file as JSON lines.")
]


@dataclass(frozen=True)
class Shape:
    """What one call works on.

    Attributes:
        num_tokens: rows.
        hidden_size: columns.
        eps: of the norm.
        weight_bias: 1.0 for a Gemma-style weight.
        model: the model it was taken from, or "".
    """

    num_tokens: int
    hidden_size: int
    eps: float = 1e-6
    weight_bias: float = 0.0
    model: str = ""

    def __str__(self) -> str:
        return f"{self.num_tokens}x{self.hidden_size}"


def words(text: str) -> list[str]:
    """Splits a list at its commas; repeated items count once."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def integers(text: str, option: str, minimum: int = 0) -> list[int]:
    """A list of integers such as ``1,16,256``.

    Raises:
        typer.BadParameter: an item is no integer or below `minimum`, or there is no item.
    """
    items = words(text)
    if not items or not all(item.isdecimal() and int(item) >= minimum for item in items):
        raise typer.BadParameter(
            f"{text!r}: expected integers of at least {minimum}, separated by commas, such as 1,16",
            param_hint=option,
        )
    return [int(item) for item in items]


def choices(text: str, option: str, allowed: tuple[str, ...]) -> list[str]:
    """A list of words out of `allowed`.

    Raises:
        typer.BadParameter: a word is not one of them, or there is none.
    """
    items = words(text)
    unknown = [item for item in items if item not in allowed]
    if unknown or not items:
        given = ", ".join(unknown) or repr(text)
        raise typer.BadParameter(
            f"{given}: expected some of {', '.join(allowed)}", param_hint=option
        )
    return items


def shapes(text: str) -> list[Shape]:
    """A list of shapes such as ``1x4096,8192x4096`` (num_tokens x hidden_size).

    Raises:
        typer.BadParameter: an item has another form.
    """
    found = []
    for item in words(text):
        match = re.fullmatch(r"(\d+)[xX](\d+)", item)
        if not match or int(match[2]) == 0:
            raise typer.BadParameter(
                f"{item!r}: expected num_tokens x hidden_size, such as 1x4096",
                param_hint="--shapes",
            )
        found.append(Shape(int(match[1]), int(match[2])))
    if not found:
        raise typer.BadParameter(
            f"{text!r}: expected a shape such as 1x4096", param_hint="--shapes"
        )
    return found


def model_shapes(names: str, num_tokens: list[int]) -> list[Shape]:
    """The shapes of the named models, one for every number of tokens."""
    found = [models.find(name) for name in words(names)]
    return [
        Shape(tokens, model.hidden_size, model.eps, model.weight_bias, model.name)
        for model in found
        for tokens in num_tokens
    ]


def device(text: str) -> str:
    """Settles what the ranks run on, "cuda" or "cpu".

    Raises:
        typer.BadParameter: another word, or "cuda" on a machine without a GPU.
    """
    gpus = topology.num_gpus()
    if text == "auto":
        return "cuda" if gpus else "cpu"
    if text not in ("cuda", "cpu"):
        raise typer.BadParameter(f"{text!r}: expected cuda, cpu or auto", param_hint="--device")
    if text == "cuda" and not gpus:
        raise typer.BadParameter(
            "cuda: torch sees no GPU here; use --device cpu", param_hint="--device"
        )
    return text


def world_sizes(
    text: str, device_type: str, default: str = "", *, share_gpus: bool = False
) -> list[int]:
    """The numbers of ranks to run with.

    Args:
        text: what the user wrote; "" for the default.
        device_type: "cuda" or "cpu".
        default: what stands for "" instead of all GPUs, else 2 CPU processes.
        share_gpus: several ranks may be on one GPU.

    Raises:
        typer.BadParameter: no list of positive integers, or more ranks than GPUs.
    """
    gpus = topology.num_gpus()
    text = text or default or (str(gpus) if device_type == "cuda" else "2")
    sizes = integers(text, "--tp", minimum=1)
    if device_type == "cuda" and max(sizes) > gpus and not share_gpus:
        raise typer.BadParameter(
            f"{max(sizes)} ranks, but torch sees {gpus} GPU{'s' if gpus != 1 else ''} here; "
            "use fewer ranks, or --device cpu",
            param_hint="--tp",
        )
    return sizes


def one_world_size(text: str, device_type: str) -> int:
    """The number of ranks of a command that runs once; the largest of a list."""
    return max(world_sizes(text, device_type))
