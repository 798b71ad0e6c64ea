"""The command line: options, tables, progress and pictures. Other modules do the work.

This module imports nothing that only commands need, because every rank imports the program that
started it.
"""

from __future__ import annotations

import sys

USAGE_ERROR = 2


def main() -> None:
    """Runs the command line and ends the process.

    Exit codes: 0 success, 1 a check failed, 2 wrong arguments or a broken installation, 130 Ctrl-C.
    """
    try:
        from allnorm.cli import app
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("rich", "typer"):
            raise
        print(
            f"The allnorm command needs {missing}, which is not installed: "
            'pip install "allnorm[cli]"',
            file=sys.stderr,
        )
        sys.exit(USAGE_ERROR)
    sys.exit(app.run())
