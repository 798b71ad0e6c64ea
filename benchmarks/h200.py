"""README: the table of an H200 host: decode and prefill per number of GPUs, with every peer.

Times allnorm, NCCL, PyTorch symmetric memory and, if installed, FlashInfer, vLLM and SGLang. Takes
about a minute per number of GPUs. The first run also compiles the kernels of FlashInfer and SGLang.

Usage: python benchmarks/h200.py [TP], for example 2,4,8; default: 2, 4 and 8 GPUs, as far as
available.
"""

from __future__ import annotations

import run

SHAPES = (
    [f"{tokens}x4096" for tokens in (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)]
    + [f"{tokens}x2880" for tokens in (1, 16)]
    + [f"{tokens}x7168" for tokens in (1, 16, 64)]
    + [f"{tokens}x8192" for tokens in (1, 16, 8192)]
)

if __name__ == "__main__":
    shapes = ("--shapes", ",".join(SHAPES))
    bench = ("bench", "--device", "cuda", "--tp", run.world_sizes())
    run.main(run.allnorm(*bench, *shapes, *run.pictures("h200"), results="h200.jsonl"))
