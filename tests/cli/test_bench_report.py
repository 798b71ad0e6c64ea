"""From the ranks' records to rows, table and headline."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from rich.console import Console

from allnorm.cli import bench_report, output
from allnorm.cli.options import Shape

SHAPES = [Shape(1, 4096, 1e-5, model="llama-3.1-8b"), Shape(16, 4096)]
ARMS = ["allnorm", "gloo+torch", "gloo+local"]


def record(shape: int, arm: str, p50_us: float, error: str = "") -> dict[str, Any]:
    times = {"p50_us": p50_us, "p90_us": p50_us * 2, "p99_us": p50_us * 3}
    return {"shape": shape, "arm": arm, "error": error, "supported": True, **times}


def two_ranks(error: str = "") -> list[bench_report.Measurement]:
    ranks = [
        [
            record(
                shape, arm, base * (1 + shape) + rank, error if arm == "allnorm" and rank else ""
            )
            for shape in (0, 1)
            for arm, base in zip(ARMS, (4.0, 99.0, 49.0), strict=True)
        ]
        for rank in (0, 1)
    ]
    return bench_report.merge(ranks, SHAPES)


def text(measurements: list[bench_report.Measurement], width: int = 200) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(bench_report.table(measurements, ARMS, width))
    return console.export_text()


def test_the_slowest_rank_counts() -> None:
    first = two_ranks()[0]
    assert (first.p50_us, first.p90_us, first.p99_us) == (5.0, 10.0, 15.0)
    assert first.world_size == 2
    assert first.correct


def test_an_error_of_any_rank_counts() -> None:
    wrong = two_ranks("rank 1: normed differs")[0]
    assert not wrong.correct
    assert wrong.error == "rank 1: normed differs"
    assert "WRONG" in text([wrong, *two_ranks()[1:3]])


def test_speed_up_is_over_the_fastest_other_arm() -> None:
    found = {m.arm: m for m in two_ranks()[:3]}
    assert bench_report.speed_up(found, ["gloo+torch", "gloo+local"]) == 10.0
    assert bench_report.speed_up(found, ["gloo+torch"]) == 20.0


def test_headline() -> None:
    sentence = bench_report.headline(two_ranks(), "bfloat16")
    assert sentence == (
        "1x4096 bfloat16, 2 ranks: 5.00 us, 20.0x faster than gloo + PyTorch, "
        "same bits as the reference"
    )
    assert bench_report.headline([], "bfloat16") == ""


def test_a_narrow_table_leaves_out_the_tail() -> None:
    assert "(15.0)" in text(two_ranks())
    assert "(15.0)" not in text(two_ranks(), width=100)
    assert "PASS" in text(two_ranks(), width=100)


def test_an_arm_that_cannot_run_is_neither_timed_nor_wrong() -> None:
    row = {**record(0, "allnorm", math.nan), "supported": False}
    merged = bench_report.merge([[row]], SHAPES)[0]
    assert not merged.correct
    assert merged.error == ""
    assert "cannot run" in text([merged, *two_ranks()[1:3]])


def test_json_rows_have_no_nan(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.jsonl"
    rows = [bench_report.json_row(m, {"backend": "cpu"}) for m in two_ranks()]
    output.append_json_lines(path, rows)
    output.append_json_lines(path, rows[:1])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 7
    assert lines[0]["host_us"] is None
    assert lines[0]["num_tokens"] == 1
    assert lines[0]["eps"] == 1e-5
    assert lines[0]["correct"] is True


def test_times_have_three_digits() -> None:
    shown = [output.microseconds(v) for v in (1.234, 12.34, 1234.5, 12345.6, 123456.0, math.nan)]
    assert shown == ["1.23", "12.3", "1,234", "12.3 ms", "123 ms", "-"]
