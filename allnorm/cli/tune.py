"""``allnorm tune``: measures what is fastest on this machine, and stores it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table as RichTable

from allnorm import topology, tuning
from allnorm.cli import bench_modes, crossovers, options, output, tune_check
from allnorm.cli.options import Device, Json, Tp
from allnorm.cli.ranks import tune as ranks_tune
from allnorm.policy import Curve
from allnorm.testing import run_ranks
from allnorm.tuning import Measured

_GPU_HIDDEN, _CPU_HIDDEN = "2880,4096,5120,7168,8192", "2880,4096"
_GPU_QUANT, _CPU_QUANT = "none,per_group:128", "none"
_MAX_TOKENS = {"cuda": 16384, "cpu": 1024}
_FACTOR = 4  # between the sizes of the coarse grid
_TIMEOUT_SECONDS = 3600.0
LINK_ARM = "link"
"""Rows of this arm say what a call takes at some rate of the link."""


def tune(
    tp: Tp = "",
    device: Device = "auto",
    hidden: Annotated[
        str, typer.Option("--hidden", help="Hidden sizes, separated by commas.")
    ] = "",
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=0, help="Most rows. Default: 16384, on CPU 1024.")
    ] = 0,
    dtype: Annotated[
        str, typer.Option("--dtype", help="Some of " + ", ".join(options.DTYPES) + ".")
    ] = "bfloat16",
    quant: Annotated[
        str,
        typer.Option(
            "--quant",
            help="What follows the norm, as of bench. Default: none,per_group:128, on CPU none.",
        ),
    ] = "",
    algorithms: Annotated[
        str, typer.Option("--algorithms", help="Candidates; unfused may be one.")
    ] = "one_shot,two_shot",
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir", help="Where tables are kept. Default: ALLNORM_TUNING_DIR, else the cache."
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Store nothing: is what auto chooses within 5 % of the best algorithm?"
        ),
    ] = False,
    json: Json = None,
) -> None:
    """Measures which algorithm is fastest from how many tokens on, and stores the table.

    Every candidate's bits are compared with the reference before it is timed. New communicators of
    the same device and number of ranks use the table; their plan() says so.
    """
    where = options.device(device)
    sizes = [size for size in dict.fromkeys(options.world_sizes(tp, where)) if size > 1]
    if not sizes:
        raise typer.BadParameter("1: one rank has nothing to choose", param_hint="--tp")
    on_gpu = where == "cuda"
    modes = bench_modes.modes(quant or (_GPU_QUANT if on_gpu else _CPU_QUANT), "replicated", False)
    job = ranks_tune.Job(
        dtypes=tuple(options.choices(dtype, "--dtype", options.DTYPES)),
        quants=tuple(mode.quant for mode in modes),
        hidden_sizes=tuple(
            options.integers(hidden or (_GPU_HIDDEN if on_gpu else _CPU_HIDDEN), "--hidden", 1)
        ),
        tokens=tuple(crossovers.token_grid(max_tokens or _MAX_TOKENS[where], _FACTOR)),
        algorithms=tuple(options.choices(algorithms, "--algorithms", options.ALGORITHMS)),
        device=where,
    )
    console = output.console()
    if check:
        ok = [tune_check.run(job, size, directory, json, console) for size in sizes]
    else:
        ok = [_tune(job, size, directory, json, console) for size in sizes]
    if not all(ok):
        raise typer.Exit(1)


def _tune(
    job: ranks_tune.Job, size: int, directory: Path | None, json: Path | None, console: Console
) -> bool:
    """Measures and stores one table; returns whether every candidate was right."""
    name = tuning.device_name(job.device)
    path = tuning.path_of(directory, name, size)
    began = time.monotonic()
    with output.progress(f"tune, {output.ranks(size)}") as show:
        results: list[ranks_tune.Result] = run_ranks(
            ranks_tune.run,
            size,
            device=job.device,
            args=(job,),
            timeout=_TIMEOUT_SECONDS,
            on_message=show,
        )
    result = results[0]
    # All ranks went by the same times; a table that they do not share must not be stored.
    if any(other != result for other in results):
        raise RuntimeError("the ranks measured different curves: this is a defect of allnorm tune")
    provenance = output.provenance()
    measured = Measured(_curves(result.curves), result.link_gbps)
    output.append_json_lines(json, _rows(result, measured.curves, size, job.device, provenance))
    console.print(_table(result.curves, measured.curves, size))
    if 0.0 in result.link_us:
        console.print(_describe_link(result))
    wrong = {(str(c), text) for record in result.curves for c, text in record["wrong"].items()} | {
        (f"{rate:.0f} GB/s", text) for rate, text in result.link_wrong.items()
    }
    for candidate, text in sorted(wrong):
        console.print(output.bad(f"{candidate} is left out, its results are wrong: {text}"))
    if measured.curves:
        before = tuning.read(path, name, size).tuned
        table = replace(measured, curves=merge(before.curves, measured.curves))
        tuning.save(path, tuning.document(table, name, size, provenance))
        # A path must not be folded: somebody will copy it.
        console.print(f"stored in {path}", soft_wrap=True)
    console.print(f"{time.monotonic() - began:.0f} s")
    return bool(measured.curves) and not wrong


def merge(before: tuning.Curves, measured: tuning.Curves) -> tuning.Curves:
    """What was measured now, and of what was stored whatever was not measured again."""
    merged = {name: list(curves) for name, curves in measured.items()}
    for name, curves in before.items():
        again = {curve.hidden_size for curve in merged.get(name, [])}
        kept = [curve for curve in curves if curve.hidden_size not in again]
        merged[name] = [*merged.get(name, []), *kept]
    return merged


def _curves(records: list[dict[str, Any]]) -> tuning.Curves:
    wrong = {candidate for record in records for candidate in record["wrong"]}
    curves: tuning.Curves = {}
    for record in records:
        steps = crossovers.steps(record["times"], without=wrong)
        if steps:
            name = (record["dtype"], ranks_tune.epilogue_of(record["quant"]))
            curves.setdefault(name, []).append(Curve(record["hidden_size"], steps))
    return curves


def _table(records: list[dict[str, Any]], curves: tuning.Curves, size: int) -> RichTable:
    rows = []
    for record in records:
        name = (record["dtype"], ranks_tune.epilogue_of(record["quant"]))
        curve = next(
            (c for c in curves.get(name, []) if c.hidden_size == record["hidden_size"]), None
        )
        what = record["reason"] if curve is None else describe(curve)
        rows.append((str(record["hidden_size"]), *name, str(len(record["times"])), what))
    columns = ("hidden_size", "dtype", "epilogue", "sizes measured", "fastest")
    return output.table(output.ranks(size), columns, rows, words=("dtype", "epilogue", "fastest"))


def _describe_link(result: ranks_tune.Result) -> str:
    """Which rate was found, and what it brings."""
    unpaced = f"{ranks_tune.LINK_SHAPE} takes {result.link_us[0.0]:.1f} us"
    if not result.link_gbps:
        return f"rate of the link: none makes a difference, {unpaced}"
    at_rate = result.link_us[result.link_gbps]
    return (
        f"rate of the link: {result.link_gbps:.0f} GB/s; {unpaced} without it, {at_rate:.1f} with"
    )


def describe(curve: Curve) -> str:
    """A curve in words: which candidate from how many tokens on."""
    parts, first = [], 1
    for step in curve.steps:
        name = str(crossovers.Candidate(step.algorithm, step.num_blocks))
        span = f"from {first}" if step.max_tokens is None else f"{first}-{step.max_tokens}"
        parts.append(f"{span}: {name}")
        first = (step.max_tokens or 0) + 1
    return "; ".join(parts)


def _rows(
    result: ranks_tune.Result,
    curves: tuning.Curves,
    size: int,
    device: str,
    provenance: dict[str, Any],
) -> list[dict[str, Any]]:
    common = {
        "gpu" if device == "cuda" else "cpu": topology.device_name(device),
        "world_size": size,
        **provenance,
    }
    wrong = {candidate for record in result.curves for candidate in record["wrong"]}
    shape = ranks_tune.LINK_SHAPE
    rows = [
        {
            **common,
            "num_tokens": shape.num_tokens,
            "hidden_size": shape.hidden_size,
            "dtype": "bfloat16",
            "quant": "",
            "arm": LINK_ARM,
            "link_gbps": rate,
            "p50_us": us,
            "correct": True,
            "chosen": rate == result.link_gbps,
        }
        for rate, us in result.link_us.items()
    ]
    for record in result.curves:
        right = {
            tokens: {c: us for c, us in found.items() if c not in wrong}
            for tokens, found in record["times"].items()
        }
        chosen = crossovers.winners(right)
        for tokens, found in record["times"].items():
            rows += [
                {
                    **common,
                    "num_tokens": tokens,
                    "hidden_size": record["hidden_size"],
                    "dtype": record["dtype"],
                    "quant": record["quant"],
                    "arm": f"allnorm:{candidate.algorithm}",
                    "num_blocks": candidate.num_blocks,
                    "link_gbps": result.link_gbps,
                    "p50_us": us,
                    "correct": candidate not in wrong,
                    "chosen": chosen.get(tokens) == candidate,
                }
                for candidate, us in found.items()
            ]
    return rows
