"""``allnorm e2e``: a whole transformer, fused against unfused: as fast, and the same tokens?"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from allnorm import topology
from allnorm.cli import e2e_models, e2e_report, options, output
from allnorm.cli.e2e_report import Result
from allnorm.cli.options import Device, Json, Tp
from allnorm.cli.ranks.e2e import peer_sites
from allnorm.cli.ranks.e2e import run as ranks_e2e
from allnorm.cli.ranks.e2e.job import Job
from allnorm.testing import run_ranks

_TIMEOUT_SECONDS = 3600.0


@dataclass(frozen=True)
class _Defaults:
    model: str
    batch: str
    prompt: int
    tokens: int


_DEFAULTS = {
    "cuda": _Defaults("llama-3.1-8b", "1,8,64", 128, 64),
    "cpu": _Defaults("tiny", "1,4", 16, 8),
}


def e2e(
    model: Annotated[
        str,
        typer.Option("--model", help=f"Dimensions by name: {', '.join(e2e_models.TRANSFORMERS)}."),
    ] = "",
    layers: Annotated[
        int, typer.Option("--layers", min=0, help="Decoder layers. Default: the model's own.")
    ] = 0,
    tp: Tp = "",
    batch: Annotated[
        str, typer.Option("--batch", help="Batch sizes. Default: 1,8,64 on GPUs, 1,4 on CPU.")
    ] = "",
    prompt: Annotated[
        int, typer.Option("--prompt", min=0, help="Tokens of a prompt. Default: 128; on CPU 16.")
    ] = 0,
    tokens: Annotated[
        int, typer.Option("--tokens", min=0, help="Tokens to generate. Default: 64; on CPU 8.")
    ] = 0,
    arms: Annotated[
        str, typer.Option("--arms", help="What to run, separated by commas. Default: everything.")
    ] = "",
    dtype: Annotated[str, typer.Option("--dtype", help=", ".join(options.DTYPES))] = "bfloat16",
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, help="Timed generations of each arm.")
    ] = 3,
    device: Device = "auto",
    json: Json = None,
) -> None:
    """Generates with a random transformer, fused and unfused, and compares tokens and times."""
    where = options.device(device)
    default = _DEFAULTS[where]
    job = Job(
        model=e2e_models.find(model or default.model, layers),
        batch_sizes=tuple(options.integers(batch or default.batch, "--batch", minimum=1)),
        prompt=prompt or default.prompt,
        tokens=_at_least_two(tokens or default.tokens),
        arms=tuple(_arms(arms, where)),
        dtype=options.choices(dtype, "--dtype", options.DTYPES)[0],
        device=where,
        rounds=rounds,
    )
    sizes = list(dict.fromkeys(options.world_sizes(tp, where)))
    for size in sizes:
        e2e_models.check_world_size(job.model, size)
    console = output.console()
    console.print(_explanation(job))
    began = time.monotonic()
    found = [result for size in sizes for result in _run(job, size, json, console)]
    console.print(f"{time.monotonic() - began:.0f} s")
    if any(result.error for result in found):
        raise typer.Exit(1)
    if any(result.exact for result in found):
        held = "allnorm's tokens, and the bits of its logits, are those of allnorm:unfused"
        console.print(output.ok(held))


def arm_names(device_type: str) -> tuple[str, ...]:
    """What can run there."""
    own = ("allnorm", "allnorm:unfused")
    if device_type == "cpu":
        return (*own, "gloo+torch", "gloo+local")
    return (*own, "nccl+torch", "nccl+local", *peer_sites.ARMS)


def _arms(text: str, where: str) -> list[str]:
    names = arm_names(where)
    asked = options.choices(text, "--arms", names) if text else names
    return [name for name in names if name in asked]


def _at_least_two(tokens: int) -> int:
    if tokens < 2:
        raise typer.BadParameter(
            "the time between tokens needs at least 2 of them", param_hint="--tokens"
        )
    return tokens


def _run(job: Job, size: int, json: Path | None, console: Console) -> list[Result]:
    """Runs with one number of ranks, shows and stores what was found."""
    with output.progress(f"e2e, {output.ranks(size)}") as show:
        ranks = run_ranks(
            ranks_e2e.run,
            size,
            device=job.device,
            args=(job,),
            timeout=_TIMEOUT_SECONDS,
            on_message=show,
        )
    found = e2e_report.merge([records for records, _ in ranks], job.model)
    common = _common(job)
    output.append_json_lines(json, [e2e_report.json_row(r, job.model, common) for r in found])
    for batch_size in job.batch_sizes:
        of_batch = [r for r in found if r.batch_size == batch_size]
        if not of_batch:  # nothing but libraries that are missing
            continue
        console.print(e2e_report.table(of_batch, job.torch_arm))
        one = of_batch[0]
        console.print(
            f"[dim]yardstick, {escape(one.yardstick)}: logits {one.yardstick_max:.3g} "
            f"({one.yardstick_mean:.2g}) apart[/dim]"
        )
        for r in of_batch:
            if r.error:
                console.print(
                    output.bad(f"{r.arm} at batch {batch_size}, {output.ranks(size)}: {r.error}")
                )
    for arm, reason in ranks[0][1].items():
        console.print(f"[dim]{arm}: {escape(reason)}[/dim]")
    return found


def _explanation(job: Job) -> str:
    model = job.model
    decode = "replays of a CUDA graph" if job.device == "cuda" else "eager calls"
    return (
        f"{model.name}, {model.num_layers} layers, {job.dtype}, random weights, on "
        f"{topology.device_name(job.device)}: {job.prompt} tokens in, {job.tokens} out, greedy. "
        f"Prefill is eager, decode {decode}; arms take turns, {job.rounds} rounds; times are the "
        "slowest rank's. Arms differ in nothing but what turns partial sums into normed rows. "
        "comm: beyond a run without communication. = unfused: tokens equal to allnorm:unfused, "
        f"and bits, if all logits are too. logits: beside those of {job.torch_arm}, for which the "
        "yardstick is what two of its algorithms differ by."
    )


def _common(job: Job) -> dict[str, Any]:
    kind = "gpu" if job.device == "cuda" else "cpu"
    return {
        kind: topology.device_name(job.device),
        "cores": topology.num_cores(),
        "backend": job.device,
        "dtype": job.dtype,
        "prompt": job.prompt,
        "tokens": job.tokens,
        "rounds": job.rounds,
        **output.provenance(),
    }
