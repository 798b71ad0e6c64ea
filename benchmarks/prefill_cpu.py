"""README: prefill shapes up to 64 MiB on two CPU processes; needs no GPU."""

from __future__ import annotations

import run

PREFILL = ("--model", "llama-3.1-8b", "--tokens", "256,1024,8192")

if __name__ == "__main__":
    run.main(run.allnorm("bench", "--device", "cpu", "--tp", "2", *PREFILL, results="cpu.jsonl"))
