"""One page with everything a benchmark found: tables, pictures, conditions. It needs no network."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from allnorm.cli import bench_plot, bench_report, bench_table, output
from allnorm.cli.bench_report import Measurement

_STYLE = """
:root { color-scheme: light dark; --rule: #8884; --best: #2a7f3f; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --best: #7fd694; --bad: #ff8a80; } }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 78rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.5rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.9rem; }
th, td { padding: 0.25rem 0.6rem; text-align: right; border-bottom: 1px solid var(--rule); }
th { vertical-align: bottom; white-space: pre-line; } td { white-space: nowrap; }
th:first-child, td:first-child, .words td, .words th { text-align: left; }
.best { color: var(--best); font-weight: 600; } .bad { color: var(--bad); font-weight: 600; }
.pictures { display: flex; flex-wrap: wrap; gap: 1rem; }
.pictures svg { width: 34rem; max-width: 100%; height: auto; }
.pictures svg text { font-family: system-ui, sans-serif !important; }
"""


def page(
    measurements: Sequence[Measurement],
    heading: str,
    explanation: str,
    conditions: Mapping[str, Any],
) -> str:
    """The page as text.

    Args:
        measurements: all of a run.
        heading: its title.
        explanation: what the arms are and how they were timed, in prose.
        conditions: what every row of the results carries: hardware, versions, commit, command.
    """
    parts = [f"<h1>{html.escape(heading)}</h1>", f"<p>{html.escape(explanation)}</p>"]
    headline = bench_table.headline(measurements, str(conditions.get("dtype", "")))
    parts.append(f"<p><strong>{html.escape(headline)}</strong></p>" if headline else "")
    for world_size, mode in bench_table.modes_of(measurements):
        here = [m for m in measurements if (m.world_size, m.mode) == (world_size, mode)]
        parts += _section(here)
    parts += ["<h2>Conditions</h2>", _pairs(_flat(conditions))]
    title = html.escape(heading)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def save(path: Path, text: str) -> None:
    """Writes a page; makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _section(measurements: Sequence[Measurement]) -> list[str]:
    """One world size and mode: the table, every arm beyond it, pictures."""
    grid = bench_table.grid(measurements, with_p99=False)
    pictures = [bench_plot.svg(measurements, p) for p in bench_plot.panels(measurements)]
    missing = bench_report.missing(measurements)
    wrong = {f"{m.arm} at {m.shape}": m.error for m in measurements if m.error}
    parts = [
        f"<h2>{html.escape(grid.title)}</h2>",
        _table(grid.columns, grid.rows),
        f'<div class="pictures">{"".join(pictures)}</div>',
        _every_arm(measurements),
    ]
    parts += ["<p>Wrong:</p>", _pairs(wrong)] if wrong else []
    parts += ["<p>Did not run:</p>", _pairs(missing)] if missing else []
    return parts


def _every_arm(measurements: Sequence[Measurement]) -> str:
    """All figures of all arms, folded away."""
    columns = ["tokens x hidden", "arm", "p50", "p90", "p99", "of floor", "host", "eager", "result"]
    rows = [
        [
            str(m.shape),
            m.arm,
            *(output.microseconds(value) for value in (m.p50_us, m.p90_us, m.p99_us)),
            f"{m.floor_share:.1%}" if m.floor_share > 0 else "-",
            *(output.microseconds(value) for value in (m.host_us, m.eager_us)),
            "WRONG" if m.error else "right" if not m.reason else "-",
        ]
        for m in measurements
    ]
    return f"<details><summary>Every arm, us</summary>{_table(columns, rows)}</details>"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "\n".join(
        "<tr>" + "".join(_cell(columns[i], cell) for i, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n'
        "</tbody></table></div>"
    )


def _cell(column: str, text: str) -> str:
    kind = ' class="bad"' if text == "WRONG" else ' class="best"' if column == "allnorm" else ""
    return f"<td{kind}>{html.escape(text)}</td>"


def _pairs(pairs: Mapping[str, Any]) -> str:
    rows = "\n".join(
        f"<tr><td>{html.escape(str(name))}</td><td>{html.escape(str(value))}</td></tr>"
        for name, value in pairs.items()
    )
    return f'<div class="scroll"><table class="words"><tbody>\n{rows}\n</tbody></table></div>'


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values under names with dots."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found
