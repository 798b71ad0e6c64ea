"""``allnorm tune --check``: how far is what `auto` chooses from the best algorithm?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from allnorm import topology
from allnorm.cli import bench_report, crossovers, output
from allnorm.cli.bench_modes import Mode
from allnorm.cli.bench_report import Measurement
from allnorm.cli.options import Shape
from allnorm.cli.ranks import bench as ranks_bench
from allnorm.cli.ranks.tune import Job
from allnorm.testing import run_ranks

LIMIT = 1.05
_TIMEOUT_SECONDS = 3600.0
_ARMS = ("allnorm", "allnorm:one_shot", "allnorm:two_shot", "allnorm:unfused")


@dataclass(frozen=True)
class Point:
    """One shape.

    Attributes:
        auto: what `auto` took.
        best: the fastest of the algorithms by name.
    """

    auto: Measurement
    best: Measurement

    @property
    def ratio(self) -> float:
        """Time of `auto` by that of the best; below 1 only by noise."""
        return self.auto.p50_us / self.best.p50_us


def run(job: Job, size: int, directory: Path | None, json: Path | None, console: Console) -> bool:
    """Measures, shows and stores; returns whether all is right and within the limit.

    What is beyond the limit is measured again before it counts, because one in a hundred points
    is beyond it by noise.
    """
    shapes = [
        Shape(tokens, hidden)
        for hidden in job.hidden_sizes
        for tokens in crossovers.token_grid(job.tokens[-1], 2)
    ]
    modes = [Mode(quant) for quant in job.quants]
    common = _common(job.device)
    good = True
    for dtype in job.dtypes:
        found = _measure(job, dtype, shapes, modes, size, directory, "tune --check")
        again = [key for key, point in found.items() if point.ratio > LIMIT]
        if again:
            # Each with the modes of all of them; few points are here.
            repeated = _measure(
                job,
                dtype,
                [shape for shape in shapes if any(shape == s for s, _ in again)],
                [mode for mode in modes if any(mode == m for _, m in again)],
                size,
                directory,
                "tune --check, again",
            )
            found |= {key: min(found[key], repeated[key], key=_ratio) for key in again}
        rows = (_row(point, dtype, common) for point in found.values())
        output.append_json_lines(json, rows)
        for mode in modes:
            points = {shape: p for (shape, m), p in found.items() if m == mode}
            if points:
                console.print(
                    _table(points, f"{output.ranks(size)}, {dtype}, {str(mode) or 'norm'}")
                )
        slow = [point for point in found.values() if not point.ratio <= LIMIT]
        wrong = [m for p in found.values() for m in (p.auto, p.best) if m.error]
        for m in wrong:
            console.print(output.bad(f"{m.arm} at {m.shape}: {m.error}"))
        worst = max(found.values(), key=_ratio, default=None)
        if worst is None:
            console.print(output.bad("nothing could be measured"))
        else:
            text = (
                f"{len(found) - len(slow)} of {len(found)} points are within "
                f"{(LIMIT - 1) * 100:.0f} % of the best algorithm; the worst is "
                f"{(worst.ratio - 1) * 100:+.1f} % at {worst.auto.shape}"
            )
            console.print(output.bad(text) if slow else output.ok(text))
        good &= worst is not None and not slow and not wrong
    return good


def _ratio(point: Point) -> float:
    return point.ratio


def _measure(
    job: Job,
    dtype: str,
    shapes: list[Shape],
    modes: list[Mode],
    size: int,
    directory: Path | None,
    title: str,
) -> dict[tuple[Shape, Mode], Point]:
    """Runs `auto` and every algorithm beside each other."""
    arms = tuple(arm for arm in _ARMS if ":" not in arm or arm.partition(":")[2] in job.algorithms)
    bench = ranks_bench.Job(
        *(tuple(shapes), tuple(modes), dtype, "rounded", arms, job.device),
        seconds=job.seconds,
        tuning_dir=None if directory is None else str(directory),
    )
    with output.progress(f"{title}, {output.ranks(size)}") as show:
        ranks = run_ranks(
            ranks_bench.run,
            size,
            device=job.device,
            args=(bench,),
            timeout=_TIMEOUT_SECONDS,
            # The records come with the results.
            on_message=lambda rank, message: None if "records" in message else show(rank, message),
        )
    element_bytes = getattr(torch, dtype).itemsize
    merged = bench_report.merge(ranks, shapes, modes, element_bytes, None)
    points = {}
    for shape in shapes:
        for mode in modes:
            here = [m for m in merged if (m.shape, m.mode) == (shape, mode)]
            auto = next((m for m in here if m.arm == "allnorm"), None)
            best = bench_report.best(m for m in here if m.arm != "allnorm")
            if auto is not None and best is not None and math.isfinite(auto.p50_us):
                points[shape, mode] = Point(auto, best)
    return points


def _table(points: dict[Shape, Point], title: str) -> Any:
    hidden_sizes = sorted({shape.hidden_size for shape in points})
    by_size = {(s.num_tokens, s.hidden_size): p for s, p in points.items()}
    rows = []
    for tokens in sorted({shape.num_tokens for shape in points}):
        cells = []
        for hidden in hidden_sizes:
            point = by_size.get((tokens, hidden))
            cells.append("" if point is None else _cell(point))
        rows.append((str(tokens), *cells))
    title += ": us of auto, and by how much it is above the best algorithm"
    return output.table(title, ("tokens", *map(str, hidden_sizes)), rows)


def _cell(point: Point) -> str:
    share = f"{(point.ratio - 1) * 100:+.1f} %"
    name = point.best.arm.partition(":")[2]
    text = f"{output.microseconds(point.auto.p50_us)} {share}"
    return f"{text} {name}" if point.ratio <= LIMIT else output.bad(f"{text} {name}")


def _row(point: Point, dtype: str, common: dict[str, Any]) -> dict[str, Any]:
    auto, best = point.auto, point.best
    return {
        **common,
        "world_size": auto.world_size,
        "num_tokens": auto.shape.num_tokens,
        "hidden_size": auto.shape.hidden_size,
        "dtype": dtype,
        "quant": auto.mode.quant,
        "auto_us": auto.p50_us,
        "best_us": best.p50_us,
        "best": best.arm,
        "ratio": point.ratio,
        "correct": auto.correct and best.correct,
    }


def _common(device: str) -> dict[str, Any]:
    kind = "gpu" if device == "cuda" else "cpu"
    return {kind: topology.device_name(device), **output.provenance()}
