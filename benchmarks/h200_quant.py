"""README: the cost of FP8 on an H200 host, and the gain of a sharded residual.

Times allnorm's fused quantization, its 16-bit call, that call followed by a quantization kernel,
the best fused 16-bit peer followed by that kernel, FlashInfer's FP8 kernels, and NCCL. Takes about
a minute and a half per number of GPUs.

Usage: python benchmarks/h200_quant.py [TP [QUANT]], for example 4,8 per_group:128,per_token;
default: 2, 4 and 8 GPUs, as far as available; groups of 128 with float32 and with packed scales.
"""

from __future__ import annotations

import sys

import run

QUANTS = "per_group:128,per_group:128:ue8m0_packed"  # FlashInfer supports the second one only
SHAPES = [f"{tokens}x4096" for tokens in (1, 4, 16, 64, 256, 1024, 8192)] + ["1x7168", "16x7168"]

if __name__ == "__main__":
    quants = sys.argv[2] if len(sys.argv) > 2 else QUANTS
    kinds = ("--quant", quants, "--residual", "replicated,sharded")
    bench = ("bench", "--device", "cuda", "--tp", run.world_sizes(), "--shapes", ",".join(SHAPES))
    code = run.allnorm(*bench, *kinds, *run.pictures("h200-quant"), results="h200-quant.jsonl")
    run.main(code)
