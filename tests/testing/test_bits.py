"""Tests that the comparison of bits detects every difference."""

from __future__ import annotations

import math

import pytest
import torch
from rank_helpers import dtype_ids

from allnorm.testing import assert_same_bits, same_bits, ulp_distance


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_equal(dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, -0.0, 1.5, math.inf, -math.inf, math.nan], dtype=dtype)
    assert same_bits(x, x.clone())
    assert same_bits(x, torch.cat([x, x])[:6])
    assert_same_bits(x, x.clone(), "x")


@pytest.mark.parametrize("dtype", **dtype_ids)
def test_signs_of_zero_differ(dtype: torch.dtype) -> None:
    assert not same_bits(torch.tensor([0.0], dtype=dtype), torch.tensor([-0.0], dtype=dtype))


def test_any_nan_matches_any_nan() -> None:
    words = torch.tensor([0x7FC00000, 0x7F800001, -1, 0x7FFFFFFF], dtype=torch.int32)
    nans = words.view(torch.float32)
    assert torch.isnan(nans).all()
    assert same_bits(nans, nans.flip(0))
    assert not same_bits(nans, torch.full((4,), math.inf))
    halves = torch.tensor([0x7FFF, -2, 0x7F81], dtype=torch.int16).view(torch.bfloat16)
    assert same_bits(halves, torch.full((3,), math.nan, dtype=torch.bfloat16))


def test_shape_and_dtype_count() -> None:
    x = torch.ones(2, 3)
    assert not same_bits(x, x.view(3, 2))
    assert not same_bits(x, x.half())
    with pytest.raises(AssertionError, match=r"out: got \[2, 3\] torch.float32, expected \[3, 2\]"):
        assert_same_bits(x, x.view(3, 2), "out")


def test_message() -> None:
    expected = torch.ones(4, 8, dtype=torch.bfloat16)
    actual = expected.clone()
    actual[2, 5] = 1.0078125  # the next bfloat16
    actual[3, 0] = math.nan
    with pytest.raises(AssertionError) as caught:
        assert_same_bits(actual, expected, "normed")
    text = str(caught.value)
    for part in (
        "normed: 2 of 32 elements differ, in 2 of 4 rows",
        "first at [2, 5]",
        "1.0078125 (0x3f81)",
        "1.0 (0x3f80)",
        "1 ulp",
        "1 NaN on one side",
    ):
        assert part in text


def test_distance() -> None:
    a = torch.tensor([1.0, -0.0, 1.0, 2.0**-149, math.inf])
    b = torch.tensor([1.0 + 2.0**-23, 0.0, 1.0, -(2.0**-149), torch.finfo(torch.float32).max])
    assert ulp_distance(a, b).tolist() == [1, 1, 0, 3, 1]


def test_integers_and_empty_tensors() -> None:
    assert same_bits(torch.tensor([1, 2]), torch.tensor([1, 2]))
    assert not same_bits(torch.tensor([1, 2]), torch.tensor([1, 3]))
    assert same_bits(torch.empty(0, 4), torch.empty(0, 4))
    with pytest.raises(AssertionError, match="1 of 2"):
        assert_same_bits(torch.tensor([1, 2]), torch.tensor([1, 3]), "integers")


def test_float8() -> None:
    x = torch.tensor([1.0, math.nan, -0.0]).to(torch.float8_e4m3fn)
    assert same_bits(x, x.clone())
    assert not same_bits(x, torch.tensor([1.0, math.nan, 0.0]).to(torch.float8_e4m3fn))
