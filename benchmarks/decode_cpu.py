"""README: decode on two CPU processes, many times faster than gloo + PyTorch; no GPU needed."""

from __future__ import annotations

import run

DECODE = ("--model", "llama-3.1-8b,gpt-oss-120b", "--tokens", "1,4,16")

if __name__ == "__main__":
    run.main(run.allnorm("bench", "--device", "cpu", "--tp", "2", *DECODE, results="cpu.jsonl"))
