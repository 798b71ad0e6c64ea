"""README: checks on H200s that calls are bit-identical to the reference, and runs the soak.

Usage: python benchmarks/h200_correct.py [TP], for example 2,4,6,8; default: 2, 4, 6 and 8 GPUs, as
far as available.
"""

from __future__ import annotations

import run

if __name__ == "__main__":
    verify = ("verify", "--device", "cuda", "--tp", run.world_sizes((2, 4, 6, 8)))
    run.main(run.allnorm(*verify, "--stress", "10000", results="h200-verify.jsonl"))
