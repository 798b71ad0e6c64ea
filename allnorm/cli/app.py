"""The program and its commands."""

from __future__ import annotations

from typing import Annotated

import typer

from allnorm import __version__, config
from allnorm.cli import USAGE_ERROR, bench, doctor, e2e, trace, tune, verify
from allnorm.cli.output import bad, console
from allnorm.errors import AllnormError
from allnorm.testing import RankError

app = typer.Typer(
    name="allnorm",
    help="All-reduce + residual add + RMSNorm in one launch: is it right here, and how fast?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (doctor.doctor, verify.verify, bench.bench, tune.tune, e2e.e2e, trace.trace):
    app.command()(command)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"allnorm {__version__}")
        raise typer.Exit


@app.callback()
def _before(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    config.read_settings()  # a misspelt variable is reported before any rank starts


def run() -> int:
    """Runs the command that was typed, which may end the process; returns the exit code."""
    try:
        app()
    except RankError as error:
        console().print(bad(str(error)))
        return 1
    except AllnormError as error:
        console().print(bad(str(error)))
        return USAGE_ERROR
    return 0
