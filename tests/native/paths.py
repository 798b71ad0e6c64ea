"""Walks over the instructions of a kernel, for the rules over machine code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

_Instruction = TypeVar("_Instruction")


def reachable(
    instructions: Sequence[_Instruction],
    successors: Sequence[Iterable[int]] | Mapping[int, Iterable[int]],
    start: int,
    stop: Callable[[_Instruction], bool],
) -> set[int]:
    """Returns the indices reachable from `start`, up to the first `stop` on each path.

    Args:
        instructions: the instructions, in address order.
        successors: for each index, the indices that can follow.
        start: an index, which is reachable itself.
        stop: returns whether a path ends at an instruction.
    """
    seen: set[int] = set()
    todo = [start]
    while todo:
        index = todo.pop()
        if index not in seen:
            seen.add(index)
            if not stop(instructions[index]):
                todo.extend(successors[index])
    return seen
