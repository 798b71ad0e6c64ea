"""Islands: disjoint sets of ranks that write to each other's memory. Does not import torch.

Rows cross between islands through the process group. Step 1b of the numerics page defines the sum
over multiple islands.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal

Islands = tuple[tuple[int, ...], ...]
"""The ranks of each island, ascending; islands are sorted by their lowest ranks."""


def check_islands(given: Any, world_size: int) -> Islands:
    """Checks the argument `islands` and returns it sorted.

    Args:
        given: sequence of sequences of ranks, in any order; every rank must occur once.
        world_size: number of ranks.

    Raises:
        TypeError: the argument is not a sequence of sequences of ranks.
        ValueError: a rank is missing, occurs twice or does not exist, or an island is empty.
    """
    expected = (
        f"expected 'auto', or a sequence of islands, each a sequence of ranks, with each of the "
        f"ranks 0 to {world_size - 1} once"
    )
    if hasattr(given, "tolist"):  # a numpy array or a tensor
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
    """Returns islands of `size` consecutive ranks; the last may be smaller. "auto" for size 0."""
    if size == 0:
        return "auto"
    return tuple(tuple(range(lo, min(lo + size, world_size))) for lo in range(0, world_size, size))


def in_order(islands: Sequence[Sequence[int]]) -> Islands:
    """Sorts the ranks of each island, and the islands by their lowest ranks."""
    return tuple(sorted(tuple(sorted(island)) for island in islands))


def group_islands(names: Sequence[str]) -> Islands:
    """Groups ranks with equal names into islands; `names` has one name per rank."""
    found: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        found.setdefault(name, []).append(rank)
    return in_order(list(found.values()))


def split_by_reach(failed: Sequence[Collection[int]]) -> Islands:
    """Splits ranks into islands that reach each other; empty if reachability is not transitive.

    Args:
        failed: per rank, the ranks that it cannot reach.
    """
    count = len(failed)
    reached = [
        frozenset(q for q in range(count) if q not in failed[rank] and rank not in failed[q])
        for rank in range(count)
    ]
    # Reachability must be transitive; otherwise the ranks cannot be split.
    if any(reached[q] != reached[rank] for rank in range(count) for q in reached[rank]):
        return ()
    return in_order(sorted({tuple(sorted(group)) for group in reached}))


def obstacle_of(islands: Islands) -> str:
    """Returns why ranks in these islands cannot run hierarchical calls; empty if they can."""
    sizes = [len(island) for island in islands]
    if min(sizes) != max(sizes):
        text = ", ".join(map(str, sizes))
        return f"the islands have {text} ranks: hierarchical calls need islands of equal size"
    return ""


def is_in_blocks(islands: Islands) -> bool:
    """Returns whether each island's ranks are consecutive, as torchrun numbers a host's ranks."""
    return all(island[-1] - island[0] == len(island) - 1 for island in islands)


def describe(islands: Islands) -> str:
    """Formats the islands as in "[0, 1], [2, 3]"."""
    return ", ".join(str(list(island)) for island in islands)
