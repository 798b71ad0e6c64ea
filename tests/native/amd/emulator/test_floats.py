"""Tests each vector instruction on floating-point numbers on its own.

Expected results are computed in exact fractions, or in numpy's float64 for special values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from .assembler import Program
from .lanes import M32, bits_of, float_sum, floats, integers, nearest, number, quotient, same_float
from .machine import LANES, Settings, Wave
from .test_vector import ACTIVE, GFX942, GFX950, KEPT, is_active, set_vectors

QUIET = Settings(noise=False)
OPERANDS = "fui"  # sources: float32, bits, or a signed number


def product_sum(a: float, b: float, c: float) -> float:
    """Returns a * b + c as v_fma_f32 does."""
    return float_sum(a, b, c)


def plus(a: float, b: float) -> float:
    """Returns a + b, rounded to float32."""
    return float_sum(1.0, a, b) if math.isfinite(a) and math.isfinite(b) else a + b


def times(a: float, b: float) -> float:
    """Returns a * b, rounded to float32."""
    exact = a * b  # exact in float64, except for special values
    if not math.isfinite(exact) or exact == 0:
        return exact
    return nearest(Fraction(exact))


def extreme(values: tuple[float, ...], pick: Callable[..., float]) -> float:
    """Returns the greatest or least number that is not NaN. -0 is less than +0."""
    numbers = [value for value in values if not math.isnan(value)]
    return pick(numbers, key=lambda v: (v, math.copysign(1, v))) if numbers else math.nan


def median(*values: float) -> float:
    """Returns the number in the middle; with a NaN the least number."""
    if any(map(math.isnan, values)):
        return extreme(values, min)
    return sorted(values, key=lambda v: (v, math.copysign(1, v)))[1]


def rounded(value: float, function: Callable[[float], float]) -> float:
    """Returns a whole number with the sign of the value."""
    if not math.isfinite(value):
        return value
    return math.copysign(function(value), value)


def scaled(value: float, power: int) -> float:
    """Returns value * 2**power, rounded to float32."""
    if value == 0 or not math.isfinite(value):
        return value
    if power > 400 or power < -400:
        return math.copysign(math.inf if power > 0 else 0.0, value)
    return nearest(Fraction(value) * Fraction(2) ** power)


def to_whole(value: float, least: int, most: int) -> int:
    """Returns a whole number within limits; 0 for NaN."""
    if math.isnan(value):
        return 0
    return min(max(int(value), least), most) if math.isfinite(value) else (
        most if value > 0 else least
    )  # fmt: skip


def to_half(value: float) -> int:
    """Returns the bits of the nearest float16."""
    if math.isfinite(value) and value != 0:
        value = nearest(Fraction(value), significand=11, least=-24, most=15)
    with np.errstate(all="ignore"):
        return int(np.float16(value).view(np.uint16))


def half(bits: int) -> float:
    """Returns a float16 from its bits."""
    return float(np.uint16(bits & 0xFFFF).view(np.float16))


def to_brain(value: float) -> int:
    """Returns the bits of the nearest bfloat16."""
    if math.isfinite(value) and value != 0:
        value = nearest(Fraction(value), significand=8, least=-133)
    return bits_of(value) >> 16


def to_e4m3(value: float) -> int:
    """Returns the bits of the nearest e4m3 of the OCP, by search among all of them."""
    sign = 0x80 if math.copysign(1, value) < 0 else 0
    if math.isnan(value):
        return 0x7F
    size = abs(value)
    values = [(code & 7 | (8 if code > 7 else 0)) * 2.0 ** (max(code >> 3, 1) - 10)
              for code in range(127)]  # fmt: skip
    if size > 464:  # 464 is halfway to the next number, which does not exist
        return sign | 0x7F
    if size == 464:
        return sign | 0x7E
    nearby = sorted(range(127), key=lambda code: (abs(values[code] - size), code & 1))
    return sign | nearby[0]


# The text; the types of the sources in v2, v4 and v6; whether the result is a float32; the
# function of one lane.
Case = tuple[str, str, bool, Callable[..., float]]
CASES: list[Case] = [
    ("v_add_f32 v0, v2, v4", "ff", True, plus),
    ("v_sub_f32 v0, v2, v4", "ff", True, lambda a, b: plus(a, -b)),
    ("v_subrev_f32 v0, v2, v4", "ff", True, lambda a, b: plus(b, -a)),
    ("v_mul_f32 v0, v2, v4", "ff", True, times),
    ("v_fma_f32 v0, v2, v4, v6", "fff", True, product_sum),
    ("v_fmac_f32 v0, v2, v4", "ff", True, lambda a, b: product_sum(a, b, number(KEPT))),
    ("v_fmamk_f32 v0, v2, 0x4f800000, v6", "f.f", True, lambda a, c: product_sum(a, 2.0**32, c)),
    ("v_fmaak_f32 v0, v2, v4, 0x4f800000", "ff", True, lambda a, b: product_sum(a, b, 2.0**32)),
    ("v_max_f32 v0, v2, v4", "ff", True, lambda *a: extreme(a, max)),
    ("v_min_f32 v0, v2, v4", "ff", True, lambda *a: extreme(a, min)),
    ("v_max3_f32 v0, v2, v4, v6", "fff", True, lambda *a: extreme(a, max)),
    ("v_min3_f32 v0, v2, v4, v6", "fff", True, lambda *a: extreme(a, min)),
    ("v_med3_f32 v0, v2, v4, v6", "fff", True, median),
    ("v_trunc_f32 v0, v2", "f", True, lambda a: rounded(a, math.trunc)),
    ("v_floor_f32 v0, v2", "f", True, lambda a: rounded(a, math.floor)),
    ("v_ceil_f32 v0, v2", "f", True, lambda a: rounded(a, math.ceil)),
    ("v_rndne_f32 v0, v2", "f", True, lambda a: rounded(a, round)),
    ("v_ldexp_f32 v0, v2, v4", "fi", True, scaled),
    ("v_add_f32_e64 v0, -v2, |v4|", "ff", True, lambda a, b: plus(-a, abs(b))),
    ("v_mul_f32 v0, 2.0, v4", ".f", True, lambda b: times(2.0, b)),
    ("v_add_f32 v0, -0.5, v4", ".f", True, lambda b: plus(-0.5, b)),
    # The exact results: without noise, approximate instructions are rounded to nearest.
    ("v_rcp_f32 v0, v2", "f", True, lambda a: quotient(1.0, a)),
    ("v_rcp_iflag_f32 v0, v2", "f", True, lambda a: quotient(1.0, a)),
    ("v_rsq_f32 v0, v2", "f", True, lambda a: near(lambda x: 1 / np.sqrt(x), a)),
    ("v_sqrt_f32 v0, v2", "f", True, lambda a: near(np.sqrt, a)),
    ("v_exp_f32 v0, v2", "f", True, lambda a: near(np.exp2, a)),
    ("v_log_f32 v0, v2", "f", True, lambda a: near(np.log2, a)),
    ("v_cvt_f32_u32 v0, v2", "u", True, lambda a: nearest(Fraction(a)) if a else 0.0),
    ("v_cvt_f32_i32 v0, v2", "i", True, lambda a: nearest(Fraction(a)) if a else 0.0),
    ("v_cvt_u32_f32 v0, v2", "f", False, lambda a: to_whole(a, 0, M32)),
    ("v_cvt_i32_f32 v0, v2", "f", False, lambda a: to_whole(a, -(1 << 31), (1 << 31) - 1) & M32),
    ("v_cvt_f32_f16 v0, v2", "u", True, half),
    ("v_cvt_f16_f32 v0, v2", "f", False, to_half),
    ("v_cvt_f32_ubyte0 v0, v2", "u", True, lambda a: float(a % 256)),
    ("v_cvt_f32_ubyte1 v0, v2", "u", True, lambda a: float(a >> 8 & 255)),
    ("v_cvt_f32_ubyte2 v0, v2", "u", True, lambda a: float(a >> 16 & 255)),
    ("v_cvt_f32_ubyte3 v0, v2", "u", True, lambda a: float(a >> 24)),
    ("v_pack_b32_f16 v0, v2, v4 op_sel:[1,0,0]", "uu", False,
     lambda a, b: a >> 16 | b % 65536 << 16),
    ("v_fma_mix_f32 v0, v2, v4, v6 op_sel:[0,1,0] op_sel_hi:[0,1,0]", "fuf", True,
     lambda a, b, c: product_sum(a, half(b >> 16), c)),
    ("v_fma_mixlo_f16 v0, v2, v4, v6", "fff", False,
     lambda a, b, c: mixed(a, b, c) | KEPT & 0xFFFF0000),
    ("v_fma_mixhi_f16 v0, v2, v4, v6 op_sel:[0,1,0] op_sel_hi:[0,1,0]", "fuf", False,
     lambda a, b, c: mixed(a, half(b >> 16), c) << 16 | KEPT & 0xFFFF),
]  # fmt: skip
CASES_950: list[Case] = [
    ("v_cvt_pk_bf16_f32 v0, v2, v4", "ff", False, lambda a, b: to_brain(a) | to_brain(b) << 16),
    ("v_cvt_pk_fp8_f32 v0, v2, v4", "ff", False,
     lambda a, b: to_e4m3(a) | to_e4m3(b) << 8 | KEPT & 0xFFFF0000),
    ("v_cvt_pk_fp8_f32 v0, v2, v4 op_sel:[0,0,1]", "ff", False,
     lambda a, b: (to_e4m3(a) | to_e4m3(b) << 8) << 16 | KEPT & 0xFFFF),
]  # fmt: skip
HALVES = {"v_cvt_f16_f32": 1, "v_fma_mixlo_f16": 1, "v_fma_mixhi_f16": 2, "v_cvt_pk_bf16_f32": 3}
PACKED = {
    "v_pk_add_f32 v[0:1], v[2:3], v[4:5]": lambda a, b, c: plus(a, b),
    "v_pk_mul_f32 v[0:1], v[2:3], v[4:5] op_sel_hi:[0,1]": lambda a, b, c: times(a, b),
    "v_pk_add_f32 v[0:1], v[2:3], v[4:5] op_sel:[1,0] op_sel_hi:[0,1]": lambda a, b, c: plus(a, b),
    "v_pk_fma_f32 v[0:1], v[2:3], v[4:5], v[6:7]": product_sum,
    "v_pk_mul_f32 v[0:1], v[2:3], v[4:5] neg_lo:[1,0] neg_hi:[0,1]": lambda a, b, c: times(a, b),
}
CLASS = "v_cmp_class_f32_e64 s[20:21], v2, v4"
ORDERS: dict[str, Callable[[float, float], bool]] = {
    "eq": lambda a, b: a == b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lg": lambda a, b: a < b or a > b,
    "o": lambda a, b: not math.isnan(a) and not math.isnan(b),
    "neq": lambda a, b: a != b,
    "nlt": lambda a, b: not a < b,
    "nle": lambda a, b: not a <= b,
    "ngt": lambda a, b: not a > b,
    "nge": lambda a, b: not a >= b,
    "nlg": lambda a, b: not (a < b or a > b),
    "u": lambda a, b: math.isnan(a) or math.isnan(b),
}
# A correctly rounded division, as the compiler writes it: v0 = v2 / v4.
DIVISION = """v_div_scale_f32 v8, s[20:21], v4, v4, v2
v_div_scale_f32 v9, vcc, v2, v4, v2
v_rcp_f32 v10, v8
v_fma_f32 v11, -v8, v10, 1.0
v_fma_f32 v10, v11, v10, v10
v_mul_f32 v11, v9, v10
v_fma_f32 v12, -v8, v11, v9
v_fma_f32 v11, v12, v10, v11
v_fma_f32 v8, -v8, v11, v9
v_div_fmas_f32 v8, v8, v10, v11
v_div_fixup_f32 v0, v8, v4, v2"""
STEPS = {
    "scale": "v_div_scale_f32 v0, vcc, v2, v4, v6",
    "fmas": "v_div_fmas_f32 v0, v2, v4, v6",
    "fixup": "v_div_fixup_f32 v0, v2, v4, v6",
}


def near(function: Callable[[np.ndarray], np.ndarray], a: float) -> float:
    """Returns a function's value, computed in numpy's longest type and rounded to float32."""
    with np.errstate(all="ignore"):
        value = function(np.array(a, np.longdouble))
    exact = float(value)
    return nearest(Fraction(exact)) if math.isfinite(exact) and exact != 0 else exact


def mixed(a: float, b: float, c: float) -> int:
    """Returns the bits of a * b + c, rounded once to float16."""
    if all(map(math.isfinite, (a, b, c))):
        exact = Fraction(a) * Fraction(b) + Fraction(c)
        if exact != 0:
            value = nearest(exact, significand=11, least=-24, most=15)
            if value == 0:
                value = math.copysign(0.0, exact)
            return int(np.float16(value).view(np.uint16))
    return to_half(float_sum(a, b, c))


@pytest.fixture(scope="module")
def programs() -> dict[str, tuple[Program, int]]:
    """All programs, assembled once, by their text."""
    texts = [text for text, _, _, _ in CASES] + [*PACKED, CLASS, DIVISION, *STEPS.values()]
    texts += [f"v_cmp_{order}_f32_e64 s[20:21], v2, v4" for order in ORDERS]
    found = {}
    for cpu, of in ((GFX942, texts), (GFX950, [text for text, _, _, _ in CASES_950])):
        program = Program(of, cpu, QUIET)
        found |= {text: (program, number) for number, text in enumerate(of)}
    return found


def prepared(program: Program, types: str, seed: int) -> tuple[Wave, list[list[float]]]:
    """Returns a wave with sources, and the sources as numbers."""
    wave = program.wave()
    wave.set_scalar(126, ACTIVE, 2)
    sources: list[list[float]] = []
    for k, kind in enumerate(types):
        if kind == ".":
            continue
        values = floats(9 * seed + k) if kind == "f" else integers(9 * seed + k)
        if kind == "i":
            values = [value if i % 2 else value % 300 - 150 & M32 for i, value in enumerate(values)]
        set_vectors(wave, 2 + 2 * k, values, 1)
        convert = {"f": number, "u": int, "i": lambda v: v - (v >> 31 << 32)}[kind]
        sources.append([convert(value) for value in values])
    wave.vectors[0] = KEPT
    return wave, sources


def same_halves(got: int, wanted: int, halves: int, brain: bool) -> bool:
    """Returns whether words are equal, where all NaNs of the halves that are results are equal."""
    for k in range(2):
        a, b = got >> 16 * k & 0xFFFF, wanted >> 16 * k & 0xFFFF
        infinity = 0x7F80 if brain else 0x7C00
        both_nan = a & 0x7FFF > infinity and b & 0x7FFF > infinity
        if a != b and not (halves >> k & 1 and both_nan):
            return False
    return True


@pytest.mark.parametrize(("text", "types", "is_float", "function"), CASES + CASES_950)
def test_lanes(
    programs: dict[str, tuple[Program, int]],
    text: str,
    types: str,
    is_float: bool,
    function: Callable[..., float],
) -> None:
    program, place = programs[text]
    for seed in range(6):
        wave, sources = prepared(program, types, seed)
        program.run(place, wave)
        for lane in range(LANES):
            got = int(wave.vectors[0][lane])
            values = [source[lane] for source in sources]
            if not is_active(lane):
                assert got == KEPT
                continue
            wanted = function(*values)
            name = text.split()[0]
            if is_float:
                assert same_float(got, bits_of(wanted)), (lane, values, hex(got), wanted)
            elif name in HALVES:
                brain = "bf16" in name
                assert same_halves(got, int(wanted), HALVES[name], brain), (lane, values, hex(got))
            elif "fp8" in name:
                for k in range(4):  # the sign of a NaN is free
                    a, b = got >> 8 * k & 255, int(wanted) >> 8 * k & 255
                    assert a == b or a & b & 127 == 127, (lane, values, hex(got))
            else:
                assert got == wanted, (lane, values, hex(got))


@pytest.mark.parametrize("text", PACKED)
def test_pairs(programs: dict[str, tuple[Program, int]], text: str) -> None:
    def modifier(name: str, default: list[int]) -> list[int]:
        found = [part for part in text.split() if part.startswith(f"{name}:")]
        return [int(bit) for bit in found[0][len(name) + 2 : -1].split(",")] if found else default

    program, place = programs[text]
    words = (modifier("op_sel", [0] * 3), modifier("op_sel_hi", [1] * 3))
    signs = (modifier("neg_lo", [0] * 3), modifier("neg_hi", [0] * 3))
    wave = program.wave()
    values = {register: floats(register) for register in range(2, 8)}
    for register, lanes in values.items():
        set_vectors(wave, register, lanes, 1)
    program.run(place, wave)
    for lane in range(LANES):
        for result in range(2):
            sources = []
            for k in range(3):
                word = words[result][k] if k < len(words[result]) else 0
                sign = signs[result][k] if k < len(signs[result]) else 0
                value = number(values[2 + 2 * k + word][lane])
                sources.append(-value if sign else value)
            wanted = bits_of(PACKED[text](*sources))
            assert same_float(int(wave.vectors[result][lane]), wanted), (lane, result)


@pytest.mark.parametrize("order", ORDERS)
def test_comparisons(programs: dict[str, tuple[Program, int]], order: str) -> None:
    program, place = programs[f"v_cmp_{order}_f32_e64 s[20:21], v2, v4"]
    for seed in range(4):
        wave, (a, b) = prepared(program, "ff", seed)
        a[4:20] = b[4:20]
        wave.vectors[2][4:20] = wave.vectors[4][4:20]
        program.run(place, wave)
        holds = [ORDERS[order](x, y) for x, y in zip(a, b, strict=True)]
        wanted = sum(1 << lane for lane in range(LANES) if holds[lane] and is_active(lane))
        assert wave.scalar(20, 2) == wanted


def test_classes(programs: dict[str, tuple[Program, int]]) -> None:
    program, place = programs[CLASS]
    examples = (0x7F80_0001, 0x7FC0_0000, 0xFF80_0000, 0xC000_0000, 0x8000_0001, 0x8000_0000, 0,
                0x007F_FFFF, 0x3F80_0000, 0x7F80_0000)  # fmt: skip
    wave = program.wave()
    for kind in range(len(examples)):
        wave.vectors[2][: len(examples)] = examples
        wave.vectors[4] = 1 << kind
        program.run(place, wave)
        assert wave.scalar(20, 2) & 0x3FF == 1 << kind
        wave.vectors[4] = 0x3FF ^ 1 << kind
        program.run(place, wave)
        assert wave.scalar(20, 2) & 0x3FF == 0x3FF ^ 1 << kind


def test_a_division_is_rounded_correctly(programs: dict[str, tuple[Program, int]]) -> None:
    program, place = programs[DIVISION]
    for seed in range(40):
        wave, (a, b) = prepared(program, "ff", seed)
        program.run(place, wave)
        for lane in filter(is_active, range(LANES)):
            wanted = bits_of(quotient(a[lane], b[lane]))
            assert same_float(int(wave.vectors[0][lane]), wanted), (a[lane], b[lane])


def test_a_division_does_not_depend_on_the_last_bit_of_a_reciprocal() -> None:
    program = Program([DIVISION], GFX942, Settings(noise=True, seed=3))
    for seed in range(40):
        wave, (a, b) = prepared(program, "ff", seed)
        program.run(0, wave)
        for lane in filter(is_active, range(LANES)):
            # A significand of ones needs the nearest reciprocal (Markstein's theorem). Documents do
            # not promise it. One of 8 million numbers has such a significand.
            if bits_of(b[lane]) & 0x7FFFFF == 0x7FFFFF:
                continue
            wanted = bits_of(quotient(a[lane], b[lane]))
            assert same_float(int(wave.vectors[0][lane]), wanted), (a[lane], b[lane])


# Numerator and denominator; the scaled denominator, the scaled numerator, and vcc: from the ISA
# document's description of V_DIV_SCALE_F32.
SCALES = [
    (1.0, 3.0, 3.0, 1.0, 0),
    (0.0, 3.0, math.nan, math.nan, 0),
    (1.0, 0.0, math.nan, math.nan, 0),
    (2.0**100, 2.0**2, 2.0**66, 2.0**100, 1),  # exponents differ by 96 or more
    (1.0, 2.0**-130, 2.0**-66, 1.0, 1),  # as above, and the denominator is a denormal
    (2.0**-100, 2.0**-130, 2.0**-66, 2.0**-36, 0),  # the denominator is a denormal
    (2.0**-10, 2.0**127, 2.0**127, 2.0**54, 1),  # n / d is a denormal, and d is great
    (2.0**10, 2.0**127, 2.0**127, 2.0**10, 0),  # 1 / d would be a denormal
    (2.0**-100, 2.0**50, 2.0**50, 2.0**-36, 1),  # n / d is a denormal
    (2.0**-110, 2.0**-100, 2.0**-36, 2.0**-46, 0),  # the numerator is small
]


@pytest.mark.parametrize(("a", "b", "denominator", "numerator", "later"), SCALES)
def test_scales_of_a_division(
    programs: dict[str, tuple[Program, int]],
    a: float,
    b: float,
    denominator: float,
    numerator: float,
    later: int,
) -> None:
    program, place = programs[STEPS["scale"]]
    wave = program.wave()
    for value, wanted in ((b, denominator), (a, numerator)):
        wave.vectors[2], wave.vectors[4], wave.vectors[6] = map(bits_of, (value, b, a))
        program.run(place, wave)
        with np.errstate(over="ignore"):
            assert same_float(int(wave.vectors[0][0]), bits_of(wanted))
        assert wave.scalar(106) & 1 == later


def test_the_last_sum_of_a_division_is_scaled_back(
    programs: dict[str, tuple[Program, int]],
) -> None:
    program, place = programs[STEPS["fmas"]]
    wave = program.wave()
    wave.vectors[2], wave.vectors[4] = bits_of(3.0), bits_of(5.0)
    for c, vcc, wanted in ((1.0, 0, 16.0), (1.0, 1, 16.0 * 2.0**-64), (8.0, 1, 23.0 * 2.0**64)):
        wave.vectors[6] = bits_of(c)
        wave.set_scalar(106, vcc, 2)
        program.run(place, wave)
        assert number(int(wave.vectors[0][0])) == wanted


def test_special_quotients(programs: dict[str, tuple[Program, int]]) -> None:
    program, place = programs[STEPS["fixup"]]
    wave = program.wave()
    inf, nan = math.inf, math.nan
    for a, b, wanted in ((nan, 1.0, nan), (1.0, nan, nan), (0.0, 0.0, nan), (inf, -inf, nan),
                         (-1.0, 0.0, -inf), (inf, -2.0, -inf), (3.0, -inf, -0.0), (0.0, -3.0, -0.0),
                         (2.0**-140, 2.0**100, 0.0), (-6.0, 2.0, -7.0)):  # fmt: skip
        wave.vectors[2], wave.vectors[4], wave.vectors[6] = map(bits_of, (7.0, b, a))
        program.run(place, wave)
        assert same_float(int(wave.vectors[0][0]), bits_of(wanted)), (a, b)


@pytest.mark.parametrize("name", ["rcp", "rcp_iflag", "rsq", "sqrt", "exp", "log"])
def test_noise_is_one_unit_in_the_last_place(name: str) -> None:
    text = f"v_{name}_f32 v0, v2"
    exact, noisy = (Program([text], GFX942, Settings(noise=noise)) for noise in (False, True))
    differences = set()
    for program in (exact, noisy):
        wave = program.wave()
        wave.vectors[2] = np.linspace(1.5, 9, LANES).astype(np.float32).view(np.uint32)
        program.run(0, wave)
        differences.add(tuple(int(bits) for bits in wave.vectors[0]))
    first, second = differences
    assert {a - b for a, b in zip(first, second, strict=True)} == {-1, 0, 1}


def instructions() -> set[str]:
    """Returns the instructions that this file tests."""
    texts = [text for text, _, _, _ in CASES + CASES_950] + [*PACKED, CLASS, *STEPS.values()]
    return {text.split()[0] for text in texts} | {f"v_cmp_{order}_f32" for order in ORDERS}
