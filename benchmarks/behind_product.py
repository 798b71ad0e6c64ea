"""Performance page: times calls after a GEMM and in a chain, in separate processes.

Each process times allnorm, its algorithms, NCCL and every installed peer, plus an empty kernel and
the local norm. At the end it prints the spread of the processes: the largest difference between
medians per arm. A process takes one to two minutes.

Usage: python benchmarks/behind_product.py [TP [PROCESSES [RESULTS]]], for example 2 3; default: 2,
4 and 8 GPUs, as far as available, and three processes.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict

import run

COLUMNS = 7168
SHAPES = [f"{tokens}x4096" for tokens in (1, 8, 16, 32, 64, 128, 256)] + ["1x8192", "16x8192"]
ARMS = "allnorm,allnorm:one_shot,nccl+local,symm_mem,sglang,vllm,flashinfer"


def spread(rows: list[dict[str, object]]) -> dict[str, tuple[float, int]]:
    """Returns, per arm, the largest spread of medians at any shape, and the fewest processes."""
    medians: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for row in rows:
        if row["mode"] == "product" and isinstance(row["beyond_empty_us"], float):
            at = (row["arm"], row["world_size"], row["num_tokens"], row["hidden_size"])
            medians[at].append(row["beyond_empty_us"])
    found: dict[str, tuple[float, int]] = {}
    for place, values in medians.items():
        before = found.get(str(place[0]), (0.0, len(values)))
        distance = max(before[0], max(values) - min(values))
        found[str(place[0])] = (distance, min(before[1], len(values)))
    return found


def main() -> int:
    """Runs the processes; returns the worst exit code."""
    processes = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    results = sys.argv[3] if len(sys.argv) > 3 else "product.jsonl"
    path = run.RESULTS / results
    before = len(path.read_text().splitlines()) if path.exists() else 0
    arguments = ("bench", "--device", "cuda", "--tp", run.world_sizes())
    what = ("--product", f"0,{COLUMNS}", "--shapes", ",".join(SHAPES), "--arms", ARMS)
    codes = [run.allnorm(*arguments, *what, results=results) for _ in range(processes)]
    rows = [json.loads(line) for line in path.read_text().splitlines()[before:]]
    for arm, (distance, number) in spread(rows).items():
        print(f"{arm}: {number} processes differ by at most {distance:.2f} us")
    return max(codes)


if __name__ == "__main__":
    run.main(main())
