"""Correctness on H200s: `allnorm verify` with a long soak, repeated shapes, and fault tests.

Usage: python benchmarks/h200_soak.py [TP], for example 2,3,4; default: 2, 3, 4 and 8 GPUs, as far
as available.
"""

from __future__ import annotations

import run

CALLS = "100000"  # per number of ranks
SHAPES = "1x4096,16x4096,64x2880,128x2880,1024x2880,1319x2880,2048x2880,16384x2880"

if __name__ == "__main__":
    on = ("verify", "--device", "cuda", "--tp", run.world_sizes((2, 3, 4, 8)))
    run.main(
        run.allnorm(*on, "--stress", CALLS, results="h200-soak.jsonl"),
        run.allnorm(*on, "--shapes", SHAPES, "--repeat", "2000", results="h200-soak.jsonl"),
        run.allnorm(*on, "--faults", results="h200-faults.jsonl"),
    )
