"""Numbers, places of slots and comparisons of the protocol: functions of `csrc`, compiled.

A model of few operations uses halves of few units, and a defect is a switch of the sources
(`csrc/protocol/fault_switch.h`): both are definitions that the functions are compiled with.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Hashable, Iterable

import pytest

from native.accesses import CSRC

SOURCE = pathlib.Path(__file__).with_name("arithmetic.cpp")
Compare = Callable[[int, int], bool]


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


@functools.cache
def _library(half_units: int, faults: tuple[str, ...]) -> ctypes.CDLL:
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler: the model's arithmetic is that of csrc")
    path = pathlib.Path(_folder().name) / f"{'-'.join((str(half_units), *faults))}.so"
    command = [compiler, "-std=c++20", "-shared", "-fPIC", "-O1", f"-I{CSRC}", str(SOURCE)]
    command += [f"-DALLNORM_HALF_UNITS={half_units}", "-o", str(path)]
    command += [f"-DALLNORM_FAULT_{fault}" for fault in faults]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return ctypes.CDLL(str(path))


@dataclasses.dataclass(frozen=True)
class SlotPlace:
    """Where the slots of one operation are.

    Attributes:
        slots: which it uses, a unit or a large phase.
        uses: how many operations have used them before.
        hands_back: whether it hands slots back.
        since: how many operations lie between it and the last before it that has.
    """

    slots: Hashable
    uses: int
    hands_back: bool
    since: int


class Arithmetic:
    """That of `csrc`, with halves of so many units and the given faults."""

    def __init__(self, half_units: int = 16, faults: tuple[str, ...] = ()) -> None:
        library = self._library = _library(half_units, faults)
        self.tag_slots: int = library.model_tag_slots()
        self.pull_phases: int = library.model_pull_phases()
        self.first_released: int = library.model_first_released()
        words = library.model_tested_words()
        self.tested_words = frozenset(word for word in range(4) if words >> word & 1)
        self.reached = self._compare(lambda seen, op: library.model_reached(seen, op))
        nan_e4m3, canonical = library.model_nan_e4m3(), _word(library.model_canonical_word())
        # What is stored for a NaN, by what a word holds: numbers of 16 or 32 bits, four e4m3
        # numbers, the scale of a row of 16 bits as a float32, four e2m1 numbers and their scale.
        # tests/cuda_accesses_test.cpp looks at what the kernels store.
        self.nan_words = {
            "16": canonical,
            "32": canonical,
            "e4m3": nan_e4m3 * 0x01010101,
            "scale": 0x7FFF0000,
            "nvfp4": nan_e4m3 << 16,
        }

    def _compare(self, function: Callable[[int, int], int]) -> Compare:
        return functools.cache(
            lambda seen, op: bool(function(ctypes.c_uint32(seen).value, ctypes.c_uint32(op).value))
        )

    def is_tag_of(self, index: int) -> Compare:
        """Whether word `index` of a tag of one operation is taken for one of another."""
        return self._compare(lambda seen, op: self._library.model_is_tag_of(index, seen, op))

    def slot_places(
        self, operations: int, large: Iterable[int], small: Iterable[int]
    ) -> list[SlotPlace]:
        """Of that many operations: large ones, small ones, which take a unit, and others, which
        take half of a half."""
        places: list[SlotPlace] = []
        kept, large, small = 0, set(large), set(small)
        for k in range(operations):
            units = 1 if k in large | small else self._library.model_more_units()
            found = (ctypes.c_uint32 * 4)()
            self._library.model_slot_place(kept, units, k in large, found)
            index, hands_back, since, kept = found
            slots = ("large" if k in large else "unit", index)
            uses = sum(place.slots == slots for place in places)
            places.append(SlotPlace(slots, uses, bool(hands_back), since))
        return places


def _word(number: int) -> int:
    return number % (1 << 32)
