"""Tests each vector instruction on integers on its own, with results computed in Python."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from .assembler import Program
from .lanes import M32, M64, integers
from .machine import LANES, Settings, StopError, Wave
from .test_scalar import signed

GFX942, GFX950 = "gfx942", "gfx950"
ACTIVE = 0xF0F0_5A5A_0FF0_C3C7  # active lanes of most tests
KEPT = 0x7777_0000  # what inactive lanes of a destination hold


def reversed_bits(value: int) -> int:
    """Returns the 32 bits in reverse."""
    return int(format(value, "032b")[::-1], 2)


def bytes_of(value: int, count: int = 8) -> bytes:
    """Returns the bytes, the lowest first."""
    return value.to_bytes(count, "little")


def permuted(a: int, b: int, chosen: int) -> int:
    """Returns the bytes of b and a that are chosen."""
    source = bytes_of(b, 4) + bytes_of(a, 4)
    signs = [0xFF if source[k] & 0x80 else 0 for k in (1, 3, 5, 7)]
    values = [*source, *signs, 0, *[0xFF] * 243]
    return int.from_bytes(bytes(values[k] for k in bytes_of(chosen, 4)), "little")


def extracted(value: int, first: int, length: int, *, is_signed: bool) -> int:
    """Returns a field of a value."""
    first, length = first % 32, length % 32
    number = (signed(value) if is_signed else value) >> first
    return (
        signed(number % 2**length, length) if is_signed and length else number % 2**length
    ) & M32


def table_lookup(table: int) -> Callable[[int, int, int], int]:
    """Returns the function of v_bitop3 with a truth table."""

    def function(a: int, b: int, c: int) -> int:
        result = 0
        for bit in range(32):
            row = (a >> bit & 1) * 4 + (b >> bit & 1) * 2 + (c >> bit & 1)
            result |= (table >> row & 1) << bit
        return result

    return function


def low24(value: int) -> int:
    """Returns the low 24 bits as a signed number."""
    return signed(value, 24)


# The text of an instruction whose result is in v0 (v[0:1]), and whose sources are in v2, v4 and v6;
# the widths of the sources and, last, of the result; the function of one lane.
Case = tuple[str, str, Callable[..., int]]
CASES: list[Case] = [
    ("v_mov_b32 v0, v2", "11", lambda a: a),
    ("v_mov_b64 v[0:1], v[2:3]", "22", lambda a: a),
    ("v_not_b32 v0, v2", "11", lambda a: M32 - a),
    ("v_and_b32 v0, v2, v4", "111", lambda a, b: a & b),
    ("v_or_b32 v0, v2, v4", "111", lambda a, b: a | b),
    ("v_xor_b32 v0, v2, v4", "111", lambda a, b: a ^ b),
    ("v_and_or_b32 v0, v2, v4, v6", "1111", lambda a, b, c: a & b | c),
    ("v_or3_b32 v0, v2, v4, v6", "1111", lambda a, b, c: a | b | c),
    ("v_bfi_b32 v0, v2, v4, v6", "1111", lambda a, b, c: a & b | (M32 - a) & c),
    ("v_bfe_u32 v0, v2, v4, v6", "1111", lambda a, b, c: extracted(a, b, c, is_signed=False)),
    ("v_bfe_i32 v0, v2, v4, v6", "1111", lambda a, b, c: extracted(a, b, c, is_signed=True)),
    ("v_bfrev_b32 v0, v2", "11", reversed_bits),
    ("v_alignbit_b32 v0, v2, v4, v6", "1111", lambda a, b, c: (a << 32 | b) >> c % 32 & M32),
    ("v_alignbyte_b32 v0, v2, v4, v6", "1111", lambda a, b, c: (a << 32 | b) >> c % 4 * 8 & M32),
    ("v_ffbh_u32 v0, v2", "11", lambda a: format(a, "032b").find("1") & M32),
    ("v_ffbl_b32 v0, v2", "11", lambda a: format(a, "032b")[::-1].find("1") & M32),
    ("v_bcnt_u32_b32 v0, v2, v4", "111", lambda a, b: format(a, "b").count("1") + b & M32),
    ("v_lshlrev_b32 v0, v2, v4", "111", lambda a, b: b * 2 ** (a % 32) & M32),
    ("v_lshrrev_b32 v0, v2, v4", "111", lambda a, b: b // 2 ** (a % 32)),
    ("v_ashrrev_i32 v0, v2, v4", "111", lambda a, b: signed(b) // 2 ** (a % 32) & M32),
    ("v_lshlrev_b64 v[0:1], v2, v[4:5]", "122", lambda a, b: b * 2 ** (a % 64) & M64),
    ("v_lshrrev_b64 v[0:1], v2, v[4:5]", "122", lambda a, b: b // 2 ** (a % 64)),
    ("v_ashrrev_i64 v[0:1], v2, v[4:5]", "122", lambda a, b: signed(b, 64) // 2 ** (a % 64) & M64),
    ("v_lshlrev_b16 v0, v2, v4", "111", lambda a, b: b * 2 ** (a % 16) % 65536),
    ("v_lshrrev_b16 v0, v2, v4", "111", lambda a, b: b % 65536 // 2 ** (a % 16)),
    ("v_lshl_or_b32 v0, v2, v4, v6", "1111", lambda a, b, c: a * 2 ** (b % 32) & M32 | c),
    ("v_lshl_add_u32 v0, v2, v4, v6", "1111", lambda a, b, c: a * 2 ** (b % 32) + c & M32),
    ("v_add_lshl_u32 v0, v2, v4, v6", "1111", lambda a, b, c: (a + b) * 2 ** (c % 32) & M32),
    ("v_lshl_add_u64 v[0:1], v[2:3], 4, v[6:7]", "2.22", lambda a, c: a * 16 + c & M64),
    ("v_lshl_add_u64 v[0:1], v[2:3], 0, v[6:7]", "2.22", lambda a, c: a + c & M64),
    ("v_add_u32 v0, v2, v4", "111", lambda a, b: a + b & M32),
    ("v_sub_u32 v0, v2, v4", "111", lambda a, b: a - b & M32),
    ("v_sub_u32_e64 v0, v2, v4 clamp", "111", lambda a, b: max(a - b, 0)),
    ("v_subrev_u32 v0, v2, v4", "111", lambda a, b: b - a & M32),
    ("v_add3_u32 v0, v2, v4, v6", "1111", lambda a, b, c: a + b + c & M32),
    ("v_xad_u32 v0, v2, v4, v6", "1111", lambda a, b, c: (a ^ b) + c & M32),
    ("v_add_u16 v0, v2, v4", "111", lambda a, b: (a + b) % 65536),
    ("v_sub_u16 v0, v2, v4", "111", lambda a, b: (a - b) % 65536),
    ("v_max_u32 v0, v2, v4", "111", max),
    ("v_min_u32 v0, v2, v4", "111", min),
    ("v_max_i32 v0, v2, v4", "111", lambda a, b: max(a, b, key=signed)),
    ("v_min_i32 v0, v2, v4", "111", lambda a, b: min(a, b, key=signed)),
    ("v_max_u16 v0, v2, v4", "111", lambda a, b: max(a % 65536, b % 65536)),
    ("v_min_u16 v0, v2, v4", "111", lambda a, b: min(a % 65536, b % 65536)),
    ("v_max3_u32 v0, v2, v4, v6", "1111", max),
    ("v_min3_u32 v0, v2, v4, v6", "1111", min),
    ("v_max3_i32 v0, v2, v4, v6", "1111", lambda *a: max(a, key=signed)),
    ("v_min3_i32 v0, v2, v4, v6", "1111", lambda *a: min(a, key=signed)),
    ("v_med3_u32 v0, v2, v4, v6", "1111", lambda *a: sorted(a)[1]),
    ("v_med3_i32 v0, v2, v4, v6", "1111", lambda *a: sorted(a, key=signed)[1]),
    ("v_mul_lo_u32 v0, v2, v4", "111", lambda a, b: a * b & M32),
    ("v_mul_hi_u32 v0, v2, v4", "111", lambda a, b: a * b >> 32),
    ("v_mul_hi_i32 v0, v2, v4", "111", lambda a, b: signed(a) * signed(b) >> 32 & M32),
    ("v_mul_u32_u24 v0, v2, v4", "111", lambda a, b: a % 2**24 * (b % 2**24) & M32),
    ("v_mul_i32_i24 v0, v2, v4", "111", lambda a, b: low24(a) * low24(b) & M32),
    ("v_mad_u32_u24 v0, v2, v4, v6", "1111", lambda a, b, c: a % 2**24 * (b % 2**24) + c & M32),
    ("v_mad_i32_i24 v0, v2, v4, v6", "1111", lambda a, b, c: low24(a) * low24(b) + c & M32),
    ("v_perm_b32 v0, v2, v4, v6", "1111", permuted),
    # Constants, and a scalar register, which holds 0x1234_5678.
    ("v_add_u32 v0, -16, v4", ".11", lambda b: b - 16 & M32),
    ("v_and_b32 v0, 0x12345678, v4", ".11", lambda b: b & 0x1234_5678),
    ("v_xor_b32 v0, s9, v4", ".11", lambda b: b ^ 0x1234_5678),
    # SDWA: parts of sources and of the destination.
    ("v_and_b32_sdwa v0, v2, v4 dst_sel:DWORD src0_sel:BYTE_1 src1_sel:WORD_1", "111",
     lambda a, b: bytes_of(a)[1] & b // 65536),
    ("v_max_u32_sdwa v0, v2, v4 dst_sel:DWORD src0_sel:WORD_0 src1_sel:BYTE_3", "111",
     lambda a, b: max(a % 65536, bytes_of(b)[3])),
    ("v_or_b32_sdwa v0, v2, v4 dst_sel:BYTE_2 dst_unused:UNUSED_PAD src0_sel:BYTE_0 "
     "src1_sel:BYTE_2", "111", lambda a, b: (bytes_of(a)[0] | bytes_of(b)[2]) << 16),
    ("v_add_u32_sdwa v0, v2, v4 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:DWORD "
     "src1_sel:DWORD", "111", lambda a, b: (a + b) % 65536 << 16 | KEPT % 65536),
]  # fmt: skip
CASES_950: list[Case] = [
    ("v_bitop3_b32 v0, v2, v4, v6 bitop3:0x1e", "1111", table_lookup(0x1E)),
    ("v_bitop3_b32 v0, v2, v4, v6 bitop3:0xd8", "1111", table_lookup(0xD8)),
]
# Instructions that also write a bit per lane to vcc: the result with its carry.
CARRIES: list[tuple[str, str, Callable[..., tuple[int, bool]]]] = [
    ("v_add_co_u32 v0, vcc, v2, v4", "111", lambda a, b, c: (a + b, a + b > M32)),
    ("v_sub_co_u32 v0, vcc, v2, v4", "111", lambda a, b, c: (a - b, a < b)),
    ("v_subrev_co_u32 v0, vcc, v2, v4", "111", lambda a, b, c: (b - a, b < a)),
    ("v_addc_co_u32 v0, vcc, v2, v4, vcc", "111", lambda a, b, c: (a + b + c, a + b + c > M32)),
    ("v_subb_co_u32 v0, vcc, v2, v4, vcc", "111", lambda a, b, c: (a - b - c, a < b + c)),
    ("v_subbrev_co_u32 v0, vcc, v2, v4, vcc", "111", lambda a, b, c: (b - a - c, b < a + c)),
    ("v_mad_u64_u32 v[0:1], vcc, v2, v4, v[6:7]", "1122",
     lambda a, b, d, c: (a * b + d, a * b + d > M64)),
    ("v_mad_i64_i32 v[0:1], vcc, v2, v4, v[6:7]", "1122",
     lambda a, b, d, c: (signed(a) * signed(b) + signed(d, 64),
                         not -(1 << 63) <= signed(a) * signed(b) + signed(d, 64) < 1 << 63)),
]  # fmt: skip
ORDERS: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
KINDS: dict[str, tuple[int, Callable[[int], int]]] = {
    "u32": (1, int),
    "i32": (1, signed),
    "u64": (2, int),
    "i64": (2, lambda a: signed(a, 64)),
    "u16": (1, lambda a: a % 65536),
}


def compare_text(order: str, kind: str) -> str:
    """Returns the text of a comparison of v2 and v4 (or pairs)."""
    a, b = ("v[2:3]", "v[4:5]") if KINDS[kind][0] == 2 else ("v2", "v4")
    return f"v_cmp_{order}_{kind}_e64 s[20:21], {a}, {b}"


LANE_TEXTS = [
    "v_cndmask_b32 v0, v2, v4, vcc",
    "v_mbcnt_lo_u32_b32 v0, v2, v4",
    "v_mbcnt_hi_u32_b32 v0, v2, v4",
    "v_readfirstlane_b32 s20, v2",
    "v_readlane_b32 s20, v2, s22",
    "v_writelane_b32 v0, s20, 41",
    "v_pk_mov_b32 v[0:1], v[2:3], v[4:5] op_sel:[1,0]",
    "v_pk_mov_b32 v[0:1], v[2:3], v[4:5] op_sel:[0,1]",
    "v_accvgpr_write_b32 a3, v2\nv_accvgpr_read_b32 v0, a3",
]
LANE_TEXTS_950 = ["v_permlane32_swap_b32 v0, v2", "v_permlane16_swap_b32 v0, v2"]


def set_vectors(wave: Wave, register: int, values: list[int], words: int) -> None:
    """Sets a register, or a pair, in all lanes."""
    for word in range(words):
        wave.vectors[register + word] = [value >> 32 * word & M32 for value in values]


def get_vectors(wave: Wave, register: int, words: int) -> list[int]:
    """Returns a register, or a pair, of all lanes."""
    parts = [[int(value) << 32 * word for value in wave.vectors[register + word]]
             for word in range(words)]  # fmt: skip
    return [sum(lane) for lane in zip(*parts, strict=True)]


def prepared(program: Program, widths: str, seed: int) -> tuple[Wave, list[list[int]]]:
    """Returns a wave with random sources, and the sources."""
    wave = program.wave(512)
    wave.set_scalar(9, 0x1234_5678)
    wave.set_scalar(126, ACTIVE, 2)
    sources = []
    for k, width in enumerate(widths[:-1]):
        if width == ".":
            continue
        values = integers(10 * seed + k, 32 * int(width))
        set_vectors(wave, 2 + 2 * k, values, int(width))
        sources.append(values)
    wave.vectors[0:2] = KEPT
    return wave, sources


def is_active(lane: int) -> bool:
    """Returns whether a lane is active in most tests."""
    return bool(ACTIVE >> lane & 1)


@pytest.fixture(scope="module")
def programs() -> dict[str, tuple[Program, int]]:
    """All programs, assembled once, by their text."""
    texts = [text for text, _, _ in CASES] + [text for text, _, _ in CARRIES] + LANE_TEXTS
    texts += [compare_text(order, kind) for order in ORDERS for kind in KINDS]
    found = {}
    for cpu, of in ((GFX942, texts), (GFX950, [text for text, _, _ in CASES_950] + LANE_TEXTS_950)):
        program = Program(of, cpu, Settings())
        found |= {text: (program, number) for number, text in enumerate(of)}
    return found


@pytest.mark.parametrize(("text", "widths", "function"), CASES + CASES_950)
def test_lanes(
    programs: dict[str, tuple[Program, int]],
    text: str,
    widths: str,
    function: Callable[..., int],
) -> None:
    program, number = programs[text]
    words = int(widths[-1])
    for seed in range(4):
        wave, sources = prepared(program, widths, seed)
        program.run(number, wave)
        kept = KEPT | KEPT << 32 if words == 2 else KEPT
        for lane, got in enumerate(get_vectors(wave, 0, words)):
            values = [source[lane] for source in sources]
            wanted = function(*values) if is_active(lane) else kept
            assert got == wanted, (lane, [hex(value) for value in values])


@pytest.mark.parametrize(("text", "widths", "function"), CARRIES)
def test_carries(
    programs: dict[str, tuple[Program, int]],
    text: str,
    widths: str,
    function: Callable[..., tuple[int, bool]],
) -> None:
    program, number = programs[text]
    words = int(widths[-1])
    carries = 0x1357_9BDF_0246_8ACE
    for seed in range(4):
        wave, sources = prepared(program, widths, seed)
        wave.set_scalar(106, carries, 2)
        program.run(number, wave)
        mask = wave.scalar(106, 2)
        for lane, got in enumerate(get_vectors(wave, 0, words)):
            if not is_active(lane):
                assert not mask >> lane & 1
                continue
            value, carry = function(*(source[lane] for source in sources), carries >> lane & 1)
            assert got == value & (1 << 32 * words) - 1
            assert bool(mask >> lane & 1) == carry, lane


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ORDERS)
def test_comparisons(programs: dict[str, tuple[Program, int]], order: str, kind: str) -> None:
    program, number = programs[compare_text(order, kind)]
    words, convert = KINDS[kind]
    for seed in range(4):
        wave, (a, b) = prepared(program, f"{words}{words}1", seed)
        a[8:24] = b[8:24]  # some are equal
        set_vectors(wave, 2, a, words)
        program.run(number, wave)
        holds = [ORDERS[order](convert(x), convert(y)) for x, y in zip(a, b, strict=True)]
        wanted = sum(1 << lane for lane in range(LANES) if holds[lane] and is_active(lane))
        assert wave.scalar(20, 2) == wanted


def test_conditional_mask(programs: dict[str, tuple[Program, int]]) -> None:
    program, number = programs["v_cndmask_b32 v0, v2, v4, vcc"]
    wave, (a, b) = prepared(program, "111", 1)
    chosen = 0x1357_9BDF_0246_8ACE
    wave.set_scalar(106, chosen, 2)
    program.run(number, wave)
    for lane in filter(is_active, range(LANES)):
        assert wave.vectors[0][lane] == (b if chosen >> lane & 1 else a)[lane]


@pytest.mark.parametrize(("half", "first"), [("lo", 0), ("hi", 32)])
def test_count_of_lanes_below(
    programs: dict[str, tuple[Program, int]], half: str, first: int
) -> None:
    program, number = programs[f"v_mbcnt_{half}_u32_b32 v0, v2, v4"]
    wave, (a, b) = prepared(program, "111", 1)
    program.run(number, wave)
    for lane in filter(is_active, range(LANES)):
        below = [bit for bit in range(32) if a[lane] >> bit & 1 and bit + first < lane]
        assert wave.vectors[0][lane] == len(below) + b[lane] & M32


def test_reads_of_lanes(programs: dict[str, tuple[Program, int]]) -> None:
    program, number = programs["v_readfirstlane_b32 s20, v2"]
    wave, (a,) = prepared(program, "11", 1)
    for active, lane in ((ACTIVE, 0), (1 << 63, 63), (0b1000, 3), (0, 0)):
        wave.set_scalar(126, active, 2)
        program.run(number, wave)
        assert wave.scalar(20) == a[lane]
    program, number = programs["v_readlane_b32 s20, v2, s22"]
    wave, (a,) = prepared(program, "11", 2)
    for lane in (0, 5, 63, 64 + 7):
        wave.set_scalar(22, lane)
        program.run(number, wave)
        assert wave.scalar(20) == a[lane % 64]


def test_write_of_a_lane(programs: dict[str, tuple[Program, int]]) -> None:
    program, number = programs["v_writelane_b32 v0, s20, 41"]
    wave = program.wave()
    wave.set_scalar(126, 0, 2)  # an inactive lane is written too
    wave.set_scalar(20, 77)
    program.run(number, wave)
    assert list(np.nonzero(wave.vectors[0])[0]) == [41]
    assert wave.vectors[0][41] == 77


@pytest.mark.parametrize(("first", "second"), [(1, 0), (0, 1)])
def test_move_of_a_pair(programs: dict[str, tuple[Program, int]], first: int, second: int) -> None:
    text = f"v_pk_mov_b32 v[0:1], v[2:3], v[4:5] op_sel:[{first},{second}]"
    program, number = programs[text]
    wave, _ = prepared(program, "221", 1)
    program.run(number, wave)
    for lane in filter(is_active, range(LANES)):
        assert wave.vectors[0][lane] == wave.vectors[2 + first][lane]
        assert wave.vectors[1][lane] == wave.vectors[4 + second][lane]


def test_accumulators(programs: dict[str, tuple[Program, int]]) -> None:
    program, number = programs["v_accvgpr_write_b32 a3, v2\nv_accvgpr_read_b32 v0, a3"]
    wave, (a,) = prepared(program, "11", 1)
    program.run(number, wave)
    assert all(wave.vectors[0][lane] == a[lane] for lane in filter(is_active, range(LANES)))


@pytest.mark.parametrize("width", [16, 32])
def test_swaps_of_lanes(programs: dict[str, tuple[Program, int]], width: int) -> None:
    program, number = programs[f"v_permlane{width}_swap_b32 v0, v2"]
    wave = program.wave()
    wave.vectors[0], wave.vectors[2] = np.arange(64), np.arange(100, 164)
    program.run(number, wave)
    for lane in range(LANES):
        upper = lane // width % 2
        first = 100 + lane - width if upper else lane
        second = 100 + lane if upper else lane + width
        assert (wave.vectors[0][lane], wave.vectors[2][lane]) == (first, second)
    wave.set_scalar(126, 1, 2)
    with pytest.raises(StopError, match="inactive"):
        program.run(number, wave)


def instructions() -> set[str]:
    """Returns the instructions that this file tests."""
    texts = [text for text, _, _ in CASES + CASES_950] + [text for text, _, _ in CARRIES]
    texts += LANE_TEXTS + LANE_TEXTS_950
    named = {line.split()[0] for text in texts for line in text.splitlines()}
    return named | {f"v_cmp_{order}_{kind}" for order in ORDERS for kind in KINDS}
