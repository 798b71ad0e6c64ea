"""``allnorm trace``: counts the reductions of a program that run fused."""

from __future__ import annotations

from typing import Annotated

import typer

from allnorm.cli import output
from allnorm.cli.options import Json, option
from allnorm.tracing import TraceReport, program
from allnorm.tracing.report import FUSED, NORM, REDUCTION


def trace(
    command: Annotated[
        list[str],
        typer.Argument(help="Program to run, after --: a Python file, torchrun, or any command."),
    ],
    require: Annotated[
        float | None,
        option(
            "Exit with code 1 if a smaller fraction of the reductions ran fused on any rank.",
            min=0.0,
            max=1.0,
        ),
    ] = None,
    json: Json = None,
) -> None:
    """Runs a program and counts, on each rank, which reductions ran fused with their norm."""
    try:
        code, reports = program.run(command)
    except OSError as error:
        text = f"{command[0]}: {error.strerror}"
        raise typer.BadParameter(text, param_hint="CMD") from error
    console = output.console()
    for table in _tables(reports):
        console.print(table)
    rows = [report.to_dict() for report in reports]
    output.append_json_lines(json, rows, output.provenance() if json else {})
    if code:
        console.print(output.bad(f"the program ended with exit code {code}"))
        raise typer.Exit(code)
    problem = program.problem(reports, require)
    if problem:
        output.fail(problem)
    lowest = min(reports, key=lambda report: report.fraction)
    console.print(output.ok(f"{lowest.summary()} ({lowest.fraction:.1%})"))


def _tables(reports: list[TraceReport]) -> list[object]:
    if not reports:
        return []
    ranks = [
        (
            str(report.rank),
            report.summary(),
            f"{report.time_us(FUSED):,.0f}",
            str(report.calls(REDUCTION)),
            f"{report.time_us(REDUCTION):,.0f}",
            str(report.calls(NORM)),
            f"{report.time_us(NORM):,.0f}",
        )
        for report in reports
    ]
    columns = ("rank", "reductions", "us", "not fused", "us", "separate norms", "us")
    places = [
        (entry.kind, entry.what, entry.module, str(entry.calls), f"{entry.time_us:,.0f}")
        for entry in reports[0].entries
    ]
    headings = ("kind", "what", "module", "calls", "us")
    return [
        output.FittedTable("by rank", columns, ranks, words=("reductions",)),
        output.FittedTable(f"rank {reports[0].rank}", headings, places, words=("what", "module")),
    ]
