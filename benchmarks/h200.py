"""README: the table of an H200 host: decode and prefill at each number of GPUs, beside NCCL.

Usage: python benchmarks/h200.py [TP], for example 2,4,8; default: 2, 4 and 8 as far as there are
GPUs.
"""

from __future__ import annotations

import sys

import run
import torch

SHAPES = (
    [f"{tokens}x4096" for tokens in (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)]
    + [f"{tokens}x2880" for tokens in (1, 16)]
    + [f"{tokens}x7168" for tokens in (1, 16, 64)]
    + [f"{tokens}x8192" for tokens in (1, 16, 8192)]
)

if __name__ == "__main__":
    gpus = torch.cuda.device_count()
    sizes = sys.argv[1] if len(sys.argv) > 1 else ",".join(str(n) for n in (2, 4, 8) if n <= gpus)
    shapes = ("--shapes", ",".join(SHAPES))
    bench = ("bench", "--device", "cuda", "--tp", sizes)
    run.main(run.allnorm(*bench, *shapes, results="h200.jsonl"))
