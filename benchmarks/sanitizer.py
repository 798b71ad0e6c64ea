"""compute-sanitizer finds nothing in the kernels: memcheck and synccheck over `allnorm verify`.

Usage: python benchmarks/sanitizer.py [TP [SECONDS]]; default: 2 GPUs, a sample of 60 s each.

The tool comes with the CUDA toolkit, or as the package nvidia-cuda-sanitizer-api (complete from
13.5 on: without TreeLauncherSubreaper it can start no program). It is looked for in
COMPUTE_SANITIZER, in installed packages, in the toolkit and on PATH. Only kernels of allnorm are
instrumented. Waits between ranks keep the default deadline of 600 s, far beyond the slowdown.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig

FOUND = 9  # the exit code that stands for findings
TOOLS = ("memcheck", "synccheck")


def tool() -> str:
    """Path of compute-sanitizer."""
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
    """Runs one tool of the sanitizer; 0 if it has watched kernels and found nothing."""
    options = ["--tool", name, "--target-processes", "all", "--error-exitcode", str(FOUND)]
    # Names of functions below the namespace; torch's own kernels would only be slow.
    options += ["--kernel-name", "kns=allnorm", "--print-limit", "20"]
    # NCCL asks the driver for kernels that it has not brought for this GPU.
    options += ["--report-api-errors", "no"] if name == "memcheck" else []
    verify = ["verify", "--device", "cuda", "--tp", world_size, "--seconds", seconds]
    verify.append("--share-gpus")  # where there are fewer
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
    # One line for all processes; none, or a library that is not let in, and nothing was checked.
    summaries = re.findall(r"ERROR SUMMARY: (\d+) errors?\b(?! were not printed)", done.stdout)
    print(f"{name}: exit code {done.returncode}, errors: {', '.join(summaries)}", flush=True)
    if not summaries or "failed to initialize" in done.stdout:
        print(f"{name}: expected the sanitizer to have watched every process", flush=True)
        return 1
    return 1 if done.returncode or any(count != "0" for count in summaries) else 0


if __name__ == "__main__":
    sizes, seconds = ([*sys.argv[1:], "2", "60"] if len(sys.argv) < 2 else [*sys.argv[1:], "60"])[
        :2
    ]
    sys.exit(max([run(name, tool(), sizes, seconds) for name in TOOLS]))
