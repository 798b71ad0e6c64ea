"""The rows of each rank, for sharded residuals and for rows with owners."""

from __future__ import annotations


def row_shard(num_tokens: int, world_size: int, rank: int) -> tuple[int, int]:
    """Returns the bounds (lo, hi) of a rank's rows, which are lo to hi - 1.

    Each rank owns a contiguous block; the first `num_tokens % world_size` ranks have one row more.
    `num_tokens` may be symbolic: no branch depends on it.
    """
    # Counts the rows of earlier ranks, as if dealt one by one: rank 0 gets the first of each round.
    lo, hi = (
        sum((num_tokens + world_size - 1 - earlier) // world_size for earlier in range(end))
        for end in (rank, rank + 1)
    )
    return lo, hi
