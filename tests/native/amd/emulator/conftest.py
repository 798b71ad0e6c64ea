"""Skips the tests of the emulator where LLVM 22 is missing."""

from __future__ import annotations

import pytest

from native.amd.compiler import ToolMissingError, require_tools


@pytest.fixture(scope="package", autouse=True)
def tools() -> None:
    try:
        require_tools()
    except ToolMissingError as missing:
        pytest.skip(str(missing))
