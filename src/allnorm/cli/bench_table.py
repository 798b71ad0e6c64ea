"""Output of `bench`: console tables, and a self-contained HTML page with all results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from allnorm.bench.compare import Change
from allnorm.bench.modes import YARDSTICKS, Mode, family, is_other
from allnorm.bench.report import Measurement, best, missing, speed_up
from allnorm.cli import bench_plot, output

_WIDE = 150  # minimum console width for showing p99 next to p50 ...
_FEW = 7  # ... of at most this many arms
_SEEN_SHARE = 0.1  # a floor below this share of the time is not shown, because latency dominates

Found = dict[str, Measurement]
"""Maps arm names to the measurements of one shape."""


@dataclass(frozen=True)
class Grid:
    """A table before it is rendered: headings, and a row of cells per shape."""

    title: str  # printed above the table
    columns: list[str]  # the headings
    rows: list[list[str]]  # cells without markup, one per column
    wrong: list[bool]  # per row: whether the result of an arm was wrong
    best: list[int | None]  # per row: column index of the fastest arm


def grid(measurements: Sequence[Measurement], with_p99: bool) -> Grid:
    """Returns the table of one world size, mode and GEMM: a row per shape, a column per arm family.

    A peer's algorithms share a column, which shows the fastest of them. A family that never ran has
    no column. After a GEMM, times are in excess of the empty kernel's time; the empty kernel's own
    column shows its time in excess of the GEMM alone.

    With `with_p99`, p99 follows p50 in parentheses.
    """
    ran = {family(m.arm) for m in measurements if not m.reason}
    kinds = [k for k in dict.fromkeys(family(m.arm) for m in measurements) if k in ran]
    others = list(dict.fromkeys(m.arm for m in measurements if is_other(m.arm)))
    shapes = list(dict.fromkeys(m.shape for m in measurements))
    by_shape = [{m.arm: m for m in measurements if m.shape == shape} for shape in shapes]
    columns: dict[str, Callable[[Found], str]] = {}
    if any(shape.model for shape in shapes):
        columns["model"] = lambda found: next(iter(found.values())).shape.model or "-"
    columns["tokens x\nhidden"] = lambda found: str(next(iter(found.values())).shape)
    for kind in kinds:
        columns[_heading(kind)] = _empty if kind == "empty" else _times(kind, with_p99)
    columns |= _derived(measurements, others)
    places = {kind: list(columns).index(_heading(kind)) for kind in kinds}
    fastest = [
        best(m for m in found.values() if m.correct and m.arm not in YARDSTICKS)
        for found in by_shape
    ]
    return Grid(
        _title(measurements[0]),
        list(columns),
        [[cell(found) for cell in columns.values()] for found in by_shape],
        [any(m.error for m in found.values()) for found in by_shape],
        [None if m is None else places[family(m.arm)] for m in fastest],
    )


def _heading(kind: str) -> str:
    return kind.replace(":", ":\n").replace("+", "\n+")


def table(measurements: Sequence[Measurement], width: int) -> output.FittedTable:
    """Returns the table for a console; leaves p99 out if the console is narrow."""
    arms = {family(m.arm) for m in measurements}
    found = grid(measurements, width >= _WIDE and len(arms) <= _FEW)
    verdicts = [output.bad("WRONG") if wrong else output.ok("PASS") for wrong in found.wrong]
    rows = [
        [*(output.bad(cell) if cell == "WRONG" else cell for cell in row), verdict]
        for row, verdict in zip(found.rows, verdicts, strict=True)
    ]
    return output.FittedTable(
        found.title, [*found.columns, "bits"], rows, optional=_optional(found)
    )


def _optional(found: Grid) -> list[str]:
    """Returns the columns that a narrow console drops first."""
    details = ["host\nus", "floor /\ntime", "floor", "model"]
    variants = [c for c in found.columns if c.startswith("allnorm") and c != "allnorm"]
    local = [c for c in found.columns if c.endswith("+local")]
    return [*details, *variants[::-1], *local]


_COMPARED = ("ranks", "tokens x hidden", "mode", "arm", "before", "now", "tolerance", "change")


def compared(found: Iterable[Change]) -> output.FittedTable:
    """Returns a table of arms that differ from an earlier file by more than the tolerance."""
    rows = [
        [*_cells(change)[:-1], (output.bad if change.slower else output.ok)(_cells(change)[-1])]
        for change in _differing(found)
    ]
    title = "Comparison, us per call"
    return output.FittedTable(title, _COMPARED, rows, ("mode",), ("tolerance", "mode"))


def _differing(found: Iterable[Change]) -> list[Change]:
    """Returns the changes that exceed the tolerance, worst first."""
    differing = (change for change in found if change.slower or change.faster)
    return sorted(differing, key=lambda change: -change.difference_us / change.before_us)


def _cells(change: Change) -> list[str]:
    row, relative = change.row, change.difference_us / change.before_us
    mode = Mode(**{f.name: row[f.name] for f in fields(Mode) if row.get(f.name)})
    return [
        str(row["world_size"]),
        f"{row['num_tokens']}x{row['hidden_size']}",
        str(mode) or "-",
        str(row["arm"]),
        *map(output.microseconds, (change.before_us, change.now_us, change.tolerance_us)),
        f"{relative:+.1%}" if math.isfinite(relative) else "lost",
    ]


def headline(measurements: Sequence[Measurement], dtype: str) -> str:
    """Returns a sentence comparing allnorm with the fastest other implementation.

    It covers the smallest shape at the largest number of ranks, in a chain of calls if any chain
    was measured.
    """
    candidates = [m for m in measurements if m.arm == "allnorm" and math.isfinite(m.p50_us)]
    if not candidates:
        return ""
    chosen = min(
        candidates,
        key=lambda m: (
            *(-m.world_size, bool(m.product), m.shape.num_tokens),
            m.shape.hidden_size != 4096,
        ),
    )
    same = (chosen.shape, *_key(chosen))
    found = {m.arm: m for m in measurements if (m.shape, *_key(m)) == same}
    what = f", {chosen.mode}" if str(chosen.mode) else ""
    text = f"{chosen.shape} {dtype}{what}, {output.ranks(chosen.world_size)}: "
    text += output.time_of(chosen.shown_us)
    text += " in excess of an empty kernel after the same GEMM" if chosen.product else ""
    other = best(m for m in found.values() if is_other(m.arm))
    ratio = speed_up(found, [other.arm]) if other else math.nan
    if other and math.isfinite(ratio):
        slower = f"{_ratio(1 / ratio, 1)} slower than"
        relation = f"{_ratio(ratio, 1)} as fast as" if ratio >= 1 else slower
        text += f", {relation} the best alternative, {other.arm}"
        text += f" ({output.time_of(other.shown_us)})"
    return f"{text}; bit-identical to the reference"


def _title(m: Measurement) -> str:
    ranks = output.ranks(m.world_size)
    times = "us per call"
    if m.product:
        times = f"us in excess of an empty kernel, after a GEMM (K = {m.product})"
    return ", ".join([ranks, *([str(m.mode)] if str(m.mode) else []), times])


def _derived(
    measurements: Sequence[Measurement], others: list[str]
) -> dict[str, Callable[[Found], str]]:
    """Returns the comparison columns that have any values to show."""
    columns: dict[str, Callable[[Found], str]] = {}
    if not any(m.arm == "allnorm" for m in measurements):
        return columns
    if others:
        columns["speedup\nvs best"] = lambda found: _ratio(speed_up(found, others))
    if any(math.isfinite(m.quant_cost_us) for m in measurements):
        columns["quant\ncost"] = lambda found: _finite(found["allnorm"].quant_cost_us, "+.2f")
    if any(math.isfinite(m.floor_us) for m in measurements):
        columns["floor"] = lambda found: output.microseconds(_seen_floor(found["allnorm"])[0])
        columns["floor /\ntime"] = lambda found: _finite(_seen_floor(found["allnorm"])[1], ".0%")
    if any(math.isfinite(m.host_us) for m in measurements):
        columns["host\nus"] = lambda found: output.microseconds(found["allnorm"].host_us)
    return columns


def _empty(found: Found) -> str:
    return output.microseconds(found["empty"].p50_us) if "empty" in found else "-"


def _times(kind: str, with_p99: bool) -> Callable[[Found], str]:
    """Returns the cell function of an arm family: the time of its fastest variant."""

    def cell(found: Found) -> str:
        members = [m for m in found.values() if family(m.arm) == kind]
        if any(m.error for m in members):
            return "WRONG"
        fastest = best(members)
        if fastest is None:
            return "-"
        text = output.microseconds(fastest.shown_us)
        return f"{text} ({output.microseconds(fastest.shown_p99_us)})" if with_p99 else text

    return cell


def _ratio(ratio: float, decimals: int = 2) -> str:
    """Formats a ratio; from 10 on without decimals."""
    return f"{ratio:.{decimals if ratio < 10 else 0}f}x" if math.isfinite(ratio) else "-"


def _finite(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else "-"


def _seen_floor(m: Measurement) -> tuple[float, float]:
    """Returns the floor and its share of the time; NaN if latency dominates."""
    return (m.floor_us, m.floor_share) if m.floor_share >= _SEEN_SHARE else (math.nan, math.nan)


def _key(m: Measurement) -> tuple[int, Mode, int]:
    return m.world_size, m.mode, m.product


def tables_of(measurements: Sequence[Measurement]) -> list[list[Measurement]]:
    """Groups measurements by table: world size, mode and GEMM; chains of calls come first."""
    keys = dict.fromkeys(map(_key, measurements))
    ordered = sorted(keys, key=lambda key: bool(key[2]))
    return [[m for m in measurements if _key(m) == key] for key in ordered]


_TEMPLATE = Path(__file__).with_name("bench_page.html.j2")
_EVERY_ARM = (
    *("tokens x hidden", "arm", "p50", "p90", "p99", "floor / time", "host", "eager", "result"),
)


def page(
    measurements: Sequence[Measurement],
    heading: str,
    explanation: str,
    conditions: Mapping[str, Any],
    comparison: Mapping[str, Any] | None = None,
) -> str:
    """Returns the HTML page.

    Args:
        measurements: the results.
        heading: title of the page.
        explanation: text that describes the arms and how they were timed.
        conditions: fields common to all rows of the results, such as hardware, versions, commit
            and command.
        comparison: result of `comparison()`; None: no comparison was made.
    """
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        heading=heading,
        explanation=explanation,
        headline=headline(measurements, str(conditions.get("dtype", ""))),
        sections=[_section(found) for found in tables_of(measurements)],
        every_arm=_EVERY_ARM,
        bands=bench_plot.BANDS,
        comparison=comparison,
        conditions=_flat(conditions),
    )


def comparison(found: Sequence[Change], name: str, summary: str) -> dict[str, Any]:
    """Returns the template values for a comparison with the file of that name."""
    rows = [_cells(change) for change in _differing(found)]
    return {"name": name, "summary": summary, "columns": _COMPARED, "rows": rows}


def _section(measurements: Sequence[Measurement]) -> dict[str, Any]:
    """Returns the template values for one table: its grid, its pictures and all arms."""
    return {
        "grid": grid(measurements, with_p99=False),
        "pictures": [bench_plot.svg(measurements, p) for p in bench_plot.panels(measurements)],
        "arms": [
            [
                str(m.shape),
                m.arm,
                *map(output.microseconds, (m.p50_us, m.p90_us, m.p99_us)),
                f"{m.floor_share:.1%}" if m.floor_share > 0 else "-",
                *map(output.microseconds, (m.host_us, m.eager_us)),
                "WRONG" if m.error else "PASS" if not m.reason else "-",
            ]
            for m in measurements
        ],
        "wrong": {f"{m.arm} at {m.shape}": m.error for m in measurements if m.error},
        "missing": missing(measurements),
    }


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested values under dotted names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        nested = isinstance(value, Mapping)
        found |= _flat(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return found
