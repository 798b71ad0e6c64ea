"""Helpers that run the command as a user types it, in a separate process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from limits import HANG_SECONDS


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # Tables must not be wrapped to the width of the terminal that runs the tests.
    environ = {**os.environ, "COLUMNS": "180", **environment}
    return subprocess.run(
        # -P: import the package under test, not a checkout in the working directory.
        [sys.executable, "-P", "-m", "allnorm", *arguments],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        env=environ,
        check=False,
    )


def unwrapped(text: str) -> str:
    """Returns a command's output as one line, without the boxes that rich draws.

    Line breaks depend on the length of paths in the output.
    """
    return " ".join(re.sub("[\u2500-\u257f]", " ", text).split())


def rows(path: Path) -> list[dict[str, Any]]:
    """Reads a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]
