"""The rows of each rank, for sharded residuals and for rows with owners."""

from __future__ import annotations


def row_shard(num_tokens: int, world_size: int, rank: int) -> tuple[int, int]:
    """Returns a rank's rows, lo to hi - 1.

    Ranks own contiguous blocks; the first `num_tokens % world_size` of them have one row more.
    `num_tokens` may be symbolic: no branch depends on it.
    """
    # The rows of earlier ranks: one of every full round each, and their share of the last round.
    lo, hi = (
        sum((num_tokens + world_size - 1 - earlier) // world_size for earlier in range(end))
        for end in (rank, rank + 1)
    )
    return lo, hi
