"""Reads an AMD code object's machine code: kernels, their instructions, and their control flow.

Parses the output of `llvm-objdump`.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
from collections.abc import Callable

from native.paths import reachable

from .compiler import Resources, output_of, resources_of, tool

_SYMBOL = re.compile(r"^([0-9a-f]+) <(.*)>:$", re.MULTILINE)
_LINE = re.compile(
    r"\t(\S+)(?: +(.*?))? *// ([0-9A-F]+): [0-9A-F ]+(?:<(\S+?)(?:\+0x([0-9a-f]+))?>)?"
)
# The bytes of an access, by the end of its opcode.
_SIZES = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "x2": 8, "short": 2, "ushort": 2, "byte": 1}
_SIZES |= {"ubyte": 1, "sbyte": 1, "d16": 2, "hi": 2}


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One instruction, such as `global_store_dwordx2 v[4:5], v[0:1], off sc0 sc1`."""

    address: int
    opcode: str
    operands: str = ""
    target: int | None = None  # the address that a branch leads to

    def __str__(self) -> str:
        return f"{self.address:x}: {self.opcode} {self.operands}".rstrip()

    @property
    def _family(self) -> str:
        return self.opcode.partition("_")[0]

    @property
    def is_global(self) -> bool:
        """True if it accesses global memory, also by a generic address or a buffer."""
        return self._family in ("global", "flat") or (
            self._family == "buffer" and self.opcode.split("_")[1] in ("load", "store", "atomic")
        )

    @property
    def is_scratch(self) -> bool:
        return self._family == "scratch"

    @property
    def is_load(self) -> bool:
        return self.is_global and "_load_" in self.opcode

    @property
    def is_store(self) -> bool:
        return self.is_global and "_store_" in self.opcode

    @property
    def is_atomic(self) -> bool:
        return self.is_global and "_atomic_" in self.opcode

    @functools.cached_property
    def bits(self) -> frozenset[str]:
        """The cache bits after the operands: sc0, sc1 and nt."""
        return frozenset(self.operands.split()) & {"sc0", "sc1", "nt"}

    @property
    def is_system_wide(self) -> bool:
        """True if a load, a store, a write-back or an invalidation has system scope."""
        return self.bits == {"sc0", "sc1"}

    @property
    def access_bytes(self) -> int:
        """The number of bytes that a load or store moves per lane."""
        return _SIZES.get(self.opcode.rpartition("_")[2], 4)

    @property
    def most_outstanding(self) -> int | None:
        """The accesses of vector memory that may still be outstanding after a wait, or None."""
        found = re.search(r"vmcnt\((\d+)\)", self.operands) if self.opcode == "s_waitcnt" else None
        return int(found[1]) if found else None

    @property
    def waits_for_all(self) -> bool:
        """True if the instruction waits for all accesses of vector memory."""
        return self.most_outstanding == 0


@dataclasses.dataclass(frozen=True)
class Function:
    """A kernel, or a function that kernels call."""

    name: str
    instructions: tuple[Instruction, ...]
    needs: Resources | None = None  # None: not a kernel

    @functools.cached_property
    def _index(self) -> dict[int, int]:
        return {found.address: i for i, found in enumerate(self.instructions)}

    @functools.cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """The indices of the possible next instructions of each instruction.

        Every condition can have either value, and calls return.
        """
        return tuple(map(self._successors, range(len(self.instructions))))

    def _successors(self, index: int) -> tuple[int, ...]:
        found = self.instructions[index]
        following = (index + 1,) if index + 1 < len(self.instructions) else ()
        if found.opcode in ("s_endpgm", "s_setpc_b64"):
            return ()
        if found.opcode == "s_branch" or found.opcode.startswith("s_cbranch_"):
            if found.target not in self._index:
                raise NotImplementedError(f"a jump out of {self.name}: {found}")
            jump = (self._index[found.target],)
            return jump if found.opcode == "s_branch" else jump + following
        return following

    def reachable(
        self, start: int = 0, stop: Callable[[Instruction], bool] = lambda _: False
    ) -> set[int]:
        """Returns the indices reachable from `start`, up to the first `stop` on each path."""
        return reachable(self.instructions, self.successors, start, stop)

    def after(
        self, index: int, stop: Callable[[Instruction], bool] = lambda _: False
    ) -> list[Instruction]:
        """Returns what can follow an instruction, up to the first `stop` on each path."""
        seen: set[int] = set()
        for following in self.successors[index]:
            seen |= self.reachable(following, stop)
        return [self.instructions[i] for i in sorted(seen)]

    def __str__(self) -> str:
        return self.name


def parse(text: str, needs: dict[str, Resources]) -> list[Function]:
    """Parses the output of `llvm-objdump -d`."""
    parts = _SYMBOL.split(text)[1:]
    starts = {name: int(address, 16) for address, name in zip(parts[::3], parts[1::3], strict=True)}
    found = []
    for name, body in zip(parts[1::3], parts[2::3], strict=True):
        instructions = []
        for opcode, operands, address, symbol, offset in _LINE.findall(body):
            target = starts[symbol] + int(offset or "0", 16) if symbol else None
            instructions.append(Instruction(int(address, 16), opcode, operands, target))
        # After the end of a kernel, padding follows.
        last = max(
            i
            for i, x in enumerate(instructions)
            if x.opcode in ("s_endpgm", "s_setpc_b64", "s_branch")
        )
        found.append(Function(name, tuple(instructions[: last + 1]), needs.get(name)))
    return found


def disassemble(code_object: pathlib.Path) -> list[Function]:
    """Disassembles all functions of a code object, kernels included."""
    text = output_of(tool("llvm-objdump"), "--disassemble", str(code_object))
    return parse(text, resources_of(code_object))
