"""The emulator: runs code objects of several ranks, or single instructions."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from typing import Any

import numpy as np

from .code_object import CodeObject, Encoded, Kernel
from .toolchain import emulator_library

LANES = 64


class StopError(RuntimeError):
    """The program did something that the emulator does not know or does not allow."""


class _Settings(ctypes.Structure):
    """struct Settings in memory.h."""

    _fields_ = (
        ("seed", ctypes.c_uint64),
        ("late_stores", ctypes.c_int32),
        ("late_loads", ctypes.c_int32),
        ("torn", ctypes.c_int32),
        ("caches", ctypes.c_int32),
        ("noise", ctypes.c_int32),
        ("checks_waits", ctypes.c_int32),
        ("schedule", ctypes.c_int32),
        ("quantum", ctypes.c_int32),
        ("endings", ctypes.c_int32),
    )


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a run; memory.h describes the effects.

    Attributes:
        seed: Runs with the same seed are equal.
        late_stores: Whether stores take effect late.
        late_loads: Whether loads read late.
        torn: Whether accesses take effect word by word and lane by lane.
        caches: Whether there are caches.
        noise: Whether approximate instructions are wrong in their last bit.
        checks_waits: Whether a register that is used before its load was waited for stops the run.
        schedule: Which waves run: Schedule in machine.h, or -1 to let the seed choose.
        quantum: The greatest number of instructions that a wave runs in a row.
        endings: Whether the end of a kernel writes caches back.
    """

    seed: int = 1
    late_stores: bool = True
    late_loads: bool = True
    torn: bool = True
    caches: bool = True
    noise: bool = True
    checks_waits: bool = True
    schedule: int = -1
    quantum: int = 60
    endings: bool = True


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(emulator_library()))
    pointer, u32, u64 = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "emu_last_error": (ctypes.c_char_p, []),
        "emu_create": (pointer, [ctypes.c_int, ctypes.POINTER(_Settings)]),
        "emu_destroy": (None, [pointer]),
        "emu_add_code": (ctypes.c_int, [pointer, ctypes.POINTER(Encoded), ctypes.c_size_t]),
        "emu_add_region": (ctypes.c_int, [pointer, u64, u64, ctypes.c_int]),
        "emu_enqueue": (
            None,
            [
                pointer,
                ctypes.c_int,
                ctypes.POINTER(Kernel),
                u32,
                u32,
                ctypes.c_char_p,
                ctypes.c_size_t,
            ],
        ),
        "emu_delay": (None, [pointer, ctypes.c_int, u64]),
        "emu_run": (ctypes.c_int, [pointer, u64]),
        "emu_instructions": (u64, [pointer]),
        "emu_clock": (u64, [pointer]),
        "emu_has_executed": (ctypes.c_int, [pointer, u64]),
        "emu_names": (None, [ctypes.c_char_p, ctypes.c_size_t]),
        "emu_lone_wave": (pointer, [pointer, u32]),
        "emu_run_alone": (ctypes.c_int, [pointer, pointer, u64]),
        "emu_vectors": (pointer, [pointer]),
        "emu_shared": (pointer, [pointer]),
        "emu_get_scalar": (u32, [pointer, u32]),
        "emu_set_scalar": (None, [pointer, u32, u32]),
        "emu_get_scc": (ctypes.c_int, [pointer]),
        "emu_set_scc": (None, [pointer, ctypes.c_int]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def known_instructions() -> frozenset[str]:
    """Returns the names of the instructions that the emulator knows."""
    text = ctypes.create_string_buffer(1 << 16)
    _library().emu_names(text, len(text))
    return frozenset(text.value.decode().split())


class Wave:
    """A single wave, for tests of single instructions.

    Attributes:
        vectors: uint32 [register, lane], a view of its vector registers.
        shared: uint32 [word], a view of its block's shared memory.
    """

    def __init__(self, machine: Machine, vectors: int) -> None:
        self._machine = machine
        self.handle = _library().emu_lone_wave(machine.handle, vectors)
        self.vectors = self._view(_library().emu_vectors(self.handle), vectors * LANES)
        self.vectors = self.vectors.reshape(vectors, LANES)
        self.shared = self._view(_library().emu_shared(self.handle), 1024)

    @staticmethod
    def _view(address: int, count: int) -> np.ndarray:
        return np.frombuffer((ctypes.c_uint32 * count).from_address(address), np.uint32)

    def scalar(self, number: int, words: int = 1) -> int:
        """Returns one or more scalar registers, the first in the lowest bits."""
        read = _library().emu_get_scalar
        return sum(int(read(self.handle, number + k)) << 32 * k for k in range(words))

    def set_scalar(self, number: int, value: int, words: int = 1) -> None:
        """Sets one or more scalar registers."""
        for k in range(words):
            _library().emu_set_scalar(self.handle, number + k, value >> 32 * k & 0xFFFFFFFF)

    @property
    def scc(self) -> bool:
        """The scalar condition code."""
        return bool(_library().emu_get_scc(self.handle))

    @scc.setter
    def scc(self, value: bool) -> None:
        _library().emu_set_scc(self.handle, value)

    def run(self, address: int) -> None:
        """Runs from `address` to s_endpgm.

        Raises:
            StopError: The program did something that is not allowed.
        """
        if _library().emu_run_alone(self._machine.handle, self.handle, address):
            raise StopError(_library().emu_last_error().decode())


class Machine:
    """The devices of all ranks."""

    def __init__(self, num_ranks: int, settings: Settings) -> None:
        """Creates devices without code."""
        given = _Settings(**dataclasses.asdict(settings))
        self.handle = _library().emu_create(num_ranks, ctypes.byref(given))
        self._kept: list[object] = []

    def close(self) -> None:
        """Frees the devices."""
        _library().emu_destroy(self.handle)
        self.handle = None

    def _check(self, failed: int) -> None:
        if failed:
            raise StopError(_library().emu_last_error().decode())

    def add_code(self, code: CodeObject) -> None:
        """Adds the instructions of a code object and makes its image readable."""
        self.add_instructions(code.encoded())
        self.add_region(code.base, code.size, cached=True)
        self._kept.append(code)

    def add_instructions(self, encoded: ctypes.Array[Encoded]) -> None:
        """Adds instructions."""
        self._check(_library().emu_add_code(self.handle, encoded, len(encoded)))

    def add_region(self, begin: int, num_bytes: int, *, cached: bool) -> None:
        """Lets kernels access memory of this process.

        Raises:
            StopError: The region overlaps another one.
        """
        if num_bytes:
            self._check(_library().emu_add_region(self.handle, begin, num_bytes, cached))

    def enqueue(
        self, rank: int, kernel: Kernel, num_blocks: int, num_threads: int, parameters: bytes
    ) -> None:
        """Enqueues a launch; the launches of a rank run one after the other."""
        _library().emu_enqueue(
            self.handle, rank, kernel, num_blocks, num_threads, parameters, len(parameters)
        )

    def delay(self, rank: int, turns: int) -> None:
        """Lets a rank start late."""
        _library().emu_delay(self.handle, rank, turns)

    def run(self, most_instructions: int) -> None:
        """Runs until all launches have ended.

        Raises:
            StopError: The program did something that is not allowed, or did not end.
        """
        self._check(_library().emu_run(self.handle, most_instructions))

    @property
    def instructions(self) -> int:
        """The number of instructions that waves have run."""
        return int(_library().emu_instructions(self.handle))

    def executed(self, code: CodeObject) -> set[int]:
        """Returns the addresses in a code object's image that waves have run."""
        ran = _library().emu_has_executed
        return {line.address for line in code.lines if ran(self.handle, code.base + line.address)}

    @property
    def clock(self) -> int:
        """The time in ticks of 10 ns."""
        return int(_library().emu_clock(self.handle))

    def wave(self, vectors: int = 32) -> Wave:
        """Creates a wave that belongs to no launch."""
        return Wave(self, vectors)
