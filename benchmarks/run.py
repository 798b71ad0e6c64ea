"""Runs an `allnorm` command for a benchmark script and keeps its results in benchmarks/results."""

from __future__ import annotations

import pathlib
import subprocess
import sys

RESULTS = pathlib.Path(__file__).parent / "results"


def allnorm(*arguments: str, results: str) -> int:
    """Runs `allnorm ARGUMENTS --json benchmarks/results/RESULTS`; returns its exit code.

    Rows are appended: each one carries its commit, command and date.
    """
    line = [*arguments, "--json", str(RESULTS / results)]
    print("$ allnorm", " ".join(line), flush=True)
    # -P: the installed package, not a checkout in the working directory that may have no libraries.
    command = [sys.executable, "-P", "-m", "allnorm", *line]
    return subprocess.run(command, check=False).returncode


def main(*codes: int) -> None:
    """Ends the script with the worst of the exit codes."""
    sys.exit(max(codes))
