"""Tests a check's record: wrong results on a rank, and results that differ between ranks."""

from __future__ import annotations

import pytest
import torch

from allnorm.testing import run_ranks
from allnorm.verify.context import Recorder

X = torch.arange(12, dtype=torch.bfloat16).view(3, 4)


def test_a_wrong_element_is_located() -> None:
    recorder = Recorder("bits")
    wrong = X.clone()
    wrong[1, 2] = -0.0
    recorder.compare("right", [X], [X])
    recorder.compare("wrong", [X, wrong], [X, X])
    assert recorder.cases == 2
    assert recorder.failures == [
        (
            1,
            "wrong: residual_out: 1 of 12 elements differ, in 1 of 3 rows; the first at [1, 2]: "
            "got -0.0 (0x8000), expected 6.0 (0x40c0); largest distance 16577 ulp",
        )
    ]


def test_quantized_results_and_packed_scales_are_compared() -> None:
    recorder = Recorder("bits")
    quantized, words = X.to(torch.float8_e4m3fn), X.to(torch.int32)
    wrong, other = quantized.clone(), words.t().clone()
    wrong.view(torch.uint8)[0, 3] = 0x80
    other[2, 1] += 1
    recorder.compare("right", [quantized, words], [quantized, words], ["quantized", "scale"])
    recorder.compare("wrong", [wrong, other.t()], [quantized, words], ["quantized", "scale"])
    assert recorder.failures == [
        (
            1,
            "wrong: quantized: 1 of 12 elements differ, in 1 of 3 rows; the first at [0, 3]: got "
            "-0.0 (0x80), expected 3.0 (0x44); largest distance 69 ulp; "
            "scale: 1 of 12 elements differ, in 1 of 3 rows; the first at [1, 2]: got 7 "
            "(0x00000007), expected 6 (0x00000006); largest distance 1",
        )
    ]


@pytest.mark.parametrize("other", [X.float(), X[:2], X.flatten()])
def test_a_different_shape_or_dtype_is_wrong(other: torch.Tensor) -> None:
    recorder = Recorder("bits")
    recorder.compare("case", [other], [X], digest=False)
    assert "expected [3, 4] torch.bfloat16" in recorder.failures[0][1]


def finish_on_ranks(rank: int, world_size: int) -> dict[str, object]:
    recorder = Recorder("check")
    recorder.compare("all alike", [X], [X])
    recorder.compare("rank 1 is wrong", [X], [X + rank])
    mine = X.flip(0) if rank else X
    recorder.compare("ranks differ", [mine], [mine])
    recorder.compare("empty", [X[:0]], [X[:0]])
    return recorder.finish()


def test_every_rank_learns_of_every_failure() -> None:
    ranks = run_ranks(finish_on_ranks, 2)
    for found in ranks:
        assert found["cases"] == 4
        assert found["failures"] == 2
        assert found["details"] == [
            "rank 1: rank 1 is wrong: normed: 12 of 12 elements differ, in 3 of 3 rows; the first "
            "at [0, 0]: got 0.0 (0x0000), expected 1.0 (0x3f80); largest distance 16256 ulp",
            "ranks 0 and 1 hold different bits",
        ]
