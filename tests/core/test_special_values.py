"""Zeros, infinities, NaN, denormals, and every word that a transport might reserve for itself."""

from __future__ import annotations

import itertools

import pytest
import torch
from rank_helpers import ALGORITHMS, Case, assert_ranks_agree, can_run, comm, dtype_ids, on

from allnorm import reference
from allnorm.testing import (
    SENTINEL_WORDS,
    SPECIAL_KINDS,
    RankPool,
    assert_same_bits,
    sentinel_input,
)


def check_kinds(rank: int, world_size: int, kinds: list[str], dtype: torch.dtype) -> None:
    c = comm()
    for kind, algorithm, with_residual, mode in itertools.product(
        kinds, ALGORITHMS, (True, False), ("rounded", "vllm")
    ):
        case = Case(
            (7, 256), dtype, residual=with_residual, kind=kind, algorithm=algorithm, numerics=mode
        )
        if can_run(c, algorithm, 256, dtype):
            assert_ranks_agree(c, *case.check(c))


@on(cpu=(1, 2, 3, 8), gpu=(2, 3, 8))
@pytest.mark.parametrize("dtype", **dtype_ids)
def test_special_values(pool: RankPool, dtype: torch.dtype) -> None:
    pool.run(check_kinds, list(SPECIAL_KINDS), dtype)


def sentinels(rank: int, world_size: int, dtype: torch.dtype) -> None:
    c = comm()
    # 24 words x 5 positions = 120 packs a cycle; 16 rows of 64 packs hold all of them in all ranks
    hidden_size = 64 * 16 // dtype.itemsize
    for kind, algorithm, call in itertools.product(
        ("sentinels", "finite_sentinels"), ALGORITHMS, range(3)
    ):
        case = Case((16, hidden_size), dtype, kind=kind, algorithm=algorithm, call=call)
        if not can_run(c, algorithm, hidden_size, dtype):
            continue
        assert_ranks_agree(c, *case.check(c))
        reduced = c.all_reduce(case.x(rank), algorithm=algorithm)
        assert_same_bits(reduced, reference.all_reduce(case.xs(world_size)), f"{case}")


@on(cpu=(1, 2, 3), gpu=(2, 3, 8))
@pytest.mark.parametrize("dtype", **dtype_ids)
def test_sentinel_words_are_ordinary_data(pool: RankPool, dtype: torch.dtype) -> None:
    """Incident 10: neither a wait for ever nor a changed value."""
    pool.run(sentinels, dtype)


def only_sentinels(rank: int, world_size: int, dtype: torch.dtype) -> None:
    """All ranks send nothing but one word, in their partial sums and in the residual."""
    c = comm()
    for word, algorithm in itertools.product(SENTINEL_WORDS, ("one_shot", "two_shot")):
        if not can_run(c, algorithm, 256, dtype):
            continue
        signed = word - (1 << 32) if word >= 1 << 31 else word
        device = c.device
        x = torch.full((4, 256 * dtype.itemsize // 4), signed, dtype=torch.int32, device=device)
        x = x.view(dtype)
        weight = torch.ones(256, device=device)
        got = c.all_reduce_add_rms_norm(x, x, weight, 1e-6, algorithm=algorithm)
        expected = reference.all_reduce_add_rms_norm([x] * world_size, x, weight, 1e-6)
        for name, a, b in zip(("normed", "residual_out"), got, expected, strict=True):
            assert_same_bits(a, b, f"{name} of word {word:#010x} by {algorithm}")


@on(cpu=(2, 3), gpu=(2, 8))
@pytest.mark.parametrize("dtype", **dtype_ids)
def test_tensors_of_nothing_but_one_sentinel(pool: RankPool, dtype: torch.dtype) -> None:
    pool.run(only_sentinels, dtype)


@pytest.mark.parametrize("dtype", **dtype_ids)
def test_the_sentinel_input_has_every_word_in_every_position(dtype: torch.dtype) -> None:
    words = sentinel_input((16, 64 * 16 // dtype.itemsize), dtype, 0).view(torch.int32)
    packs = (words.long() & 0xFFFFFFFF).view(-1, 4)
    for word, position in itertools.product(SENTINEL_WORDS, range(4)):
        assert (packs[:, position] == word).any(), f"{word:#010x} at {position}"
    for word in SENTINEL_WORDS:
        assert (packs == word).all(-1).any(), f"{word:#010x} in all positions"


def nan_in_one_row(rank: int, world_size: int, where: str) -> None:
    c = comm()
    for algorithm in ALGORITHMS:
        case = Case((5, 1032), algorithm=algorithm)
        x, arguments = case.x(rank), case.norm_arguments()
        if where == "x" and rank == world_size - 1:
            x[2, 1000] = float("nan")
        if where == "residual":
            arguments["residual"][2, 3] = float("nan")
        normed, total = c.all_reduce_add_rms_norm(x, algorithm=algorithm, **arguments)
        assert torch.isnan(normed[2]).all()
        assert int(torch.isnan(total).sum()) == 1
        assert not torch.isnan(normed[[0, 1, 3, 4]]).any()
        want_normed, want_total = case.expected(world_size)
        others = [0, 1, 3, 4]
        assert_same_bits(normed[others], want_normed[others], "other rows")
        assert_same_bits(total[others], want_total[others], "other rows")
        assert_ranks_agree(c, normed, total)


@on(cpu=(2, 3), gpu=(2, 8))
@pytest.mark.parametrize("where", ["x", "residual"])
def test_nan_stays_in_its_row(pool: RankPool, where: str) -> None:
    pool.run(nan_in_one_row, where)


def nan_in_the_weight(rank: int, world_size: int) -> None:
    c = comm()
    case = Case((3, 256))
    arguments = case.norm_arguments()
    arguments["weight"][9] = float("nan")
    normed, total = c.all_reduce_add_rms_norm(case.x(rank), **arguments)
    assert torch.isnan(normed).nonzero()[:, 1].unique().tolist() == [9]
    assert not torch.isnan(total).any()


@on(cpu=(2,), gpu=(2,))
def test_nan_in_the_weight_stays_in_its_column(pool: RankPool) -> None:
    pool.run(nan_in_the_weight)


def mean_squares(rank: int, world_size: int) -> None:
    """x is (a, b, 0, 0): with b of no, one or two units of the last place of the square of a."""
    c = comm()
    chunk, step = (1 << 20, 1) if c.device.type == "cuda" else (1 << 14, 509)
    weight = torch.ones(4, device=c.device)
    for begin, b in itertools.product(
        range(0x3F800000, 0x40000000, chunk * step), (0.0, 2.0**-11.5, 2.0**-11)
    ):
        bits = torch.arange(begin, min(begin + chunk * step, 0x40000000), step, dtype=torch.int32)
        x = torch.zeros(len(bits), 4, device=c.device)
        if rank == 0:
            x[:, 0] = bits.to(c.device).view(torch.float32)
        else:
            x[:, 1] = b
        got, divided = (
            c.all_reduce_add_rms_norm(x, None, weight, 0.0, algorithm=algorithm)
            for algorithm in ("one_shot", "unfused")
        )
        for mine, wanted in zip(got, divided, strict=True):
            assert_same_bits(mine, wanted, f"from {begin:#x} on, b = {b}")


@on(cpu=(2,), gpu=(2,))
def test_every_mean_square(pool: RankPool) -> None:
    """The exchange kernels divide by nothing, the local kernel does: on GPUs every significand."""
    pool.run(mean_squares)
