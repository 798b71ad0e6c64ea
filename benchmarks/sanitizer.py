"""Runs compute-sanitizer's memcheck and synccheck over `allnorm verify`.

Usage: python benchmarks/sanitizer.py [TP [SECONDS]]; default: 2 GPUs, a sample of 60 s each.

The tool comes with the CUDA toolkit or the package nvidia-cuda-sanitizer-api (from 13.5 on; older
packages lack TreeLauncherSubreaper). The script looks for it in COMPUTE_SANITIZER, in installed
packages, in the toolkit and on PATH. It instruments only allnorm's kernels. Waits between ranks
keep the default timeout of 600 s, which is far longer than the slowdown.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig

FOUND = 9  # exit code for findings
TOOLS = ("memcheck", "synccheck")


def tool() -> str:
    """Returns the path of compute-sanitizer."""
    home = pathlib.Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    purelib = pathlib.Path(sysconfig.get_path("purelib"))
    candidates = [
        pathlib.Path(os.environ.get("COMPUTE_SANITIZER", "")),
        *purelib.glob("nvidia/*/bin/compute-sanitizer"),
        home / "bin" / "compute-sanitizer",
    ]
    found = next((str(p) for p in candidates if p.is_file() and os.access(p, os.X_OK)), None)
    found = found or shutil.which("compute-sanitizer")
    if found is None:
        sys.exit(
            "compute-sanitizer is not on this machine: install the CUDA toolkit or the package "
            "nvidia-cuda-sanitizer-api, or name the program in COMPUTE_SANITIZER"
        )
    return found


def run(name: str, sanitizer: str, world_size: str, seconds: str) -> int:
    """Runs one tool of the sanitizer; returns 0 if it checked kernels and found nothing."""
    options = ["--tool", name, "--target-processes", "all", "--error-exitcode", str(FOUND)]
    # Only kernels in allnorm's namespace; checking torch's kernels would be slow.
    options += ["--kernel-name", "kns=allnorm", "--print-limit", "20"]
    # NCCL looks up kernels that it does not have for this GPU, which the tool reports as API
    # errors.
    options += ["--report-api-errors", "no"] if name == "memcheck" else []
    verify = ["verify", "--device", "cuda", "--tp", world_size, "--seconds", seconds]
    verify.append("--share-gpus")  # if there are fewer GPUs
    command = [sanitizer, *options, sys.executable, "-P", "-m", "allnorm", *verify]
    environment = {
        **os.environ,
        **dict.fromkeys(("TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS"), "1"),
        "NCCL_NVLS_ENABLE": "0",
    }
    print("$", *command, flush=True)
    done = subprocess.run(
        command,
        env=environment,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    print(done.stdout, flush=True)
    # One summary for all processes. Without it, or if the library failed to load, nothing ran.
    summaries = re.findall(r"ERROR SUMMARY: (\d+) errors?\b(?! were not printed)", done.stdout)
    print(f"{name}: exit code {done.returncode}, errors: {', '.join(summaries)}", flush=True)
    if not summaries or "failed to initialize" in done.stdout:
        print(f"{name}: expected a summary of all processes; nothing was checked", flush=True)
        return 1
    return 1 if done.returncode or any(count != "0" for count in summaries) else 0


if __name__ == "__main__":
    sizes, seconds = ([*sys.argv[1:], "2", "60"] if len(sys.argv) < 2 else [*sys.argv[1:], "60"])[
        :2
    ]
    sys.exit(max([run(name, tool(), sizes, seconds) for name in TOOLS]))
