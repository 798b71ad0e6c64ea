"""Tests islands: accepted arguments, grouping by name or reachability, sums over islands."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_helpers import DTYPES

from allnorm import islands, reference
from allnorm.testing import all_inputs, assert_same_bits


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([[0, 1], [2, 3]], ((0, 1), (2, 3))),
        (((3, 2), (1, 0)), ((0, 1), (2, 3))),
        ([[0, 2], [3, 1]], ((0, 2), (1, 3))),
        ([range(4)], ((0, 1, 2, 3),)),
        ([[1], [3, 0], [2]], ((0, 3), (1,), (2,))),
    ],
    ids=str,
)
def test_islands_have_one_order(given: Any, expected: Any) -> None:
    assert islands.check_islands(given, 4) == expected


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ([[0, 1], [2]], ValueError),
        ([[0, 1], [1, 2, 3]], ValueError),
        ([[0, 1], [2, 4]], ValueError),
        ([[0, 1, 2, 3], []], ValueError),
        ([], ValueError),
        ([0, 1, 2, 3], TypeError),
        ("[[0,1],[2,3]]", TypeError),
        (["01", "23"], TypeError),
        ([[0, True], [2, 3]], TypeError),
        (7, TypeError),
    ],
    ids=str,
)
def test_wrong_islands_are_refused(given: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"islands=.*expected 'auto'.*0 to 3"):
        islands.check_islands(given, 4)


def test_islands_are_found_by_name() -> None:
    assert islands.group_islands(["b", "a", "b", "a"]) == ((0, 2), (1, 3))
    assert islands.group_islands(["a"] * 3) == ((0, 1, 2),)


def test_islands_by_reach() -> None:
    """Arguments list unreachable ranks. Failure in one direction separates two ranks."""
    assert islands.split_by_reach([set(), set(), set()]) == ((0, 1, 2),)
    assert islands.split_by_reach([{2, 3}, {2, 3}, {0, 1}, {0, 1}]) == ((0, 1), (2, 3))
    assert islands.split_by_reach([{1, 3}, set(), {1, 3}, {0, 2}]) == ((0, 2), (1, 3))
    assert islands.split_by_reach([{2}, set(), set()]) == (), "0 and 1, 1 and 2, not 0 and 2"


def test_what_keeps_islands_from_hierarchical_calls() -> None:
    assert islands.obstacle_of(((0, 1), (2, 3))) == ""
    assert islands.obstacle_of(((0, 1), (2, 3), (4, 5))) == ""
    assert "2, 1 ranks" in islands.obstacle_of(((0, 1), (2,)))
    assert islands.obstacle_of(((0,), (1,), (2,))) == ""
    assert islands.is_in_blocks(((0, 1), (2, 3)))
    assert not islands.is_in_blocks(((0, 2), (1, 3)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("given", [[[0, 1], [2, 3]], [[0, 3], [1, 2]], [[2, 1, 3], [0]]], ids=str)
def test_the_sum_over_islands(dtype: torch.dtype, given: list[list[int]]) -> None:
    """Compares with explicit sums: each island in rank order, then islands by lowest rank."""
    x = all_inputs(4, (7, 256), dtype)
    f = [value.float() for value in x]
    totals = {
        "[[0, 1], [2, 3]]": (f[0] + f[1]) + (f[2] + f[3]),
        "[[0, 3], [1, 2]]": (f[0] + f[3]) + (f[1] + f[2]),
        "[[2, 1, 3], [0]]": f[0] + ((f[1] + f[2]) + f[3]),
    }
    expected = totals[str(given)].to(dtype)
    assert_same_bits(reference.all_reduce(x, islands=given), expected)
    weight = torch.ones(256, dtype=dtype)
    normed, residual = reference.all_reduce_add_rms_norm(x, None, weight, 1e-6, islands=given)
    assert_same_bits(residual, expected)
    assert_same_bits(normed, reference.add_rms_norm(expected, None, weight, 1e-6)[0])
    quantized = reference.all_reduce_add_rms_norm_quant(x, None, weight, 1e-6, islands=given)
    assert_same_bits(quantized.residual, expected)


def test_one_island_and_islands_of_one_rank_are_the_flat_sum() -> None:
    x = all_inputs(4, (5, 128), torch.float32)
    flat = reference.all_reduce(x)
    assert_same_bits(reference.all_reduce(x, islands=[[0, 1, 2, 3]]), flat)
    assert_same_bits(reference.all_reduce(x, islands=[[0], [1], [2], [3]]), flat)
    assert (reference.all_reduce(x, islands=[[0, 1], [2, 3]]) != flat).any()
