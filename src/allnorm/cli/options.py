"""The options that commands share, and their parsers.

Parsers raise typer.BadParameter, with the expected syntax, for a value they cannot parse.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from allnorm import names, topology
from allnorm.bench import modes as bench_modes
from allnorm.bench.modes import Mode, Shape
from allnorm.cli import output

_MAX_WORLD_SIZE = 64  # of a communicator: ALLNORM_MAX_WORLD_SIZE in csrc/allnorm.h
RANKS, WORK, OUTPUT = "Ranks", "What runs", "Output"
"""Titles of the option panels of --help."""


def _writable(path: Path | None) -> Path | None:
    """Rejects a file that cannot be written, before anything runs."""
    if path is not None:
        try:
            output.check_writable(path)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    return path


def option(help_text: str, *names_of: str, panel: str = "", **more: Any) -> Any:
    """Returns an option with a help text, in a panel of --help; `more` as in typer.Option."""
    return typer.Option(*names_of, help=help_text, rich_help_panel=panel or None, **more)


def file_option(help_text: str, *names_of: str) -> Any:
    """Returns an option for a results file."""
    return option(help_text, *names_of, panel=OUTPUT, callback=_writable)


def work_option(help_text: str, *names_of: str, **limits: Any) -> Any:
    """Returns an option that selects what runs."""
    return option(help_text, *names_of, panel=WORK, **limits)


_TP = (
    "Number of ranks, or a list such as 2,4,8. Default: all GPUs (bench: 2, then all); without "
    "GPUs 2 CPU processes."
)
Tp = Annotated[str, option(_TP, "--tp", panel=RANKS)]
Device = Annotated[
    str, option("cuda, cpu or auto (cuda if there is a GPU).", "--device", panel=RANKS)
]
Dtype = Annotated[str, work_option(", ".join(names.DTYPES), "--dtype")]
Json = Annotated[
    Path | None, file_option("Append the results to this file as JSON lines.", "--json")
]


@contextlib.contextmanager
def of(option: str) -> Iterator[None]:
    """Reports a ValueError raised in the block as an invalid value of `option`: exit code 2."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def words(text: str) -> list[str]:
    """Splits a comma-separated list and drops repeated items."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def integers(text: str, option: str, minimum: int = 0) -> list[int]:
    """Parses a list of integers such as ``1,16,256``."""
    items = words(text)
    if not items or not all(item.isdecimal() and int(item) >= minimum for item in items):
        raise typer.BadParameter(
            f"{text!r}: expected integers of at least {minimum}, separated by commas, such as 1,16",
            param_hint=option,
        )
    return [int(item) for item in items]


def choices(text: str, option: str, allowed: tuple[str, ...]) -> list[str]:
    """Parses a list of words, each of which must be in `allowed`."""
    items = words(text)
    unknown = [item for item in items if item not in allowed]
    if unknown or not items:
        given = ", ".join(unknown) or repr(text)
        raise typer.BadParameter(
            f"{given}: expected one or more of {', '.join(allowed)}", param_hint=option
        )
    return items


def choice(text: str, option: str, allowed: tuple[str, ...]) -> str:
    """Parses one word of `allowed`; takes the first word of a list."""
    return choices(text, option, allowed)[0]


def modes(
    quant: str,
    residual: str = "replicated",
    return_normed: bool = False,
    post_norm: bool = False,
    experts: int = 0,
    float32_residual: bool = False,
    own_rows: bool = False,
    slices: int = 0,
    streams: int = 0,
    next_input: bool = False,
) -> list[Mode]:
    """Returns the modes that the lists `quant` and `residual` and the other options select."""
    residuals = choices(residual, "--residual", bench_modes.RESIDUALS)
    with of("--quant"):
        return bench_modes.modes(
            *(words(quant), residuals, return_normed, post_norm, experts),
            *(float32_residual, own_rows, slices, streams, next_input),
        )


def shapes(text: str, least: int = 0) -> list[Shape]:
    """Parses shapes (num_tokens x hidden_size) such as ``1x4096``, with at least `least` tokens."""
    found = []
    for item in words(text):
        match = re.fullmatch(r"(\d+)[xX](\d+)", item)
        if not match or int(match[1]) < least or int(match[2]) == 0:
            tokens = f"with at least {least} tokens, " if least else ""
            raise typer.BadParameter(
                f"{item!r}: expected num_tokens x hidden_size, {tokens}such as 1x4096",
                param_hint="--shapes",
            )
        found.append(Shape(int(match[1]), int(match[2])))
    if not found:
        raise typer.BadParameter(
            f"{text!r}: expected a shape such as 1x4096", param_hint="--shapes"
        )
    return found


def model_shapes(models: str, num_tokens: list[int]) -> list[Shape]:
    """Returns the shapes of the named models, one per number of tokens."""
    with of("--model"):
        return [bench_modes.find_model(name, n) for name in words(models) for n in num_tokens]


def device(text: str) -> str:
    """Returns the device type of the ranks, "cuda" or "cpu".

    Raises:
        typer.BadParameter: unknown device, or "cuda" on a machine without a GPU.
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
    """Returns the numbers of ranks to run with, without repetition.

    An empty `text` means `default`; if that is empty too, all GPUs or 2 CPU processes. With
    `share_gpus` several ranks may share a GPU.
    """
    gpus = topology.num_gpus()
    text = text or default or (str(gpus) if device_type == "cuda" else "2")
    sizes = list(dict.fromkeys(integers(text, "--tp", minimum=1)))
    if max(sizes) > _MAX_WORLD_SIZE:
        raise typer.BadParameter(
            f"{max(sizes)} ranks: expected at most {_MAX_WORLD_SIZE}", param_hint="--tp"
        )
    if device_type == "cuda" and max(sizes) > gpus and not share_gpus:
        raise typer.BadParameter(
            f"{max(sizes)} ranks, but torch sees {gpus} GPU{'s' if gpus != 1 else ''} here; "
            "use fewer ranks, or --device cpu",
            param_hint="--tp",
        )
    return sizes


def crowded(world_size: int, device_type: str) -> str:
    """Returns a warning if there are more CPU ranks than cores; otherwise ""."""
    cores = topology.num_cores()
    if device_type != "cpu" or world_size <= cores:
        return ""
    return (
        f"{world_size} ranks on {cores} cores: ranks share cores, so times are not meaningful. "
        "Results are not affected."
    )


def check_memory(rank_bytes: int, world_size: int, device_type: str, remedy: str) -> None:
    """Raises if the ranks need more memory than is available, before the machine swaps.

    Args:
        rank_bytes: estimated memory per rank.
        world_size: number of ranks. CPU ranks share the memory; each GPU has its own.
        device_type: "cuda" or "cpu".
        remedy: sentence that tells the user what to do.

    Raises:
        ValueError: too little memory is available.
    """
    needed = rank_bytes if device_type == "cuda" else world_size * rank_bytes
    there = topology.available_memory_bytes(device_type)
    if there is not None and needed > there:
        whose = "each GPU" if device_type == "cuda" else f"{output.ranks(world_size)} together"
        raise ValueError(
            f"needs about {output.gibibytes(needed)} of memory for {whose}, but only "
            f"{output.gibibytes(there)} are available. {remedy}"
        )
