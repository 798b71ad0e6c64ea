"""Regressions: matching of rows, and the tolerance between two measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from allnorm.bench import compare as bench_compare
from allnorm.cli import bench_table


def row(p50_us: float | None = 10.0, spread_us: float = 0.0, **changes: Any) -> dict[str, Any]:
    p99_us = None if p50_us is None else p50_us + spread_us
    found = {
        "gpu": "NVIDIA H200",
        "world_size": 4,
        "num_tokens": 16,
        "hidden_size": 4096,
        "eps": 1e-6,
        "weight_bias": 0.0,
        "dtype": "bfloat16",
        "numerics": "rounded",
        "quant": "",
        "residual_sharded": False,
        "return_normed": False,
        "arm": "allnorm",
        "p50_us": p50_us,
        "p99_us": p99_us,
        "correct": True,
        "reason": "",
    }
    return {**found, **changes}


def one(before: list[dict[str, Any]], now: dict[str, Any]) -> bench_compare.Change:
    found = bench_compare.changes(before, [now])
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize(
    ("before", "now", "regressed"),
    [
        ([row(10.0)], row(10.19), False),  # 2 %: the variation between quiet runs
        ([row(10.0)], row(10.21), True),
        ([row(1.0)], row(1.09), False),  # 0.1 us: the variation between quiet runs
        ([row(1.0)], row(1.11), True),
        ([row(10.0, spread_us=1.0)], row(10.9), False),
        ([row(10.0, spread_us=1.0)], row(11.1), True),
        ([row(10.0)], row(10.9, spread_us=1.0), False),
        ([row(9.0), row(10.0), row(11.0)], row(11.9), False),  # their median +- their distance
        ([row(9.0), row(10.0), row(11.0)], row(12.1), True),
        ([row(10.0, spread_us=5.0), row(10.0, spread_us=5.0)], row(11.0), True),
    ],
)
def test_beyond_the_measured_spread(
    before: list[dict[str, Any]], now: dict[str, Any], regressed: bool
) -> None:
    assert one(before, now).regressed is regressed


def test_faster_is_no_regression() -> None:
    change = one([row(10.0)], row(9.0))
    assert change.faster
    assert not change.regressed


@pytest.mark.parametrize(
    "other",
    [
        {"gpu": "NVIDIA H100"},
        {"world_size": 8},
        {"num_tokens": 17},
        {"hidden_size": 8192},
        {"dtype": "float16"},
        {"numerics": "vllm"},
        {"weight_bias": 1.0},
        {"arm": "allnorm:one_shot"},
        {"quant": "per_group:128"},
        {"residual_sharded": True},
        {"return_normed": True},
    ],
)
def test_only_equal_work_is_compared(other: dict[str, Any]) -> None:
    assert bench_compare.changes([row(**other)], [row(99.0)]) == []


def test_rows_of_older_versions_have_no_quantization() -> None:
    old = row(10.0)
    for key in ("quant", "residual_sharded", "return_normed"):
        del old[key]
    assert one([old], row(20.0)).regressed


def test_no_longer_right_or_running_is_a_regression() -> None:
    assert one([row()], row(None, correct=False)).regressed
    assert one([row()], row(None, correct=False, reason="too wide")).regressed
    assert bench_compare.changes([row(None, correct=False)], [row()]) == []


def test_other_libraries_do_not_regress() -> None:
    slow = one([row(arm="vllm")], row(99.0, arm="vllm"))
    assert slow.slower
    assert not slow.regressed
    absent = row(None, arm="vllm", correct=False, reason="missing: no module")
    assert bench_compare.changes([row(arm="vllm")], [absent]) == []


def test_table_and_summary() -> None:
    before = [row(arm=arm) for arm in ("allnorm", "allnorm:one_shot", "nccl+torch", "vllm")]
    now = [
        row(12.0),
        row(9.0, arm="allnorm:one_shot"),
        row(11.0, arm="nccl+torch"),
        row(10.0, arm="vllm"),
        row(1.0, arm="new"),
    ]
    found = bench_compare.changes(before, now)
    assert bench_compare.summary(found, len(now), "old.jsonl") == (
        "4 of 5 rows are in old.jsonl: 1 regressed, 1 faster, 1 of other libraries slower, "
        "1 the same within the measured spread"
    )
    console = Console(width=150, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(bench_table.compared([*found, one([row()], row(None, correct=False))]))
    shown = console.export_text()
    assert shown.index("lost") < shown.index("+20.0%") < shown.index("+10.0%") < shown.index("-10")


def test_files(tmp_path: Path) -> None:
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
def test_on_cpu_arms_are_judged_beside_the_others(
    now_us: float, gloo_us: float, regressed: bool
) -> None:
    before = [on_cpu("allnorm", 10.0), on_cpu("gloo+torch", 100.0), on_cpu("gloo+local", 50.0)]
    now = [on_cpu("allnorm", now_us), on_cpu("gloo+torch", gloo_us)]
    now.append(on_cpu("gloo+local", gloo_us / 2))
    found = bench_compare.changes(before, now)
    assert found[0].regressed == regressed


def test_on_gpus_the_others_do_not_count() -> None:
    before = [row(10.0), row(100.0, arm="nccl+torch")]
    found = bench_compare.changes(before, [row(12.5), row(125.0, arm="nccl+torch")])
    assert found[0].regressed
