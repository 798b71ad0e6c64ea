"""Values for lanes, and results of float32 arithmetic in exact fractions, for the tests."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np

from .machine import LANES

M32, M64 = (1 << 32) - 1, (1 << 64) - 1
EDGES = (0, 1, 2, 3, 15, 16, 31, 32, 33, 63, 64, 0xFF, 0xFFFF, 0x8000, 0x7FFF_FFFF, 0x8000_0000,
         0xFFFF_FFFF, 0xFFFF_FFFE, 0x1234_8765, 0xDEAD_BEEF, 0x00FF_FFFF, 0x0100_0000)  # fmt: skip
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, 3.0, 448.0, 464.0, 1e-3, 1e30, -1e30, 3e38,
          1.17549435e-38, 1e-40, -1e-45, 65504.0, 65520.0, 6e-8, math.inf, -math.inf, math.nan,
          0.1, 16777215.0, 8388609.5, 4294967040.0, -7.99, 2.0**-6, 2.0**-9, 2.0**-10)  # fmt: skip


def integers(seed: int, bits: int = 32) -> list[int]:
    """Returns a value per lane: edges, and random bits."""
    random = np.random.default_rng(seed)
    drawn = [int(value) for value in random.integers(0, 1 << 32, 2 * LANES, dtype=np.uint64)]
    edges = list(random.permutation(np.array(EDGES, np.uint64)))
    values = [int(edges[i]) if i < len(edges) else drawn[i] for i in range(LANES)]
    if bits == 32:
        return values
    high = [int(value) for value in random.permutation(np.array(values, np.uint64))]
    return [low | top << 32 for low, top in zip(values, high, strict=True)]


def floats(seed: int) -> list[int]:
    """Returns the bits of a float32 per lane: edges, random bits, and numbers near each other."""
    random = np.random.default_rng(seed)
    edges = random.permutation(np.array(FLOATS, np.float32)).view(np.uint32)
    near = random.normal(0, 4, LANES // 4).astype(np.float32).view(np.uint32)
    drawn = random.integers(0, 1 << 32, LANES, dtype=np.uint64).astype(np.uint32)
    return [int(value) for value in np.concatenate([edges, near, drawn])[:LANES]]


def number(bits: int) -> float:
    """Returns a float32 from its bits."""
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def bits_of(value: float) -> int:
    """Returns the bits of a number that is a float32."""
    return int(np.float32(value).view(np.uint32))


def is_nan(bits: int) -> bool:
    """Returns whether bits are a NaN of float32."""
    return bits & 0x7FFF_FFFF > 0x7F80_0000


def same_float(got: int, wanted: int) -> bool:
    """Returns whether bits of float32 are equal; all NaNs are."""
    return got == wanted or (is_nan(got) and is_nan(wanted))


def nearest(value: Fraction, *, significand: int = 24, least: int = -149, most: int = 127) -> float:
    """Returns the nearest number of a format, ties to even.

    Args:
        value: Not zero.
        significand: Bits of a significand.
        least: The exponent of the smallest number.
        most: The exponent of the greatest binade.
    """
    size = abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if size < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** max(exponent - significand + 1, least)
    rounded = round(size / unit) * unit  # Python rounds fractions half to even
    sign = -1.0 if value < 0 else 1.0
    return sign * math.inf if rounded >= Fraction(2) ** (most + 1) else sign * float(rounded)


def float_sum(a: float, b: float, c: float) -> float:
    """Returns a * b + c, rounded once to float32."""
    if not all(map(math.isfinite, (a, b, c))):
        with np.errstate(all="ignore"):
            return float(np.float64(a) * np.float64(b) + np.float64(c))
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return a * b + c  # the sign of zero; a product of float32 is exact in float64
    return nearest(exact)


def quotient(a: float, b: float) -> float:
    """Returns a / b, rounded once to float32."""
    if math.isfinite(a) and math.isfinite(b) and b != 0 and a != 0:
        return nearest(Fraction(a) / Fraction(b))
    with np.errstate(all="ignore"):
        return float(np.float64(a) / np.float64(b))
