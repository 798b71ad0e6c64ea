"""One page with all results of a benchmark: tables, pictures, conditions. It needs no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from allnorm.bench import report
from allnorm.bench.report import Measurement
from allnorm.cli import bench_plot, bench_table, output

_TEMPLATE = Path(__file__).with_name("bench_page.html.j2")
_EVERY_ARM = ("tokens x hidden", "arm", "p50", "p90", "p99", "of floor", "host", "eager", "result")


def page(
    measurements: Sequence[Measurement],
    heading: str,
    explanation: str,
    conditions: Mapping[str, Any],
) -> str:
    """The page as text.

    The explanation says in prose what the arms are and how they were timed; the conditions are what
    every row of the results carries: hardware, versions, commit, command.
    """
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        heading=heading,
        explanation=explanation,
        headline=bench_table.headline(measurements, str(conditions.get("dtype", ""))),
        sections=[
            _section([m for m in measurements if (m.world_size, m.mode) == key])
            for key in bench_table.modes_of(measurements)
        ],
        every_arm=_EVERY_ARM,
        conditions=_flat(conditions),
    )


def save(path: Path, text: str) -> None:
    """Writes a page; makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _section(measurements: Sequence[Measurement]) -> dict[str, Any]:
    """One world size and mode: the table, pictures, every arm beyond the table."""
    return {
        "grid": bench_table.grid(measurements, with_p99=False),
        "pictures": [bench_plot.svg(measurements, p) for p in bench_plot.panels(measurements)],
        "arms": [
            [
                str(m.shape),
                m.arm,
                *map(output.microseconds, (m.p50_us, m.p90_us, m.p99_us)),
                f"{m.floor_share:.1%}" if m.floor_share > 0 else "-",
                *map(output.microseconds, (m.host_us, m.eager_us)),
                "WRONG" if m.error else "right" if not m.reason else "-",
            ]
            for m in measurements
        ],
        "wrong": {f"{m.arm} at {m.shape}": m.error for m in measurements if m.error},
        "missing": report.missing(measurements),
    }


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values under names with dots."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        nested = isinstance(value, Mapping)
        found |= _flat(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return found
