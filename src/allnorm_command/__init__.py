"""Starts the `allnorm` command, so that Ctrl-C ends it with one line even while torch is imported.

A package of its own, because importing any module of `allnorm` imports torch, which takes seconds.
For the same reason it shows `allnorm --help` itself.
"""

from __future__ import annotations

import os
import signal
import sys
import types

MESSAGE = "allnorm: interrupted"
INTERRUPTED = 130  # the exit code of shells for a program that SIGINT ended


def end(number: int, frame: types.FrameType | None) -> None:
    """Ends the process in the middle of an import, without a traceback."""
    os.write(2, f"{MESSAGE}\n".encode())
    os._exit(INTERRUPTED)


def _completes() -> bool:
    """Returns whether a shell asks for completions, for which the commands are needed."""
    # allnorm.config, which reads all other variables, would import torch.
    return "_ALLNORM_COMPLETE" in os.environ  # noqa: TID251


def main() -> None:
    """Runs the command line and ends the process."""
    signal.signal(signal.SIGINT, end)
    if sys.argv[1:] in ([], ["--help"]) and not _completes():
        try:
            from allnorm_command.overview import program
        except ModuleNotFoundError:
            pass  # the command reports what is missing
        else:
            program()()
    from allnorm.cli import main as run

    run()
