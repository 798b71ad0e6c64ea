"""RMS norms among the expressions of a graph, and what is nearly one.

The grammar, in float32 arithmetic, operands of `add` and `mul` in either order:

    rstd    = rsqrt(add(mean(square(z)), eps))
    product = mul(z, rstd)
    normed  = round(mul(product, gain))             weight multiplied in float32
            | round(mul(up(round(product)), gain))  rounded before the weight too
            | round(product)                        no weight
    gain    = add(up(weight), bias) | up(weight)

and in front of the residual, where A is the reduced sum:

    branch  = A | normed(z=up(A)) | round(mul(up(A | normed), scale))

`round` and `up` vanish for float32. Any other order of the products rounds differently.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from allnorm.compile.expressions import Algebra, Value, as_float32, bare, number_of


@dataclass(frozen=True)
class Norm:
    """One norm.

    Attributes:
        z: what is normalised, a float32 expression.
        rstd: the reciprocal root.
        product: `z * rstd`.
        eps: added to the mean square.
        hidden_size: number of elements of a row.
    """

    z: Value
    rstd: Value
    product: Value
    eps: float
    hidden_size: int


@dataclass(frozen=True)
class Output:
    """What a graph makes of `z * rstd`.

    Attributes:
        normed: the result, in the dtype of the reduction.
        gain: the float32 expression of the weight; None if there is none.
        rounds_first: whether the product is rounded before the weight is multiplied; None without
            a weight, where that is the same.
        values: the expressions from the product to the result.
    """

    normed: Value
    gain: Value | None
    rounds_first: bool | None
    values: tuple[Value, ...]


@dataclass(frozen=True)
class Branch:
    """What the reduced sum goes through before the residual is added: step 1c of the numerics page.

    Attributes:
        value: as it is added, in the dtype of the reduction.
        norm: the post norm; None if there is none.
        output: what the graph makes of it.
        scale: what the sum, or its post norm, is multiplied by.
    """

    value: Value
    norm: Norm | None = None
    output: Output | None = None
    scale: float = 1.0

    @property
    def is_plain(self) -> bool:
        """Whether it is the reduced sum itself."""
        return self.norm is None and self.scale == 1.0

    def __str__(self) -> str:
        parts = [] if self.norm is None else ["post norm"]
        return ", ".join(parts if self.scale == 1.0 else [*parts, f"scale {self.scale:g}"])


def find_branches(
    reduced: Value, norms: dict[Value, list[Norm]], algebra: Algebra, dtype: torch.dtype
) -> Iterator[Branch]:
    """The sum as it is, then what a graph makes of it. What is nearly a scaled one gets a note."""
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
        value = user if dtype == torch.float32 else algebra.find("round", (user,), dtype)
        if value is None:
            user.note = user.note or f"the scaled sum is not rounded to {_name(dtype)}"
        else:
            yield replace(branch, value=value, scale=number)


def stored32(value: Value, algebra: Algebra, dtype: torch.dtype) -> Value | None:
    """A stored tensor in float32; None if nothing of the graph computes with it."""
    return value if dtype == torch.float32 else algebra.find("up", (value,))


def find_norms(algebra: Algebra) -> dict[Value, list[Norm]]:
    """All norms by what they normalise. What is nearly one gets a note."""
    found: dict[Value, list[Norm]] = {}
    for rstd in algebra.all_of("rsqrt"):
        parsed = _mean_square(rstd)
        if isinstance(parsed, str):
            rstd.note = rstd.note or parsed
            continue
        z, eps, hidden_size = parsed
        for user in rstd.users:
            if user.op == "mul" and user.other(rstd) is z:
                norm = Norm(z, rstd, user, eps, hidden_size)
                found.setdefault(z, []).append(norm)
            elif user.op == "mul":
                user.note = user.note or _note_on_product(user.other(rstd), z)
            elif user.op == "round":
                user.note = user.note or f"1/rms is rounded to {_name(user.attr)} before its use"
    for root in algebra.all_of("sqrt"):
        for user in root.users:
            if user.op == "div" and user.args[1] is root:
                user.note = user.note or (
                    "it divides by the root of the mean square: allnorm multiplies by its "
                    "reciprocal, which rounds differently"
                )
    return found


def _mean_square(rstd: Value) -> tuple[Value, float, int] | str:
    """(z, eps, hidden_size) of a reciprocal root, or why it is none of a mean square."""
    inner, eps = rstd.args[0], 0.0
    number = number_of(inner.args[1]) if inner.op == "add" else None
    if number is not None:
        inner, eps = inner.args[0], number
    if not math.isfinite(as_float32(eps)) or eps < 0:
        return f"eps={eps} is not a finite number >= 0 in float32"
    if inner.op != "mean" and bare(inner).op == "mean":
        return f"the mean square is rounded to {_name(inner.args[0].attr)}"
    if inner.op != "mean":
        return inner.note or f"the root is not of a mean of squares, but of {_shown(inner)}"
    squares = inner.args[0]
    if squares.op != "square" and bare(squares).op == "square":
        return f"the squares are rounded to {_name(squares.args[0].attr)}"
    if squares.op != "square":
        return f"the mean is not of squares, but of {_shown(squares)}"
    return squares.args[0], eps, inner.attr


def _note_on_product(factor: Value, z: Value) -> str:
    if bare(factor) is bare(z):
        return (
            "the mean square and the product with its root are of different roundings of the "
            f"sum, {_shown(z)} and {_shown(factor)}"
        )
    return (
        f"1/rms is multiplied by {_shown(factor)} first: allnorm multiplies it by what is "
        "normalised, which rounds differently"
    )


def outputs_of(norm: Norm, algebra: Algebra, dtype: torch.dtype) -> list[Output]:
    """What may stand for the normed tensor: with a weight in the order of the graph, then without.

    What is nearly one gets a note.
    """
    product = norm.product
    found = _weighted(algebra, product, (), dtype)
    rounded = product if dtype == torch.float32 else algebra.find("round", (product,), dtype)
    if rounded is None:
        return found
    if dtype != torch.float32:
        upcast = algebra.find("up", (rounded,))
        if upcast is not None:
            found += _weighted(algebra, upcast, (rounded, upcast), dtype)
            found.sort(key=lambda output: output.normed.order)
    return [*found, Output(rounded, None, None, (rounded,))]


def _weighted(
    algebra: Algebra, factor: Value, before: tuple[Value, ...], dtype: torch.dtype
) -> list[Output]:
    found = []
    for user in factor.users:
        if user.op != "mul":
            continue
        normed = user if dtype == torch.float32 else algebra.find("round", (user,), dtype)
        if normed is None:
            user.note = user.note or f"the normed tensor is not rounded to {_name(dtype)}"
        else:
            values = (*before, user, normed)
            found.append(Output(normed, user.other(factor), bool(before), values))
    return found


def split_gain(gain: Value) -> Iterator[tuple[Value, float]]:
    """(weight, weight_bias) that give this gain, the one with least left to compute first.

    A bias of -0.0 adds nothing to any weight; 0.0 would turn a weight of -0.0 into 0.0.
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
