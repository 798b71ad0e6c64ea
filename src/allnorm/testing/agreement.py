"""Collective functions that exchange values between ranks, so that all ranks decide alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

_MAX_WORDS = 200  # maximum characters of a reason


class RankFailedError(RuntimeError):
    """A step failed on some rank. Raised on all ranks, with the reason of the first failed rank."""


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Returns every rank's value, in rank order. Collective.

    It pickles the values, so it is meant for decisions and times, not for tensors.

    Args:
        value: this rank's value, picklable.
        group: None is WORLD, or this process alone without torch.distributed.
    """
    if not dist.is_available() or not dist.is_initialized():
        return [value]
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def agree(text: str) -> str:
    """Returns the non-empty text of the lowest rank, on all ranks. Collective over WORLD.

    Args:
        text: what this rank reports, for example the reason of a failure; "" reports nothing.

    Returns:
        "rank R: TEXT" of the lowest rank R with a text; "" if no rank has one.
    """
    return next((f"rank {rank}: {said}" for rank, said in enumerate(gather(text)) if said), "")


def all_or_none(step: Callable[..., T], *arguments: Any) -> T:
    """Runs a step that may fail on only some ranks. Collective over WORLD.

    All ranks learn of a failure, so that none continues alone and waits for the others.

    Args:
        step: the function to run, for example a call of another library. It must not wait for a
            peer that has raised an error.
        arguments: positional arguments of `step`.

    Returns:
        This rank's result of `step`.

    Raises:
        RankFailedError: the step raised on some rank.
    """
    try:
        result, reason = step(*arguments), ""
    except Exception as error:  # noqa: BLE001 - the other ranks must learn of every error
        reason = first_line(error)
    reason = agree(reason)
    if reason:
        raise RankFailedError(reason)
    return result


def start_together() -> None:
    """Waits until all ranks have called it. Collective over WORLD, which must be initialized."""
    dist.all_reduce(torch.zeros(1))


def first_line(error: BaseException) -> str:
    """Formats an exception in one line. Not collective."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:_MAX_WORDS].rstrip(": ")
