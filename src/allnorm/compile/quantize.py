"""Finds quantization among a graph's expressions: step 6 of the numerics page.

    amax  = amax(abs(y))                                over a row, or over groups of a row
    scale = div(clamp(amax, 1e-10, None), 448)
    q     = round(clamp(div(y, scale), -448, 448))      the same with a static scale

If the scale is computed, the quotient's clamp may be missing: the rounded quotient is at most 448.

Common kernels compute slightly different values. The pass fuses them only if the caller allows it:

    scale = div(clamp(amax, least, None), 448)          0 < least <= 1/512
          | clamp(div(amax, 448), least, None)          0 < least <= 1/512/448
    q     = round(clamp(mul(y, reciprocal(scale)), -448, 448))

Above these bounds the scale is the same, because rounded division is monotonic. The product differs
from the quotient by less than two float32 ulps: the reciprocal's relative error of 2^-24 is at most
one ulp of the product, and rounding the product and the quotient adds half an ulp each. So product
and quotient are equal or adjacent float32 numbers, unless the reciprocal is subnormal or overflows.
Other orders and ranges are not fused.

MXFP8 and NVFP4 are found by operator name (compile/block_scaled.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from allnorm.compile.expressions import Algebra, Value, as_float32, number_of
from allnorm.compile.shapes import FP8
from allnorm.names import GROUP_SIZES
from allnorm.quant import Fp8PerGroup

_MAX = 448.0
_MIN_AMAX = 1e-10
_MAX_LEAST_AMAX = 1 / 512


@dataclass(frozen=True)
class Quantization:
    """A quantization of the normed tensor.

    Attributes:
        kind: "per_token", "per_group", "per_tensor" or "nvfp4", as passed to the operator.
        group_size: the group size for "per_group" and "nvfp4"; otherwise 0.
        quantized: the expression of the quantized rows.
        scale: the computed scale; None for "per_tensor".
        static: the static scale for "per_tensor" and "nvfp4"; otherwise None.
        inverse: the reciprocal of the static scale, if the graph multiplies by it.
        scale_layout: the layout of the scales for "nvfp4" and MXFP8; empty for other kinds.
        scale_format: the format of the scales, as passed to the operator.
    """

    kind: str
    group_size: int
    quantized: Value
    scale: Value | None
    static: Value | None
    inverse: Value | None = None
    scale_layout: str = ""
    scale_format: str = "float32"

    def __str__(self) -> str:
        if self.scale_layout:
            return "mxfp8" if self.kind == Fp8PerGroup.kind else self.kind
        return f"{self.kind} {self.group_size}" if self.group_size else self.kind


def find_quantizations(
    algebra: Algebra, normed: Value, hidden_size: int, *, approximate: bool
) -> Iterator[Quantization]:
    """Yields the quantizations of a normed tensor, including approximate ones if allowed."""
    y = algebra.up(normed)
    yield from _block_scaled(y, hidden_size)
    grouped = [user for user in y.users if user.op == "rows"]
    for rows in (y, *grouped):
        size = hidden_size if rows is y else rows.attr[1]
        for quotient, scale, inverse in _quotients(rows, approximate=approximate):
            computed = _is_scale(scale, rows, approximate=approximate)
            quantized = _cast(algebra, quotient, clamped=not computed)
            if quantized is not None and not quantized.holders:
                # An operator that quantizes groups returns rows of the original length.
                quantized = algebra.find("rows", (quantized,), (size, hidden_size))
            if quantized is None or not quantized.holders:
                continue
            if computed and rows is y:
                yield Quantization("per_token", 0, quantized, scale, None)
            elif computed and size in GROUP_SIZES and hidden_size % size == 0:
                yield Quantization("per_group", size, quantized, scale, None)
            elif not computed and rows is y and not scale.column and scale.op != "const":
                yield Quantization("per_tensor", 0, quantized, None, scale, inverse)


def _block_scaled(y: Value, hidden_size: int) -> Iterator[Quantization]:
    for blocks in [user for user in y.users if user.op == "blocks"]:
        kind, group_size, layout, scale_format = blocks.attr
        parts = {part.attr[0]: part for part in blocks.users if part.op == "part" and part.holders}
        if len(parts) == 2 and hidden_size % group_size == 0:
            quantized, scale = parts[0], parts[1]
            static = blocks.args[1] if len(blocks.args) > 1 else None
            yield Quantization(
                *(kind, group_size, quantized, scale, static),
                scale_layout=layout,
                scale_format=scale_format,
            )


def _quotients(rows: Value, *, approximate: bool) -> Iterator[tuple[Value, Value, Value | None]]:
    """Yields (quotient, scale, None), or (product, scale, the scale's reciprocal)."""
    for user in rows.users:
        if user.op == "div" and user.args[0] is rows:
            yield user, user.args[1], None
        elif user.op == "mul" and approximate:
            inverse = user.other(rows)
            if inverse.op == "reciprocal":
                yield user, inverse.args[0], inverse
            elif inverse.op == "div" and number_of(inverse.args[0]) == 1.0:
                yield user, inverse.args[1], inverse


def _is_scale(scale: Value, rows: Value, *, approximate: bool) -> bool:
    """Returns whether `scale` is `max(amax(abs(rows)), least) / 448` with an allowed `least`."""
    quotient, least = _without_least(scale)
    most = _MAX_LEAST_AMAX / _MAX
    if quotient.op != "div" or number_of(quotient.args[1]) != _MAX:
        return False
    amax = quotient.args[0]
    if quotient is scale:
        amax, least = _without_least(amax)
        most = _MAX_LEAST_AMAX
    elif not approximate:
        return False
    if least is None or amax.op != "amax" or amax.args[0].op != "abs":
        return False
    in_range = 0.0 < least <= as_float32(most)
    exact = quotient is scale and least == as_float32(_MIN_AMAX)
    return amax.args[0].args[0] is rows and (exact or (approximate and in_range))


def _without_least(value: Value) -> tuple[Value, float | None]:
    """Returns the operand and the lower bound of a clamp; (value, None) for anything else."""
    if value.op == "clamp" and value.attr[0] is not None and value.attr[1] is None:
        return value.args[0], value.attr[0]
    return value, None


def _cast(algebra: Algebra, quotient: Value, *, clamped: bool) -> Value | None:
    for user in quotient.users:
        if user.op == "clamp" and user.attr == (-_MAX, _MAX):
            quantized = algebra.find("round", (user,), FP8)
            if quantized is not None:
                return quantized
    return None if clamped else algebra.find("round", (quotient,), FP8)


def is_quantized_otherwise(algebra: Algebra, normed: Value) -> bool:
    """Returns whether known operations compute a quantized tensor from the normed tensor."""
    pending, seen = [algebra.up(normed)], {normed}
    for value in pending:
        if value.dtype == FP8 or value.op == "blocks":
            return True
        for user in value.users:
            if user not in seen and user.op not in ("opaque", "reduced", "tuple"):
                seen.add(user)
                pending.append(user)
    return False
