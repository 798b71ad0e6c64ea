"""The results of a call: memory that the caller gave, or that is made for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from allnorm import arguments
from allnorm.arguments import Like
from allnorm.launch import Guard, Launch


class Result(NamedTuple):
    """One result.

    Attributes:
        name: of the argument that preallocates it.
        like: what it must be.
        given: preallocated memory, or None.
        may_be: the input whose memory it may be.
    """

    name: str
    like: Like
    given: torch.Tensor | None
    may_be: str = ""

    def is_copied(self, written: torch.Tensor) -> bool:
        """Whether what the kernels write must be copied to the memory that was given."""
        return self.given is not None and self.given is not written


def check(results: Sequence[Result], taken: dict[str, torch.Tensor | None], launch: Launch) -> None:
    """Raises ValueError or TypeError unless the given memory fits and is nobody else's.

    Args:
        results: of one call.
        taken: what must not be overwritten, by name.
        launch: the prepared call; remembers what has been found to fit.
    """
    names = tuple(name for name, _, given, _ in results if given is not None)
    memory = [given for _, _, given, _ in results if given is not None]
    guard = launch.results.get(names)
    fits = guard is not None and guard.accepts(memory)
    taken = dict(taken)
    for name, like, given, may_be in reversed(results):
        if given is not None:
            if not fits:
                arguments.check_result(name, given, like)
            arguments.check_writable(name, given)
            arguments.check_overlap(name, given, taken, may_be)
            taken[name] = given
    if guard is None:
        launch.results[names] = Guard(memory)


def writable(results: Sequence[Result], launch: Launch) -> list[torch.Tensor]:
    """Memory that the kernels can write to: the given one, or new."""
    return [
        given
        if given is not None and launch.writable(given)
        else torch.empty(like.shape, dtype=like.dtype, device=like.device)
        for _, like, given, _ in results
    ]


def store(results: Sequence[Result], written: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What the caller gets: the given memory, filled, or else what was made."""
    return [
        result.given.copy_(tensor)
        if result.given is not None and result.is_copied(tensor)
        else tensor
        for result, tensor in zip(results, written, strict=True)
    ]
