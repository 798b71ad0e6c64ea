"""Builds the kernels with each fault in table.py, one at a time, and runs the fault's test.

The test must report the fault. The kernels run on simulated GPUs (csrc/tests/shim). The tests must
first pass without faults.

    python tests/native/kernel_mutants/run.py [--only NAME] [--part 1/32]
"""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import queue
import subprocess
import sys
import time
from typing import Annotated

import typer
from rich.console import Console

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests"))
from native.kernel_mutants import table  # noqa: E402

BUILD_TIMEOUT_S = 600
TEST_TIMEOUT_S = 600
# The number of lines of a report that are printed.
REPORT_LINES = 12


def output_of(timeout_s: int, *command: str) -> tuple[int, str]:
    """Runs a command. Returns its exit status, or -1 after a timeout, and its output."""
    try:
        done = subprocess.run(
            command, timeout=timeout_s, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    except subprocess.TimeoutExpired as error:
        output = (error.stdout or b"").decode(errors="replace")
        return -1, f"{output}\nstill running after {timeout_s} s"
    return done.returncode, done.stdout.decode(errors="replace")


def head(output: str) -> str:
    """Returns the first lines of a report."""
    return "\n".join(output.strip().splitlines()[:REPORT_LINES])


def built_and_run(
    folder: pathlib.Path, kind: table.Build, test: str, fault: str = ""
) -> tuple[int, str]:
    """Builds and runs a test, optionally with a fault. Returns its exit status and output.

    Raises:
        RuntimeError: The test does not compile.
    """
    build = folder / kind
    sanitizer = "thread" if kind == "thread" else ""
    configure = ["cmake", "-G", "Ninja", "-S", str(ROOT), "-B", str(build), "--log-level=WARNING"]
    configure += ["-DALLNORM_BUILD_TESTS=ON", "-DALLNORM_CUDA=off", f"-DALLNORM_FAULT={fault}"]
    # With -O1, compiling and running together take the least time.
    configure += ["-DCMAKE_CXX_FLAGS_RELEASE=-O1", f"-DALLNORM_SANITIZE={sanitizer}"]
    for command in (
        configure,
        ["cmake", "--build", str(build), "--target", test, "--parallel", "1"],
    ):
        status, output = output_of(BUILD_TIMEOUT_S, *command)
        if status != 0:
            raise RuntimeError(f"does not compile\n{head(output)}")
    return output_of(TEST_TIMEOUT_S, str(build / test))


def try_original(folder: pathlib.Path, kind: table.Build, test: str) -> tuple[str | None, str]:
    """Runs a test without faults. Returns the problem, or None, and a line for the report."""
    status, output = built_and_run(folder, kind, test)
    return (None if status == 0 else f"ended with status {status}\n{head(output)}"), "passes"


def try_fault(folder: pathlib.Path, fault: table.Fault) -> tuple[str | None, str]:
    """Runs a test with a fault. Returns the problem, or None, and a line for the report."""
    status, output = built_and_run(folder, fault.build, fault.test, fault.name)
    lines = [line for line in output.splitlines() if any(text in line for text in fault.report)]
    if status == 0:
        return "passes", ""
    if not lines:
        return f"expected one of {fault.report}, seen\n{head(output)}", ""
    return None, lines[0].strip()


def main(
    only: Annotated[str, typer.Option(help="Only faults whose name contains this.")] = "",
    part: Annotated[str, typer.Option(help="K/N: every N-th fault, from the K-th on.")] = "1/1",
    jobs: Annotated[int, typer.Option(help="Faults to try in parallel.")] = os.cpu_count() or 1,
    folder: Annotated[pathlib.Path, typer.Option(help="Build folder.")] = ROOT / "build/mutants",
) -> None:
    """Tries faults and prints their reports. The exit status is 1 if a fault is not reported."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    number, parts = (int(word) for word in part.split("/"))
    if not 1 <= number <= parts:
        raise typer.BadParameter(f"--part is {part}: expected K/N with K from 1 to N, such as 1/2")
    chosen = [fault for fault in table.FAULTS if only in fault.name][number - 1 :: parts]
    kinds = sorted({(fault.build, fault.test) for fault in chosen})
    start = time.monotonic()
    folders: queue.Queue[pathlib.Path] = queue.Queue()
    for job in range(jobs):
        folders.put(folder / str(job))

    def attempt(work, *arguments):
        build_folder = folders.get()
        begin = time.monotonic()
        try:
            problem, line = work(build_folder, *arguments)
        except RuntimeError as error:
            problem, line = str(error), ""
        finally:
            folders.put(build_folder)
        return problem, line, time.monotonic() - begin

    def report(tries) -> int:
        failures = 0
        for name, future in tries:
            problem, line, seconds = future.result()
            failures += problem is not None
            verdict = f"NOT AS EXPECTED: {problem}" if problem else line
            style = "red" if problem else None
            console.print(f"{seconds:6.1f} s  {name}: {verdict}", style=style)
        return failures

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        originals = [
            (f"no fault, {test}, {kind}", pool.submit(attempt, try_original, kind, test))
            for kind, test in kinds
        ]
        failures = report(originals)
        if failures == 0:
            failures = report([(f.name, pool.submit(attempt, try_fault, f)) for f in chosen])
    console.print(
        f"{len(chosen)} faults, {failures} not as expected, {time.monotonic() - start:.0f} s"
    )
    raise typer.Exit(1 if failures else 0)


if __name__ == "__main__":
    typer.run(main)
