"""From the ranks' records to rows, table and headline."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from allnorm.cli import output
from allnorm.cli.options import Shape

_TIMES = ("p50_us", "p90_us", "p99_us", "host_us")
_WIDE = 150  # columns from which on p99 fits beside p50


@dataclass(frozen=True)
class Measurement:
    """One arm at one shape, over all ranks.

    Attributes:
        shape: what was run.
        world_size: with how many ranks.
        arm: which way.
        p50_us, p90_us, p99_us: time per call; of every rank's figure the largest. NaN if not timed.
        host_us: what an eager call costs the host; NaN if not measured.
        error: "" if the result was right, else what was wrong.
        supported: whether the arm can run this shape at all.
    """

    shape: Shape
    world_size: int
    arm: str
    p50_us: float
    p90_us: float
    p99_us: float
    host_us: float
    error: str
    supported: bool

    @property
    def correct(self) -> bool:
        """Whether it ran and its result was right."""
        return self.supported and not self.error


def merge(ranks: Sequence[Sequence[dict[str, Any]]], shapes: Sequence[Shape]) -> list[Measurement]:
    """Joins the records of all ranks: the slowest rank's time counts, any rank's error counts.

    Args:
        ranks: what `cli.ranks.bench.run` returned, in rank order.
        shapes: the shapes of that job.

    Returns:
        One measurement per shape and arm.
    """
    merged = []
    for records in zip(*ranks, strict=True):
        slowest = {key: _largest(record.get(key, math.nan) for record in records) for key in _TIMES}
        merged.append(
            Measurement(
                shape=shapes[records[0]["shape"]],
                world_size=len(ranks),
                arm=records[0]["arm"],
                error=next((record["error"] for record in records if record["error"]), ""),
                supported=all(record["supported"] for record in records),
                **slowest,
            )
        )
    return merged


def json_row(m: Measurement, common: dict[str, Any]) -> dict[str, Any]:
    """One line of the results file."""
    return {
        **common,
        "world_size": m.world_size,
        "num_tokens": m.shape.num_tokens,
        "hidden_size": m.shape.hidden_size,
        "eps": m.shape.eps,
        "weight_bias": m.shape.weight_bias,
        "model": m.shape.model,
        "arm": m.arm,
        **{key: getattr(m, key) for key in _TIMES},
        "correct": m.correct,
        "supported": m.supported,
        "error": m.error,
    }


def table(measurements: Sequence[Measurement], arms: Sequence[str], width: int) -> Table:
    """The table of one world size: a row per shape, a column per arm.

    Args:
        measurements: of one world size.
        arms: in the order of the columns.
        width: of the output, in characters; a narrow one shows no p99.
    """
    others = [arm for arm in arms if not arm.startswith("allnorm")]
    compared = "allnorm" in arms
    columns = ["model", "tokens x hidden", *(arm.replace(":", ":\n") for arm in arms)]
    columns += ["vs best\nother"] if compared and others else []
    columns += [f"vs\n{arm}" for arm in others if compared and arm.endswith("+torch")]
    columns += ["host us"] if any(math.isfinite(m.host_us) for m in measurements) else []
    rows = []
    for shape in dict.fromkeys(m.shape for m in measurements):
        found = {m.arm: m for m in measurements if m.shape == shape}
        row = [shape.model or "-", str(shape), *(_cell(found[arm], width >= _WIDE) for arm in arms)]
        if compared and others:
            row.append(_times(speed_up(found, others)))
        row += [
            _times(speed_up(found, [arm])) for arm in others if compared and arm.endswith("+torch")
        ]
        if "host us" in columns:
            row.append(output.microseconds(found["allnorm"].host_us))
        rows.append([*row, _verdict(found.values())])
    size = measurements[0].world_size
    title = f"{size} rank{'s' if size != 1 else ''}, us per call"
    return output.table(title, [*columns, "bits"], rows)


def speed_up(found: dict[str, Measurement], others: Iterable[str]) -> float:
    """How many times faster "allnorm" is than the fastest of `others`; NaN if one was not timed."""
    times = [found[arm].p50_us for arm in others if math.isfinite(found[arm].p50_us)]
    return min(times) / found["allnorm"].p50_us if times else math.nan


def headline(measurements: Sequence[Measurement], dtype: str) -> str:
    """One sentence: the smallest shape at the most ranks, beside the all-reduce + PyTorch."""
    candidates = [m for m in measurements if m.arm == "allnorm" and math.isfinite(m.p50_us)]
    if not candidates:
        return ""
    best = min(
        candidates, key=lambda m: (-m.world_size, m.shape.num_tokens, m.shape.hidden_size != 4096)
    )
    found = {
        m.arm: m for m in measurements if m.shape == best.shape and m.world_size == best.world_size
    }
    time = output.microseconds(best.p50_us)
    text = f"{best.shape} {dtype}, {best.world_size} ranks: {time}"
    text += "" if time.endswith("ms") else " us"
    baseline = next((arm for arm in found if arm.endswith("+torch")), None)
    ratio = speed_up(found, [baseline]) if baseline else math.nan
    if baseline and math.isfinite(ratio):
        library = baseline.partition("+")[0]
        relation = f"{ratio:.1f}x faster than" if ratio >= 1 else f"{1 / ratio:.1f}x slower than"
        text += f", {relation} {library} + PyTorch"
    return f"{text}, same bits as the reference"


def _cell(m: Measurement, with_p99: bool) -> str:
    if not m.supported:
        return "cannot run"
    if m.error:
        return output.bad("WRONG")
    text = output.microseconds(m.p50_us)
    return f"{text} [dim]({output.microseconds(m.p99_us)})[/dim]" if with_p99 else text


def _verdict(found: Iterable[Measurement]) -> str:
    wrong = [m for m in found if m.error]
    return output.bad("WRONG") if wrong else output.ok("PASS")


def _times(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.0f}x" if math.isfinite(ratio) else "-"


def _largest(values: Iterable[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return max(finite, default=math.nan)
