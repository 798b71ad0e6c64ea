"""Traces an unmodified program on each of its ranks."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import NamedTuple

from allnorm.tracing import inject
from allnorm.tracing.report import TraceReport

_SITECUSTOMIZE = """\
import importlib.util
spec = importlib.util.spec_from_file_location("_allnorm_inject", {source!r})
inject = importlib.util.module_from_spec(spec)
spec.loader.exec_module(inject)
inject.install({folder!r}, {own!r})
"""


class Traced(NamedTuple):
    """The result of a traced program.

    Attributes:
        exit_code: the program's exit code, as a shell reports it.
        reports: reports of the traced ranks, in rank order.
    """

    exit_code: int
    reports: list[TraceReport]


def run(command: list[str]) -> Traced:
    """Runs a program with tracing; its output goes to the streams of this process.

    Args:
        command: a program and its arguments. A Python file runs with this interpreter.

    Raises:
        OSError: the program does not exist.
    """
    if command[0].endswith(".py"):
        command = [sys.executable, *command]
    with tempfile.TemporaryDirectory(prefix="allnorm-trace-") as name:
        folder = pathlib.Path(name).resolve()
        own = folder / "site"
        own.mkdir()
        text = _SITECUSTOMIZE.format(source=inject.__file__, folder=str(folder), own=str(own))
        (own / "sitecustomize.py").write_text(text)
        package = str(pathlib.Path(inject.__file__).resolve().parents[2])
        paths = [str(own), *filter(None, [os.environ.get("PYTHONPATH")]), package]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        code = subprocess.run(command, env=environment, check=False).returncode
        found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    reports = sorted(map(TraceReport.from_dict, found), key=lambda report: report.rank)
    return Traced(code if code >= 0 else 128 - code, reports)


def problem(reports: list[TraceReport], require: float | None = None) -> str:
    """Describes the problem in the reports of a program's ranks; "" if there is none.

    With `require`, at least that fraction of the reductions must have run fused on each rank.
    """
    if not reports:
        return (
            "no rank was traced: no process of the program called "
            "torch.distributed.init_process_group(), or all were killed before they exited"
        )
    missing = set(range(reports[0].world_size)) - {report.rank for report in reports}
    if missing:
        ranks = ", ".join(map(str, sorted(missing)))
        return f"no report of rank {ranks}: was it killed before it exited?"
    if require is None:
        return ""
    lowest = min(reports, key=lambda report: report.fraction)
    if not lowest.reductions:
        return f"rank {lowest.rank} ran no reductions, so there was nothing to fuse"
    if lowest.fraction < require:
        return (
            f"rank {lowest.rank}: {lowest.summary()}, {lowest.fraction:.1%}; "
            f"expected at least --require {require:g}"
        )
    return ""
