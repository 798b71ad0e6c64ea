"""Tests the test inputs: equal or different across ranks and calls, as specified."""

from __future__ import annotations

import itertools

import pytest
import torch
from rank_helpers import dtype_ids

from allnorm.testing import (
    SENTINEL_WORDS,
    SPECIAL_KINDS,
    all_inputs,
    copy_all,
    rank_input,
    same_bits,
    sentinel_input,
    shared_input,
    special_input,
)


@pytest.mark.parametrize("dtype", **dtype_ids)
def test_distinct_by_rank_call_and_seed_and_reproducible(dtype: torch.dtype) -> None:
    drawn = {
        (rank, call, seed): rank_input((4, 64), dtype, rank, call=call, seed=seed)
        for rank, call, seed in itertools.product(range(3), repeat=3)
    }
    for (key_a, a), (key_b, b) in itertools.combinations(drawn.items(), 2):
        assert not torch.equal(a, b), (key_a, key_b)
    for (rank, call, seed), x in drawn.items():
        assert torch.equal(x, rank_input((4, 64), dtype, rank, call=call, seed=seed))
        assert x.dtype == dtype


def test_all_inputs_are_the_ranks_inputs() -> None:
    xs = all_inputs(3, (2, 8), torch.float32, call=5)
    for rank, x in enumerate(xs):
        assert torch.equal(x, rank_input((2, 8), torch.float32, rank, call=5))


def test_shared_inputs_depend_on_their_name() -> None:
    a = shared_input((64,), torch.float32, "weight")
    assert torch.equal(a, shared_input((64,), torch.float32, "weight"))
    assert not torch.equal(a, shared_input((64,), torch.float32, "residual"))


@pytest.mark.parametrize("dtype", **dtype_ids)
def test_special_kinds_have_their_values(dtype: torch.dtype) -> None:
    made = {kind: special_input(kind, (9, 64), dtype, 0) for kind in SPECIAL_KINDS}
    assert (made["zeros"] == 0).all()
    assert torch.signbit(made["negative_zeros"]).all()
    assert set(torch.signbit(made["mixed_zeros"]).unique().tolist()) == {False, True}
    small = made["denormals"].abs()
    assert ((small > 0) & (small < torch.finfo(dtype).smallest_normal)).float().mean() > 0.8
    assert torch.isinf(made["huge"] * 2).all()
    assert torch.isfinite(made["huge"]).all()
    assert torch.isnan(made["nan"]).any(-1).tolist() == [row % 3 == 0 for row in range(9)]
    assert torch.isinf(made["infinity"]).any(-1).tolist() == [row % 3 == 0 for row in range(9)]
    assert torch.isfinite(special_input("nan", (9, 64), dtype, 1)).all()
    opposite = made["opposite_infinities"] + special_input("opposite_infinities", (9, 64), dtype, 1)
    assert torch.isnan(opposite).any(-1).tolist() == [row % 3 == 0 for row in range(9)]
    with pytest.raises(ValueError, match="'odd'"):
        special_input("odd", (1, 8), dtype, 0)


@pytest.mark.parametrize("dtype", **dtype_ids)
def test_finite_sentinels_are_finite_and_ranks_differ(dtype: torch.dtype) -> None:
    shape = (16, 512)
    assert torch.isfinite(sentinel_input(shape, dtype, 0, finite=True).float()).all()
    assert not torch.isfinite(sentinel_input(shape, dtype, 0).float()).all()
    assert not same_bits(sentinel_input(shape, dtype, 0), sentinel_input(shape, dtype, 1))


@pytest.mark.parametrize("dtype", **dtype_ids)
def test_the_sentinel_input_has_every_word_in_every_position(dtype: torch.dtype) -> None:
    words = sentinel_input((16, 64 * 16 // dtype.itemsize), dtype, 0).view(torch.int32)
    packs = (words.long() & 0xFFFFFFFF).view(-1, 4)
    for word, position in itertools.product(SENTINEL_WORDS, range(4)):
        assert (packs[:, position] == word).any(), f"{word:#010x} at {position}"
    for word in SENTINEL_WORDS:
        assert (packs == word).all(-1).any(), f"{word:#010x} in all positions"


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="kind 'other': expected one of zeros, "):
        special_input("other", (2, 8), torch.float32, 0)
    with pytest.raises(ValueError, match="shorter"):
        copy_all([torch.empty(2), torch.empty(2)], [torch.empty(2)])
