"""Runs an `allnorm` command for a benchmark script and stores its results."""

from __future__ import annotations

import importlib.util
import pathlib
import subprocess
import sys

RESULTS = pathlib.Path(__file__).parent / "results"


def allnorm(*arguments: str, results: str) -> int:
    """Runs `allnorm ARGUMENTS --json benchmarks/results/RESULTS`; returns its exit code.

    Rows are appended. Each row contains its commit, command and date.
    """
    line = [*arguments, "--json", str(RESULTS / results)]
    print("$ allnorm", " ".join(line), flush=True)
    # -P: import the installed package, not a checkout in the working directory without libraries.
    command = [sys.executable, "-P", "-m", "allnorm", *line]
    return subprocess.run(command, check=False).returncode


def world_sizes(sizes: tuple[int, ...] = (2, 4, 8)) -> str:
    """Returns the numbers of GPUs from the command line; by default, the available `sizes`."""
    import torch

    gpus = torch.cuda.device_count()
    return sys.argv[1] if len(sys.argv) > 1 else ",".join(str(n) for n in sizes if n <= gpus)


def pictures(name: str) -> list[str]:
    """Returns options to draw benchmarks/results/NAME.png and .html, if matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return []
    return ["--plot", str(RESULTS / f"{name}.png"), "--html", str(RESULTS / f"{name}.html")]


def main(*codes: int) -> None:
    """Ends the script with the worst of the exit codes."""
    sys.exit(max(codes))
