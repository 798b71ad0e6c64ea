"""Tests each scalar instruction on its own, assembled, with results computed in Python."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from .assembler import Program
from .machine import Settings

M32, M64 = (1 << 32) - 1, (1 << 64) - 1
EXEC, VCC = 126, 106
EDGES32 = (0, 1, 2, 31, 32, 63, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFF, 0x1234_8765, 0x0008_0004)
EDGES64 = (*EDGES32, 1 << 32, 1 << 63, M64, 0x0123_4567_89AB_CDEF, 0xFEDC_BA98_0000_0001)

Result = tuple[int, bool | None]  # the value, and SCC or None if it keeps its value


def signed(value: int, bits: int = 32) -> int:
    """Returns the two's complement number."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def nonzero(value: int, bits: int = 32) -> Result:
    """Returns a value that sets SCC if it is not zero."""
    value &= (1 << bits) - 1
    return value, value != 0


def added(value: int, carry: bool) -> Result:
    """Returns a sum with its carry."""
    return value & M32, carry


def overflow(value: int) -> Result:
    """Returns a signed sum, and whether it does not fit."""
    return value & M32, not -(1 << 31) <= value < 1 << 31


def field(value: int, control: int, bits: int, *, is_signed: bool) -> Result:
    """Returns the bits of s_bfe."""
    first, length = control & (bits - 1), control >> 16 & 127
    text = format(value, f"0{bits}b")[::-1][first : first + length]
    if not text:
        return 0, False
    # A field that ends beyond the value is filled with zeros, or with the sign.
    filler = text[-1] if is_signed else "0"
    full = text.ljust(bits, filler) if is_signed else text
    return nonzero(int(full[::-1], 2), bits)


def pair(name: str) -> bool:
    """Returns whether an instruction has 64-bit results."""
    return name.endswith("64") and not name.startswith(("s_bcnt", "s_ff1", "s_flbit"))


def shift(value: int, count: int, bits: int, kind: str) -> Result:
    """Returns a shifted value."""
    count %= bits
    if kind == "lshl":
        return nonzero(value * 2**count, bits)
    number = signed(value, bits) if kind == "ashr" else value
    return nonzero(number // 2**count, bits)


BINARY: dict[str, Callable[[int, int], Result]] = {
    "s_add_i32": lambda a, b: overflow(signed(a) + signed(b)),
    "s_sub_i32": lambda a, b: overflow(signed(a) - signed(b)),
    "s_add_u32": lambda a, b: added(a + b, a + b > M32),
    "s_sub_u32": lambda a, b: added(a - b, a < b),
    "s_mul_i32": lambda a, b: (a * b & M32, None),
    "s_mul_hi_u32": lambda a, b: (a * b >> 32, None),
    "s_mul_hi_i32": lambda a, b: (signed(a) * signed(b) >> 32 & M32, None),
    "s_min_i32": lambda a, b: (min(signed(a), signed(b)) & M32, signed(a) < signed(b)),
    "s_max_i32": lambda a, b: (max(signed(a), signed(b)) & M32, signed(a) > signed(b)),
    "s_min_u32": lambda a, b: (min(a, b), a < b),
    "s_max_u32": lambda a, b: (max(a, b), a > b),
    "s_bfe_u32": lambda a, b: field(a, b, 32, is_signed=False),
    "s_bfe_i32": lambda a, b: field(a, b, 32, is_signed=True),
    "s_bfe_u64": lambda a, b: field(a, b, 64, is_signed=False),
    "s_bfe_i64": lambda a, b: field(a, b, 64, is_signed=True),
    "s_pack_ll_b32_b16": lambda a, b: (a % 65536 + b % 65536 * 65536, None),
    "s_pack_lh_b32_b16": lambda a, b: (a % 65536 + b // 65536 * 65536, None),
    "s_pack_hh_b32_b16": lambda a, b: (a // 65536 + b // 65536 * 65536, None),
    **{
        f"s_lshl{k}_add_u32": lambda a, b, k=k: added(a * 2**k + b, a * 2**k + b > M32)
        for k in range(1, 5)
    },
    **{
        f"s_{kind}_{letter}{bits}": lambda a, b, bits=bits, kind=kind: shift(a, b, bits, kind)
        for kind, letter in (("lshl", "b"), ("lshr", "b"), ("ashr", "i"))
        for bits in (32, 64)
    },
}
LOGIC: dict[str, Callable[[int, int], int]] = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "andn2": lambda a, b: a & (M64 - b),
    "orn2": lambda a, b: a | (M64 - b),
    "nand": lambda a, b: M64 - (a & b),
    "nor": lambda a, b: M64 - (a | b),
    "xnor": lambda a, b: M64 - (a ^ b),
}
for _name, _function in LOGIC.items():
    for _bits in (32, 64):
        BINARY[f"s_{_name}_b{_bits}"] = lambda a, b, f=_function, n=_bits: nonzero(f(a, b), n)

UNARY: dict[str, Callable[[int], Result]] = {
    "s_mov_b32": lambda a: (a, None),
    "s_mov_b64": lambda a: (a, None),
    "s_not_b32": lambda a: nonzero(M32 - a),
    "s_not_b64": lambda a: nonzero(M64 - a, 64),
    "s_abs_i32": lambda a: nonzero(abs(signed(a))),
    "s_brev_b32": lambda a: (int(format(a, "032b")[::-1], 2), None),
    "s_bcnt1_i32_b32": lambda a: nonzero(format(a, "b").count("1")),
    "s_bcnt1_i32_b64": lambda a: nonzero(format(a, "b").count("1")),
    "s_ff1_i32_b32": lambda a: (format(a, "b")[::-1].find("1") & M32, None),
    "s_ff1_i32_b64": lambda a: (format(a, "b")[::-1].find("1") & M32, None),
    "s_flbit_i32_b32": lambda a: (format(a, "032b").find("1") & M32, None),
    "s_flbit_i32_b64": lambda a: (format(a, "064b").find("1") & M32, None),
    "s_sext_i32_i8": lambda a: (signed(a, 8) & M32, None),
    "s_sext_i32_i16": lambda a: (signed(a, 16) & M32, None),
}
COMPARE: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "lg": lambda a, b: a != b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
}
# A program for each instruction that needs more than one; its registers before and after. SCC is
# register "scc".
State = dict[int | str, int]
PROGRAMS: list[tuple[str, State, State]] = [
    ("s_addc_u32 s0, s2, s4", {2: M32, 4: 0, "scc": 1}, {0: 0, "scc": 1}),
    ("s_addc_u32 s0, s2, s4", {2: 5, 4: 7, "scc": 0}, {0: 12, "scc": 0}),
    ("s_subb_u32 s0, s2, s4", {2: 5, 4: 5, "scc": 1}, {0: M32, "scc": 1}),
    ("s_subb_u32 s0, s2, s4", {2: 5, 4: M32, "scc": 1}, {0: 5, "scc": 1}),
    ("s_subb_u32 s0, s2, s4", {2: 9, 4: 5, "scc": 1}, {0: 3, "scc": 0}),
    ("s_movk_i32 s0, 0x8001", {}, {0: 0xFFFF_8001}),
    ("s_movk_i32 s0, 0x7fff", {}, {0: 0x7FFF}),
    ("s_addk_i32 s0, 0xffff", {0: 5}, {0: 4, "scc": 0}),
    ("s_addk_i32 s0, 1", {0: 0x7FFF_FFFF}, {0: 0x8000_0000, "scc": 1}),
    ("s_mulk_i32 s0, 0xfffd", {0: 7}, {0: -21 & M32}),
    ("s_cselect_b32 s0, s2, s4", {2: 1, 4: 2, "scc": 1}, {0: 1, "scc": 1}),
    ("s_cselect_b32 s0, s2, s4", {2: 1, 4: 2, "scc": 0}, {0: 2, "scc": 0}),
    ("s_cselect_b64 s[0:1], s[2:3], s[4:5]", {2: 1, 3: 8, 4: 2, 5: 9, "scc": 0}, {0: 2, 1: 9}),
    ("s_bitcmp0_b32 s2, 31", {2: 0x8000_0000, "scc": 1}, {"scc": 0}),
    ("s_bitcmp1_b32 s2, s4", {2: 0x8000_0000, 4: 63}, {"scc": 1}),
    ("s_bitset0_b32 s0, 4", {0: 0x1F}, {0: 0x0F}),
    ("s_bitset1_b32 s0, s2", {0: 0, 2: 33}, {0: 2}),
    ("s_cmpk_eq_i32 s2, 0xff00", {2: 0xFFFF_FF00}, {"scc": 1}),
    ("s_cmpk_lg_i32 s2, 0xff00", {2: 0xFFFF_FF00, "scc": 1}, {"scc": 0}),
    ("s_cmpk_gt_i32 s2, 0xff00", {2: 0}, {"scc": 1}),
    ("s_cmpk_ge_i32 s2, 0xff00", {2: 0x8000_0000, "scc": 1}, {"scc": 0}),
    ("s_cmpk_lt_i32 s2, 0xff00", {2: 0x8000_0000}, {"scc": 1}),
    ("s_cmpk_le_i32 s2, 5", {2: 5}, {"scc": 1}),
    ("s_cmpk_eq_u32 s2, 0xff00", {2: 0xFF00}, {"scc": 1}),
    ("s_cmpk_lg_u32 s2, 0xff00", {2: 0xFFFF_FF00}, {"scc": 1}),
    ("s_cmpk_gt_u32 s2, 0xff00", {2: 0xFFFF_FF00}, {"scc": 1}),
    ("s_cmpk_ge_u32 s2, 0xff00", {2: 0xFF00}, {"scc": 1}),
    ("s_cmpk_lt_u32 s2, 0xff00", {2: 0xFFFF_FF00, "scc": 1}, {"scc": 0}),
    ("s_cmpk_le_u32 s2, 0xff00", {2: 0xFF00}, {"scc": 1}),
    # Branches: the first that is not taken leaves a 1 in s0.
    ("s_branch 1\ns_mov_b32 s0, 1", {}, {0: 0}),
    ("s_cbranch_execz 1\ns_mov_b32 s0, 1", {EXEC: 0, EXEC + 1: 0}, {0: 0}),
    ("s_cbranch_execz 1\ns_mov_b32 s0, 1", {EXEC: 0, EXEC + 1: 1}, {0: 1}),
    ("s_cbranch_execnz 1\ns_mov_b32 s0, 1", {EXEC: 0, EXEC + 1: 1}, {0: 0}),
    ("s_cbranch_execnz 1\ns_mov_b32 s0, 1", {EXEC: 0, EXEC + 1: 0}, {0: 1}),
    ("s_cbranch_vccz 1\ns_mov_b32 s0, 1", {VCC: 0, VCC + 1: 0}, {0: 0}),
    ("s_cbranch_vccz 1\ns_mov_b32 s0, 1", {VCC: 0, VCC + 1: 1}, {0: 1}),
    ("s_cbranch_vccnz 1\ns_mov_b32 s0, 1", {VCC: 0, VCC + 1: 1}, {0: 0}),
    ("s_cbranch_vccnz 1\ns_mov_b32 s0, 1", {VCC: 0, VCC + 1: 0}, {0: 1}),
    ("s_cbranch_scc0 1\ns_mov_b32 s0, 1", {"scc": 0}, {0: 0}),
    ("s_cbranch_scc0 1\ns_mov_b32 s0, 1", {"scc": 1}, {0: 1}),
    ("s_cbranch_scc1 1\ns_mov_b32 s0, 1", {"scc": 1}, {0: 0}),
    ("s_cbranch_scc1 1\ns_mov_b32 s0, 1", {"scc": 0}, {0: 1}),
    # A loop: a branch backward.
    ("s_add_u32 s0, s0, 3\ns_cmp_lg_u32 s0, 12\ns_cbranch_scc1 65533", {}, {0: 12}),
    # Calls: over 8 bytes of instructions, and back to the address after the call.
    ("s_getpc_b64 s[2:3]\ns_add_u32 s2, s2, 12\ns_setpc_b64 s[2:3]\ns_mov_b32 s0, 1\n"
     "s_mov_b32 s4, 1", {}, {0: 0, 4: 1}),
    ("s_getpc_b64 s[2:3]\ns_add_u32 s2, s2, 12\ns_swappc_b64 s[6:7], s[2:3]\ns_mov_b32 s0, 1\n"
     "s_sub_u32 s4, s2, s6", {}, {0: 0, 4: 4}),
    ("s_nop 3\ns_sleep 1\ns_setprio 2\ns_mov_b32 s0, 1", {}, {0: 1}),
    ("s_barrier\ns_waitcnt vmcnt(0) expcnt(0) lgkmcnt(0)\ns_mov_b32 s0, 1", {}, {0: 1}),
]  # fmt: skip
for _name, _function in LOGIC.items():
    _before = 0xF0F0_1234_0000_FFFF
    _value = _function(0x0FF0_4321_FFFF_0000, _before) & M64
    PROGRAMS.append(
        (
            f"s_{_name}_saveexec_b64 s[0:1], s[2:3]",
            {2: 0xFFFF_0000, 3: 0x0FF0_4321, EXEC: _before & M32, EXEC + 1: _before >> 32},
            {0: _before & M32, 1: _before >> 32, EXEC: _value & M32, EXEC + 1: _value >> 32,
             "scc": int(_value != 0)},
        )
    )  # fmt: skip


def _text(name: str, sources: int) -> str:
    def register(number: int, wide: bool) -> str:
        return f"s[{number}:{number + 1}]" if wide else f"s{number}"

    wide = pair(name)
    first = wide or name.endswith("_b64")
    second = wide and name.removeprefix("s_").split("_")[0] not in ("lshl", "lshr", "ashr", "bfe")
    operands = [register(0, wide), register(2, first), register(4, second)][: 1 + sources]
    return f"{name} {', '.join(operands)}"


def _compares() -> list[str]:
    names = [f"s_cmp_{op}_{kind}" for op in COMPARE for kind in ("i32", "u32")]
    return [*names, "s_cmp_eq_u64", "s_cmp_lg_u64"]


@pytest.fixture(scope="module")
def programs() -> dict[str, tuple[Program, int]]:
    """All programs, assembled once, by their text."""
    texts = [_text(name, 2) for name in BINARY] + [_text(name, 1) for name in UNARY]
    for name in _compares():
        wide = name.endswith("64")
        texts.append(f"{name} s[2:3], s[4:5]" if wide else f"{name} s2, s4")
    texts += dict.fromkeys(text for text, _, _ in PROGRAMS)
    program = Program(texts, "gfx942", Settings())
    return {text: (program, number) for number, text in enumerate(texts)}


@pytest.mark.parametrize("name", BINARY)
def test_two_sources(programs: dict[str, tuple[Program, int]], name: str) -> None:
    program, number = programs[_text(name, 2)]
    wave = program.wave()
    edges = EDGES64 if name.endswith("64") else EDGES32
    controls = [(16 << 16) + 3, 40 << 16, (8 << 16) + 30, (70 << 16) + 1]
    extra = controls if "bfe" in name else []
    narrow = name.startswith(("s_lshl", "s_lshr", "s_ashr", "s_bfe"))
    for a, b in itertools.product(edges, (*(EDGES32 if narrow else edges), *extra)):
        for scc in (False, True):
            wave.set_scalar(2, a, 2)
            wave.set_scalar(4, b, 2)
            wave.scc = scc
            program.run(number, wave)
            value, condition = BINARY[name](a, b)
            assert wave.scalar(0, 2 if pair(name) else 1) == value, (hex(a), hex(b))
            assert wave.scc == (scc if condition is None else condition), (hex(a), hex(b))


@pytest.mark.parametrize("name", UNARY)
def test_one_source(programs: dict[str, tuple[Program, int]], name: str) -> None:
    program, number = programs[_text(name, 1)]
    wave = program.wave()
    for a in EDGES64 if name.endswith("64") else EDGES32:
        for scc in (False, True):
            wave.set_scalar(2, a, 2)
            wave.scc = scc
            program.run(number, wave)
            value, condition = UNARY[name](a)
            assert wave.scalar(0, 2 if pair(name) else 1) == value, hex(a)
            assert wave.scc == (scc if condition is None else condition), hex(a)


@pytest.mark.parametrize("name", _compares())
def test_comparisons(programs: dict[str, tuple[Program, int]], name: str) -> None:
    wide = name.endswith("64")
    program, number = programs[f"{name} s[2:3], s[4:5]" if wide else f"{name} s2, s4"]
    wave = program.wave()
    edges = EDGES64 if wide else EDGES32
    _, _, operation, kind = name.split("_")
    for a, b in itertools.product(edges, edges):
        wave.set_scalar(2, a, 2)
        wave.set_scalar(4, b, 2)
        program.run(number, wave)
        numbers = (signed(a), signed(b)) if kind == "i32" else (a, b)
        assert wave.scc == COMPARE[operation](*numbers), (hex(a), hex(b))


@pytest.mark.parametrize(("text", "before", "after"), PROGRAMS)
def test_programs(
    programs: dict[str, tuple[Program, int]], text: str, before: State, after: State
) -> None:
    program, number = programs[text]
    wave = program.wave()
    for register, value in before.items():
        if isinstance(register, str):
            wave.scc = bool(value)
        else:
            wave.set_scalar(register, value)
    program.run(number, wave)
    for register, value in after.items():
        got = wave.scc if isinstance(register, str) else wave.scalar(register)
        assert got == value, register


def instructions() -> set[str]:
    """Returns the instructions that this file tests."""
    texts = [text for text, _, _ in PROGRAMS]
    named = {line.split()[0] for text in texts for line in text.splitlines()}
    return {*BINARY, *UNARY, *_compares(), *named, "s_endpgm"}
