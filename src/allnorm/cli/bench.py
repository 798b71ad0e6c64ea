"""``allnorm bench``: speed compared with other implementations, each checked before it is timed."""

from __future__ import annotations

import contextlib
import time
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

import allnorm
from allnorm import names, topology
from allnorm.bench import compare as bench_compare
from allnorm.bench import layers as bench_layers
from allnorm.bench import modes as bench_modes
from allnorm.bench import report
from allnorm.bench.modes import Shape
from allnorm.bench.report import Measurement
from allnorm.bench.run import Job
from allnorm.cli import bench_layers as layers_command
from allnorm.cli import bench_plot, bench_table, options, output
from allnorm.cli.options import Device, Dtype, Json, Tp, work_option

_MODELS = {"cuda": "llama-3.1-8b,llama-3.1-70b", "cpu": "llama-3.1-8b,gpt-oss-120b"}
_TOKENS = {"cuda": "1,4,16,64,128,256,512,1024", "cpu": "1,16,256"}
_PREFILL_MODELS = {"cuda": "llama-3.1-8b,llama-3.1-70b", "cpu": "llama-3.1-8b"}
_PREFILL_TOKENS = 8192
_PRODUCTS = {"cuda": "0,7168", "cpu": "0"}
_PEER_PACKAGES = ("flashinfer-python", "sglang", "vllm", "triton")


def bench(
    model: Annotated[
        str,
        work_option(
            "Models to take hidden sizes and norms from, separated by commas: "
            f"{', '.join(bench_modes.MODELS)}."
        ),
    ] = "",
    tokens: Annotated[
        str, work_option("Numbers of tokens for the models, separated by commas.")
    ] = "",
    shapes: Annotated[
        str, work_option("Shapes to run, num_tokens x hidden_size, such as 1x4096,8192x4096.")
    ] = "",
    tp: Tp = "",
    dtype: Dtype = "bfloat16",
    numerics: Annotated[str, work_option(", ".join(names.NUMERICS))] = "rounded",
    quant: Annotated[
        str,
        work_option(
            "Quantized results: per_group:128, per_group:N:LAYOUT:FORMAT, per_token, "
            "per_tensor, mxfp8, nvfp4, nvfp4:row_major, or none for 16-bit results; or a list "
            "separated by commas."
        ),
    ] = "",
    return_normed: Annotated[
        bool, work_option("With --quant: also return the 16-bit rows.", "--return-normed")
    ] = False,
    residual: Annotated[
        str, work_option("replicated, sharded, or both (replicated,sharded).")
    ] = "replicated",
    residual_sharded: Annotated[
        bool, work_option("Same as --residual sharded.", "--residual-sharded")
    ] = False,
    post_norm: Annotated[
        bool,
        work_option(
            "Also time calls with a post norm (a norm before the residual add).", "--post-norm"
        ),
    ] = False,
    experts: Annotated[
        int,
        work_option(
            "Also time calls that first sum the rows of this many experts and of a shared "
            "expert; 0: none.",
            min=0,
            max=names.TOP_K[-1],
        ),
    ] = 0,
    float32_residual: Annotated[
        bool,
        work_option(
            "Also time calls with a float32 residual and 16-bit inputs, and for comparison the "
            "same calls with a 16-bit residual.",
            "--float32-residual",
        ),
    ] = False,
    own_rows: Annotated[
        bool,
        work_option(
            "Also time calls with a sharded residual that return only this rank's rows "
            "(gather=False), and for comparison the calls that return all rows.",
            "--own-rows",
        ),
    ] = False,
    sharded_norm: Annotated[
        int,
        work_option(
            "Also time rms_norm_sharded of this many tensors with each rank's shape, num_tokens x "
            "hidden_size, such as q and k; 0: none.",
            min=0,
            max=4,
        ),
    ] = 0,
    streams: Annotated[
        int,
        work_option(
            "Also time calls with this many residual streams (hyper-connections), 2 to 8; 0: none.",
            min=0,
            max=8,
        ),
    ] = 0,
    next_input: Annotated[
        bool,
        work_option(
            "With --streams: also time these calls with the next layer's input in each.",
            "--next-input",
        ),
    ] = False,
    layers: Annotated[
        str,
        work_option(
            "Instead of calls, time chains of decoder layers of these models without attention, "
            "such as llama-3.1-8b, with and without prefetch of the next weight. Separate several "
            "with commas. Goes with --tokens (default: 1,8,32,64), --tp, --dtype, --numerics and "
            "--max-blocks."
        ),
    ] = "",
    arms: Annotated[str, work_option("Implementations to time, by name. Default: all.")] = "",
    product: Annotated[
        str,
        work_option(
            "Time each call after a GEMM with this inner dimension that writes the call's "
            "input, as in a model, and subtract an empty kernel's time; 0: time a chain of calls; "
            "or a list. Default: 0,7168; on CPU 0."
        ),
    ] = "",
    max_blocks: Annotated[
        int,
        work_option(
            "Maximum thread blocks per allnorm call on a GPU; 0: as many as the GPU can run.", min=0
        ),
    ] = 0,
    island_size: Annotated[
        int,
        work_option(
            "Ranks per island. Islands exchange through the process group; hierarchical "
            "calls and their steps are timed. 0: detect islands.",
            min=0,
        ),
    ] = 0,
    device: Device = "auto",
    push_gbps: Annotated[
        float,
        options.option(
            "Send bandwidth of one GPU in GB/s, for the wire floor (lower bound); 0: the "
            "known value of this GPU.",
            panel=options.OUTPUT,
            min=0.0,
        ),
    ] = 0.0,
    json: Json = None,
    plot: Annotated[
        Path | None, options.file_option("Write a picture: .png, .svg or .pdf.")
    ] = None,
    html: Annotated[
        Path | None, options.file_option("Write an HTML page with all results and pictures.")
    ] = None,
    compare: Annotated[
        Path | None,
        options.option(
            "Compare with this file of --json; exit code 1 if allnorm has become slower.",
            panel=options.OUTPUT,
        ),
    ] = None,
) -> None:
    """Times the fused op and other implementations, after checking each of them."""
    where = options.device(device)
    if layers:
        given = {
            "--model": model,
            "--shapes": shapes,
            "--quant": quant,
            "--return-normed": return_normed,
            "--arms": arms,
            "--product": product,
            "--post-norm": post_norm,
            "--experts": experts,
            "--float32-residual": float32_residual,
            "--own-rows": own_rows,
            "--sharded-norm": sharded_norm,
            "--streams": streams,
            "--next-input": next_input,
            "--residual": residual_sharded or residual != "replicated",
            "--plot": plot,
            "--html": html,
            "--compare": compare,
            "--island-size": island_size,
        }
        _time_layers(layers, tokens, tp, dtype, numerics, max_blocks, where, given, json)
        return
    residuals = "sharded" if residual_sharded else residual
    if streams == 1:
        raise typer.BadParameter("1 stream: expected 2 to 8, or 0", param_hint="--streams")
    if next_input and not streams:
        raise typer.BadParameter("goes only with --streams", param_hint="--next-input")
    if float32_residual and dtype == "float32":
        text = "with --dtype float32 every residual is float32: expected a 16-bit dtype"
        raise typer.BadParameter(text, param_hint="--float32-residual")
    modes = options.modes(
        *(quant, residuals, return_normed, post_norm, experts),
        *(float32_residual, own_rows, sharded_norm, streams, next_input),
    )
    known = bench_modes.known_arms(where, modes, island_size)
    chosen = options.choices(arms, "--arms", known) if arms else known
    job = Job(
        shapes=tuple(_shapes(model, tokens, shapes, where)),
        modes=tuple(modes),
        dtype=options.choice(dtype, "--dtype", names.DTYPES),
        numerics=options.choice(numerics, "--numerics", names.NUMERICS),
        arms=bench_modes.with_compared(chosen, modes),
        device=where,
        products=tuple(options.integers(product or _PRODUCTS[where], "--product", 0)),
        max_blocks=max_blocks,
        island_size=island_size,
    )
    gpus = topology.num_gpus()
    sizes = options.world_sizes(tp, where, f"2,{gpus}" if where == "cuda" and gpus > 2 else "")
    if plot and plot.suffix not in bench_plot.ENDINGS:
        text = f"{plot}: expected a file name ending in {', '.join(bench_plot.ENDINGS)}"
        raise typer.BadParameter(text, param_hint="--plot")
    for option, path in (("--plot", plot), ("--html", html)):
        if path:
            bench_plot.check_installed(option)
    with options.of("--compare"):
        before = bench_compare.read_rows(compare) if compare else []
    console = output.console()
    console.print(_explanation(job))
    if crowded := options.crowded(max(sizes), where):
        console.print(output.bad(crowded))
    began = time.monotonic()
    measured, rows = _run(job, sizes, push_gbps, json, console)
    console.print(bench_table.headline(measured, job.dtype))
    heading = f"allnorm bench, {topology.device_name(where)}, {job.dtype}"
    if plot:
        bench_plot.save(measured, plot, heading)
    regressed, comparison = False, None
    if compare:
        found = bench_compare.changes(before, rows)
        if any(change.slower or change.faster for change in found):
            console.print(bench_table.compared(found))
        summary = bench_compare.summary(found, len(rows), compare.name)
        console.print(summary)
        comparison = bench_table.comparison(found, compare.name, summary)
        regressed = any(change.regressed for change in found)
    if html:
        parts = (measured, heading, _explanation(job), _common(job), comparison)
        page = bench_table.page(*parts)
        output.write_results(html, lambda file: file.write_text(page, encoding="utf-8"))
    console.print(f"{time.monotonic() - began:.0f} s")
    if regressed or any(m.error for m in measured):
        raise typer.Exit(1)


def _time_layers(
    models: str,
    tokens: str,
    tp: str,
    dtype: str,
    numerics: str,
    max_blocks: int,
    where: str,
    given: dict[str, Any],
    json: Path | None,
) -> None:
    """Runs `--layers`, after rejecting the options that it would ignore."""
    for name in (name for name, value in given.items() if value):
        raise typer.BadParameter("does not go with --layers", param_hint=name)
    job = bench_layers.Job(
        models=tuple(options.words(models)),
        tokens=tuple(options.integers(tokens or layers_command.TOKENS[where], "--tokens", 1)),
        dtype=options.choice(dtype, "--dtype", names.DTYPES),
        device=where,
        numerics=options.choice(numerics, "--numerics", names.NUMERICS),
        max_blocks=max_blocks,
    )
    sizes = options.world_sizes(tp, where)
    layers_command.check(job, sizes)
    if not layers_command.run(job, sizes, json, _common(job), output.console()):
        raise typer.Exit(1)


def _run(
    job: Job, sizes: list[int], push_gbps: float, json: Path | None, console: Console
) -> tuple[list[Measurement], list[dict[str, Any]]]:
    """Measures, shows and stores results; returns the measurements and the JSON rows."""
    measured: list[Measurement] = []
    rows: list[dict[str, Any]] = []
    common = _common(job)

    def keep(new: list[Measurement]) -> None:
        written = [report.json_row(m, common) for m in new]
        output.append_json_lines(json, written)
        measured.extend(new)
        rows.extend(written)

    for size in sizes:
        try:
            with output.progress(f"bench, {output.ranks(size)}") as show:
                report.measure(job, size, push_gbps, keep, show)
        finally:
            _show([m for m in measured if m.world_size == size], console)
    return measured, rows


def _show(found: list[Measurement], console: Console) -> None:
    for each in bench_table.tables_of(found):
        console.print(bench_table.table(each, console.width))
    for arm, reason in report.missing(found).items():
        console.print(f"[dim]{arm}: {escape(reason)}[/dim]")
    for m in found:
        if m.error:
            what = f"{m.shape}, {m.mode}" if str(m.mode) else str(m.shape)
            what += ", after a GEMM" if m.product else ""
            console.print(output.bad(f"{m.arm} at {what}, {output.ranks(m.world_size)}: {m.error}"))


def _shapes(model: str, tokens: str, shapes: str, where: str) -> list[Shape]:
    """Returns the shapes that the options select; by default, shapes of common models."""
    found = options.shapes(shapes, least=1) if shapes else []
    if not shapes or model or tokens:
        numbers = options.integers(tokens or _TOKENS[where], "--tokens")
        found += options.model_shapes(model or _MODELS[where], numbers)
        if not model and not tokens:
            found += options.model_shapes(_PREFILL_MODELS[where], [_PREFILL_TOKENS])
    return list(dict.fromkeys(found))


def _explanation(job: Job) -> str:
    clock = "time per call in CUDA graph replays"
    if job.device != "cuda":
        clock = "wall time per call, one process per rank"
    quantized = any(mode.quant for mode in job.modes)
    text = (
        f"All-reduce + residual add + RMSNorm{' + FP8' if quantized else ''} of {job.dtype} on "
        f"{topology.device_name(job.device)}: p50 and (p99) of the {clock}, in us, of the slowest "
        "rank. Implementations are interleaved; every rank has "
        "different inputs. allnorm: chooses its algorithm. +torch: PyTorch's add and RMSNorm "
        "after the all-reduce. +local: allnorm's own add + norm kernel after the all-reduce. "
        "bits: allnorm's results are bit-identical to the reference, the others' are within their "
        "rounding error bounds; checked before anything is timed."
    )
    if quantized:
        text += (
            " allnorm16: without quantization; quant cost: time of allnorm minus allnorm16. "
            "+quant: 16-bit results, then a quantization kernel (+local+quant: one kernel for "
            "both)."
        )
    if any(mode.post_norm for mode in job.modes):
        text += (
            " Post norm: the reduced sum is normalized before the residual is added. allnorm+norm: "
            "a fused call for the all-reduce and that norm, then the local add + norm kernel."
        )
    if any(mode.experts for mode in job.modes):
        text += (
            " Experts: x is the weighted sum of expert rows, gathered by an index, plus the shared "
            "expert's row. sum+allnorm: a Triton kernel (on CPU: PyTorch) sums them, then the "
            "call runs; nccl+local sums them in the same way."
        )
    if any(mode.float32_residual for mode in job.modes):
        text += " Float32 residual: allnorm-residual16 is the same call with a 16-bit residual."
    if any(mode.slices for mode in job.modes):
        text += (
            " Sharded norm: rms_norm_sharded of a rank's slices, such as q and k, side by side in "
            "one tensor. +torch: sums of squares, their all-reduce, and norms in PyTorch; "
            "+inductor: the same, compiled."
        )
    if any(mode.streams for mode in job.modes):
        text += (
            " Streams: all_reduce_hyper_connection of residuals with several streams. +mix: an "
            "all-reduce, then a kernel that mixes the streams (Triton; on CPU: PyTorch; for "
            "flashinfer+mix: FlashInfer's)."
        )
    if any(mode.next_input for mode in job.modes):
        text += (
            " Next input: each implementation also makes the next layer's normed input, bit for "
            "bit: allnorm by all_reduce_hyper_connection_input, all others and allnorm+input by "
            "hyper_connection_input after the call."
        )
    if any(mode.own_rows for mode in job.modes):
        text += (
            " Own rows: each rank gets only its rows (gather=False); allnorm-gathered is the same "
            "call with all rows, and the other implementations do not all-gather."
        )
    if any(mode.residual_sharded and not mode.own_rows for mode in job.modes):
        text += " Sharded residual: the other implementations reduce-scatter, then all-gather."
    if job.max_blocks:
        text += f" allnorm's calls use at most {job.max_blocks} thread blocks."
    if job.island_size:
        text += f" Ranks form islands of {job.island_size}."
    for columns in filter(None, job.products):
        text += (
            f" After a GEMM (K = {columns}): a GEMM with this inner dimension writes the input of "
            "each call. Times are in excess of an empty kernel (empty) in the call's place. local: "
            "allnorm's add and norm without communication. For implementations that communicate "
            "the shortest time over the ranks counts in each replay, for the others the longest."
        )
    return text


def _common(job: Job | bench_layers.Job) -> dict[str, Any]:
    conditions = output.conditions(job.device)
    if job.device == "cuda":
        for package in _PEER_PACKAGES:
            with contextlib.suppress(metadata.PackageNotFoundError):
                conditions["versions"][package] = metadata.version(package)
    return {
        **conditions,
        "cores": topology.num_cores(),
        "backend": job.device,
        "dtype": job.dtype,
        "numerics": job.numerics,
        "max_blocks": job.max_blocks,
        "island_size": getattr(job, "island_size", 0),
        "fast_calls": allnorm.capabilities()["fast_calls"],
    }
