"""The protocol's numbers, slot places and comparisons, computed by compiled `csrc` functions.

Models with few operations use halves of few units, and defects are switches in the sources
(`csrc/protocol/fault_switch.h`). Both are passed to the compiler as definitions.
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
        pytest.skip("no C++ compiler, which the model's arithmetic needs")
    path = pathlib.Path(_folder().name) / f"{'-'.join((str(half_units), *faults))}.so"
    command = [compiler, "-std=c++20", "-shared", "-fPIC", "-O1", str(SOURCE)]
    command += [f"-I{CSRC}", f"-I{CSRC / 'tests' / 'shim'}"]
    command += [f"-DALLNORM_HALF_UNITS={half_units}", "-o", str(path)]
    command += [f"-DALLNORM_FAULT_{fault}" for fault in faults]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return ctypes.CDLL(str(path))


@dataclasses.dataclass(frozen=True)
class SlotPlace:
    """The slots of one operation.

    Attributes:
        slots: The operation's unit or large phase.
        uses: How many earlier operations used the same slots.
        hands_back: Whether the operation returns slots.
        since: How many operations have passed since an earlier operation returned slots.
    """

    slots: Hashable
    uses: int
    hands_back: bool
    since: int


class Arithmetic:
    """The arithmetic in `csrc`, compiled with halves of `half_units` units and the given faults."""

    def __init__(self, half_units: int = 16, faults: tuple[str, ...] = ()) -> None:
        library = self._library = _library(half_units, faults)
        self.tag_slots: int = library.model_tag_slots()
        self.pull_phases: int = library.model_pull_phases()
        self.first_released: int = library.model_first_released()
        words = library.model_tested_words()
        self.tested_words = frozenset(word for word in range(4) if words >> word & 1)
        self.reached = self._compare(lambda seen, op: library.model_reached(seen, op))
        nan_e4m3, canonical = library.model_nan_e4m3(), library.model_canonical_word() % (1 << 32)
        # The word stored for NaN, keyed by the word's contents: 16- or 32-bit numbers, four e4m3
        # numbers, a 16-bit row's float32 scale, or four e2m1 numbers with their scale.
        # csrc/tests/cuda_accesses_test.cpp checks the kernels' stores.
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
        """Returns a function that compares word `index` of a tag with an operation's number."""
        return self._compare(lambda seen, op: self._library.model_is_tag_of(index, seen, op))

    def slot_places(
        self, operations: int, large: Iterable[int], small: Iterable[int]
    ) -> list[SlotPlace]:
        """Returns the slot places of consecutive operations.

        Operations in `small` take a unit, those in `large` a large phase, others half of a half.
        """
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
