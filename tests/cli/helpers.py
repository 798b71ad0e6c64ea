"""The command as a user types it, in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from limits import HANG_SECONDS


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # A terminal of the person who runs the tests must not fold the tables.
    environ = {**os.environ, "COLUMNS": "180", **environment}
    return subprocess.run(
        # -P: the package that is under test, not a checkout in the working directory.
        [sys.executable, "-P", "-m", "allnorm", *arguments],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        env=environ,
        check=False,
    )


def unwrapped(text: str) -> str:
    """Returns what a command wrote as one line, without the boxes that rich folds messages into.

    Where lines end depends on the length of paths in them.
    """
    return " ".join(re.sub("[\u2500-\u257f]", " ", text).split())


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
