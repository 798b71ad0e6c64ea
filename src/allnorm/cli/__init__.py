"""The command line: options, tables, progress and pictures; what commands do is in libraries.

Nothing is imported here that the commands alone need: ranks import the program that started them.
"""

from __future__ import annotations

import sys

USAGE_ERROR = 2


def main() -> None:
    """Runs the command line; ends the process.

    Exit codes: 0 everything held, 1 something did not, 2 the command or the installation is wrong.
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
