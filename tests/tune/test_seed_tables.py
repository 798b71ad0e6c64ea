"""Tests how benchmarks/seed_tables.py converts measured rows to tables."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from script_helpers import script

TOKENS = (1, 16, 64, 256, 1024)
WIDTHS = (4096, 8192)
US = {"one_shot": 2.0, "two_shot": 3.0}


def row(tokens: int, width: int, algorithm: str, **changes: Any) -> dict[str, Any]:
    return {
        "gpu": "NVIDIA H200",
        "world_size": 2,
        "commit": "c1",
        "date": "2026-11-26T00:00:00+00:00",
        "num_tokens": tokens,
        "hidden_size": width,
        "dtype": "bfloat16",
        "quant": "",
        "arm": f"allnorm:{algorithm}",
        "p50_us": US[algorithm],
        "correct": True,
        **changes,
    }


def algorithms(path: pathlib.Path, rows: list[dict[str, Any]]) -> dict[int, list[str]]:
    """Makes a table from the rows; returns the algorithms of each width's curve."""
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    seed_tables = script("benchmarks/seed_tables.py")
    ((_, found),) = seed_tables.read([path]).items()
    curves = seed_tables.curves_of(found)["bfloat16", "norm"]
    return {curve.hidden_size: [step.algorithm for step in curve.steps] for curve in curves}


def rows_of_all() -> list[dict[str, Any]]:
    return [
        row(tokens, width, algorithm) for width in WIDTHS for tokens in TOKENS for algorithm in US
    ]


def test_the_fastest_algorithm_is_chosen(tmp_path: pathlib.Path) -> None:
    found = algorithms(tmp_path / "rows.jsonl", rows_of_all())
    assert found == {4096: ["one_shot"], 8192: ["one_shot"]}


def test_an_algorithm_that_was_wrong_once_is_in_no_curve_of_the_commit(
    tmp_path: pathlib.Path,
) -> None:
    wrong = row(64, 4096, "one_shot", p50_us=None, correct=False)
    found = algorithms(tmp_path / "rows.jsonl", [*rows_of_all(), wrong])
    assert found == {4096: ["two_shot"], 8192: ["two_shot"]}
    elsewhere = {**wrong, "commit": "c0"}
    found = algorithms(tmp_path / "rows.jsonl", [*rows_of_all(), elsewhere])
    assert found == {4096: ["one_shot"], 8192: ["one_shot"]}
