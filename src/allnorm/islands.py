"""Islands: the ranks of a group that write to each other's memory, set beside set. Without torch.

Between islands rows go through the process group. How a sum over several islands is made is step 1b
of the numerics page.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal

Islands = tuple[tuple[int, ...], ...]
"""Ranks of each island in rising order, islands in the order of their lowest ranks."""


def check_islands(given: Any, world_size: int) -> Islands:
    """What a caller means by `islands`, in the one order that they have.

    Args:
        given: a sequence of sequences of ranks, in any order, in which every rank stands once.
        world_size: number of ranks.

    Raises:
        TypeError: it is none.
        ValueError: a rank is missing, stands there twice, or does not exist; an island is empty.
    """
    expected = (
        f"expected 'auto', or a sequence of islands, each a sequence of ranks: every one of the "
        f"ranks 0 to {world_size - 1} once"
    )
    if hasattr(given, "tolist"):  # an array of numpy, a tensor
        expected += ", such as islands.tolist()"
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        raise TypeError(f"islands={given!r}: {expected}.")
    for island in given:
        if isinstance(island, str | bytes) or not isinstance(island, Sequence):
            raise TypeError(f"islands={given!r}: {expected}.")
        if any(isinstance(rank, bool) or not isinstance(rank, int) for rank in island):
            raise TypeError(f"islands={given!r}: {expected}.")
    ranks = [rank for island in given for rank in island]
    if sorted(ranks) != list(range(world_size)) or not all(map(len, given)):
        raise ValueError(f"islands={given!r}: {expected}.")
    return in_order(given)


def of_size(size: int, world_size: int) -> Islands | Literal["auto"]:
    """Islands of `size` ranks that follow each other, the last perhaps smaller; 0: to be found."""
    if size == 0:
        return "auto"
    return tuple(tuple(range(lo, min(lo + size, world_size))) for lo in range(0, world_size, size))


def in_order(islands: Sequence[Sequence[int]]) -> Islands:
    """The same islands, each sorted, by their lowest ranks."""
    return tuple(sorted(tuple(sorted(island)) for island in islands))


def group_islands(names: Sequence[str]) -> Islands:
    """The islands of ranks that say where they are, those of one name together."""
    found: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        found.setdefault(name, []).append(rank)
    return in_order(list(found.values()))


def split_by_reach(failed: Sequence[Collection[int]]) -> Islands:
    """The ranks that all reach each other, together; empty if that is no partition of the ranks.

    Args:
        failed: by rank, those that it does not reach.
    """
    count = len(failed)
    reached = [
        frozenset(q for q in range(count) if q not in failed[rank] and rank not in failed[q])
        for rank in range(count)
    ]
    # Whoever is reached by one of a set is reached by all of it, or there is no such set.
    if any(reached[q] != reached[rank] for rank in range(count) for q in reached[rank]):
        return ()
    return in_order(sorted({tuple(sorted(group)) for group in reached}))


def obstacle_of(islands: Islands) -> str:
    """Why ranks in these islands have no hierarchical calls; empty if they can."""
    sizes = [len(island) for island in islands]
    if min(sizes) != max(sizes):
        text = ", ".join(map(str, sizes))
        return f"the islands have {text} ranks: only equal ones can exchange sums rank by rank"
    return ""


def is_in_blocks(islands: Islands) -> bool:
    """Whether the ranks of every island follow each other, as torchrun numbers those of a host."""
    return all(island[-1] - island[0] == len(island) - 1 for island in islands)


def describe(islands: Islands) -> str:
    """Islands in words: [0, 1], [2, 3]."""
    return ", ".join(str(list(island)) for island in islands)
