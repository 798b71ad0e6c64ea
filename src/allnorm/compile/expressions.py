"""What a tensor of a graph holds, as an expression in float32 arithmetic with explicit roundings.

PyTorch computes on 16-bit tensors in float32 and rounds each result; types are promoted in between.
Written out, ``add`` of two bfloat16 tensors is ``round(add(up(a), up(b)))``, and the question which
rounding mode a norm uses is the question where a ``round`` stands. Reshapes that keep the last
dimension do not appear: an expression is the rows of a tensor in order, whatever is in front.

| op | is |
|---|---|
| `leaf`, `reduced` | an input; the sum of an operand over ranks, by the node `attr` |
| `opaque` | anything else, different for each node |
| `const` | a Python number; its value is `attr` |
| `up`, `round` | exact conversion to float32; rounding of float32 to `attr` |
| `add mul div pow` | of two float32 expressions |
| `square rsqrt sqrt reciprocal abs` | of one |
| `mean sum amax` | over the last dimension; `attr` is its size |
| `clamp` | of one, between `attr`; None is no bound |
| `choices` | the sum over each `attr` successive rows |
| `choice` | row `attr[0]` of each `attr[1]` successive ones |
| `zeros` | a tensor of zeros |
| `rows` | the same elements in rows of another length; `attr` is (length before, length) |
| `blocks` | rows in MXFP8 or NVFP4 with their scales, as `attr` says |
| `part` | the rows of these, or the scales; `attr` is (0 or 1, dtype) |
| `tuple` | several results of one call |

Equal expressions are one object: compare them with `is`.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, overload

import torch
from torch.fx import Node

from allnorm.compile.shapes import FP8, HALF

_FLOAT32_CONST = torch.float32


class NotUnderstood(Exception):  # noqa: N818 - not an error: the node stays opaque
    """A node that has no expression here; the text, if any, goes into the report."""


class Value:
    """One expression.

    Attributes:
        op: as in the table above.
        args: its operands.
        attr: what else distinguishes it.
        dtype: of the tensors that hold it; None for a tuple or an unknown one.
        column: whether it has one element for each row.
        note: what keeps the pass from understanding more of it, for the report.
        users: expressions that have it as an operand.
        definers: nodes whose result it is, or that write it somewhere.
        holders: nodes whose tensor holds it at some time.
        readers: (node, argument of it) for each read.
        questions: the same for each call that only asks for shapes or dtypes.
    """

    __slots__ = (
        *("args", "attr", "column", "definers", "dtype", "holders", "note", "op", "order"),
        *("questions", "readers", "users"),
    )

    def __init__(
        self, op: str, args: tuple[Value, ...], attr: Any, dtype: torch.dtype | None, order: int
    ) -> None:
        self.op = op
        self.args = args
        self.attr = attr
        self.dtype = dtype
        self.order = order
        self.column = False
        self.note = ""
        self.users: list[Value] = []
        self.definers: list[Node] = []
        self.holders: list[Node] = []
        self.readers: list[tuple[Node, Node]] = []
        self.questions: list[tuple[Node, Node]] = []

    def other(self, operand: Value) -> Value:
        """The second operand of a commutative operation."""
        return self.args[1] if self.args[0] is operand else self.args[0]

    def derives_from(self, origin: Value) -> bool:
        """Whether this is computed from `origin`, or is it."""
        pending, seen = [self], {self}
        for value in pending:
            if value is origin:
                return True
            # Operands are made before what is computed from them.
            newer = [operand for operand in value.args if operand.order >= origin.order]
            pending += [operand for operand in newer if operand not in seen]
            seen.update(newer)
        return False

    def __repr__(self) -> str:
        inside = ", ".join(
            [*map(repr, self.args), *([] if self.attr is None else [str(self.attr)])]
        )
        return f"{self.op}({inside})"


class Algebra:
    """Makes expressions, each only once, in a normal form. Only exact identities are applied."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], Value] = {}
        self._by_op: dict[str, list[Value]] = {}
        self._count = 0

    def all_of(self, op: str) -> list[Value]:
        """Every expression with this outermost operation, in the order of the graph."""
        return self._by_op.get(op, [])

    def find(self, op: str, args: tuple[Value, ...], attr: Any = None) -> Value | None:
        """An expression, if the graph has it."""
        return self._made.get((op, args, attr))

    def make(
        self,
        op: str,
        args: tuple[Value, ...] = (),
        attr: Any = None,
        dtype: torch.dtype | None = torch.float32,
    ) -> Value:
        """The expression with these parts, without simplification."""
        key = (op, args, attr)
        value = self._made.get(key)
        if value is None:
            value = self._new(op, args, attr, dtype)
            self._made[key] = value
        return value

    def _new(self, op: str, args: tuple[Value, ...], attr: Any, dtype: torch.dtype | None) -> Value:
        self._count += 1
        value = Value(op, args, attr, dtype, self._count)
        value.column = op in ("mean", "sum", "amax") or (
            op not in ("opaque", "leaf", "const", "reduced", "tuple", "zeros")
            and all(operand.column or operand.op == "const" for operand in args)
        )
        for operand in dict.fromkeys(args):
            operand.users.append(value)
        self._by_op.setdefault(op, []).append(value)
        return value

    def opaque(self, args: tuple[Value, ...], dtype: torch.dtype | None, note: str = "") -> Value:
        """Something that is not understood, equal to nothing else."""
        value = self._new("opaque", args, None, dtype)
        value.note = note
        return value

    def const(self, number: float) -> Value:
        """A Python number; -0.0 is not 0.0."""
        return self.make("const", (), number.hex(), _FLOAT32_CONST)

    def up(self, value: Value) -> Value:
        """The exact float32 of a tensor's values."""
        if value.dtype not in HALF:
            return value
        if value.op == "rows":
            return self.rows(self.up(value.args[0]), *value.attr)
        if value.op == "choice":
            return self.choice(self.up(value.args[0]), value.attr)
        if value.op == "round" and _fits(value.args[0], value.dtype):
            return value.args[0]
        return self.make("up", (value,))

    def round(self, value: Value, dtype: torch.dtype | None) -> Value:
        """A float32 expression as stored in a tensor of `dtype`."""
        if dtype not in (*HALF, FP8):
            return value
        if value.op == "rows":
            return self.rows(self.round(value.args[0], dtype), *value.attr)
        if value.op == "choice":
            return self.choice(self.round(value.args[0], dtype), value.attr)
        if value.op == "up" and value.args[0].dtype == dtype:
            return value.args[0]
        return self.make("round", (value,), dtype, dtype)

    def rows(self, value: Value, before: int, after: int) -> Value:
        """The elements of rows of length `before` in rows of length `after`."""
        if value.op == "rows":
            value, before = value.args[0], value.attr[0]
        if before == after:
            return value
        return self.make("rows", (value,), (before, after), value.dtype)

    def choice(self, value: Value, attr: tuple[int, int]) -> Value:
        """One of each so many successive rows."""
        return self.make("choice", (value,), attr, value.dtype)

    def clamp(self, value: Value, low: float | None, high: float | None) -> Value:
        """At least `low`, then at most `high`; a NaN stays one."""
        low, high = as_float32(low), as_float32(high)
        if value.op == "clamp" and high is not None and low is None and value.attr[1] is None:
            value, low = value.args[0], value.attr[0]
        return self.make("clamp", (value,), (low, high))

    def unary(self, op: str, a: Value) -> Value:
        """`square`, `rsqrt`, `sqrt`, `reciprocal` or `abs`."""
        if op == "square" and a.op == "abs":
            a = a.args[0]
        if op == "reciprocal" and a.op == "sqrt":
            return self.make("rsqrt", a.args)
        return self.make(op, (a,))

    def over_last(self, op: str, a: Value, size: Any) -> Value:
        """`mean`, `sum` or `amax` over the last dimension."""
        return self.make(op, (a,), size)

    def binary(self, op: str, a: Value, b: Value) -> Value:
        """`add`, `mul`, `div` or `pow`."""
        number = number_of(b)
        if op in ("add", "mul") and number_of(a) is not None and number is None:
            a, b, number = b, a, number_of(a)
        if op in ("mul", "div") and number == 1.0:  # PyTorch makes 1.0 / x a reciprocal times 1.0
            return a
        if op == "mul" and a is b:
            return self.unary("square", a)
        if op == "pow" and number in (2.0, -0.5, 0.5):
            return self.unary({2.0: "square", -0.5: "rsqrt", 0.5: "sqrt"}[number], a)
        if op == "div" and number_of(a) == 1.0 and b.op == "sqrt":
            return self.make("rsqrt", b.args)
        if a.op == "sum" and isinstance(a.attr, int) and number is not None:
            power_of_two = math.frexp(a.attr)[0] == 0.5
            if (op == "div" and number == a.attr) or (
                op == "mul" and power_of_two and number * a.attr == 1.0
            ):
                return self.make("mean", a.args, a.attr)
        if op in ("add", "mul") and number is None and a.order > b.order:
            a, b = b, a
        return self.make(op, (a, b))


def _fits(value: Value, dtype: torch.dtype) -> bool:
    """Whether rounding a float32 expression to `dtype` changes nothing."""
    if value.op in ("abs", "amax", "rows", "choice"):
        return _fits(value.args[0], dtype)
    return value.op == "up" and value.args[0].dtype == dtype


@overload
def as_float32(number: float) -> float: ...
@overload
def as_float32(number: float | None) -> float | None: ...
def as_float32(number: float | None) -> float | None:
    """A number rounded to float32."""
    return None if number is None else ctypes.c_float(number).value


def number_of(value: Value) -> float | None:
    """The value of a constant; None for anything else."""
    return float.fromhex(value.attr) if value.op == "const" else None


def bare(value: Value) -> Value:
    """An expression without its outermost roundings and conversions."""
    while value.op in ("up", "round"):
        value = value.args[0]
    return value
