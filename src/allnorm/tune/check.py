"""Comparison of the algorithm that `auto` chooses with the best algorithm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allnorm.bench import report
from allnorm.bench.modes import Mode, Shape
from allnorm.bench.report import Measurement
from allnorm.bench.run import Job as Benchmark
from allnorm.testing import OnMessage
from allnorm.tune import crossovers
from allnorm.tune.run import PRODUCT_TOKENS, Job

LIMIT = 1.05


@dataclass(frozen=True)
class Point:
    """The times of `auto` and of the best algorithm at one shape."""

    auto: Measurement  # measurement of `auto`
    best: Measurement  # measurement of the fastest algorithm

    @property
    def ratio(self) -> float:
        """The time of `auto` divided by the best algorithm's; only noise makes it less than 1."""
        return self.auto.p50_us / self.best.p50_us

    @property
    def slow(self) -> bool:
        """Whether the ratio exceeds the limit."""
        return not self.ratio <= LIMIT

    @property
    def errors(self) -> list[str]:
        """The errors in the two measurements' results."""
        return [f"{m.arm} at {m.shape}: {m.error}" for m in (self.auto, self.best) if m.error]


Points = dict[tuple[Shape, Mode], Point]
"""Maps (shape, mode) to the measured point."""


def measure(
    job: Job,
    dtype: str,
    world_size: int,
    directory: Path | None = None,
    on_message: OnMessage | None = None,
) -> Points:
    """Starts ranks that time `auto` and every algorithm with one of the job's dtypes.

    Points that exceed the limit are measured a second time, because noise makes about one in a
    hundred exceed it. For `directory` see `tuning.path_of`.

    Raises:
        RankError: a rank raised an error, died or timed out.
    """

    def measured(shapes: Sequence[Shape], modes: Sequence[Mode]) -> Points:
        arms = ("allnorm", *(f"allnorm:{algorithm}" for algorithm in job.algorithms))
        found, points = [], {}
        for product, chosen in _by_product(shapes, job.product).items():
            benchmark = Benchmark(
                *(tuple(chosen), tuple(modes), dtype, "rounded", arms, job.device),
                seconds=job.seconds,
                tuning_dir=None if directory is None else str(directory),
                products=(product,),
            )
            timed = report.measure(benchmark, world_size, on_message=on_message)
            found += [m for m in timed if m.arm in arms]
        for shape, mode in dict.fromkeys((m.shape, m.mode) for m in found):
            here = {m.arm: m for m in found if (m.shape, m.mode) == (shape, mode)}
            auto = here.pop("allnorm")
            best = report.best(here.values())
            if best is not None and math.isfinite(auto.p50_us):
                points[shape, mode] = Point(auto, best)
        return points

    tokens = crossovers.token_grid(job.tokens[-1], 2)
    shapes = [Shape(t, hidden_size) for hidden_size in job.hidden_sizes for t in tokens]
    found = measured(shapes, [Mode(quant) for quant in job.quants])
    again = [key for key, point in found.items() if point.slow]
    if again:
        # Measures all combinations of these shapes and modes, for simplicity, because there are
        # few.
        shapes_again, modes_again = (dict.fromkeys(part) for part in zip(*again, strict=True))
        repeated = measured(list(shapes_again), list(modes_again))
        for key in again:
            found[key] = min(found[key], repeated[key], key=lambda point: point.ratio)
    return found


def _by_product(shapes: Sequence[Shape], product: int) -> dict[int, list[Shape]]:
    """Groups shapes by the K of the GEMM after which `tune` measures them."""
    found: dict[int, list[Shape]] = {}
    for shape in shapes:
        columns = product if shape.num_tokens <= PRODUCT_TOKENS else 0
        found.setdefault(columns, []).append(shape)
    return found


def json_row(point: Point, dtype: str) -> dict[str, Any]:
    """Returns one row of the results file."""
    auto, best = point.auto, point.best
    return {
        "world_size": auto.world_size,
        "num_tokens": auto.shape.num_tokens,
        "hidden_size": auto.shape.hidden_size,
        "dtype": dtype,
        "quant": auto.mode.quant,
        "product": auto.product,
        "auto_us": auto.p50_us,
        "best_us": best.p50_us,
        "best": best.arm,
        "ratio": point.ratio,
        "correct": auto.correct and best.correct,
    }
