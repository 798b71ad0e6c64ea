"""README: on H200s every kind of call gives the reference's bits, and survives the ordering soak.

Usage: python benchmarks/h200_correct.py [TP], for example 2,4,6,8; default: 2, 4, 6 and 8 as far as
there are GPUs.
"""

from __future__ import annotations

import run

if __name__ == "__main__":
    verify = ("verify", "--device", "cuda", "--tp", run.world_sizes((2, 4, 6, 8)))
    run.main(run.allnorm(*verify, "--stress", "10000", results="h200-verify.jsonl"))
