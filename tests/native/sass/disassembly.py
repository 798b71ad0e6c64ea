"""Reads a CUDA library's machine code: kernels, their instructions, and their control flow.

Parses the output of `cuobjdump` and `nvdisasm`, which come with the CUDA toolkit or as packages.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from native.paths import reachable

INSTRUCTION_BYTES = 16
JUMPS = ("BRA", "WARPSYNC")
GLOBAL_MEMORY = ("LD", "LDG", "LDGSTS", "ST", "STG", "ATOM", "ATOMG", "RED")


class ToolMissingError(Exception):
    """Raised if a CUDA toolkit program is not installed."""


def tool(name: str) -> str:
    """Returns the path of a CUDA toolkit program, from a package, the toolkit or PATH."""
    home = pathlib.Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    purelib = pathlib.Path(sysconfig.get_path("purelib"))
    for folder in (*purelib.glob("nvidia/*/bin"), home / "bin"):
        if os.access(folder / name, os.X_OK):
            return str(folder / name)
    found = shutil.which(name)
    if found is None:
        raise ToolMissingError(
            f"{name} is not installed: it comes with the CUDA toolkit, and as the package "
            f"nvidia-cuda-{name}"
        )
    return found


def output_of(*command: str, cwd: pathlib.Path | None = None) -> str:
    """Runs a program and returns its output. If it fails, raises RuntimeError."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return done.stdout


# Cached, because a library has a million instructions and a few hundred opcodes.
@functools.cache
def _parts(opcode: str) -> tuple[str, ...]:
    return tuple(opcode.split("."))


@dataclasses.dataclass(eq=False, slots=True)
class Instruction:
    """One instruction, such as `@!P0 STG.E.128.STRONG.SYS desc[UR4][R2.64],R4`."""

    address: int
    opcode: str
    operands: str = ""
    predicate: str = ""

    def __str__(self) -> str:
        words = (f"/*{self.address:04x}*/", self.predicate, self.opcode, self.operands)
        return " ".join(word for word in words if word)

    @property
    def parts(self) -> tuple[str, ...]:
        """The opcode and its modifiers."""
        return _parts(self.opcode)

    @property
    def verb(self) -> str:
        return self.parts[0]

    @property
    def target(self) -> int | None:
        """The target address of a control instruction, or None."""
        match = re.search(r"(?:^|,)0x([0-9a-f]+)$", self.operands)
        return int(match[1], 16) if match else None

    @property
    def is_global(self) -> bool:
        """Whether the instruction accesses global memory, possibly through a generic address."""
        return self.verb in GLOBAL_MEMORY

    @property
    def is_load(self) -> bool:
        return self.verb in ("LD", "LDG")

    @property
    def is_store(self) -> bool:
        return self.verb in ("ST", "STG")

    @property
    def is_system_wide(self) -> bool:
        """Whether the instruction is a strong access with system scope."""
        return self.parts[-2:] == ("STRONG", "SYS")

    @property
    def access_bytes(self) -> int:
        """The number of bytes that a load or store moves."""
        sizes = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
        return next((sizes[part] for part in self.parts if part in sizes), 4)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel and its subroutines."""

    name: str
    instructions: tuple[Instruction, ...]
    frame_bytes: int = 0

    def _barrier_targets(self, indices: set[int]) -> dict[str, set[int]]:
        """Maps convergence barriers that instructions at `indices` set up to where they end."""
        targets: dict[str, set[int]] = {}
        for instruction in (self.instructions[i] for i in indices):
            if instruction.verb == "BSSY" and instruction.target is not None:
                barrier = instruction.operands.split(",")[0]
                targets.setdefault(barrier, set()).add(instruction.target // INSTRUCTION_BYTES)
        return targets

    @functools.cached_property
    def _body(self) -> set[int]:
        # Subroutines use the same barriers, but only those that the body sets up count. The body
        # and its barriers depend on each other, so this repeats until nothing changes.
        body: set[int] = set()
        while True:
            barriers = self._barrier_targets(body)
            seen: set[int] = set()
            todo = [0]
            while todo:
                index = todo.pop()
                if index not in seen:
                    seen.add(index)
                    todo.extend(self._successors(index, barriers))
            if seen == body:
                return body
            body = seen

    @functools.cached_property
    def successors(self) -> dict[int, set[int]]:
        """Maps the index of each instruction in the body to the possible next instructions.

        Assumes that every predicate can have either value, and that calls return.
        """
        barriers = self._barrier_targets(self._body)
        return {i: self._successors(i, barriers) for i in self._body}

    def _successors(self, index: int, barriers: dict[str, set[int]]) -> set[int]:
        instruction = self.instructions[index]
        following = {index + 1} if index + 1 < len(self.instructions) else set()
        target = set()
        if instruction.verb in JUMPS and instruction.target is not None:
            target = {instruction.target // INSTRUCTION_BYTES}
        match instruction.verb:
            case "EXIT" | "RET" | "KILL":
                return following if instruction.predicate else set()
            case "BRA":
                # The condition can also be an operand.
                conditional = bool(instruction.predicate) or "," in instruction.operands
                return target | following if conditional else target
            case "WARPSYNC":
                return target | following
            case "BSYNC":
                # Continues at the target of a BSSY, nearly always the next instruction. The BSSY is
                # unknown, so all of them are possible.
                barrier = instruction.operands.split(",")[-1]
                where = barriers.get(barrier, set())
                return following if following <= where else where | following
            case "BRX" | "BRXU" | "JMP" | "JMX" | "JMXU":
                raise NotImplementedError(f"a jump to a computed address in {self}: {instruction}")
        return following

    def reachable(
        self, start: int = 0, stop: Callable[[Instruction], bool] = lambda _: False
    ) -> set[int]:
        """Returns the indices reachable from `start`, up to the first `stop` on each path.

        Does not enter subroutines.
        """
        return reachable(self.instructions, self.successors, start, stop)

    @functools.cached_property
    def body(self) -> tuple[Instruction, ...]:
        """The instructions outside subroutines, in address order."""
        return tuple(self.instructions[i] for i in sorted(self._body))

    @functools.cached_property
    def subroutines(self) -> tuple[Instruction, ...]:
        """The instructions of subroutines."""
        body = self._body
        return tuple(found for i, found in enumerate(self.instructions) if i not in body)

    def __str__(self) -> str:
        return self.name


def parse(text: str, frames: dict[str, int]) -> Iterator[Kernel]:
    """Parses the kernels in the output of `nvdisasm --emit-json`."""
    _, functions = json.loads(text)
    for function in functions:
        name = function["function-name"]
        if function["start"] != 0:
            raise NotImplementedError(f"{name} starts at {function['start']}; expected 0")
        instructions = tuple(
            Instruction(
                INSTRUCTION_BYTES * index,
                found["opcode"],
                found.get("operands", ""),
                found.get("predicate", ""),
            )
            for index, found in enumerate(function["sass-instructions"])
        )
        yield Kernel(name, instructions, frames.get(name, 0))


def frame_sizes(binary: pathlib.Path) -> dict[str, int]:
    """Returns each kernel's local memory per thread in bytes: spilled registers and arrays."""
    text = output_of(tool("cuobjdump"), "--dump-resource-usage", str(binary))
    found = re.findall(r"Function (\S+):\s+REG:\d+ STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    return {name: int(stack) + int(local) for name, stack, local in found}


def disassemble(cubin: pathlib.Path) -> list[Kernel]:
    """Disassembles all kernels of a cubin."""
    text = output_of(tool("nvdisasm"), "--emit-json", str(cubin))
    return list(parse(text, frame_sizes(cubin)))


def disassemble_library(
    library: pathlib.Path, architecture: str, folder: pathlib.Path
) -> list[Kernel]:
    """Disassembles all kernels of a library for one architecture; extracts cubins to `folder`."""
    output_of(tool("cuobjdump"), "--extract-elf", "all", str(library.absolute()), cwd=folder)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(disassemble, sorted(folder.glob(f"*.{architecture}.cubin")))
        return [kernel for kernels in found for kernel in kernels]
