"""Finds RMSNorms among a graph's expressions, and adds notes to expressions that nearly match.

The grammar, in float32 arithmetic, with the operands of `add` and `mul` in either order:

    rstd    = rsqrt(add(mean(square(z)), eps))
    product = mul(z, rstd)
    normed  = round(mul(product, gain))             weight multiplied in float32
            | round(mul(up(round(product)), gain))  rounded before the weight too
            | round(product)                        no weight
    gain    = add(up(weight), bias) | up(weight)

Before the residual is added, where A is the reduced sum:

    branch  = A | normed(z=up(A)) | round(mul(up(A | normed), scale))

`round` and `up` are absent for float32. Multiplying in any other order rounds differently.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from allnorm.compile.expressions import Algebra, Value, as_float32, bare, number_of


@dataclass(frozen=True)
class Norm:
    """One norm, in the grammar's terms; `hidden_size` is the number of elements per row."""

    z: Value
    rstd: Value
    product: Value
    eps: float
    hidden_size: int


@dataclass(frozen=True)
class Output:
    """A norm's result: `z * rstd` with the graph's weight and roundings.

    Attributes:
        normed: the result, in the reduction's dtype.
        gain: the float32 expression by which the product is multiplied, or None.
        rounds_first: whether the product is rounded before that multiplication; None without a
            gain.
    """

    normed: Value
    gain: Value | None
    rounds_first: bool | None


@dataclass(frozen=True)
class Branch:
    """The reduced sum with its post norm and scale: step 1c of the numerics page.

    Attributes:
        value: the expression that is added to the residual, in the reduction's dtype.
        norm: the post norm, or None; `output` is its result.
        scale: the factor by which the sum, or the result of its post norm, is multiplied.
    """

    value: Value
    norm: Norm | None = None
    output: Output | None = None
    scale: float = 1.0

    def __str__(self) -> str:
        parts = [] if self.norm is None else ["post norm"]
        return ", ".join(parts if self.scale == 1.0 else [*parts, f"scale {self.scale:g}"])


def find_branches(
    reduced: Value, norms: dict[Value, list[Norm]], algebra: Algebra, dtype: torch.dtype
) -> Iterator[Branch]:
    """Yields the possible branches of a reduced sum; the plain sum comes first."""
    z = stored32(reduced, algebra, dtype)
    found = [Branch(reduced)]
    for norm in () if z is None else norms.get(z, ()):
        found += [Branch(o.normed, norm, o) for o in outputs_of(norm, algebra, dtype)]
    for branch in found:
        yield branch
        yield from _scaled(branch, algebra, dtype)


def _scaled(branch: Branch, algebra: Algebra, dtype: torch.dtype) -> Iterator[Branch]:
    factor = stored32(branch.value, algebra, dtype)
    for user in () if factor is None else factor.users:
        number = number_of(user.args[1]) if user.op == "mul" else None
        if number is None or not math.isfinite(as_float32(number)):
            continue
        value = rounded(user, algebra, dtype)
        if value is None:
            user.note = user.note or f"the scaled sum is not rounded to {_name(dtype)}"
        else:
            yield replace(branch, value=value, scale=number)


def stored32(value: Value, algebra: Algebra, dtype: torch.dtype) -> Value | None:
    """Returns a stored tensor converted to float32; None if the graph does not compute with it."""
    return value if dtype == torch.float32 else algebra.find("up", (value,))


def rounded(value: Value, algebra: Algebra, dtype: torch.dtype) -> Value | None:
    """Returns a float32 expression rounded to a dtype; None if the graph does not round it."""
    return value if dtype == torch.float32 else algebra.find("round", (value,), dtype)


def find_norms(algebra: Algebra) -> dict[Value, list[Norm]]:
    """Returns all norms, keyed by the expression that they normalize."""
    found: dict[Value, list[Norm]] = {}
    for rstd in algebra.all_of("rsqrt"):
        parsed = _mean_square(rstd)
        if isinstance(parsed, str):
            rstd.note = rstd.note or parsed
            continue
        z, eps, hidden_size = parsed
        for norm in norms_by(rstd, z, eps, hidden_size):
            found.setdefault(z, []).append(norm)
    for root in algebra.all_of("sqrt"):
        for user in root.users:
            if user.op == "div" and user.args[1] is root:
                user.note = user.note or (
                    "it divides by the root of the mean square: allnorm multiplies by the "
                    "reciprocal root, which rounds differently"
                )
    return found


def norms_by(rstd: Value, z: Value, eps: float, hidden_size: int) -> list[Norm]:
    """Returns the norms that multiply `z` by `rstd`; adds notes to other uses of `rstd`."""
    found = []
    for user in rstd.users:
        if user.op == "mul" and user.other(rstd) is z:
            found.append(Norm(z, rstd, user, eps, hidden_size))
        elif user.op == "mul":
            user.note = user.note or _note_on_product(user.other(rstd), z)
        elif user.op == "round":
            user.note = user.note or (
                f"1/rms is rounded to {_name(user.attr)}: allnorm multiplies by float32"
            )
    return found


def _mean_square(rstd: Value) -> tuple[Value, float, int] | str:
    """Returns (z, eps, hidden_size) of a reciprocal root mean square; otherwise a note."""
    inner, eps = rstd.args[0], 0.0
    number = number_of(inner.args[1]) if inner.op == "add" else None
    if number is not None:
        inner, eps = inner.args[0], number
    if not math.isfinite(as_float32(eps)) or eps < 0:
        return f"eps={eps} is not a finite number >= 0 in float32"
    if inner.op != "mean" and bare(inner).op == "mean":
        return f"the mean square is rounded to {_name(inner.args[0].attr)}"
    if inner.op != "mean":
        return inner.note or f"it takes the root of {_shown(inner)}: expected a mean of squares"
    squares = inner.args[0]
    if squares.op != "square" and bare(squares).op == "square":
        return f"the squares are rounded to {_name(squares.args[0].attr)}"
    if squares.op != "square":
        return f"it takes the mean of {_shown(squares)}: expected squares"
    return squares.args[0], eps, inner.attr


def _note_on_product(factor: Value, z: Value) -> str:
    if bare(factor) is bare(z):
        return (
            "the mean square and the multiplication by 1/rms use different roundings of the sum, "
            f"{_shown(z)} and {_shown(factor)}"
        )
    return (
        f"1/rms is multiplied by {_shown(factor)} first: allnorm multiplies it by the sum first, "
        "which rounds differently"
    )


def outputs_of(norm: Norm, algebra: Algebra, dtype: torch.dtype) -> list[Output]:
    """Returns a norm's possible results: those with a weight, in graph order, then without."""
    found = list(_weighted(algebra, norm.product, dtype))
    without_weight = rounded(norm.product, algebra, dtype)
    if without_weight is None:
        return found
    upcast = None if dtype == torch.float32 else algebra.find("up", (without_weight,))
    if upcast is not None:
        found += _weighted(algebra, upcast, dtype, rounds_first=True)
        found.sort(key=lambda output: output.normed.order)
    return [*found, Output(without_weight, None, None)]


def _weighted(
    algebra: Algebra, factor: Value, dtype: torch.dtype, *, rounds_first: bool = False
) -> Iterator[Output]:
    for user in [user for user in factor.users if user.op == "mul"]:
        normed = rounded(user, algebra, dtype)
        if normed is None:
            user.note = user.note or f"the normed tensor is not rounded to {_name(dtype)}"
        else:
            yield Output(normed, user.other(factor), rounds_first)


def split_gain(gain: Value) -> Iterator[tuple[Value, float]]:
    """Yields (weight, weight_bias) pairs that result in this gain, the simplest weight first.

    A bias of -0.0 leaves every weight unchanged; 0.0 would turn a weight of -0.0 into 0.0.
    """
    weight, bias = gain, -0.0
    number = number_of(gain.args[1]) if gain.op == "add" else None
    if number is not None and math.isfinite(as_float32(number)):
        weight, bias = gain.args[0], number
    if weight.op == "up":
        yield weight.args[0], bias
    yield weight, bias
    if weight is not gain:
        yield gain, -0.0


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shown(value: Value) -> str:
    while value.op == "up" and not value.definers:
        value = value.args[0]
    return str(value.definers[0]) if value.definers else value.op
