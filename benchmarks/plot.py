"""Draws stored rows of `allnorm bench --json`: latency against tokens, one panel per hidden size.

    python benchmarks/plot.py benchmarks/results/h200x2-peers.jsonl docs/h200x2.svg \
        --hidden 4096

allnorm's algorithms apart from what it chooses are left out. Of several files the last one that has
an arm at a size counts.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

import matplotlib

from allnorm.bench.modes import Mode, Shape
from allnorm.bench.report import Measurement
from allnorm.cli import bench_plot


def measurement(row: dict[str, Any]) -> Measurement:
    """What a row was made of, as far as a picture needs it."""
    number = {k: float("nan") if row[k] is None else row[k] for k in row if k.endswith("_us")}
    return Measurement(
        shape=Shape(row["num_tokens"], row["hidden_size"]),
        mode=Mode(row["quant"], row["residual_sharded"], row["return_normed"]),
        world_size=row["world_size"],
        arm=row["arm"],
        error=row["error"],
        reason=row["reason"],
        **number,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("rows", type=pathlib.Path, nargs="+")
    parser.add_argument("picture", type=pathlib.Path, help=".svg, .png or .pdf")
    parser.add_argument("--hidden", type=int, help="only this hidden size")
    options = parser.parse_args()
    rows = [json.loads(line) for path in options.rows for line in path.read_text().splitlines()]
    found = [
        measurement(row)
        for row in rows
        if row["supported"]
        and row["correct"]
        and not row["arm"].startswith("allnorm:")
        and options.hidden in (None, row["hidden_size"])
    ]
    shown = list({(m.arm, m.mode, m.shape): m for m in found}.values())
    if not shown:
        parser.error("no rows are to be shown")
    # The same names inside from the same rows: otherwise all of the file would seem to change.
    matplotlib.rcParams["svg.hashsalt"] = str(options.rows[0])
    bench_plot.save(shown, options.picture, f"{rows[0]['gpu']}, {rows[0]['dtype']}")


if __name__ == "__main__":
    main()
