"""README: on H200s every kind of call gives the reference's bits, and survives the ordering soak.

Usage: python benchmarks/h200_correct.py [TP], for example 2,4,6,8; default: 2, 4, 6 and 8 as far as
there are GPUs.
"""

from __future__ import annotations

import sys

import run
import torch

if __name__ == "__main__":
    gpus = torch.cuda.device_count()
    sizes = (
        sys.argv[1] if len(sys.argv) > 1 else ",".join(str(n) for n in (2, 4, 6, 8) if n <= gpus)
    )
    verify = ("verify", "--device", "cuda", "--tp", sizes, "--stress", "10000")
    run.main(run.allnorm(*verify, results="h200-verify.jsonl"))
