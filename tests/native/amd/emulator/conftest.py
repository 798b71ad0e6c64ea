"""Skips the tests of the emulator where LLVM 22 is missing."""

from __future__ import annotations

import pytest

from .toolchain import ToolMissingError, tool


@pytest.fixture(scope="package", autouse=True)
def tools() -> None:
    """Skips the tests if a tool is not installed."""
    try:
        for name in ("clang++", "ld.lld", "llvm-mc", "llvm-objdump"):
            tool(name)
    except ToolMissingError as missing:
        pytest.skip(str(missing))
