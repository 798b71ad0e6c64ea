"""README: decode and prefill shapes on two CPU processes, compared with gloo + PyTorch."""

from __future__ import annotations

import run

DECODE = ("--model", "llama-3.1-8b,gpt-oss-120b", "--tokens", "1,4,16")
PREFILL = ("--model", "llama-3.1-8b", "--tokens", "256,1024,8192")

if __name__ == "__main__":
    bench = ("bench", "--device", "cpu", "--tp", "2")
    run.main(*(run.allnorm(*bench, *shapes, results="cpu.jsonl") for shapes in (DECODE, PREFILL)))
