"""Starts the `allnorm` command, so that Ctrl-C ends it with one line even while torch is imported.

A package of its own, because importing any module of `allnorm` imports torch, which takes seconds.
"""

from __future__ import annotations

import os
import signal
import types

MESSAGE = "allnorm: interrupted"
INTERRUPTED = 130  # the exit code of shells for a program that SIGINT ended


def end(number: int, frame: types.FrameType | None) -> None:
    """Ends the process in the middle of an import, without a traceback."""
    os.write(2, f"{MESSAGE}\n".encode())
    os._exit(INTERRUPTED)


def main() -> None:
    """Runs the command line and ends the process."""
    signal.signal(signal.SIGINT, end)
    from allnorm.cli import main as run

    run()
