"""``allnorm trace``: how many reductions of a program run fused?"""

from __future__ import annotations

import json as json_module
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Annotated

import typer

from allnorm.cli import output
from allnorm.cli.options import Json
from allnorm.tracing import TraceReport, inject
from allnorm.tracing.report import FUSED, NORM, REDUCTION

_SITECUSTOMIZE = """\
import importlib.util
spec = importlib.util.spec_from_file_location("_allnorm_inject", {source!r})
inject = importlib.util.module_from_spec(spec)
spec.loader.exec_module(inject)
inject.install({folder!r}, {own!r})
"""


def trace(
    command: Annotated[
        list[str],
        typer.Argument(help="The program, after --: a Python file, torchrun, or any command."),
    ],
    require: Annotated[
        float | None,
        typer.Option(
            "--require",
            min=0.0,
            max=1.0,
            help="Fail if on some rank a smaller part of the reductions ran fused.",
        ),
    ] = None,
    json: Json = None,
) -> None:
    """Runs a program and counts, on each rank, which reductions ran fused with their norm."""
    with tempfile.TemporaryDirectory(prefix="allnorm-trace-") as folder:
        code = _run(command, pathlib.Path(folder).resolve())
        reports = _read(pathlib.Path(folder))
    console = output.console()
    for table in _tables(reports):
        console.print(table)
    provenance = output.provenance() if json else {}
    output.append_json_lines(json, ({**provenance, **report.to_dict()} for report in reports))
    if code:
        console.print(output.bad(f"the program ended with exit code {code}"))
        raise typer.Exit(code)
    problem = _problem(reports, require)
    if problem:
        console.print(output.bad(problem))
        raise typer.Exit(1)
    lowest = min(reports, key=lambda report: report.fraction)
    console.print(output.ok(f"{lowest.summary()} ({lowest.fraction:.1%})"))


def _run(command: list[str], folder: pathlib.Path) -> int:
    """Runs the program with the injected trace; returns its exit code, as a shell would."""
    own = folder / "site"
    own.mkdir()
    text = _SITECUSTOMIZE.format(source=inject.__file__, folder=str(folder), own=str(own))
    (own / "sitecustomize.py").write_text(text)
    package = str(pathlib.Path(inject.__file__).resolve().parents[2])
    paths = [str(own), *filter(None, [os.environ.get("PYTHONPATH")]), package]
    if command[0].endswith(".py"):
        command = [sys.executable, *command]
    try:
        ended = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, check=False
        )
    except OSError as error:
        raise typer.BadParameter(f"{command[0]}: {error.strerror}", param_hint="CMD") from error
    return ended.returncode if ended.returncode >= 0 else 128 - ended.returncode


def _read(folder: pathlib.Path) -> list[TraceReport]:
    found = [
        TraceReport.from_dict(json_module.loads(path.read_text()))
        for path in sorted(folder.glob("*.json"))
    ]
    return sorted(found, key=lambda report: report.rank)


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
        output.table("by rank", columns, ranks, words=("reductions",)),
        output.table(f"rank {reports[0].rank}", headings, places, words=("what", "module")),
    ]


def _problem(reports: list[TraceReport], require: float | None) -> str:
    if not reports:
        return (
            "no rank was traced: no process of the program called "
            "torch.distributed.init_process_group(), or all were killed before their end"
        )
    missing = set(range(reports[0].world_size)) - {report.rank for report in reports}
    if missing:
        return f"no report of rank {', '.join(map(str, sorted(missing)))}: killed before its end?"
    if require is None:
        return ""
    lowest = min(reports, key=lambda report: report.fraction)
    if not lowest.reductions:
        return f"rank {lowest.rank} made no reduction: there is nothing that could be fused"
    if lowest.fraction < require:
        return (
            f"rank {lowest.rank}: {lowest.summary()}, {lowest.fraction:.1%}; "
            f"--require {require:g} asks for more"
        )
    return ""
