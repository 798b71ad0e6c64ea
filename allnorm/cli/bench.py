"""``allnorm bench``: speed beside the unfused ways, every arm checked before it is timed."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from allnorm import topology
from allnorm.cli import bench_report, options, output
from allnorm.cli.options import Device, Json, Shape, Tp
from allnorm.cli.ranks import bench as ranks_bench
from allnorm.testing import run_ranks

_CPU_MODELS, _CPU_TOKENS, _CPU_PREFILL = "llama-3.1-8b,gpt-oss-120b", "1,16,256", "llama-3.1-8b"
_GPU_MODELS, _GPU_TOKENS = "llama-3.1-8b,llama-3.1-70b", "1,4,16,64,128,256,512,1024"
_PREFILL_TOKENS = 8192
_TIMEOUT_SECONDS = 3600.0


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
    arms: Annotated[
        str, typer.Option("--arms", help="What to time, separated by commas. Default: everything.")
    ] = "",
    device: Device = "auto",
    json: Json = None,
) -> None:
    """Times the fused op beside the unfused ways, after checking each of them."""
    where = options.device(device)
    job = ranks_bench.Job(
        shapes=tuple(_shapes(model, tokens, shapes, where)),
        dtype=options.choices(dtype, "--dtype", options.DTYPES)[0],
        numerics=options.choices(numerics, "--numerics", options.NUMERICS)[0],
        arms=tuple(_arms(arms, where)),
        device=where,
    )
    gpus = topology.num_gpus()
    default = f"2,{gpus}" if where == "cuda" and gpus > 1 else ""
    sizes = list(dict.fromkeys(options.world_sizes(tp, where, default)))
    console = output.console()
    console.print(_explanation(job))
    measured: list[bench_report.Measurement] = []
    began = time.monotonic()
    for size in sizes:
        with output.progress(f"bench, {size} ranks") as show:
            ranks = run_ranks(
                ranks_bench.run,
                size,
                device=where,
                args=(job,),
                timeout=_TIMEOUT_SECONDS,
                on_message=show,
            )
        found = bench_report.merge(ranks, job.shapes)
        console.print(bench_report.table(found, job.arms, console.width))
        for m in found:
            if m.error:
                console.print(output.bad(f"{m.arm} at {m.shape}, {size} ranks: {m.error}"))
        measured += found
        common = _common(job)
        output.append_json_lines(json, (bench_report.json_row(m, common) for m in found))
    console.print(bench_report.headline(measured, job.dtype))
    console.print(f"{time.monotonic() - began:.0f} s")
    if any(m.error for m in measured):
        raise typer.Exit(1)


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


def _arms(text: str, where: str) -> list[str]:
    """The arms to time; "nccl" is called "gloo" on CPU."""
    library = "nccl" if where == "cuda" else "gloo"
    own = ("allnorm", "allnorm:one_shot", "allnorm:two_shot", "allnorm:unfused")
    known = (*own, f"{library}+torch", f"{library}+local")
    return options.choices(text, "--arms", known) if text else list(known)


def _explanation(job: ranks_bench.Job) -> str:
    clock = (
        "time per call in CUDA graph replays"
        if job.device == "cuda"
        else "wall time per call, one process per rank"
    )
    where = topology.device_name(job.device)
    return (
        f"All-reduce + residual add + RMSNorm of {job.dtype} on {where}: p50 and (p99) of the\n"
        f"{clock}, in us, of the slowest rank. Arms are interleaved; every rank has other inputs.\n"
        "allnorm: chooses its algorithm. +torch: PyTorch's add and RMSNorm after the all-reduce. "
        "+local: allnorm's own\nadd + norm kernel after it. bits: allnorm's arms equal the "
        "reference bit for bit, the others are within the bound\nof their roundings; checked "
        "before anything is timed."
    )


def _common(job: ranks_bench.Job) -> dict[str, Any]:
    kind = "gpu" if job.device == "cuda" else "cpu"
    return {
        kind: topology.device_name(job.device),
        "cores": topology.num_cores(),
        "backend": job.device,
        "dtype": job.dtype,
        "numerics": job.numerics,
        **output.provenance(),
    }
