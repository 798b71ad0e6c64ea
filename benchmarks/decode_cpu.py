"""README: decode shapes on two CPU processes, compared with gloo + PyTorch; needs no GPU."""

from __future__ import annotations

import run

DECODE = ("--model", "llama-3.1-8b,gpt-oss-120b", "--tokens", "1,4,16")

if __name__ == "__main__":
    run.main(run.allnorm("bench", "--device", "cpu", "--tp", "2", *DECODE, results="cpu.jsonl"))
