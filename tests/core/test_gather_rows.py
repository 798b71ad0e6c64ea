"""all_gather_rows: every rank's rows of a sharded residual, everywhere."""

from __future__ import annotations

import itertools

import pytest
import torch
from rank_helpers import Case, can_run, comm, dtype_ids, message_of, on

import allnorm
from allnorm import reference
from allnorm.testing import RankPool, assert_same_bits, rank_input, sentinel_input

TOKENS = (0, 1, 2, 3, 5, 7, 33)


def gathers(rank: int, world_size: int, dtype: torch.dtype) -> None:
    c = comm()
    names = [
        name
        for name in ("auto", "two_shot", "unfused")
        if can_run(c, name, 1024, dtype, sharded=True)
    ]
    for tokens, hidden_size, algorithm in itertools.product(TOKENS, (1, 7, 120, 1024), names):
        if not can_run(c, algorithm, hidden_size, dtype):
            continue
        heights = [reference.row_shard(tokens, world_size, r) for r in range(world_size)]
        for kind in ("normal", "sentinels"):
            make = rank_input if kind == "normal" else sentinel_input
            shards = [
                make((hi - lo, hidden_size), dtype, r, call=tokens, device=c.device)
                for r, (lo, hi) in enumerate(heights)
            ]
            own, before = shards[rank], shards[rank].clone()
            want = reference.all_gather_rows(shards, tokens)
            text = f"{tokens}x{hidden_size} {dtype} {kind} by {algorithm}"
            got = c.all_gather_rows(own, tokens, algorithm=algorithm)
            assert got.is_contiguous()
            assert_same_bits(got, want, text)
            assert_same_bits(own, before, "the shard, which must not be modified")
            # preallocated, strided results; strided shards; unaligned ones
            for pad, offset in ((8, 0), (3, 1)):
                memory = torch.full(
                    (tokens * (hidden_size + pad) + offset,), 7.0, dtype=dtype, device=c.device
                )
                out = memory[offset:].view(tokens, hidden_size + pad)[:, :hidden_size]
                wide = own.new_full((own.shape[0], hidden_size + pad), 9.0)
                wide[:, :hidden_size] = own
                result = c.all_gather_rows(
                    wide[:, :hidden_size], tokens, algorithm=algorithm, out=out
                )
                assert result is out
                assert_same_bits(out, want, f"{text}, strided")
                assert int((memory == 7.0).sum()) >= tokens * pad + offset


@on(cpu=(1, 2, 3, 5), gpu=(1, 2, 3, 8))
@pytest.mark.parametrize("dtype", **dtype_ids)
def test_all_gather_rows(pool: RankPool, dtype: torch.dtype) -> None:
    pool.run(gathers, dtype)


def large_gathers(rank: int, world_size: int) -> None:
    small = comm(workspace_bytes=64 << 10)
    for tokens, hidden_size in ((300, 512), (77, 4096)):
        heights = [reference.row_shard(tokens, world_size, r) for r in range(world_size)]
        shards = [
            rank_input((hi - lo, hidden_size), torch.bfloat16, r, device=small.device)
            for r, (lo, hi) in enumerate(heights)
        ]
        got = small.all_gather_rows(shards[rank], tokens)
        assert_same_bits(got, reference.all_gather_rows(shards, tokens), f"{tokens}")


@on(cpu=(2, 3), gpu=(2, 8))
def test_all_gather_rows_beyond_the_workspace(pool: RankPool) -> None:
    pool.run(large_gathers)


def gather_refusals(rank: int, world_size: int) -> None:
    c = comm()
    shard = Case((2, 64)).x(rank)
    tokens = 2 * world_size
    for error, words, call in (
        (ValueError, "(2, 64)", lambda: c.all_gather_rows(shard, tokens + 2 * world_size)),
        (ValueError, "num_tokens=-1", lambda: c.all_gather_rows(shard, -1)),
        (TypeError, "num_tokens=2.0", lambda: c.all_gather_rows(shard, 2.0)),
        (TypeError, "list", lambda: c.all_gather_rows([1.0], tokens)),
        (allnorm.UnsupportedError, "float64", lambda: c.all_gather_rows(shard.double(), tokens)),
        (ValueError, "(2, 1, 64)", lambda: c.all_gather_rows(shard[:, None], tokens)),
        (ValueError, "contiguous", lambda: c.all_gather_rows(shard.t().contiguous().t(), tokens)),
        (ValueError, "'ring'", lambda: c.all_gather_rows(shard, tokens, algorithm="ring")),
        (ValueError, "num_tokens rows", lambda: c.all_gather_rows(shard, tokens, out=shard)),
        (TypeError, "out", lambda: c.all_gather_rows(shard, tokens, out=1)),
        (ValueError, "num_tokens=-3", lambda: c.row_shard(-3)),
        (TypeError, "num_tokens=True", lambda: c.row_shard(True)),
        (TypeError, "num_tokens='4'", lambda: c.row_shard("4")),
    ):
        assert words in message_of(error, call), words
    room = torch.empty(tokens, 64, dtype=shard.dtype, device=c.device)
    lo, hi = c.row_shard(tokens)
    with pytest.raises(ValueError, match=r"out shares memory with residual_shard\. Pass separate"):
        c.all_gather_rows(room[lo:hi], tokens, out=room)
    with pytest.raises(allnorm.UnsupportedError, match=r"owners.*'auto'"):
        c.all_gather_rows(shard, tokens, algorithm="one_shot")
    assert c.all_gather_rows(shard, tokens).shape == (tokens, 64)


@on(cpu=(2, 3), gpu=(2,))
def test_refusals_of_all_gather_rows(pool: RankPool) -> None:
    pool.run(gather_refusals)
