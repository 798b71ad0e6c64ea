"""The command line: one module per command, orchestration and presentation only.

What runs inside the ranks is in `allnorm.cli.ranks`.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from allnorm import __version__, config
from allnorm.cli import bench, doctor, e2e, trace, tune, verify
from allnorm.cli.output import bad, console
from allnorm.errors import AllnormError
from allnorm.testing import RankError

USAGE_ERROR = 2

app = typer.Typer(
    name="allnorm",
    help="All-reduce + residual add + RMSNorm in one launch: is it right here, and how fast?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(doctor.doctor)
app.command()(verify.verify)
app.command()(bench.bench)
app.command()(tune.tune)
app.command()(e2e.e2e)
app.command()(trace.trace)


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


def main() -> None:
    """Runs the command line; ends the process.

    Exit codes: 0 everything held, 1 something did not, 2 the command or the installation is wrong.
    """
    try:
        app()
    except RankError as error:
        console().print(bad(str(error)))
        sys.exit(1)
    except AllnormError as error:
        console().print(bad(str(error)))
        sys.exit(USAGE_ERROR)
