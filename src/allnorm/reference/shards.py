"""The assignment of rows to ranks, and a function that gathers them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from allnorm.names import REQUESTS, check_choice


def row_shard(num_tokens: int, world_size: int, rank: int) -> tuple[int, int]:
    """Returns a rank's row range; the first `num_tokens % world_size` ranks have one row more.

    Args:
        num_tokens: total number of rows, >= 0.
        world_size: number of ranks, >= 1.
        rank: the rank, 0 to world_size - 1.

    Returns:
        `(lo, hi)`: rows lo to hi - 1.

    Raises:
        ValueError: a number is out of range.
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
    """Splits `x`, `[..., hidden_size]`, into new tensors `[hi - lo, hidden_size]`, one per rank."""
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
    """Joins the rows of all ranks, in rank order.

    Equivalent to ``torch.cat(shards)``.

    Args:
        shards: every rank's rows `[hi - lo, hidden_size]`, in rank order; equal dtypes, one device.
        num_tokens: total number of rows.
        algorithm: ignored, to match the signature of allnorm's calls; all algorithms are
            bit-identical.
        out: receives the rows.

    Returns:
        `[num_tokens, hidden_size]`, in `out` or a new tensor.

    Raises:
        ValueError: a shard does not have the number of rows of `row_shard`, or the shards differ.
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
