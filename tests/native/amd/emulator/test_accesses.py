"""Tests each instruction that accesses memory on its own: where it reads and writes, and what."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from .assembler import Program
from .machine import LANES, Settings, StopError, Wave

ACTIVE = 0xF0F0_5A5A_0FF0_C3C7
WAIT = "s_waitcnt vmcnt(0) lgkmcnt(0)"
WORDS = {"dword": 1, "dwordx2": 2, "dwordx3": 3, "dwordx4": 4}
SPACES = ("global", "flat")
STEP = 16  # bytes from lane to lane
FILL = 0x5A5A_5A5A


def registers(first: int, words: int) -> str:
    """Returns the text of registers."""
    return f"v{first}" if words == 1 else f"v[{first}:{first + words - 1}]"


def lanes() -> list[int]:
    """Returns the active lanes."""
    return [lane for lane in range(LANES) if ACTIVE >> lane & 1]


class Bench:
    """A program with memory of 64 lanes times 16 bytes, and 64 bytes more on both sides.

    Attributes:
        wave: Holds the address of each lane's memory in v[2:3], 0xaa000000 + 256 k + lane in
            v[4 + k], and the address of the memory in s[2:3].
        memory: uint32 [word], a view without the margins.
    """

    def __init__(self, text: str, settings: Settings | None = None) -> None:
        self.program = Program([text], "gfx942", settings or Settings())
        self._bytes = (ctypes.c_uint32 * (4 * LANES + 32))()
        address = self.program.share(self._bytes, cached=True) + 64
        whole = np.frombuffer(self._bytes, np.uint32)
        whole[:] = FILL
        self.memory = whole[16:-16]
        self.margins = (whole[:16], whole[-16:])
        self.wave: Wave = self.program.wave()
        self.wave.set_scalar(126, ACTIVE, 2)
        self.wave.set_scalar(2, address, 2)
        places = address + STEP * np.arange(LANES, dtype=np.uint64)
        self.wave.vectors[2] = places & 0xFFFF_FFFF
        self.wave.vectors[3] = places >> 32
        for k in range(4):
            self.wave.vectors[4 + k] = 0xAA00_0000 + 256 * k + np.arange(LANES)
        self.wave.vectors[10] = STEP * np.arange(LANES)

    def run(self) -> None:
        """Runs the program; the second cache is written back by its last instructions."""
        self.program.run(0, self.wave)


BACK = "buffer_wbl2 sc0 sc1\ns_waitcnt vmcnt(0)"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("size", WORDS)
def test_loads(space: str, size: str) -> None:
    words = WORDS[size]
    off = ", off" if space == "global" else ""
    bench = Bench(f"{space}_load_{size} {registers(12, words)}, v[2:3]{off}\n{WAIT}")
    bench.memory[:] = np.arange(len(bench.memory)) + 0x1000
    bench.run()
    for k in range(4):
        for lane in range(LANES):
            loaded = k < words and lane in lanes()
            assert bench.wave.vectors[12 + k][lane] == (0x1000 + 4 * lane + k if loaded else 0)


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("size", WORDS)
def test_stores(space: str, size: str) -> None:
    words = WORDS[size]
    off = ", off" if space == "global" else ""
    bench = Bench(f"{space}_store_{size} v[2:3], {registers(4, words)}{off}\n{WAIT}\n{BACK}")
    bench.run()
    for lane in range(LANES):
        for k in range(4):
            stored = k < words and lane in lanes()
            wanted = 0xAA00_0000 + 256 * k + lane if stored else FILL
            assert bench.memory[4 * lane + k] == wanted
    assert all((margin == FILL).all() for margin in bench.margins)


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize(
    ("name", "offset", "loaded"),
    [
        ("load_ubyte", 1, lambda old, word: word >> 8 & 0xFF),
        ("load_ushort", 2, lambda old, word: word >> 16),
        ("load_short_d16_hi", 2, lambda old, word: old & 0xFFFF | word & 0xFFFF_0000),
    ],
)
def test_narrow_loads(space: str, name: str, offset: int, loaded: object) -> None:
    assert callable(loaded)
    off = ", off" if space == "global" else ""
    bench = Bench(f"{space}_{name} v12, v[2:3]{off} offset:{offset}\n{WAIT}")
    bench.memory[:] = 0x8765_4321 + np.arange(len(bench.memory)) * 0x0101_0101 % 0x0777_7777
    bench.wave.vectors[12] = 0x1111_2222
    bench.run()
    for lane in lanes():
        wanted = loaded(0x1111_2222, int(bench.memory[4 * lane]))
        assert bench.wave.vectors[12][lane] == wanted


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize(
    ("name", "mask", "shift"),
    [
        ("store_byte", 0xFF, 0),
        ("store_byte_d16_hi", 0xFF, 16),
        ("store_short", 0xFFFF, 0),
        ("store_short_d16_hi", 0xFFFF, 16),
    ],
)
def test_narrow_stores(space: str, name: str, mask: int, shift: int) -> None:
    off = ", off" if space == "global" else ""
    bench = Bench(f"{space}_{name} v[2:3], v4{off} offset:2\n{WAIT}\n{BACK}")
    bench.run()
    for lane in lanes():
        part = (0xAA00_0000 + lane) >> shift & mask
        assert bench.memory[4 * lane] == FILL & ~(mask << 16) | part << 16


@pytest.mark.parametrize("offset", [-16, 16])
def test_a_base_in_scalar_registers(offset: int) -> None:
    bench = Bench(f"global_load_dword v12, v10, s[2:3] offset:{offset}\n{WAIT}")
    bench.memory[:] = np.arange(len(bench.memory))
    bench.run()
    for lane in lanes():
        place = 4 * lane + offset // 4
        inside = 0 <= place < len(bench.memory)
        assert bench.wave.vectors[12][lane] == (place if inside else FILL)


def test_memory_outside_of_all_regions_cannot_be_accessed() -> None:
    bench = Bench(f"global_load_dword v12, v10, s[2:3] offset:2048\n{WAIT}")
    with pytest.raises(StopError, match="no region contains"):
        bench.run()
    bench = Bench(f"global_load_dwordx4 v[12:15], v10, s[2:3] offset:4\n{WAIT}")
    with pytest.raises(StopError, match="misaligned"):
        bench.run()


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize(("suffix", "words"), [("", 1), ("_x2", 2)])
@pytest.mark.parametrize("returns", [False, True])
def test_atomic_additions(space: str, suffix: str, words: int, returns: bool) -> None:
    to = f"{registers(12, words)}, " if returns else ""
    off = ", off" if space == "global" else ""
    flag = " sc0" if returns else ""
    bench = Bench(
        f"{space}_atomic_add{suffix} {to}v[2:3], {registers(4, words)}{off}{flag}\n{WAIT}"
    )
    bench.memory[:] = 0xFFFF_FFF0
    bench.run()
    full = (1 << 32 * words) - 1
    old = 0xFFFF_FFF0_FFFF_FFF0 & full
    for lane in lanes():
        added = (0xAA00_0000 + lane | (0xAA00_0100 + lane) << 32) & full
        now = sum(int(bench.memory[4 * lane + k]) << 32 * k for k in range(words))
        assert now == old + added & full
        got = sum(int(bench.wave.vectors[12 + k][lane]) << 32 * k for k in range(words))
        assert got == (old if returns else 0)


def test_lanes_add_to_the_same_word_one_after_the_other() -> None:
    bench = Bench(f"global_atomic_add v12, v9, v8, s[2:3] sc0\n{WAIT}")
    bench.wave.vectors[8] = 1
    bench.memory[0] = 5
    bench.run()
    assert bench.memory[0] == 5 + len(lanes())
    got = sorted(int(bench.wave.vectors[12][lane]) for lane in lanes())
    assert got == list(range(5, 5 + len(lanes())))


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize(("suffix", "words"), [("", 1), ("_x2", 2)])
def test_compare_and_swap(space: str, suffix: str, words: int) -> None:
    off = ", off" if space == "global" else ""
    data = registers(4, 2 * words)
    name = f"{space}_atomic_cmpswap{suffix}"
    bench = Bench(f"{name} {registers(12, words)}, v[2:3], {data}{off} sc0\n{WAIT}")
    for lane in range(LANES):  # every second lane has the expected value
        for k in range(words):
            expected = 0xAA00_0000 + 256 * (words + k) + lane
            bench.memory[4 * lane + k] = expected if lane % 2 else 7
    before = bench.memory.copy()
    bench.run()
    for lane in range(LANES):
        for k in range(words):
            swapped = lane in lanes() and lane % 2
            wanted = 0xAA00_0000 + 256 * k + lane if swapped else before[4 * lane + k]
            assert bench.memory[4 * lane + k] == wanted
            if lane in lanes():
                assert bench.wave.vectors[12 + k][lane] == before[4 * lane + k]


@pytest.mark.parametrize("size", WORDS)
def test_scratch(size: str) -> None:
    words = WORDS[size]
    data, back = registers(4, words), registers(12, words)
    bench = Bench(
        f"scratch_store_{size} off, {data}, s8 offset:8\n"
        f"scratch_load_{size} {back}, off, off offset:40\n{WAIT}"
    )
    bench.wave.set_scalar(8, 32)
    bench.run()
    for k in range(words):
        for lane in lanes():
            assert bench.wave.vectors[12 + k][lane] == 0xAA00_0000 + 256 * k + lane


def test_parts_of_words_in_scratch() -> None:
    bench = Bench(
        "scratch_store_dword v9, v4, off\nscratch_store_byte off, v8, off offset:1\n"
        "scratch_store_short off, v8, off offset:2\nscratch_load_dword v12, off, off\n"
        f"scratch_load_ubyte v13, off, off offset:1\n"
        f"scratch_load_ushort v14, off, off offset:2\n{WAIT}"
    )
    bench.wave.vectors[8] = 0x1234_5678
    bench.run()
    for lane in lanes():
        assert bench.wave.vectors[12][lane] == 0x5678_7800 | lane
        assert (bench.wave.vectors[13][lane], bench.wave.vectors[14][lane]) == (0x78, 0x5678)


def test_flat_accesses_reach_scratch() -> None:
    bench = Bench(
        "s_mov_b64 s[4:5], src_private_base\nv_mov_b32 v15, s5\nv_mov_b32 v14, 12\n"
        f"flat_store_dword v[14:15], v4\nscratch_load_dword v12, off, off offset:12\n{WAIT}"
    )
    bench.run()
    assert all(bench.wave.vectors[12][lane] == 0xAA00_0000 + lane for lane in lanes())


SHARED = [("b32", 1), ("b64", 2), ("b96", 3), ("b128", 4)]


@pytest.mark.parametrize(("size", "words"), SHARED)
def test_shared_memory(size: str, words: int) -> None:
    bench = Bench(
        f"ds_write_{size} v10, {registers(4, words)} offset:16\n"
        f"ds_read_{size} {registers(12, words)}, v10 offset:16\n{WAIT}"
    )
    bench.run()
    for lane in range(LANES):
        for k in range(words):
            active = lane in lanes()
            value = 0xAA00_0000 + 256 * k + lane if active else 0
            assert bench.wave.shared[4 * lane + 4 + k] == value
            assert bench.wave.vectors[12 + k][lane] == value


@pytest.mark.parametrize(
    ("name", "words", "unit"), [("2_b32", 1, 4), ("2_b64", 2, 8), ("2st64_b32", 1, 256)]
)
def test_two_places_of_shared_memory(name: str, words: int, unit: int) -> None:
    first, second = registers(4, words), registers(4 + words, words)
    bench = Bench(
        f"ds_write{name} v10, {first}, {second} offset0:1 offset1:3\n"
        f"ds_read{name} {registers(12, 2 * words)}, v10 offset0:1 offset1:3\n{WAIT}"
    )
    bench.wave.vectors[10] = 64 * (np.arange(LANES) % 8)
    bench.wave.set_scalar(126, 0xFF, 2)
    bench.run()
    for lane in range(8):
        for half, offset in enumerate((1, 3)):
            for k in range(words):
                value = 0xAA00_0000 + 256 * (half * words + k) + lane
                assert bench.wave.shared[(64 * lane + unit * offset) // 4 + k] == value
                assert bench.wave.vectors[12 + half * words + k][lane] == value


def test_permutation() -> None:
    bench = Bench(f"ds_bpermute_b32 v12, v13, v4 offset:4\n{WAIT}")
    bench.wave.vectors[13] = 4 * (np.arange(LANES) ^ 5)
    bench.run()
    for lane in range(LANES):
        source = ((lane ^ 5) + 1) % 64
        value = 0xAA00_0000 + source if source in lanes() else 0
        assert bench.wave.vectors[12][lane] == (value if lane in lanes() else 0)


@pytest.mark.parametrize("words", [1, 2, 4, 8, 16])
def test_scalar_loads(words: int) -> None:
    to = "s16" if words == 1 else f"s[16:{15 + words}]"
    size = "" if words == 1 else f"x{words}"
    bench = Bench(f"s_load_dword{size} {to}, s[2:3], 0x10\n{WAIT}")
    bench.memory[:] = np.arange(len(bench.memory)) + 9
    bench.run()
    assert [bench.wave.scalar(16 + k) for k in range(words)] == [13 + k for k in range(words)]


@pytest.mark.parametrize("name", ["s_memtime", "s_memrealtime"])
def test_clocks(name: str) -> None:
    bench = Bench(f"{name} s[16:17]\n{WAIT}")
    bench.wave.set_scalar(16, 1 << 63, 2)
    bench.run()
    assert bench.wave.scalar(16, 2) == bench.program.machine.clock


def instructions() -> set[str]:
    """Returns the instructions that this file tests."""
    sizes = {f"{what}_{size}" for what in ("load", "store") for size in WORDS}
    narrow = {"load_ubyte", "load_ushort", "load_short_d16_hi", "store_byte", "store_byte_d16_hi",
              "store_short", "store_short_d16_hi"}  # fmt: skip
    atomic = {f"atomic_{what}{size}" for what in ("add", "cmpswap") for size in ("", "_x2")}
    found = {f"{space}_{name}" for space in SPACES for name in sizes | narrow | atomic}
    parts = {"load_ubyte", "load_ushort", "store_byte", "store_short"}
    found |= {f"scratch_{name}" for name in sizes | parts}
    shared = [size for size, _ in SHARED] + ["2_b32", "2_b64", "2st64_b32"]
    for way in ("read", "write"):
        found |= {f"ds_{way}{size}" if size[0] == "2" else f"ds_{way}_{size}" for size in shared}
    found |= {f"s_load_dword{size}" for size in ("", "x2", "x4", "x8", "x16")}
    return found | {"ds_bpermute_b32", "s_memtime", "s_memrealtime", "buffer_wbl2"}
