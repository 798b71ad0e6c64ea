"""README: what FP8 costs on an H200 host, and what a sharded residual saves.

Beside allnorm's fused quantisation: its 16-bit call, that call with a quantising kernel after it,
the best fused 16-bit peer with that kernel, FlashInfer's FP8 kernels, and NCCL. Takes about a
minute and a half for each number of GPUs.

Usage: python benchmarks/h200_quant.py [TP [QUANT]], for example 4,8 per_group:128,per_token;
default: 2, 4 and 8 as far as there are GPUs, groups of 128 with float32 and with packed scales.
"""

from __future__ import annotations

import sys

import run

QUANTS = "per_group:128,per_group:128:ue8m0_packed"  # FlashInfer has the second kind only
SHAPES = [f"{tokens}x4096" for tokens in (1, 4, 16, 64, 256, 1024, 8192)] + ["1x7168", "16x7168"]

if __name__ == "__main__":
    quants = sys.argv[2] if len(sys.argv) > 2 else QUANTS
    kinds = ("--quant", quants, "--residual", "replicated,sharded")
    bench = ("bench", "--device", "cuda", "--tp", run.world_sizes(), "--shapes", ",".join(SHAPES))
    code = run.allnorm(*bench, *kinds, *run.pictures("h200-quant"), results="h200-quant.jsonl")
    run.main(code)
