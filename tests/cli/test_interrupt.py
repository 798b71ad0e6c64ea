"""Tests that Ctrl-C ends a command with a one-line message and exit code 130."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from limits import HANG_SECONDS

COMMAND = (sys.executable, "-c", "import allnorm_command as c; c.main()")
LONG = ("bench", "--device", "cpu", "--tp", "2", "--shapes", "1x64,8x64,64x4096,512x4096")


# Seconds until Ctrl-C: while torch is imported, while ranks start, and while they measure.
@pytest.mark.parametrize("after", [0.5, 1.0, 2.0, 3.0, 4.5, 6.0])
def test_ctrl_c_at_any_moment(after: float) -> None:
    process = subprocess.Popen(
        [*COMMAND, *LONG],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a terminal sends the signal to all of a command's processes
    )
    time.sleep(after)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
    printed, errors = process.communicate(timeout=HANG_SECONDS)
    assert "Traceback" not in errors + printed
    if "as fast as" in printed and process.returncode == 0:
        pytest.skip(f"the command had ended after {after} s")
    assert process.returncode == 130, errors
    assert errors.splitlines()[-1:] == ["allnorm: interrupted"]
