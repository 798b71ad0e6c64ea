"""``allnorm tune``: measures which algorithm is fastest on this machine and stores the result."""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from allnorm import names, topology
from allnorm.bench import layers as bench_layers
from allnorm.bench.modes import Shape
from allnorm.cli import options, output
from allnorm.cli.options import Device, Json, Tp, option
from allnorm.tune import check as tune_check
from allnorm.tune import crossovers, run, table
from allnorm.tune import prefetch as tune_prefetch
from allnorm.tune.check import Point
from allnorm.tune.prefetch import PrefetchTimes
from allnorm.tune.run import Job, LinkTimes, Result
from allnorm.tuning import Curves

_HIDDEN = {"cuda": "2880,4096,5120,7168,8192", "cpu": "2880,4096"}
_QUANT = {"cuda": "none,per_group:128", "cpu": "none"}
_MAX_TOKENS = {"cuda": 16384, "cpu": 1024}
_SPARE_CORES = 0.5  # this many of the cores that the ranks need may be busy
_PRODUCT = {"cuda": 7168, "cpu": 0}
_LAYERS = {"cuda": "llama-3.1-8b,llama-3.1-70b", "cpu": "none"}
_FACTOR = 4  # between the sizes of the coarse grid


def tune(
    tp: Tp = "",
    device: Device = "auto",
    hidden: Annotated[str, option("Hidden sizes, separated by commas.")] = "",
    max_tokens: Annotated[
        int,
        option("Largest number of rows. Default: 16384; on CPU 1024.", min=0, show_default=False),
    ] = 0,
    dtype: Annotated[str, option(f"One or more of {', '.join(names.DTYPES)}.")] = "bfloat16",
    quant: Annotated[
        str,
        option(
            "Quantization after the norm, as in bench. Default: none,per_group:128; on CPU none."
        ),
    ] = "",
    product: Annotated[
        int | None,
        option(
            "Measure calls after a GEMM with this inner dimension, as in a model; 0: in a "
            "chain of calls. Default: 7168; on CPU 0.",
            min=0,
            show_default=False,
        ),
    ] = None,
    algorithms: Annotated[
        str, option(f"Candidates, one or more of {', '.join(names.ALGORITHMS)}.")
    ] = "one_shot,two_shot",
    layers: Annotated[
        str,
        option(
            "Models whose layers are timed with and without prefetch of the next weight, as in "
            "bench; none: keep what is stored. Default: llama-3.1-8b,llama-3.1-70b; on CPU none."
        ),
    ] = "",
    directory: Annotated[
        Path | None,
        option("Folder of the tables. Default: ALLNORM_TUNING_DIR, or the cache folder.", "--dir"),
    ] = None,
    check: Annotated[
        bool,
        option(
            "Store nothing; check that auto chooses within 5 % of the best algorithm.", "--check"
        ),
    ] = False,
    yes: Annotated[bool, option("Store the result without asking.", "--yes", "-y")] = False,
    busy: Annotated[
        bool, option("Measure even if other work keeps the machine busy.", "--busy")
    ] = False,
    json: Json = None,
) -> None:
    """Measures which algorithm is fastest at each number of tokens, and stores the table.

    Each candidate's results are compared with the reference bit for bit before it is timed. New
    communicators with the same device and number of ranks use the table; plan() then reports the
    table as its source.
    """
    where = options.device(device)
    sizes = [size for size in options.world_sizes(tp, where) if size > 1]
    if not sizes:
        raise typer.BadParameter("1: expected at least 2 ranks", param_hint="--tp")
    job = Job(
        dtypes=tuple(options.choices(dtype, "--dtype", names.DTYPES)),
        quants=tuple(mode.quant for mode in options.modes(quant or _QUANT[where])),
        hidden_sizes=tuple(options.integers(hidden or _HIDDEN[where], "--hidden", 1)),
        tokens=tuple(crossovers.token_grid(max_tokens or _MAX_TOKENS[where], _FACTOR)),
        algorithms=tuple(options.choices(algorithms, "--algorithms", names.ALGORITHMS)),
        device=where,
        product=_PRODUCT[where] if product is None else product,
        layers=_models(layers or _LAYERS[where], sizes),
    )
    if not busy:
        _reject_busy_machine(max(sizes))
    console = output.console()
    if check:
        held = [_check(job, size, directory, json, console) for size in sizes]
    else:
        _check_folder(job, sizes, directory)
        held = [_tune(job, size, directory, json, console, yes) for size in sizes]
    if not all(held):
        raise typer.Exit(1)


def _models(text: str, sizes: list[int]) -> tuple[str, ...]:
    """Returns the models of a list, each of which all numbers of ranks can share; () for "none"."""
    models = () if text == "none" else tuple(options.words(text))
    with options.of("--layers"):
        for name, size in itertools.product(models, sizes):
            bench_layers.find(name, size)
    return models


def _reject_busy_machine(world_size: int) -> None:
    """Raises if too few cores are idle, because the measured times would be noise."""
    cores, busy = topology.num_cores(), topology.busy_cores()
    needed = min(world_size, cores)
    if busy is not None and cores - busy < needed - _SPARE_CORES:
        raise typer.BadParameter(
            f"{busy:.1f} of {cores} cores are busy, and {output.ranks(world_size)} need {needed} "
            "for themselves: the measured times would be noise. Stop the other work, or pass "
            "--busy to measure anyway",
            param_hint="--busy",
        )


def _check_folder(job: Job, sizes: list[int], directory: Path | None) -> None:
    with options.of("--dir"):
        for size in sizes:
            output.check_writable(table.path_of(directory, job.device, size), create_folder=True)


def _tune(
    job: Job, size: int, directory: Path | None, json: Path | None, console: Console, yes: bool
) -> bool:
    """Measures one table and stores it if the user agrees; returns whether everything succeeded."""
    began = time.monotonic()
    common, tried = output.conditions(job.device, world_size=size), LinkTimes()

    def take(rank: int, message: dict[str, Any]) -> None:
        nonlocal tried
        measured = message.get("measured")
        if measured is None:
            show(rank, message)
        elif rank == 0 and isinstance(measured, LinkTimes):
            tried = measured
            output.append_json_lines(json, table.link_rows(tried), common)
        elif rank == 0 and isinstance(measured, PrefetchTimes):
            output.append_json_lines(json, measured.rows(size), common)
        elif rank == 0:
            rows = table.curve_rows(measured, tried.gbps, job.product)
            output.append_json_lines(json, rows, common)

    with output.progress(f"tune, {output.ranks(size)}") as show:
        result = run.measure(job, size, take)
    curves = table.curves_of(result)
    console.print(_table(result, curves, size))
    if link := table.describe_link(result):
        console.print(link)
    for chain in result.prefetch.chains:
        text = f"prefetch, {chain.model}, {chain.num_tokens} rows: {chain.gain_us:+.2f} us per call"
        console.print(text)
    if result.prefetch.chains:
        console.print(f"prefetch: {tune_prefetch.describe(result.prefetch.tokens)}")
    wrong = {(str(c), text) for curve in result.curves for c, text in curve.wrong.items()}
    wrong |= {(f"{rate:.0f} GB/s", text) for rate, text in result.link.wrong.items()}
    wrong |= {("prefetch", text) for text in result.prefetch.errors}
    for candidate, text in sorted(wrong):
        console.print(output.bad(f"{candidate} is excluded, its results are wrong: {text}"))
    console.print(f"{time.monotonic() - began:.0f} s")
    stored = bool(curves) and _store(result, directory, job.device, size, console, yes)
    return stored and not wrong


def _store(
    result: Result, directory: Path | None, device: str, size: int, console: Console, yes: bool
) -> bool:
    """Shows what would change, asks the user, and stores the table."""
    path = table.path_of(directory, device, size)
    changes = table.changes(result, directory, device, size)
    # The path must not be folded, so that the user can copy it.
    console.print(f"{path}:", *(changes or ["nothing changes"]), sep="\n  ", soft_wrap=True)
    if not yes:
        if not sys.stdin.isatty():
            console.print(output.bad("not stored: no terminal to ask on; pass --yes"))
            return False
        if not typer.confirm("Store this table?"):
            console.print("not stored")
            return True
    try:
        table.store(result, directory, device, size, output.provenance())
    except OSError as error:
        console.print(output.bad(f"not stored: {path}: {error.strerror}"), soft_wrap=True)
        return False
    console.print(f"stored in {path}", soft_wrap=True)
    return True


def _table(result: Result, curves: Curves, size: int) -> output.FittedTable:
    rows = []
    for record in result.curves:
        found = (c for c in curves.get(record.name, []) if c.hidden_size == record.hidden_size)
        what = next(map(table.describe, found), record.reason)
        rows.append((str(record.hidden_size), *record.name, str(len(record.times)), what))
    columns = ("hidden_size", "dtype", "epilogue", "sizes measured", "fastest")
    return output.FittedTable(
        output.ranks(size), columns, rows, words=("dtype", "epilogue", "fastest")
    )


# ---- --check -------------------------------------------------------------------------------------


def _check(
    job: Job, size: int, directory: Path | None, json: Path | None, console: Console
) -> bool:
    """Measures, shows and writes --json; returns whether all points are right and fast enough."""
    common, good = output.conditions(job.device), True
    for dtype in job.dtypes:
        with output.progress(f"tune --check, {output.ranks(size)}") as show:
            found = tune_check.measure(job, dtype, size, directory, show)
        rows = [tune_check.json_row(point, dtype) for point in found.values()]
        output.append_json_lines(json, rows, common)
        for mode in dict.fromkeys(mode for _, mode in found):
            points = {shape: point for (shape, m), point in found.items() if m == mode}
            title = f"{output.ranks(size)}, {dtype}, {str(mode) or 'norm'}"
            console.print(_points_table(points, title))
        errors = [error for point in found.values() for error in point.errors]
        for error in errors:
            console.print(output.bad(error))
        slow = sum(point.slow for point in found.values())
        if not found:
            console.print(output.bad("nothing could be measured"))
        else:
            worst = max(found.values(), key=lambda point: point.ratio)
            text = (
                f"{len(found) - slow} of {len(found)} points are within "
                f"{(tune_check.LIMIT - 1) * 100:.0f} % of the best algorithm; the worst is "
                f"{(worst.ratio - 1) * 100:+.1f} % at {worst.auto.shape}"
            )
            console.print(output.bad(text) if slow else output.ok(text))
        good &= bool(found) and not slow and not errors
    return good


def _points_table(points: dict[Shape, Point], title: str) -> output.FittedTable:
    hidden_sizes = sorted({shape.hidden_size for shape in points})
    by_size = {(s.num_tokens, s.hidden_size): _cell(p) for s, p in points.items()}
    rows = [
        (str(tokens), *(by_size.get((tokens, hidden), "") for hidden in hidden_sizes))
        for tokens in sorted({shape.num_tokens for shape in points})
    ]
    title += ": us of auto, excess over the best algorithm, best algorithm"
    return output.FittedTable(title, ("tokens", *map(str, hidden_sizes)), rows)


def _cell(point: Point) -> str:
    share = f"{(point.ratio - 1) * 100:+.1f} %"
    name = point.best.arm.partition(":")[2]
    text = f"{output.microseconds(point.auto.p50_us)} {share} {name}"
    return output.bad(text) if point.slow else text
