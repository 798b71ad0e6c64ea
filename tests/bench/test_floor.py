"""Tests the wire floor: the bytes that the protocol sends, and the time they take."""

from __future__ import annotations

import math

import pytest

from allnorm.bench import floor as bench_floor
from allnorm.bench.modes import Mode

T, H = 8192, 4096


def test_with_a_replicated_residual_sums_are_sent_unquantized() -> None:
    plain = bench_floor.wire_bytes(8, T, H, 2, Mode())
    assert plain == 2 * 7 / 8 * T * H * 2
    assert bench_floor.wire_bytes(8, T, H, 2, Mode("per_group:128")) == plain
    assert bench_floor.wire_bytes(2, T, H, 4, Mode()) == T * H * 4
    assert bench_floor.wire_bytes(1, T, H, 2, Mode()) == 0


@pytest.mark.parametrize(
    ("quant", "scale_bytes"),
    [
        ("per_group:128", H / 128 * 4),
        ("per_group:128:column_major_tma:ue8m0", H / 128 * 4),
        ("per_group:128:column_major_tma:ue8m0_packed", H / 128),
        ("per_token", 4),
        ("per_tensor", 0),
        ("mxfp8", H / 32 * 4),
        ("nvfp4", 0),
    ],
)
def test_with_a_sharded_residual_quantized_results_are_sent(quant: str, scale_bytes: float) -> None:
    sent = bench_floor.wire_bytes(4, T, H, 2, Mode(quant, residual_sharded=True))
    assert sent == 3 / 4 * T * (2 * H + H + scale_bytes)
    both = bench_floor.wire_bytes(4, T, H, 2, Mode(quant, True, return_normed=True))
    assert both == sent + 3 / 4 * T * H * 2


def test_packed_scales_fill_whole_words() -> None:
    mode = Mode("per_group:64:column_major_tma:ue8m0_packed", residual_sharded=True)
    assert bench_floor.wire_bytes(2, 1, 64 * 5, 2, mode) == 1 / 2 * (320 * 3 + 8)


def test_bandwidth_is_interpolated_between_measured_numbers_of_ranks() -> None:
    name = "NVIDIA H200"
    known = [bench_floor.push_gbps(name, ranks) for ranks in (2, 3, 4, 6, 8)]
    assert known == [362, 356, 350, 342, 334]
    assert bench_floor.push_gbps(name, 1) is None
    assert bench_floor.push_gbps(name, 16) is None
    assert bench_floor.push_gbps("NVIDIA B300", 8) is None


def test_the_floors_of_8192x4096() -> None:
    def floor(ranks: int, mode: Mode) -> float:
        sent = bench_floor.wire_bytes(ranks, T, H, 2, mode)
        return bench_floor.floor_us(sent, bench_floor.push_gbps("NVIDIA H200", ranks))

    assert [round(floor(ranks, Mode())) for ranks in (2, 4, 8)] == [185, 288, 352]
    sharded = Mode("per_group:128", residual_sharded=True)
    assert [round(floor(ranks, sharded)) for ranks in (2, 4, 8)] == [140, 218, 266]
    assert math.isnan(bench_floor.floor_us(1.0, None))
