"""Runs the kernels for AMD GPUs in the emulator: every kernel, many seeds, and all defects.

python tests/native/amd/emulator/run.py kernels [--seeds 4] [--part 1/8]
python tests/native/amd/emulator/run.py seeds [--seeds 300] [--part 1/8]
python tests/native/amd/emulator/run.py shapes [--seeds 2]
python tests/native/amd/emulator/run.py mutants
"""

from __future__ import annotations

import pathlib
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))
from native.amd.compiler import ARCHITECTURES
from native.amd.emulator import mutants
from native.amd.emulator.cases import (
    GFX942,
    GFX950,
    MORE,
    REUSED,
    SHORT,
    Case,
    all_kernels,
    shapes,
    shapes_of_others,
)
from native.amd.emulator.machine import Settings, StopError

app = typer.Typer(add_completion=False, help=__doc__)
console = Console(width=120)
Part = Annotated[str, typer.Option(help="a part of the cases, for example 2/8")]
Seeds = Annotated[int, typer.Option(help="seeds of each case")]


def part_of(cases: Iterable[Case], part: str) -> list[Case]:
    """Returns every n-th case from the k-th on, for the part `k/n`."""
    place, count = map(int, part.split("/"))
    if not 1 <= place <= count:
        raise typer.BadParameter(f"{part}: expected a part such as 2/8")
    return list(cases)[place - 1 :: count]


def run_cases(cases: Sequence[Case], seeds: int) -> None:
    """Runs cases with seeds from 1 on, prints a table, and exits if any failed."""
    begin, failed = time.monotonic(), []
    runs, calls, instructions = Counter[int](), Counter[int](), Counter[int]()
    kernels = set()
    for case in cases:
        done = sum(instructions.values()), time.monotonic()
        for seed in range(1, seeds + 1):
            try:
                outcome = case.run(Settings(seed=seed))
            except (StopError, RuntimeError) as stop:
                failed.append(f"{case.cpu} {case.name}, seed {seed}: {stop}")
                continue
            if not outcome.is_right:
                failed.append(
                    f"{case.cpu} {case.name}, seed {seed}: {outcome.wrong} wrong, "
                    f"{outcome.not_at_rest} not at rest, "
                    f"status {[fault.status for fault in outcome.faults]}"
                )
            runs[case.ranks] += 1
            calls[case.ranks] += len(case.calls)
            instructions[case.ranks] += outcome.instructions
            kernels |= {(case.cpu, variant) for variant in outcome.kernels}
        millions = (sum(instructions.values()) - done[0]) / 1e6
        console.print(
            f"{case.cpu} {case.name}: {case.ranks} ranks, {seeds} seeds, "
            f"{millions:.1f} million instructions, {time.monotonic() - done[1]:.1f} s; "
            f"{len(failed)} failed so far",
            markup=False,
        )
    table = Table("ranks", "runs", "calls", "million instructions", title=f"{len(kernels)} kernels")
    for ranks in sorted(runs):
        row = (ranks, runs[ranks], calls[ranks], f"{instructions[ranks] / 1e6:.1f}")
        table.add_row(*map(str, row))
    console.print(table)
    console.print(
        f"{len(failed)} of {sum(runs.values())} runs failed, {time.monotonic() - begin:.0f} s"
    )
    for text in failed:
        console.print(text, markup=False)
    if failed:
        raise typer.Exit(1)


@app.command()
def kernels(seeds: Seeds = 4, part: Part = "1/1") -> None:
    """Runs every kernel, compiled for each architecture."""
    cases = [case for cpu in ARCHITECTURES for case in all_kernels(cpu)]
    run_cases(part_of(cases, part), seeds)


@app.command()
def seeds(seeds: Seeds = 300, part: Part = "1/1") -> None:
    """Runs the cases of every commit and further ones with many seeds."""
    run_cases(part_of([*SHORT, *MORE, *REUSED], part), seeds)


@app.command(name="shapes")
def run_shapes(seeds: Seeds = 2, part: Part = "1/1") -> None:
    """Runs 1 to 128 rows of the widths of models, with 2, 4 and 8 ranks."""
    cases = [case for cpu in (GFX942, GFX950) for case in (*shapes(cpu), *shapes_of_others(cpu))]
    run_cases(part_of(cases, part), seeds)


@app.command(name="mutants")
def run_mutants() -> None:
    """Tries every defect, and prints what notices each."""
    table = Table("defect", "noticed by", "reported by rules", "number")
    for case in REUSED:
        counts = Counter(
            (edit.kind, mutants.noticed_edit(case, edit), mutants.reported_edit(case, edit))
            for edit in mutants.edits_of_case(case)
        )
        for (kind, how, reported), number in sorted(counts.items()):
            what = f"{case.name}: {kind} removed"
            table.add_row(what, how or "nothing here", "yes" if reported else "no", str(number))
    unnoticed = []
    for fault in mutants.FAULTS:
        how = mutants.noticed(fault.case, faults=(fault.name,))
        table.add_row(fault.name, how or "nothing", "", "1")
        unnoticed += [] if how else [fault.name]
    console.print(table)
    if unnoticed:
        console.print(f"not noticed: {', '.join(unnoticed)}")
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
