"""The program and its commands."""

from __future__ import annotations

import signal
import types
from collections.abc import Callable
from typing import Annotated

import typer

from allnorm import __version__, config
from allnorm.cli import USAGE_ERROR, bench, doctor, e2e, output, trace, tune, verify
from allnorm.cli.output import bad, console
from allnorm.errors import AllnormError
from allnorm.testing import RankError
from allnorm_command import INTERRUPTED, MESSAGE
from allnorm_command.overview import SETTINGS, VERSION

app = typer.Typer(**SETTINGS)
_EXAMPLES: dict[Callable[..., None], str] = {
    doctor.doctor: "allnorm doctor --tp 2",
    verify.verify: "allnorm verify --tp 2,4 --stress 10000",
    bench.bench: "allnorm bench --shapes 1x4096,8192x4096 --html bench.html",
    tune.tune: "allnorm tune --tp 2,4,8 --yes",
    e2e.e2e: "allnorm e2e --model llama-3.1-8b --batch 1,8,64",
    trace.trace: "allnorm trace --require 0.95 -- torchrun --nproc-per-node 2 generate.py",
}
for command, example in _EXAMPLES.items():
    app.command(epilog=f"Example: {example}")(command)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"allnorm {__version__}")
        raise typer.Exit


@app.callback()
def _before(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, **VERSION)] = False,
) -> None:
    config.read_settings()  # reports a misspelled environment variable before any rank starts


class _Interrupted(BaseException):
    """Ctrl-C. It is not KeyboardInterrupt, which typer would report in its own way."""


def _interrupt(number: int, frame: types.FrameType | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ends the ranks once, and in order
    raise _Interrupted


def run() -> int:
    """Runs the command of `sys.argv` and returns the exit code; may end the process instead."""
    before = signal.signal(signal.SIGINT, _interrupt)
    try:
        app()
    except _Interrupted:
        typer.echo(MESSAGE, err=True)
        return INTERRUPTED
    except SystemExit as end:
        if end.code or output.all_written():
            raise
        return 1
    except RankError as error:
        console().print(bad(str(error)))
        return 1
    except AllnormError as error:
        console().print(bad(str(error)))
        return USAGE_ERROR
    finally:
        signal.signal(signal.SIGINT, before)
    return 0
