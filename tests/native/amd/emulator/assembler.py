"""Assembles instructions and runs them on a wave, for tests of their semantics."""

from __future__ import annotations

import ctypes
import pathlib
import tempfile
from collections.abc import Sequence

from .code_object import disassemble, encode_all
from .machine import Machine, Settings, Wave
from .toolchain import run_tool

BASE = 1 << 40  # an address at which no memory is


class Program:
    """Short programs, assembled together, each ended by s_endpgm.

    Attributes:
        names: The mnemonics of all programs as the disassembler prints them, without encodings.
    """

    def __init__(self, texts: Sequence[str], cpu: str, settings: Settings) -> None:
        """Assembles the programs for a GPU."""
        source = "".join(f"{text}\ns_endpgm\n" for text in texts)
        arguments = ("-triple=amdgcn-amd-amdhsa", f"-mcpu={cpu}", "-filetype=obj")
        with tempfile.NamedTemporaryFile(suffix=".o") as compiled:
            run_tool("llvm-mc", *arguments, "-o", compiled.name, stdin=source)
            lines = disassemble(pathlib.Path(compiled.name), cpu)
        encoded = encode_all(lines, BASE)
        self._entries, begins = [], True
        self.names = set()
        for line, instruction in zip(lines, encoded, strict=True):
            if begins:
                self._entries.append(BASE + line.address)
            begins = line.name == "s_endpgm"
            self.names.add(instruction.name.decode())
        if len(self._entries) != len(texts):
            raise ValueError(f"{len(texts)} programs, but {len(self._entries)} ends of programs")
        self.machine = Machine(1, settings)
        self.machine.add_instructions(encoded)

    def run(self, number: int, wave: Wave) -> None:
        """Runs a program on a wave.

        Raises:
            StopError: It did something that is not allowed.
        """
        wave.run(self._entries[number])

    def wave(self, vectors: int = 32) -> Wave:
        """Creates a wave whose registers are 0."""
        return self.machine.wave(vectors)

    def share(self, memory: ctypes.Array[ctypes.c_uint32], *, cached: bool) -> int:
        """Lets the programs access memory; returns its address."""
        address = ctypes.addressof(memory)
        self.machine.add_region(address, ctypes.sizeof(memory), cached=cached)
        return address
