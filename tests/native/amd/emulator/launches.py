"""Assembles whole kernels and runs them on several ranks, for tests of the memory model."""

from __future__ import annotations

import ctypes
import functools
import pathlib
import struct
import tempfile

import numpy as np

from .code_object import CodeObject
from .machine import LANES, Machine, Settings
from .toolchain import run_tool

MOST = 1_000_000


@functools.cache
def assembled(source: str) -> CodeObject:
    """Assembles and links a kernel for gfx942."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        arguments = ("-triple=amdgcn-amd-amdhsa", "-mcpu=gfx942", "-filetype=obj")
        run_tool("llvm-mc", *arguments, "-o", folder / "kernel.o", stdin=source)
        run_tool("ld.lld", "-shared", folder / "kernel.o", "-o", folder / "kernel.co")
        return CodeObject(folder / "kernel.co", "gfx942")


def run_kernels(
    sources: dict[int, str], settings: Settings, *, cached: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Runs a kernel of one wave on each rank; depending on the seed, the first rank is late.

    Args:
        sources: Each rank's kernel, whose arguments are the addresses of two parts of memory.
        settings: What the emulator does.
        cached: Whether the first part may be kept in the second cache.

    Returns:
        uint32 [1024] twice: both parts, which are zeros before. The second is not cached.
    """
    raw = (ctypes.c_uint32 * (2 * 1024 + 64))()
    first = (ctypes.addressof(raw) + 127) // 128 * 128
    machine = Machine(len(sources), settings)
    machine.add_region(first, 4096, cached=cached)
    machine.add_region(first + 4096, 4096, cached=False)
    parameters = struct.pack("<QQ", first, first + 4096)
    for rank, source in sources.items():
        code = assembled(source)
        machine.add_code(code)
        (name,) = code.kernels()
        machine.enqueue(rank, code.kernel(name), 1, LANES, parameters)
    # The others poll meanwhile.
    machine.delay(min(sources), 128 * (settings.seed % 4))
    machine.run(MOST)
    machine.close()
    begin = (first - ctypes.addressof(raw)) // 4
    words = np.frombuffer(raw, np.uint32)[begin : begin + 2048].copy()
    return words[:1024], words[1024:]
