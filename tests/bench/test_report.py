"""Tests how the ranks' records become measurements, rows, tables and the headline."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from allnorm.bench import report as bench_report
from allnorm.bench.modes import YARDSTICKS, Mode
from allnorm.bench.report import Measurement
from allnorm.cli import bench_table, output

from .samples import MODES, measurement, merge, record, two_ranks


def text(measurements: list[Measurement], width: int = 200) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(bench_table.table(measurements, width))
    return console.export_text()


def test_the_slowest_rank_and_an_error_of_any_rank_count() -> None:
    first = two_ranks()[0]
    assert (first.p50_us, first.p90_us, first.p99_us) == (5.0, 10.0, 15.0)
    assert first.world_size == 2
    assert first.correct
    wrong = two_ranks("rank 1: normed differs")[0]
    assert not wrong.correct
    assert wrong.error == "rank 1: normed differs"
    assert "WRONG" in text([wrong, *two_ranks()[1:3]])


def test_speed_up_is_over_the_fastest_other_arm() -> None:
    found = {m.arm: m for m in two_ranks()[:3]}
    assert bench_report.speed_up(found, ["gloo+torch", "gloo+local"]) == 10.0
    assert bench_report.speed_up(found, ["gloo+torch"]) == 20.0
    assert math.isnan(bench_report.speed_up(found, ["vllm"]))
    for us in (0.0, -0.5):  # noise can make a call as fast as the empty kernel
        own = after_gemm("allnorm", us, floor_us=1.0)
        assert math.isnan(own.floor_share)
        pair = {"allnorm": own, "nccl+torch": after_gemm("nccl+torch", 4.0)}
        assert math.isnan(bench_report.speed_up(pair, ["nccl+torch"]))


def after_gemm(arm: str, beyond_empty_us: float, **changes: Any) -> Measurement:
    """Returns a measurement after a GEMM; the empty kernel adds 1 us to the GEMM."""
    times = {"product_us": 20.0, "empty_us": 1.0, "beyond_empty_us": beyond_empty_us}
    in_step = "longest" if arm in YARDSTICKS else "shortest"
    return measurement(
        *(arm, beyond_empty_us + 1.0), product=7168, over_ranks=in_step, **times, **changes
    )


def test_after_a_gemm_times_are_in_excess_of_an_empty_kernel() -> None:
    times = {"allnorm": 2.0, "sglang": 3.0, "sglang:one_shot": 2.8, "empty": 0.0, "local": 0.55}
    found = [after_gemm(arm, us) for arm, us in times.items()]
    grid = bench_table.grid(found, with_p99=False)
    assert "GEMM (K = 7168)" in grid.title
    assert grid.columns[1:] == ["allnorm", "sglang", "empty", "local", "speedup\nvs best"]
    assert grid.rows == [["16x4096", "2.00", "2.80", "1.00", "0.55", "1.40x"]]
    assert grid.best == [1], "a yardstick is never the fastest"
    headline = bench_table.headline(found, "bfloat16")
    assert "1.4x as fast as" in headline
    assert "sglang:one_shot (2.80 us)" in headline
    rows = {m.arm: bench_report.json_row(m, {}) for m in found}
    assert rows["allnorm"]["beyond_empty_us"] == 2.0
    assert (rows["allnorm"]["mode"], rows["allnorm"]["product"]) == ("product", 7168)
    assert [rows[arm]["over_ranks"] for arm in ("allnorm", "local")] == ["shortest", "longest"]


def test_chains_and_calls_after_gemms_have_separate_tables() -> None:
    found = [after_gemm("allnorm", 2.0)]
    found += [measurement(arm, us) for arm, us in (("allnorm", 2.5), ("gloo+torch", 5.0))]
    chain, product = bench_table.tables_of(found)
    assert (chain, product) == (found[1:], found[:1])
    assert "2.0x as fast" in bench_table.headline(found, "bfloat16"), "of a chain of calls"
    row = bench_report.json_row(chain[0], {})
    assert (row["mode"], row["product"], row["over_ranks"]) == ("chain", 0, "slowest")
    assert math.isnan(row["beyond_empty_us"])


def test_records_after_different_gemms_are_merged_separately() -> None:
    mode = [Mode("per_group:128")]
    records = [
        {**record(0, arm, us + product / 1000), "product": product}
        for product in (0, 7000)
        for arm, us in (("allnorm", 4.5), ("allnorm16", 4.0 - product / 14000))
    ]
    costs = [m.quant_cost_us for m in merge([records], mode) if m.arm == "allnorm"]
    assert costs == [pytest.approx(0.5), pytest.approx(1.0)]


def test_headline() -> None:
    headline = bench_table.headline(two_ranks(), "bfloat16")
    assert headline.startswith("1x4096 bfloat16, 2 ranks: 5.00 us, 10x as fast as ")
    assert "gloo+local (50.0 us)" in headline
    assert bench_table.headline([], "bfloat16") == ""


def test_a_narrow_table_omits_p99() -> None:
    assert "(15.0)" in text(two_ranks())
    assert "(15.0)" not in text(two_ranks(), width=100)
    assert "PASS" in text(two_ranks(), width=100)


def test_the_floor_and_its_share_of_the_time() -> None:
    # 16 x 4096 x 2 bytes in each direction between two ranks, at 350 GB/s each
    sixteen = two_ranks()[3]
    assert sixteen.floor_us == pytest.approx(16 * 4096 * 2 / 350e3)
    assert sixteen.floor_share == pytest.approx(sixteen.floor_us / 9.0)
    bound = [measurement("allnorm", 200.0, floor_us=180.0), measurement("nccl+torch", 300.0)]
    assert "90%" in text(bound)
    assert "180" in text(bound)
    latency = [measurement("allnorm", 5.0, floor_us=0.2), measurement("nccl+torch", 9.0)]
    assert "4%" not in text(latency)


def test_the_variants_of_a_peer_share_a_column() -> None:
    times = {"allnorm": 4.0, "sglang": 6.5, "sglang:one_shot": 6.25, "sglang:two_shot": 7.0}
    found = [measurement(arm, us) for arm, us in times.items()]
    found.append(measurement("flashinfer", math.nan, reason="missing: rank 0: no module"))
    grid = bench_table.grid(found, with_p99=False)
    assert grid.columns == ["tokens x\nhidden", "allnorm", "sglang", "speedup\nvs best"]
    assert grid.rows == [["16x4096", "4.00", "6.25", "1.56x"]]
    assert bench_report.missing(found) == {"flashinfer": "missing: rank 0: no module"}


def test_an_arm_that_cannot_run_is_neither_timed_nor_wrong() -> None:
    row = {**record(0, "allnorm", math.nan), "reason": "too wide"}
    merged = merge([[row]])[0]
    assert not merged.correct
    assert merged.error == ""
    shown = text([merged, *two_ranks()[1:]])
    assert "WRONG" not in shown
    assert "PASS" in shown


def test_the_cost_of_quantization() -> None:
    modes = [*MODES, Mode("per_group:128")]
    times = {"allnorm": 4.5, "allnorm16": 4.2, "allnorm16+quant": 6.0}
    records = [
        record(0, "allnorm", 4.0),
        *(record(0, arm, us, mode=1) for arm, us in times.items()),
    ]
    plain, fused, unquantized, after = merge([records], modes)
    assert fused.quant_cost_us == pytest.approx(0.3)
    assert all(math.isnan(m.quant_cost_us) for m in (plain, unquantized, after))
    assert "+0.30" in text([fused, unquantized, after])
    row = bench_report.json_row(fused, {})
    assert row["quant"] == "per_group:128"
    assert row["residual_sharded"] is False


def test_records_are_merged_as_soon_as_every_rank_has_reported() -> None:
    whole: list[object] = []
    rest: list[object] = []
    take = bench_report.gatherer(2, whole.append, lambda *message: rest.append(message))
    first, second = [record(0, "allnorm", 1.0)], [record(1, "allnorm", 2.0)]
    take(1, {"records": first})
    take(0, {"text": "1x4096"})
    take(1, {"records": second})
    assert whole == []
    take(0, {"records": first})
    assert whole == [[first, first]]
    take(0, {"records": second})
    assert whole == [[first, first], [second, second]]
    assert rest == [(0, {"text": "1x4096"})]


def test_json_rows_have_no_nan(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.jsonl"
    rows = [bench_report.json_row(m, {"backend": "cpu"}) for m in two_ranks()]
    output.append_json_lines(path, rows)
    output.append_json_lines(path, rows[:1])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 7
    expected = {"host_us": None, "num_tokens": 1, "eps": 1e-5, "correct": True, "supported": True}
    assert lines[0].items() >= expected.items()


def test_times_have_three_digits() -> None:
    shown = [output.microseconds(v) for v in (1.234, 12.34, 1234.5, 12345.6, 123456.0, math.nan)]
    assert shown == ["1.23", "12.3", "1,234", "12.3 ms", "123 ms", "-"]
