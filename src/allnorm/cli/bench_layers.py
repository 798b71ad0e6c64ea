"""``allnorm bench --layers``: chains of layers with and without prefetch of the next weight."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from allnorm import topology
from allnorm.bench import layers
from allnorm.bench.layers import ARMS, ChainTimes, Job
from allnorm.cli import options, output

TOKENS = {"cuda": "1,8,32,64", "cpu": "1,8"}
_LESS_MEMORY = "Choose a smaller model with --layers, or more ranks with --tp."


def check(job: Job, sizes: Sequence[int]) -> None:
    """Raises typer.BadParameter if a model is unknown or too large for any of these rank counts."""
    for size in sizes:
        with options.of("--layers"):
            weights = [layers.num_bytes(layers.find(name, size), job, size) for name in job.models]
            options.check_memory(max(weights), size, job.device, _LESS_MEMORY)


def run(
    job: Job, sizes: Sequence[int], json: Path | None, common: dict[str, Any], console: Console
) -> bool:
    """Measures, shows and stores results; returns whether all of them were right."""
    console.print(_explanation(job))
    good = True
    for size in sizes:
        found: list[ChainTimes] = []

        def take(
            rank: int, message: dict[str, Any], found: list[ChainTimes] = found, size: int = size
        ) -> None:
            if "chain" not in message:
                show(rank, message)
            elif rank == 0:
                found.append(message["chain"])
                output.append_json_lines(json, found[-1].rows(size), common)

        try:
            with output.progress(f"bench, {output.ranks(size)}") as show:
                layers.measure(job, size, take)
        finally:
            if found:
                console.print(_table(found, size))
        for chain in found:
            for arm, error in chain.errors.items():
                if error:
                    text = f"{arm}, {chain.model}, {chain.num_tokens} rows: {error}"
                    console.print(output.bad(text))
                    good = False
    return good


def _explanation(job: Job) -> str:
    each = "a chain is one CUDA graph" if job.device == "cuda" else "wall time, a process per rank"
    return (
        f"{job.layers} layers (o_proj, call, gate_up, down, call, qkv; no attention), each with "
        f"its own weights, {job.dtype}, on {topology.device_name(job.device)}: p50 in us per layer "
        f"of the slowest rank; {each}. on: each call prefetches the start of the weight that the "
        "next GEMM reads. gain: what this saves per call. default: whether calls with "
        "`prefetch=` do so unless forced. bits: every timed call equals an unfused one, and both "
        "chains give the same result."
    )


def _table(found: Sequence[ChainTimes], size: int) -> output.FittedTable:
    columns = ("model", "rows", "off us", "on us", "gain us per call", "MiB", "default", "bits")
    rows = []
    for chain in found:
        off, on = (output.microseconds(chain.us[arm]["p50_us"]) for arm in ARMS)
        wrong = any(chain.errors.values())
        rows.append(
            (
                *(chain.model, str(chain.num_tokens), off, on, f"{chain.gain_us:+.2f}"),
                f"{chain.prefetch_bytes / 2**20:g}",
                "on" if chain.is_default else "off",
                output.bad("WRONG") if wrong else output.ok("PASS"),
            )
        )
    return output.FittedTable(output.ranks(size), columns, rows)
