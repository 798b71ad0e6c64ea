"""``allnorm bench``: speed beside other ways, every arm checked before it is timed."""

from __future__ import annotations

import contextlib
import time
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape

import allnorm
from allnorm import topology
from allnorm.cli import (
    bench_compare,
    bench_floor,
    bench_html,
    bench_modes,
    bench_plot,
    bench_report,
    bench_table,
    options,
    output,
)
from allnorm.cli.bench_report import Measurement
from allnorm.cli.options import Device, Json, Shape, Tp
from allnorm.cli.ranks import bench as ranks_bench
from allnorm.testing import run_ranks

_CPU_MODELS, _CPU_TOKENS, _CPU_PREFILL = "llama-3.1-8b,gpt-oss-120b", "1,16,256", "llama-3.1-8b"
_GPU_MODELS, _GPU_TOKENS = "llama-3.1-8b,llama-3.1-70b", "1,4,16,64,128,256,512,1024"
_PREFILL_TOKENS = 8192
_TIMEOUT_SECONDS = 3600.0
_PEER_PACKAGES = ("flashinfer-python", "sglang", "vllm", "triton")


def bench(
    model: Annotated[
        str, typer.Option("--model", help="Models by name, separated by commas.")
    ] = "",
    tokens: Annotated[str, typer.Option("--tokens", help="Numbers of tokens for the models.")] = "",
    shapes: Annotated[
        str, typer.Option("--shapes", help="num_tokens x hidden_size, such as 1x4096,8192x4096.")
    ] = "",
    tp: Tp = "",
    dtype: Annotated[str, typer.Option("--dtype", help=", ".join(options.DTYPES))] = "bfloat16",
    numerics: Annotated[
        str, typer.Option("--numerics", help=", ".join(options.NUMERICS))
    ] = "rounded",
    quant: Annotated[
        str,
        typer.Option(
            "--quant",
            help="FP8 results: per_group:128, per_group:SIZE:LAYOUT:FORMAT, per_token, per_tensor; "
            "several with commas, none among them for 16-bit results.",
        ),
    ] = "",
    return_normed: Annotated[
        bool, typer.Option("--return-normed", help="With --quant: the 16-bit rows too.")
    ] = False,
    residual: Annotated[
        str, typer.Option("--residual", help="replicated, sharded, or both with a comma.")
    ] = "replicated",
    residual_sharded: Annotated[
        bool, typer.Option("--residual-sharded", help="The same as --residual sharded.")
    ] = False,
    arms: Annotated[
        str,
        typer.Option("--arms", help="What to time: arms and peers by name. Default: everything."),
    ] = "",
    product: Annotated[
        int,
        typer.Option(
            "--product",
            min=0,
            help="Time each call behind a matrix product of so many columns that writes its input, "
            "as in a model, and take the product's own time off.",
        ),
    ] = 0,
    max_blocks: Annotated[
        int,
        typer.Option(
            "--max-blocks",
            min=0,
            help="Most thread blocks of a call of allnorm's on a GPU; 0: as many as it holds.",
        ),
    ] = 0,
    device: Device = "auto",
    push_gbps: Annotated[
        float, typer.Option("--push-gbps", help="What one GPU can send, in GB/s, for the floor.")
    ] = 0.0,
    json: Json = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Write a picture: .png, .svg or .pdf.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write one page with everything.")
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option("--compare", help="Flag what is slower than in this file of --json."),
    ] = None,
) -> None:
    """Times the fused op beside other ways, after checking each of them."""
    where = options.device(device)
    modes = bench_modes.modes(quant, "sharded" if residual_sharded else residual, return_normed)
    job = ranks_bench.Job(
        shapes=tuple(_shapes(model, tokens, shapes, where)),
        modes=tuple(modes),
        dtype=options.choices(dtype, "--dtype", options.DTYPES)[0],
        numerics=options.choices(numerics, "--numerics", options.NUMERICS)[0],
        arms=tuple(bench_modes.select(arms, where, modes)),
        device=where,
        product=product,
        max_blocks=max_blocks,
    )
    gpus = topology.num_gpus()
    default = f"2,{gpus}" if where == "cuda" and gpus > 2 else ""
    sizes = list(dict.fromkeys(options.world_sizes(tp, where, default)))
    for option, path in (("--plot", plot), ("--html", html)):
        if path:
            bench_plot.check_installed(option)
    before = bench_compare.read_rows(compare) if compare else []
    console = output.console()
    console.print(_explanation(job))
    began = time.monotonic()
    measured, rows = _run(job, sizes, push_gbps, json, console)
    console.print(bench_table.headline(measured, job.dtype))
    if plot:
        bench_plot.save(measured, plot, _heading(job))
    if html:
        page = bench_html.page(measured, _heading(job), _explanation(job), _common(job))
        bench_html.save(html, page)
    regressed = False
    if compare:
        found = bench_compare.changes(before, rows)
        if any(change.slower or change.faster for change in found):
            console.print(bench_compare.table(found))
        console.print(bench_compare.summary(found, len(rows), compare.name))
        regressed = any(change.regressed for change in found)
    console.print(f"{time.monotonic() - began:.0f} s")
    if regressed or any(m.error for m in measured):
        raise typer.Exit(1)


def _run(
    job: ranks_bench.Job, sizes: list[int], push_gbps: float, json: Path | None, console: Console
) -> tuple[list[Measurement], list[dict[str, Any]]]:
    """Measures with each number of ranks, shows and stores it; returns measurements and rows."""
    measured: list[Measurement] = []
    rows: list[dict[str, Any]] = []
    gpu = topology.device_name("cuda") if job.device == "cuda" else ""
    element_bytes = getattr(torch, job.dtype).itemsize
    common = _common(job)
    for size in sizes:
        found: list[Measurement] = []
        gbps = push_gbps or bench_floor.push_gbps(gpu, size)

        def keep(
            ranks: list[list[dict[str, Any]]],
            found: list[Measurement] = found,
            gbps: float | None = gbps,
        ) -> None:
            merged = bench_report.merge(ranks, job.shapes, job.modes, element_bytes, gbps)
            written = [bench_report.json_row(m, common) for m in merged]
            output.append_json_lines(json, written)
            found += merged
            rows.extend(written)

        try:
            with output.progress(f"bench, {output.ranks(size)}") as show:
                run_ranks(
                    ranks_bench.run,
                    size,
                    device=job.device,
                    args=(job,),
                    timeout=_TIMEOUT_SECONDS,
                    on_message=bench_report.Gatherer(size, keep, show),
                )
        finally:
            _show(found, console)
        measured += found
    return measured, rows


def _show(found: list[Measurement], console: Console) -> None:
    for _, mode in bench_table.modes_of(found):
        console.print(bench_table.table([m for m in found if m.mode == mode], console.width))
    for arm, reason in bench_report.missing(found).items():
        console.print(f"[dim]{arm}: {escape(reason)}[/dim]")
    for m in found:
        if m.error:
            what = f"{m.shape}, {m.mode}" if str(m.mode) else str(m.shape)
            console.print(output.bad(f"{m.arm} at {what}, {output.ranks(m.world_size)}: {m.error}"))


def _shapes(model: str, tokens: str, shapes: str, where: str) -> list[Shape]:
    """What to run: the options, else a few shapes of real models."""
    found = options.shapes(shapes) if shapes else []
    if not shapes or model or tokens:
        default_tokens = _GPU_TOKENS if where == "cuda" else _CPU_TOKENS
        default_models = _GPU_MODELS if where == "cuda" else _CPU_MODELS
        numbers = options.integers(tokens or default_tokens, "--tokens")
        found += options.model_shapes(model or default_models, numbers)
        if not model and not tokens:
            prefill = _GPU_MODELS if where == "cuda" else _CPU_PREFILL
            found += options.model_shapes(prefill, [_PREFILL_TOKENS])
    return list(dict.fromkeys(found))


def _heading(job: ranks_bench.Job) -> str:
    return f"allnorm bench, {topology.device_name(job.device)}, {job.dtype}"


def _explanation(job: ranks_bench.Job) -> str:
    clock = (
        "time per call in CUDA graph replays"
        if job.device == "cuda"
        else "wall time per call, one process per rank"
    )
    work = "All-reduce + residual add + RMSNorm"
    work += " + FP8" if any(mode.quant for mode in job.modes) else ""
    text = (
        f"{work} of {job.dtype} on {topology.device_name(job.device)}: p50 and (p99) of the "
        f"{clock}, in us, of the slowest rank. Arms take turns; every rank has other inputs. "
        "allnorm: chooses its algorithm. +torch: PyTorch's add and RMSNorm after the all-reduce. "
        "+local: allnorm's own add + norm kernel after it. bits: allnorm's arms equal the "
        "reference bit for bit, the others are within the bound of their roundings; checked "
        "before anything is timed."
    )
    if any(mode.quant for mode in job.modes):
        text += (
            " allnorm16: without quantisation; quant cost: what allnorm takes beyond it. +quant: "
            "16-bit results, then a kernel that quantises (+local+quant: one kernel for both)."
        )
    if any(mode.residual_sharded for mode in job.modes):
        text += " Sharded residual: the other ways reduce-scatter, then all-gather."
    if job.max_blocks:
        text += f" allnorm's calls take at most {job.max_blocks} thread blocks."
    if job.product:
        text += (
            f" Each call stands behind a matrix product of {job.product} columns that writes its "
            "input; the time of the product alone is taken off."
        )
    return text


def _common(job: ranks_bench.Job) -> dict[str, Any]:
    kind = "gpu" if job.device == "cuda" else "cpu"
    provenance = output.provenance()
    provenance["versions"] |= _peer_versions() if job.device == "cuda" else {}
    return {
        kind: topology.device_name(job.device),
        "cores": topology.num_cores(),
        "backend": job.device,
        "dtype": job.dtype,
        "numerics": job.numerics,
        "product": job.product,
        "max_blocks": job.max_blocks,
        "fast_calls": allnorm.capabilities()["fast_calls"],
        **provenance,
    }


def _peer_versions() -> dict[str, str]:
    """Versions of the libraries compared with, of those that are installed."""
    found = {}
    for package in _PEER_PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found
