"""Puts each defect of table.py into a copy of the CUDA kernels; the tests must report every one.

The kernels run over fibers, without a GPU (csrc/tests/shim). First the tests must pass as they are.

    python tests/native/kernel_mutants/run.py [--all] [--only WORDS] [--part 1/2]
"""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import queue
import shutil
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
# As much of a report as says what is wrong.
REPORT_LINES = 12


class Tree:
    """A copy of the native sources with a build of each kind, for one defect at a time."""

    def __init__(self, path: pathlib.Path) -> None:
        """Copies the sources to `path`, as new: a defect may have been built there last."""
        self.path = path
        source = path / "source"
        shutil.rmtree(source, ignore_errors=True)
        for part in ("csrc", "cmake"):
            shutil.copytree(ROOT / part, source / part, copy_function=shutil.copy)
        (source / "src" / "allnorm").mkdir(parents=True)
        for name in ("CMakeLists.txt", "src/allnorm/_version.py"):
            shutil.copy(ROOT / name, source / name)
        self._configured: set[str] = set()

    def build(self, kind: table.Build, target: str) -> str | None:
        """Builds a test; what the compiler says if it can't."""
        build = self.path / kind
        if kind not in self._configured:
            command = ["cmake", "-G", "Ninja", "-S", str(self.path / "source"), "-B", str(build)]
            command += ["-DALLNORM_BUILD_TESTS=ON", "-DALLNORM_CUDA=off", "--log-level=WARNING"]
            # The less is optimised, the sooner the next defect's turn comes.
            command += ["-DCMAKE_CXX_FLAGS_RELEASE=-O1"]
            command += [f"-DALLNORM_SANITIZE={'thread' if kind == 'thread' else ''}"]
            subprocess.run(command, check=True, timeout=BUILD_TIMEOUT_S)
            self._configured.add(kind)
        command = ["cmake", "--build", str(build), "--target", target, "--parallel", "1"]
        result = subprocess.run(
            command, timeout=BUILD_TIMEOUT_S, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        return None if result.returncode == 0 else result.stdout.decode(errors="replace")

    def run(self, kind: table.Build, target: str) -> tuple[int, str]:
        """Runs a test; exit status and output."""
        try:
            result = subprocess.run(
                [str(self.path / kind / target)],
                timeout=TEST_TIMEOUT_S,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        except subprocess.TimeoutExpired as error:
            output = (error.stdout or b"").decode(errors="replace")
            return -1, f"{output}\nstill running after {TEST_TIMEOUT_S} s"
        return result.returncode, result.stdout.decode(errors="replace")

    def apply(self, mutant: table.Mutant) -> dict[pathlib.Path, str]:
        """Edits the copy; returns what the files were."""
        sources = self.path / "source" / "csrc"
        before: dict[pathlib.Path, str] = {}
        for name, text in mutant.edited(sources).items():
            before[sources / name] = (sources / name).read_text()
            (sources / name).write_text(text)
        return before

    @staticmethod
    def restore(before: dict[pathlib.Path, str]) -> None:
        """Undoes apply()."""
        for path, text in before.items():
            path.write_text(text)


def head(output: str) -> str:
    """The first lines of a report."""
    return "\n".join(output.strip().splitlines()[:REPORT_LINES])


def try_original(tree: Tree, kind: table.Build, test: str) -> str | None:
    """What is wrong without any defect."""
    if errors := tree.build(kind, test):
        return f"does not compile\n{errors}"
    status, output = tree.run(kind, test)
    return None if status == 0 else f"ended with status {status}\n{head(output)}"


def try_mutant(tree: Tree, mutant: table.Mutant) -> tuple[str | None, str]:
    """What of the report of a defect is not as it should be, and the line that tells of it."""
    before = tree.apply(mutant)
    try:
        if errors := tree.build(mutant.build, mutant.test):
            return f"does not compile\n{head(errors)}", ""
        status, output = tree.run(mutant.build, mutant.test)
    finally:
        tree.restore(before)
    lines = [line for line in output.splitlines() if any(text in line for text in mutant.report)]
    if status == 0:
        return "passes", ""
    if not lines:
        return f"expected one of {mutant.report}, seen\n{head(output)}", ""
    return None, lines[0].strip()


def main(
    every: Annotated[bool, typer.Option("--all", help="Also those that CI leaves out.")] = False,
    only: Annotated[str, typer.Option(help="Those whose name contains this.")] = "",
    part: Annotated[str, typer.Option(help="K/N: the K-th of every N of them.")] = "1/1",
    jobs: Annotated[int, typer.Option(help="Copies of the sources.")] = os.cpu_count() or 1,
    folder: Annotated[pathlib.Path, typer.Option(help="Where to build.")] = ROOT / "build/mutants",
) -> None:
    """Tries every defect and says how it was reported; status 1 if one was not."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    chosen = [m for m in table.MUTANTS if (every or m.short or only) and only in m.name]
    number, parts = (int(word) for word in part.split("/"))
    if not 1 <= number <= parts:
        raise typer.BadParameter(f"--part is {part}: expected K/N with K from 1 to N, such as 1/2")
    chosen = chosen[number - 1 :: parts]
    kinds = sorted({(m.build, m.test) for m in chosen})
    start = time.monotonic()
    copies = [Tree(folder / str(number)) for number in range(jobs)]
    trees: queue.Queue[Tree] = queue.Queue()
    for copy in copies:
        trees.put(copy)
    failures = 0
    # Also of those that are not tried now: the next to try them would find that they fit no more.
    for mutant in table.MUTANTS:
        try:
            mutant.edited(ROOT / "csrc")
        except LookupError as error:
            failures += 1
            console.print(f"{mutant.name}: {error}", style="red")
    if failures:
        raise typer.Exit(1)

    def with_tree(work, *arguments):
        tree = trees.get()
        try:
            begin = time.monotonic()
            return work(tree, *arguments), time.monotonic() - begin
        finally:
            trees.put(tree)

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for (kind, test), future in [
            (pair, pool.submit(with_tree, try_original, *pair)) for pair in kinds
        ]:
            problem, seconds = future.result()
            console.print(f"{seconds:6.1f} s  no defect, {test}, {kind}: {problem or 'passes'}")
            failures += problem is not None
        if failures:
            raise typer.Exit(1)
        for mutant, future in [(m, pool.submit(with_tree, try_mutant, m)) for m in chosen]:
            (problem, line), seconds = future.result()
            failures += problem is not None
            verdict = f"NOT REPORTED: {problem}" if problem else line
            style = "red" if problem else None
            console.print(f"{seconds:6.1f} s  {mutant.name}: {verdict}", style=style)
    console.print(
        f"{len(chosen)} mutants, {failures} not reported, {time.monotonic() - start:.0f} s"
    )
    raise typer.Exit(1 if failures else 0)


if __name__ == "__main__":
    typer.run(main)
