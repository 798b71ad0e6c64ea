"""Creates the tables that the package ships from measured rows.

    python benchmarks/seed_tables.py benchmarks/results/h200x4-tune.jsonl

Rows come from `allnorm tune --json` or `allnorm bench --json`, with every algorithm at each size. A
curve needs at least five sizes, from one token to at least 1024; with fewer, the nearest hidden
size is a better source. The link rate is the newest that `tune` chose. If a size was measured both
after a GEMM and in a chain, the times after a GEMM count. A candidate that was wrong at one size is
excluded from all curves of its commit.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections import defaultdict
from typing import Any

from allnorm import tuning
from allnorm.policy import Curve
from allnorm.tune import crossovers
from allnorm.tune.crossovers import Candidate
from allnorm.tune.table import LINK_ARM

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_SEEDS = _ROOT / "src" / "allnorm" / "seeds"
_ENOUGH_TOKENS, _ENOUGH_SIZES = 1024, 5
_QUANTS = {"": "norm", "per_group:128": "per_group", "per_token": "per_token"}
_ARM = "allnorm:"


def read(paths: list[pathlib.Path]) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Reads the rows for tables, and groups them by GPU and number of ranks."""
    machines = defaultdict(list)
    for path in paths:
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if row.get("gpu") and (_is_of_algorithm(row) or _is_of_link(row)):
                machines[row["gpu"], row["world_size"]].append({**row, "file": path.name})
    return machines


def _is_of_algorithm(row: dict[str, Any]) -> bool:
    """Returns whether a row has the time of an algorithm, or says that its result was wrong."""
    return bool(
        row.get("arm", "").startswith(_ARM)
        and row["quant"] in _QUANTS
        and not row.get("residual_sharded")
        and not row.get("float32_residual")
        and not row.get("slices")
        and not row.get("streams")
        and not row.get("return_normed")
        and (row["p50_us"] or not row["correct"])
    )


def _is_of_link(row: dict[str, Any]) -> bool:
    """Returns whether a row has the best link rate."""
    return row.get("arm") == LINK_ARM and bool(row["chosen"])


def curves_of(rows: list[dict[str, Any]]) -> tuning.Curves:
    """Returns the curves that have enough rows, each from the newest commit with enough of them.

    Times are only compared within a commit and link rate, because kernels differ between commits.
    If a size was measured twice at a commit, the shorter time counts.
    """
    wrong = {(row["commit"], _candidate(row)) for row in rows if not row["correct"]}
    runs: dict[Any, dict[Any, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in sorted(rows, key=lambda row: row["date"], reverse=True):
        if (row["commit"], _candidate(row)) in wrong:
            continue
        key = (row["dtype"], _QUANTS[row["quant"]], row["hidden_size"])
        runs[key][row["commit"], row.get("link_gbps")].append(row)
    curves: tuning.Curves = {}
    for (dtype, epilogue, hidden_size), by_commit in sorted(runs.items()):
        found = (_times(of_commit) for of_commit in by_commit.values())  # newest first
        measured = next(filter(_is_enough, found), None)
        if measured is None:
            print(f"{dtype}, {epilogue}, {hidden_size}: skipped, too few sizes at every commit")
            continue
        times, product = measured
        curve = Curve(hidden_size, crossovers.steps(times), *product)
        curves.setdefault((dtype, epilogue), []).append(curve)
    return curves


def _candidate(row: dict[str, Any]) -> Candidate:
    """Returns the candidate of a row."""
    blocks = (row.get("num_blocks", 0), row.get("cluster_size", 0))
    return Candidate(row["arm"].removeprefix(_ARM), *blocks)


Times = dict[int, dict[Candidate, float]]


def _times(rows: list[dict[str, Any]]) -> tuple[Times, tuple[int, int]]:
    """Returns times by tokens and candidate, and (product, product_tokens) as in Curve."""
    after_gemm = {row["num_tokens"]: row["product"] for row in rows if row.get("product")}
    times: Times = defaultdict(dict)
    for row in rows:
        candidate = _candidate(row)
        of_mode = row.get("product", 0) == after_gemm.get(row["num_tokens"], 0)
        if candidate.algorithm != "unfused" and of_mode:
            found = times[row["num_tokens"]]
            found[candidate] = min(row["p50_us"], found.get(candidate, row["p50_us"]))
    return times, (max(after_gemm.values(), default=0), max(after_gemm, default=0))


def _is_enough(found: tuple[Times, Any]) -> bool:
    """Returns whether enough sizes were measured for a curve."""
    measured, _ = found
    whole = min(measured, default=0) == 1 and max(measured) >= _ENOUGH_TOKENS
    return whole and len(measured) >= _ENOUGH_SIZES


def main() -> None:
    """Writes a file per GPU and number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("rows", nargs="+", type=pathlib.Path)
    for (gpu, world_size), rows in sorted(read(parser.parse_args().rows).items()):
        newest = max(rows, key=lambda row: row["date"])
        provenance = {key: newest[key] for key in ("commit", "versions", "command", "date")}
        links = [row for row in rows if _is_of_link(row)]
        link = max(links, key=lambda row: row["date"])["link_gbps"] if links else 0.0
        curves = curves_of([row for row in rows if _is_of_algorithm(row)])
        files = ", ".join(sorted({f"benchmarks/results/{row['file']}" for row in rows}))
        measured = tuning.Measured(curves, link)
        table = tuning.document(measured, gpu, world_size, {"source": files, **provenance})
        path = _SEEDS / tuning.file_name(gpu, world_size)
        tuning.save(path, table)
        print(path.relative_to(_ROOT))


if __name__ == "__main__":
    main()
