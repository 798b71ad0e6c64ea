"""Rows that belong to ranks: who has which, and all of them together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from allnorm.names import REQUESTS, check_choice


def row_shard(num_tokens: int, world_size: int, rank: int) -> tuple[int, int]:
    """The rows of a rank: contiguous blocks, the first `num_tokens % world_size` one row longer.

    Args:
        num_tokens: rows in all, >= 0.
        world_size: number of ranks, >= 1.
        rank: whose rows, 0 to world_size - 1.

    Returns:
        `(lo, hi)`: rows lo to hi - 1.

    Raises:
        ValueError: a number is out of its range.
    """
    if num_tokens < 0 or world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(
            f"num_tokens={num_tokens}, world_size={world_size}, rank={rank}: expected >= 0, >= 1 "
            "and 0 <= rank < world_size"
        )
    begin, longer = 0, num_tokens % world_size
    for earlier in range(rank):
        begin += num_tokens // world_size + (earlier < longer)
    return begin, begin + num_tokens // world_size + (rank < longer)


def split_rows(x: Tensor, world_size: int) -> list[Tensor]:
    """Every rank's rows of `x`, `[..., hidden_size]`, each as a new `[hi - lo, hidden_size]`."""
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    bounds = [row_shard(rows.shape[0], world_size, rank) for rank in range(world_size)]
    return [rows[lo:hi].clone() for lo, hi in bounds]


def all_gather_rows(
    shards: Sequence[Tensor],
    num_tokens: int,
    *,
    algorithm: str = "auto",
    out: Tensor | None = None,
) -> Tensor:
    """The rows of all ranks in their order.

    Equivalent to ``torch.cat(shards)``.

    Args:
        shards: of every rank, in rank order, its `[hi - lo, hidden_size]`; equal dtypes, one
            device.
        num_tokens: rows in all.
        algorithm: accepted for equal signatures; every algorithm has the same bits.
        out: receives the rows.

    Returns:
        `[num_tokens, hidden_size]`, `out` or else new.

    Raises:
        ValueError: a shard has another height than `row_shard` says, or the shards differ.
    """
    check_choice("algorithm", algorithm, REQUESTS)
    _check_shards(shards, num_tokens)
    rows = torch.cat(list(shards))
    return rows if out is None else out.copy_(rows)


def _check_shards(shards: Sequence[Tensor], num_tokens: int) -> None:
    if not shards:
        raise ValueError("shards is empty: expected the rows of every rank, in rank order")
    first = shards[0]
    for rank, shard in enumerate(shards):
        lo, hi = row_shard(num_tokens, len(shards), rank)
        expected = [hi - lo, *first.shape[1:]]
        if shard.ndim != 2 or list(shard.shape) != expected:
            raise ValueError(
                f"shards[{rank}] has shape {list(shard.shape)}: expected {expected}, the rows "
                f"{lo} to {hi} of {num_tokens}"
            )
        if (shard.dtype, shard.device) != (first.dtype, first.device):
            raise ValueError(
                f"the shards differ: rank 0 has {first.dtype} on {first.device}, rank {rank} has "
                f"{shard.dtype} on {shard.device}"
            )
