"""Quantisation to FP8 among the expressions of a graph: step 6 of the numerics page, and no other.

    amax  = amax(abs(y))                                over a row, or over groups of a row
    scale = div(clamp(amax, 1e-10, None), 448)
    q     = round(clamp(div(y, scale), -448, 448))      with a static scale the same

A product with a reciprocal, another least scale or another order rounds differently, and is left
to the graph. The clamp of the quotient may be missing if the scale is computed: no quotient is then
so much above 448 that rounding would not lead there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from allnorm.compile.expressions import Algebra, Value, as_float32, number_of
from allnorm.compile.shapes import FP8
from allnorm.quant import GROUP_SIZES

_MAX = 448.0
_MIN_AMAX = 1e-10


@dataclass(frozen=True)
class Quantised:
    """How the normed tensor is quantised.

    Attributes:
        kind: "per_token", "per_group" or "per_tensor", as the operator takes it.
        group_size: of "per_group", else 0.
        quantized: the float8_e4m3fn expression.
        scale: the computed scale; None of "per_tensor".
        static: the given scale of "per_tensor".
    """

    kind: str
    group_size: int
    quantized: Value
    scale: Value | None
    static: Value | None

    def __str__(self) -> str:
        return f"{self.kind} {self.group_size}" if self.group_size else self.kind


def find_quantised(algebra: Algebra, normed: Value, hidden_size: int) -> Iterator[Quantised]:
    """The quantisations of a normed tensor."""
    y = algebra.up(normed)
    grouped = [user for user in y.users if user.op == "rows"]
    for rows in (y, *grouped):
        size = hidden_size if rows is y else rows.attr[1]
        for quotient in rows.users:
            if quotient.op != "div" or quotient.args[0] is not rows:
                continue
            scale = quotient.args[1]
            computed = _is_scale(scale, rows)
            quantized = _cast(algebra, quotient, clamped=not computed)
            if quantized is not None and not quantized.holders:
                # An operator that quantises groups returns them side by side again.
                quantized = algebra.find("rows", (quantized,), (size, hidden_size))
            if quantized is None or not quantized.holders:
                continue
            if computed and rows is y:
                yield Quantised("per_token", 0, quantized, scale, None)
            elif computed and size in GROUP_SIZES and hidden_size % size == 0:
                yield Quantised("per_group", size, quantized, scale, None)
            elif not computed and rows is y and not scale.column and scale.op != "const":
                yield Quantised("per_tensor", 0, quantized, None, scale)


def _is_scale(scale: Value, rows: Value) -> bool:
    """Whether this is `max(amax(abs(rows)), 1e-10) / 448`."""
    if scale.op != "div" or number_of(scale.args[1]) != _MAX:
        return False
    least = scale.args[0]
    if least.op != "clamp" or least.attr != (as_float32(_MIN_AMAX), None):
        return False
    amax = least.args[0]
    return amax.op == "amax" and amax.args[0].op == "abs" and amax.args[0].args[0] is rows


def _cast(algebra: Algebra, quotient: Value, *, clamped: bool) -> Value | None:
    for user in quotient.users:
        if user.op == "clamp" and user.attr == (-_MAX, _MAX):
            quantized = algebra.find("round", (user,), FP8)
            if quantized is not None:
                return quantized
    return None if clamped else algebra.find("round", (quotient,), FP8)


def is_quantised_otherwise(algebra: Algebra, normed: Value) -> bool:
    """Whether some FP8 tensor is computed from the normed one, in a way that is understood."""
    pending, seen = [algebra.up(normed)], {normed}
    for value in pending:
        if value.dtype == FP8:
            return True
        for user in value.users:
            if user not in seen and user.op not in ("opaque", "reduced", "tuple"):
                seen.add(user)
                pending.append(user)
    return False
