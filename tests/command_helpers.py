"""The command as a user types it, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # A terminal of the person who runs the tests must not fold the tables.
    environ = {**os.environ, "COLUMNS": "180", **environment}
    return subprocess.run(
        # -P: the package that is under test, not a checkout in the working directory.
        [sys.executable, "-P", "-m", "allnorm", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env=environ,
        check=False,
    )


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
