"""The options that commands share: how they are written, and what is refused.

What cannot be read raises typer.BadParameter, which says what was expected.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from allnorm import names, topology
from allnorm.bench import modes as bench_modes
from allnorm.bench.modes import Mode, Shape

Tp = Annotated[
    str,
    typer.Option(
        "--tp",
        help="Ranks, or a list such as 2,4,8. Default: all GPUs (bench: 2, then all), else 2 CPU "
        "processes.",
    ),
]
Device = Annotated[str, typer.Option("--device", help="cuda, cpu or auto (cuda if there is one).")]
Dtype = Annotated[str, typer.Option("--dtype", help=", ".join(names.DTYPES))]
Json = Annotated[
    Path | None, typer.Option("--json", help="Append the results to this file as JSON lines.")
]


@contextlib.contextmanager
def of(option: str) -> Iterator[None]:
    """Reports a ValueError of the block as a wrong value of that option: exit code 2."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def words(text: str) -> list[str]:
    """Splits a list at its commas; repeated items count once."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def integers(text: str, option: str, minimum: int = 0) -> list[int]:
    """A list of integers such as ``1,16,256``."""
    items = words(text)
    if not items or not all(item.isdecimal() and int(item) >= minimum for item in items):
        raise typer.BadParameter(
            f"{text!r}: expected integers of at least {minimum}, separated by commas, such as 1,16",
            param_hint=option,
        )
    return [int(item) for item in items]


def choices(text: str, option: str, allowed: tuple[str, ...]) -> list[str]:
    """A list of words out of `allowed`."""
    items = words(text)
    unknown = [item for item in items if item not in allowed]
    if unknown or not items:
        given = ", ".join(unknown) or repr(text)
        raise typer.BadParameter(
            f"{given}: expected some of {', '.join(allowed)}", param_hint=option
        )
    return items


def choice(text: str, option: str, allowed: tuple[str, ...]) -> str:
    """One word out of `allowed`; of a list the first."""
    return choices(text, option, allowed)[0]


def modes(quant: str, residual: str = "replicated", return_normed: bool = False) -> list[Mode]:
    """The kinds of results that `--quant` and `--residual` ask for, both of them lists."""
    residuals = choices(residual, "--residual", bench_modes.RESIDUALS)
    with of("--quant"):
        return bench_modes.modes(words(quant), residuals, return_normed)


def shapes(text: str) -> list[Shape]:
    """A list of shapes such as ``1x4096,8192x4096`` (num_tokens x hidden_size)."""
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


def model_shapes(models: str, num_tokens: list[int]) -> list[Shape]:
    """The shapes of the named models, one for every number of tokens."""
    with of("--model"):
        found = [bench_modes.find_model(name) for name in words(models)]
    return [model.shape(tokens) for model in found for tokens in num_tokens]


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
    """The numbers of ranks to run with, each once.

    `default` stands for "" instead of all GPUs, else 2 CPU processes. With `share_gpus` several
    ranks may be on one GPU.
    """
    gpus = topology.num_gpus()
    text = text or default or (str(gpus) if device_type == "cuda" else "2")
    sizes = list(dict.fromkeys(integers(text, "--tp", minimum=1)))
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
