"""Tests that Ctrl-C ends a command with a one-line message and exit code 130."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from limits import HANG_SECONDS

COMMAND = (sys.executable, "-c", "import allnorm_command as c; c.main()")
LONG = ("bench", "--device", "cpu", "--tp", "2", "--shapes", "512x4096,1024x4096,2048x4096")


def imports_torch(process: int) -> bool:
    return "libtorch_cpu" in pathlib.Path(f"/proc/{process}/maps").read_text()


def children(process: int) -> list[int]:
    return [
        int(child)
        for task in pathlib.Path(f"/proc/{process}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]


def starts_ranks(process: int) -> bool:
    return bool(children(process))


def has_ranks(process: int) -> bool:
    """Returns whether the fork server has started a rank."""
    return any(map(children, children(process)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("pause", [0.0, 0.3])
@pytest.mark.parametrize("begun", [imports_torch, starts_ranks, has_ranks])
def test_ctrl_c_at_any_moment(begun: Callable[[int], bool], pause: float) -> None:
    process = subprocess.Popen(
        [*COMMAND, *LONG],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a terminal sends the signal to all of a command's processes
    )
    deadline = time.monotonic() + HANG_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError):  # a process that has just ended
            if begun(process.pid):
                break
        time.sleep(0.01)
    time.sleep(pause)
    os.killpg(process.pid, signal.SIGINT)
    printed, errors = process.communicate(timeout=HANG_SECONDS)
    assert "Traceback" not in errors + printed, errors
    assert process.returncode == 130, errors
    assert errors.splitlines()[-1:] == ["allnorm: interrupted"]
