"""``allnorm e2e``: compares speed and tokens of a whole transformer, fused and unfused."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from allnorm import names, topology
from allnorm.bench.e2e import models, report
from allnorm.bench.e2e.models import Job, arm_names
from allnorm.bench.e2e.report import Result
from allnorm.cli import options, output
from allnorm.cli.options import Device, Dtype, Json, Tp, option

_MODEL = {"cuda": "llama-3.1-8b", "cpu": "tiny"}
_BATCH = {"cuda": "1,8,64", "cpu": "1,4"}
_LESS_MEMORY = "Use fewer --layers, a smaller --model or --batch, or more GPUs."
_PRODUCTS = {
    "torch": "",
    "triton": "Triton GEMMs before reductions. ",
    "dependent": "Triton GEMMs before reductions, which trigger the dependent launch early. ",
}
_PROMPT, _TOKENS = {"cuda": 128, "cpu": 16}, {"cuda": 64, "cpu": 8}


def e2e(
    model: Annotated[str, option(f"Model dimensions: {', '.join(models.TRANSFORMERS)}.")] = "",
    layers: Annotated[
        int, option("Decoder layers. Default: the model's own.", min=0, show_default=False)
    ] = 0,
    tp: Tp = "",
    batch: Annotated[str, option("Batch sizes. Default: 1,8,64 on GPUs, 1,4 on CPU.")] = "",
    prompt: Annotated[
        int, option("Tokens per prompt. Default: 128; on CPU 16.", min=0, show_default=False)
    ] = 0,
    tokens: Annotated[
        int, option("Tokens to generate. Default: 64; on CPU 8.", min=0, show_default=False)
    ] = 0,
    arms: Annotated[str, option("Implementations to run, separated by commas. Default: all.")] = "",
    dtype: Dtype = "bfloat16",
    product: Annotated[
        str,
        option(
            "GEMM before each reduction of up to 64 tokens, in all implementations: torch; "
            "triton; or dependent: Triton, and it triggers the dependent launch early."
        ),
    ] = "torch",
    rounds: Annotated[int, option("Timed generations per implementation.", min=1)] = 3,
    device: Device = "auto",
    json: Json = None,
) -> None:
    """Generates with a random transformer, fused and unfused, and compares tokens and times."""
    where = options.device(device)
    known = arm_names(where)
    asked = options.choices(arms, "--arms", known) if arms else known
    if tokens == 1:
        text = "1: expected at least 2 tokens, to measure the time between tokens"
        raise typer.BadParameter(text, param_hint="--tokens")
    with options.of("--model"):
        dimensions = models.find(model or _MODEL[where], layers)
    job = Job(
        model=dimensions,
        batch_sizes=tuple(options.integers(batch or _BATCH[where], "--batch", minimum=1)),
        prompt=prompt or _PROMPT[where],
        tokens=tokens or _TOKENS[where],
        arms=tuple(name for name in known if name in asked),
        dtype=options.choice(dtype, "--dtype", names.DTYPES),
        device=where,
        rounds=rounds,
        product=options.choice(product, "--product", models.PRODUCTS),
    )
    with options.of("--dtype"):
        models.check_dtype(job.model, job.dtype, where)
    with options.of("--product"):
        models.check_product(job.model, job.product, job.dtype, where)
    sizes = options.world_sizes(tp, where)
    with options.of("--tp"):
        for size in sizes:
            models.check_world_size(job.model, size)
        for size in sizes:
            options.check_memory(models.memory_bytes(job, size), size, where, _LESS_MEMORY)
    console = output.console()
    console.print(_explanation(job))
    if crowded := options.crowded(max(sizes), where):
        console.print(output.bad(crowded))
    began = time.monotonic()
    found = [result for size in sizes for result in _run(job, size, json, console)]
    console.print(f"{time.monotonic() - began:.0f} s")
    if any(result.error for result in found):
        raise typer.Exit(1)
    if any(result.exact for result in found):
        held = "PASS: tokens and logits are bit-identical to the unfused path"
        console.print(output.ok(held))


def _run(job: Job, size: int, json: Path | None, console: Console) -> list[Result]:
    """Runs with one number of ranks; shows and stores the results."""
    with output.progress(f"e2e, {output.ranks(size)}") as show:
        measured = report.measure(job, size, show)
    found = measured.results
    common = output.conditions(
        job.device,
        cores=topology.num_cores(),
        backend=job.device,
        dtype=job.dtype,
        prompt=job.prompt,
        tokens=job.tokens,
        rounds=job.rounds,
        product=job.product,
    )
    output.append_json_lines(json, [report.json_row(r, job.model) for r in found], common)
    for batch_size in job.batch_sizes:
        of_batch = [r for r in found if r.batch_size == batch_size]
        if not of_batch:  # every requested library is missing
            continue
        console.print(_table(of_batch, job.torch_arm))
        one = of_batch[0]
        console.print(
            f"[dim]yardstick, {escape(one.yardstick)}: logits differ by {one.yardstick_max:.3g} "
            f"({one.yardstick_mean:.2g})[/dim]"
        )
        for r in of_batch:
            if r.error:
                text = f"{r.arm} at batch {batch_size}, {output.ranks(size)}: {r.error}"
                console.print(output.bad(text))
    for arm, reason in measured.missing.items():
        console.print(f"[dim]{arm}: {escape(reason)}[/dim]")
    return found


def _explanation(job: Job) -> str:
    model = job.model
    decode = "replays of a CUDA graph" if job.device == "cuda" else "eager calls"
    return (
        f"{model.name}, {model.num_layers} layers, {job.dtype}, random weights, on "
        f"{topology.device_name(job.device)}: {job.prompt} tokens in, {job.tokens} out, greedy. "
        f"{_PRODUCTS[job.product]}"
        f"Prefill is eager, decode {decode}; implementations are interleaved, {job.rounds} rounds; "
        "times are the slowest rank's. Implementations differ only in how they turn partial sums "
        "into normalized rows. comm: time in excess of a run without communication. = unfused: "
        "tokens equal to allnorm:unfused; 'bits' if all logits are bit-identical too. logits: "
        f"max (mean) difference from {job.torch_arm}. The yardstick is the difference between two "
        "of its algorithms."
    )


def _table(results: Sequence[Result], torch_arm: str) -> output.FittedTable:
    """Returns the table of one batch size, with times relative to the torch arm."""
    base = next((r.tpot_ms for r in results if r.arm == torch_arm), math.nan)
    columns = (
        *("arm", "TTFT ms", "TPOT ms", f"vs {torch_arm}", "ITL p50 (p99) ms", "tokens/s"),
        *("comm us/layer", "= unfused", f"= {torch_arm}", "logits max (mean) off"),
    )
    rows = [
        (
            r.arm,
            f"{r.ttft_ms:.2f}",
            f"{r.tpot_ms:.3f}",
            f"{(r.tpot_ms / base - 1) * 100:+.1f} %" if math.isfinite(base) else "-",
            f"{r.itl_p50_ms:.3f} ({r.itl_p99_ms:.3f})",
            f"{r.tokens_per_s:,.0f}",
            output.microseconds(r.comm_us_per_layer) if r.comm_us_per_layer > 0 else "~0",
            _verdict(r),
            f"{r.tokens_equal_torch}/{r.num_tokens}",
            f"{r.logits_max_diff:.3g} ({r.logits_mean_diff:.2g})",
        )
        for r in results
    ]
    one = results[0]
    ranks = output.ranks(one.world_size)
    optional = (columns[-1], columns[-2], "comm us/layer", "TTFT ms", "tokens/s")
    return output.FittedTable(f"batch {one.batch_size}, {ranks}", columns, rows, optional=optional)


def _verdict(r: Result) -> str:
    """Returns the share of tokens equal to "allnorm:unfused"; adds "bits" if all logits are."""
    same_bits = r.steps_equal_unfused == r.steps_checked
    text = f"{r.tokens_equal_unfused}/{r.num_tokens}" + (", bits" if same_bits else "")
    if r.error:
        return output.bad(f"WRONG {text}")
    return output.ok(text) if r.exact else text
