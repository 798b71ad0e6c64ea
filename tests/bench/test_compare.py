"""Tests how regressions are found: matching rows, and the tolerance between measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from allnorm.bench import compare as bench_compare
from allnorm.bench import report as bench_report
from allnorm.cli import bench_table

from .samples import measurement


def row(p50_us: float | None = 10.0, spread_us: float = 0.0, **changes: Any) -> dict[str, Any]:
    conditions = {"gpu": "NVIDIA H200", "dtype": "bfloat16", "numerics": "rounded"}
    found = bench_report.json_row(measurement("allnorm", 10.0), conditions)
    p99_us = None if p50_us is None else p50_us + spread_us
    return {**found, "p50_us": p50_us, "p99_us": p99_us, **changes}


def one(before: list[dict[str, Any]], now: dict[str, Any]) -> bench_compare.Change:
    found = bench_compare.changes(before, [now])
    assert len(found) == 1
    return found[0]


def of_older_version() -> dict[str, Any]:
    later = ("quant", "residual_sharded", "return_normed")
    return {name: value for name, value in row().items() if name not in later}


@pytest.mark.parametrize(
    ("before", "now", "verdict"),
    [
        ([row(10.0)], row(10.19), "same"),  # 2 % is the variation between quiet runs
        ([row(10.0)], row(10.21), "regressed"),
        ([row(1.0)], row(1.09), "same"),  # 0.1 us is the variation between quiet runs
        ([row(1.0)], row(1.11), "regressed"),
        ([row(10.0, spread_us=1.0)], row(10.9), "same"),
        ([row(10.0, spread_us=1.0)], row(11.1), "regressed"),
        ([row(10.0)], row(10.9, spread_us=1.0), "same"),
        # Multiple rows: their median counts, with the spread from smallest to largest as tolerance.
        ([row(9.0), row(10.0), row(11.0)], row(11.9), "same"),
        ([row(9.0), row(10.0), row(11.0)], row(12.1), "regressed"),
        ([row(10.0, spread_us=5.0), row(10.0, spread_us=5.0)], row(11.0), "regressed"),
        ([row(10.0)], row(9.0), "faster"),
        ([of_older_version()], row(20.0), "regressed"),
        ([row()], row(None, correct=False), "regressed"),
        ([row()], row(None, correct=False, reason="too wide"), "regressed"),
        ([row(arm="vllm")], row(99.0, arm="vllm"), "slower"),
    ],
)
def test_verdict(before: list[dict[str, Any]], now: dict[str, Any], verdict: str) -> None:
    change = one(before, now)
    named = {"regressed": change.regressed, "faster": change.faster, "slower": change.slower}
    assert next((name for name, holds in named.items() if holds), "same") == verdict


@pytest.mark.parametrize(
    "other",
    [
        {"gpu": "NVIDIA H100"},
        *({"world_size": 8}, {"num_tokens": 17}, {"hidden_size": 8192}, {"dtype": "float16"}),
        *({"numerics": "vllm"}, {"weight_bias": 1.0}, {"arm": "allnorm:one_shot"}),
        *({"quant": "per_group:128"}, {"residual_sharded": True}, {"return_normed": True}),
    ],
)
def test_only_equal_work_is_compared(other: dict[str, Any]) -> None:
    assert bench_compare.changes([row(**other)], [row(99.0)]) == []


def test_arms_without_a_time_are_not_compared() -> None:
    assert bench_compare.changes([row(None, correct=False)], [row()]) == []
    absent = row(None, arm="vllm", correct=False, reason="missing: no module")
    assert bench_compare.changes([row(arm="vllm")], [absent]) == []


def test_table_and_summary() -> None:
    before = [row(arm=arm) for arm in ("allnorm", "allnorm:one_shot", "nccl+torch", "vllm")]
    now = [row(12.0), row(9.0, arm="allnorm:one_shot"), row(11.0, arm="nccl+torch")]
    now += [row(10.0, arm="vllm"), row(1.0, arm="new")]
    found = bench_compare.changes(before, now)
    assert bench_compare.summary(found, len(now), "old.jsonl") == (
        "4 of 5 rows are in old.jsonl: 1 regressed, 1 faster, 1 of other libraries slower, "
        "1 the same within the measured spread"
    )
    console = Console(width=150, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(bench_table.compared([*found, one([row()], row(None, correct=False))]))
    shown = console.export_text()
    assert shown.index("lost") < shown.index("+20.0%") < shown.index("+10.0%") < shown.index("-10")


def test_unreadable_files(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with pytest.raises(ValueError, match="No such file"):
        bench_compare.read_rows(path)
    for content in ("", "no json", '{"check": "soak"}', "[1]"):
        path.write_text(content)
        with pytest.raises(ValueError, match=r"rows\.jsonl"):
            bench_compare.read_rows(path)
    path.write_text(json.dumps(row()) + "\n\n" + json.dumps(row(None)) + "\n")
    assert len(bench_compare.read_rows(path)) == 2


def on_cpu(arm: str, p50_us: float) -> dict[str, Any]:
    return row(p50_us, arm=arm, gpu=None, cpu="a processor", world_size=2)


@pytest.mark.parametrize(
    ("now_us", "gloo_us", "regressed"),
    [
        (12.5, 125.0, False),  # all arms are slower by the same factor
        (12.5, 100.0, True),
        (12.8, 125.0, True),
        (10.0, 80.0, False),  # only gloo is faster, which is not a regression of allnorm
    ],
)
def test_on_cpu_the_slowdown_of_other_arms_is_taken_into_account(
    now_us: float, gloo_us: float, regressed: bool
) -> None:
    before = [on_cpu("allnorm", 10.0), on_cpu("gloo+torch", 100.0), on_cpu("gloo+local", 50.0)]
    now = [on_cpu("allnorm", now_us), on_cpu("gloo+torch", gloo_us)]
    now.append(on_cpu("gloo+local", gloo_us / 2))
    found = bench_compare.changes(before, now)
    assert found[0].regressed == regressed


def test_on_gpus_the_slowdown_of_other_arms_does_not_count() -> None:
    before, now = ([row(us), row(10 * us, arm="nccl+torch")] for us in (10.0, 12.5))
    assert bench_compare.changes(before, now)[0].regressed
