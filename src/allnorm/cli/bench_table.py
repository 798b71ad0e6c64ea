"""What `bench` shows: tables on the console, and a page with all results that needs no network."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allnorm.bench.compare import Change
from allnorm.bench.modes import YARDSTICKS, Mode, family, is_other
from allnorm.bench.report import Measurement, best, missing, speed_up
from allnorm.cli import bench_plot, output

_WIDE = 150  # columns from which on p99 fits beside p50 ...
_FEW = 7  # ... of so many arms
_SEEN_SHARE = 0.1  # of the floor: below it latency decides, not the link

Found = dict[str, Measurement]
"""The arms of one shape, by name."""


@dataclass(frozen=True)
class Grid:
    """A table before it is rendered: headings, and for each shape the cells."""

    title: str  # above it
    columns: list[str]  # the headings
    rows: list[list[str]]  # as long as `columns` each; cells without markup
    wrong: list[bool]  # for each row, whether an arm was wrong
    best: list[int | None]  # for each row, the column of the fastest arm


def grid(measurements: Sequence[Measurement], with_p99: bool) -> Grid:
    """The table of one world size, mode and product: a row per shape, a column per kind of arm.

    A peer's algorithms share a column, which shows the fastest of them. Kinds that ran nowhere
    have none. Behind a product times are those beyond an empty kernel's, whose own column is what
    it takes beyond the product.

    With `with_p99` it is shown in brackets behind p50.
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
    """The table for a console; where it is narrow, p99 is left out."""
    arms = {family(m.arm) for m in measurements}
    found = grid(measurements, width >= _WIDE and len(arms) <= _FEW)
    verdicts = [output.bad("WRONG") if wrong else output.ok("PASS") for wrong in found.wrong]
    rows = [
        [*(output.bad(cell) if cell == "WRONG" else cell for cell in row), verdict]
        for row, verdict in zip(found.rows, verdicts, strict=True)
    ]
    return output.table(found.title, [*found.columns, "bits"], rows, optional=_optional(found))


def _optional(found: Grid) -> list[str]:
    """What a narrow console does without first: details, variants, this norm behind others."""
    details = ["host\nus", "of it\nreached", "floor", "model"]
    variants = [c for c in found.columns if c.startswith("allnorm") and c != "allnorm"]
    local = [c for c in found.columns if c.endswith("+local")]
    return [*details, *variants[::-1], *local]


_COMPARED = ("ranks", "tokens x hidden", "mode", "arm", "before", "now", "tolerance", "change")


def compared(found: Iterable[Change]) -> output.FittedTable:
    """The arms that differ from an earlier file beyond their tolerance, the worst first."""
    rows = [
        [*cells[:-1], output.bad(cells[-1]) if slower else output.ok(cells[-1])]
        for cells, slower in _differing(found)
    ]
    return output.table(
        *("Compared, us per call", _COMPARED, rows), words=("mode",), optional=("tolerance", "mode")
    )


def _differing(found: Iterable[Change]) -> list[tuple[list[str], bool]]:
    """The cells of a row for each arm that differs, and whether it is slower."""
    differing = sorted(
        (change for change in found if change.slower or change.faster),
        key=lambda change: change.difference_us / change.before_us,
        reverse=True,
    )
    return [(_cells(change), change.slower) for change in differing]


def _cells(change: Change) -> list[str]:
    row, relative = change.row, change.difference_us / change.before_us
    flags = {
        name: bool(row.get(name)) for name in ("residual_sharded", "return_normed", "post_norm")
    }
    mode = Mode(row.get("quant") or "", **flags, experts=int(row.get("experts") or 0))
    verdict = f"{relative:+.1%}" if math.isfinite(relative) else "lost"
    return [
        str(row["world_size"]),
        f"{row['num_tokens']}x{row['hidden_size']}",
        str(mode) or "-",
        str(row["arm"]),
        *map(output.microseconds, (change.before_us, change.now_us, change.tolerance_us)),
        verdict,
    ]


def headline(measurements: Sequence[Measurement], dtype: str) -> str:
    """One sentence: the smallest shape at the most ranks, beside the fastest other way there.

    Of calls in a chain, where there are any.
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
    text += " beyond an empty kernel behind the same product" if chosen.product else ""
    other = best(m for m in found.values() if is_other(m.arm))
    ratio = speed_up(found, [other.arm]) if other else math.nan
    if other and math.isfinite(ratio):
        relation = f"{ratio:.2g}x as fast as" if ratio >= 1 else f"{1 / ratio:.2g}x slower than"
        text += f", {relation} the best other way, {other.arm} ({output.time_of(other.shown_us)})"
    return f"{text}; same bits as the reference"


def _title(m: Measurement) -> str:
    ranks = output.ranks(m.world_size)
    times = "us per call"
    if m.product:
        times = f"us beyond an empty kernel, behind a product of {m.product} columns"
    return ", ".join([ranks, *([str(m.mode)] if str(m.mode) else []), times])


def _derived(
    measurements: Sequence[Measurement], others: list[str]
) -> dict[str, Callable[[Found], str]]:
    """The columns that compare: only those that have something to show."""
    columns: dict[str, Callable[[Found], str]] = {}
    if not any(m.arm == "allnorm" for m in measurements):
        return columns
    if others:
        columns["vs best\nother"] = lambda found: _ratio(speed_up(found, others))
    if any(math.isfinite(m.quant_cost_us) for m in measurements):
        columns["quant\ncost"] = lambda found: _difference(found["allnorm"].quant_cost_us)
    if any(math.isfinite(m.floor_us) for m in measurements):
        columns["floor"] = lambda found: _floor(found["allnorm"])
        columns["of it\nreached"] = lambda found: _share(found["allnorm"])
    if any(math.isfinite(m.host_us) for m in measurements):
        columns["host\nus"] = lambda found: output.microseconds(found["allnorm"].host_us)
    return columns


def _empty(found: Found) -> str:
    return output.microseconds(found["empty"].p50_us) if "empty" in found else "-"


def _times(kind: str, with_p99: bool) -> Callable[[Found], str]:
    """The cell of one kind of arm: the fastest of its variants."""

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


def _ratio(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.0f}x" if math.isfinite(ratio) else "-"


def _difference(value: float) -> str:
    return f"{value:+.2f}" if math.isfinite(value) else "-"


def _floor(m: Measurement) -> str:
    return output.microseconds(m.floor_us) if m.floor_share >= _SEEN_SHARE else "-"


def _share(m: Measurement) -> str:
    return f"{m.floor_share:.0%}" if m.floor_share >= _SEEN_SHARE else "-"


def _key(m: Measurement) -> tuple[int, Mode, int]:
    return m.world_size, m.mode, m.product


def tables_of(measurements: Sequence[Measurement]) -> list[list[Measurement]]:
    """What belongs into one table each: of one world size, mode and product, chains first."""
    keys = dict.fromkeys(map(_key, measurements))
    ordered = sorted(keys, key=lambda key: bool(key[2]))
    return [[m for m in measurements if _key(m) == key] for key in ordered]


_TEMPLATE = Path(__file__).with_name("bench_page.html.j2")
_EVERY_ARM = ("tokens x hidden", "arm", "p50", "p90", "p99", "of floor", "host", "eager", "result")


def page(
    measurements: Sequence[Measurement],
    heading: str,
    explanation: str,
    conditions: Mapping[str, Any],
    comparison: Mapping[str, Any] | None = None,
) -> str:
    """The page as text.

    The explanation says in prose what the arms are and how they were timed; the conditions are what
    every row of the results carries: hardware, versions, commit, command; the comparison is what
    `comparison()` makes.
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
    """What a page says of a comparison with the file of this name."""
    rows = [cells for cells, _ in _differing(found)]
    return {"name": name, "summary": summary, "columns": _COMPARED, "rows": rows}


def save(path: Path, text: str) -> None:
    """Writes a page."""

    def write(file: Path) -> None:
        file.write_text(text, encoding="utf-8")

    output.write_results(path, write)


def _section(measurements: Sequence[Measurement]) -> dict[str, Any]:
    """One world size and mode: the table, pictures, every arm beyond the table."""
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
                "WRONG" if m.error else "right" if not m.reason else "-",
            ]
            for m in measurements
        ],
        "wrong": {f"{m.arm} at {m.shape}": m.error for m in measurements if m.error},
        "missing": missing(measurements),
    }


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values under names with dots."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        nested = isinstance(value, Mapping)
        found |= _flat(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return found
