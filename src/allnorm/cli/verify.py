"""``allnorm verify``: checks that results are correct on this machine."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from allnorm import topology
from allnorm.cli import options, output
from allnorm.cli.options import Device, Json, Tp, option
from allnorm.core import hip
from allnorm.verify import faults as verify_faults
from allnorm.verify import run as verify_run
from allnorm.verify.context import Job

_SAMPLE_SECONDS = {"cpu": 20.0, "cuda": 30.0}


def verify(
    tp: Tp = "",
    device: Device = "auto",
    seed: Annotated[int | None, option("Random seed. Default: random.")] = None,
    full: Annotated[
        bool, option("Run every combination instead of a random sample.", "--full")
    ] = False,
    seconds: Annotated[
        float | None,
        option(
            "Seconds for the sample of combinations, per number of ranks. Default: 20 on CPU, "
            "30 on GPUs.",
            min=0,
        ),
    ] = None,
    stress: Annotated[
        int, option("Calls of the ordering soak with random delays; 0: skip it.", min=0)
    ] = 0,
    threads: Annotated[
        float,
        option(
            "Seconds of the soak of several communicators in threads (CPU only); 0: skip it.", min=0
        ),
    ] = 0,
    only: Annotated[
        str, option("Run only checks whose names contain one of these: soak,graph.")
    ] = "",
    shapes: Annotated[
        str, option("Run only calls of these shapes, such as 1x4096,2048x2880.")
    ] = "",
    repeat: Annotated[int, option("With --shapes: calls per shape and algorithm.", min=1)] = 2000,
    faults: Annotated[
        bool,
        option(
            "Run only fault tests: a rank dies, never calls, or makes a different call.", "--faults"
        ),
    ] = False,
    timeout: Annotated[
        float, option("Seconds a rank waits for its peers (--faults only).", min=0.1)
    ] = 2.0,
    share_gpus: Annotated[
        bool, option("Allow more ranks than GPUs; sharing a GPU is slow.", "--share-gpus")
    ] = False,
    island_size: Annotated[
        int,
        option(
            "Ranks per island. Islands exchange through the process group. 0: detect islands.",
            min=0,
        ),
    ] = 0,
    json: Json = None,
) -> None:
    """Compares every kind of call with the reference, bit for bit."""
    where = options.device(device)
    sizes = options.world_sizes(tp, where, share_gpus=share_gpus)
    words = tuple(options.words(only))
    if faults:
        _faults(sizes, where, share_gpus, timeout, words, json, island_size)
        return
    seed = random.randrange(1 << 20) if seed is None else seed
    budget = _SAMPLE_SECONDS[where] if seconds is None else seconds
    given = tuple((s.num_tokens, s.hidden_size) for s in options.shapes(shapes)) if shapes else ()
    if threads and where == "cuda":
        # Kernels that wait for each other may not all fit on a GPU at once.
        raise typer.BadParameter("runs on CPU only: pass --device cpu", param_hint="--threads")
    job = Job(
        *(where, seed, full, budget, stress, given, repeat, words),
        threads=threads,
        island_size=island_size,
        proves=where == "cuda" and hip.is_used(),
    )
    _check_selection(job)
    if full:
        with options.of("--full"):
            for size in sizes:
                needed = verify_run.full_memory_bytes(size)
                remedy = "Use fewer ranks, or a sample (without --full)."
                options.check_memory(needed, size, where, remedy)
    console = output.console()
    if crowded := options.crowded(max(sizes), where):
        console.print(output.bad(crowded))
    console.print(
        f"Every result is compared with allnorm.reference bit for bit, on every rank. Seed {seed}; "
        f"on {topology.device_name(where)}."
    )
    common = {"backend": where, "seed": seed, "full": full, **output.provenance()}
    failures = 0
    for size in sizes:
        shared = _shared(share_gpus, where, size)
        with output.progress(f"verify, {output.ranks(size)}") as show:
            found = verify_run.verify(replace(job, shared_gpus=shared), size, show)
        console.print(_table(found, size))
        for record in found:
            for detail in record["details"]:
                console.print(output.bad(f"{record['check']}: {detail}"))
        failures += sum(record["failures"] for record in found)
        of_size = {**common, "world_size": size, "shared_gpus": shared, "island_size": island_size}
        output.append_json_lines(json, found, of_size)
    if failures:
        output.fail(f"{failures} cases failed; repeat with --seed {seed}")
    ranks = ", ".join([*map(str, sizes[:-1]), output.ranks(sizes[-1])])
    console.print(output.ok(f"PASS: all checks passed with {ranks} on {where}"))
    if job.proves:
        _store_proof(replace(job, shared_gpus=share_gpus), sizes, console)


def _store_proof(job: Job, sizes: list[int], console: Console) -> None:
    """Stores that the checks have passed on AMD GPUs, unless something was left out."""
    enough = job.stress >= hip.LEAST_SOAK_CALLS
    if not enough or job.only or job.shapes or job.shared_gpus or job.island_size:
        console.print(
            "No proof is stored for the preview on AMD GPUs. It takes --stress "
            f"{hip.LEAST_SOAK_CALLS} or more, without --only, --shapes, --share-gpus and "
            "--island-size."
        )
        return
    path = hip.store_proof(sizes, job.stress)
    console.print(f"Proof for the preview on AMD GPUs: {path}")


def _shared(allowed: bool, where: str, size: int) -> bool:
    """Returns whether the ranks share GPUs."""
    return allowed and where == "cuda" and size > topology.num_gpus()


def _faults(
    sizes: list[int],
    where: str,
    share_gpus: bool,
    timeout_s: float,
    words: tuple[str, ...],
    json: Path | None,
    island_size: int,
) -> None:
    """Runs the fault tests and shows their table, for each number of ranks."""
    if min(sizes) < 2:
        raise typer.BadParameter("1: expected at least 2 ranks for --faults", param_hint="--tp")
    console, failed = output.console(), 0
    console.print(
        f"Waits time out after {timeout_s:g} s. Within {verify_faults.SLACK_SECONDS:g} s after "
        f"that, every rank must report the fault and name its cause. On "
        f"{topology.device_name(where)}."
    )
    common = {"backend": where, "check": "faults", **output.provenance()}
    for size in sizes:
        shared = _shared(share_gpus, where, size)
        with output.progress(f"faults, {output.ranks(size)}") as show:
            rows = verify_faults.run(size, where, timeout_s, words, shared, show, island_size)
        _show_faults(rows, size, console)
        of_size = {**common, "world_size": size, "shared_gpus": shared, "island_size": island_size}
        output.append_json_lines(json, rows, of_size)
        failed += sum(bool(row["problems"]) for row in rows)
    if failed:
        output.fail(f"{failed} cases failed")
    console.print(output.ok("PASS: every fault was reported in time, with its cause"))


def _show_faults(rows: list[verify_faults.Row], world_size: int, console: Console) -> None:
    """Prints a line per fault, then the problems. The JSON file has one row per case."""
    cells = []
    for fault in dict.fromkeys(row["fault"] for row in rows):
        cases = [row for row in rows if row["fault"] == fault]
        seconds = [row["seconds"] for row in cases if row["seconds"] is not None]
        held = sum(not row["problems"] for row in cases)
        verdict = f"{held}/{len(cases)}"
        cells.append(
            (
                fault,
                ", ".join(dict.fromkeys(row["algorithm"] for row in cases)),
                cases[0]["saw"],
                f"{max(seconds):.2f}" if seconds else "-",
                output.ok(verdict) if held == len(cases) else output.bad(verdict),
            )
        )
    title = f"rank {world_size - 1} of {world_size} fails; what rank 0 sees"
    columns = ("fault", "algorithms of the peers", "rank 0 saw first", "max seconds", "passed")
    words = columns[:3]
    console.print(output.FittedTable(title, columns, cells, words=words, optional=columns[1:3]))
    for row in rows:
        for problem in row["problems"]:
            console.print(output.bad(f"{row['fault']}, {row['algorithm']}: {problem}"))
    held = sum(not row["problems"] for row in rows)
    slowest = max((row["seconds"] for row in rows if row["seconds"] is not None), default=0.0)
    text = f"{held} of {len(rows)} cases passed; the slowest rank reported after {slowest:.2f} s"
    console.print(output.ok(text) if held == len(rows) else output.bad(text))


def _check_selection(job: Job) -> None:
    every = verify_run.checks_of(replace(job, only=()))
    unknown = [word for word in job.only if not any(word in name for name in every)]
    if unknown:
        hint = "" if job.stress else "; with --stress N also ordering soak"
        hint += "" if job.threads else "; with --threads N also thread soak"
        raise typer.BadParameter(
            f"{', '.join(unknown)}: expected words in {', '.join(every)}{hint}", param_hint="--only"
        )


def _table(found: list[dict[str, Any]], size: int) -> output.FittedTable:
    rows = [
        (
            record["check"],
            f"{record['cases']:,}",
            output.bad(str(record["failures"])) if record["failures"] else output.ok("0"),
            f"{record['seconds']:.1f}",
            record["note"],
        )
        for record in found
    ]
    title = output.ranks(size)
    columns = ("check", "cases", "failures", "seconds", "note")
    return output.FittedTable(title, columns, rows, words=("note",))
