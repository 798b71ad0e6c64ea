"""Describes a tensor's contents as an expression in float32 arithmetic with explicit roundings.

PyTorch converts 16-bit operands to float32, computes in float32 and rounds each result. ``add`` of
two bfloat16 tensors is therefore ``round(add(up(a), up(b)))``. The rounding mode of a norm follows
from the positions of ``round``. An expression describes the rows of a tensor in order, so reshapes
that keep the last dimension do not appear.

| op | meaning |
|---|---|
| `leaf` | an input of the graph |
| `reduced` | the sum of an operand over ranks, computed by the node `attr` |
| `opaque` | anything else; never equal to another expression |
| `const` | a Python number; its value is `attr` |
| `up`, `round` | exact conversion to float32; rounding of float32 to `attr` |
| `add mul div pow` | operations on two float32 expressions |
| `square rsqrt sqrt reciprocal abs` | operations on one float32 expression |
| `mean sum amax` | reductions over the last dimension; `attr` is its size |
| `clamp` | limits to the bounds in `attr`; None means no bound |
| `choices` | the sums of every `attr` successive rows |
| `choice` | row `attr[0]` of every `attr[1]` successive rows |
| `zeros` | a tensor of zeros |
| `columns` | rows whose elements are the operands, one column each |
| `column` | column `attr` of the sum of `columns` over ranks |
| `rows` | the same elements in rows of a different length; `attr` is (old length, new length) |
| `blocks` | rows quantized to MXFP8 or NVFP4, with their scales; `attr` is the format |
| `part` | the rows (`attr[0]` is 0) or the scales (1) of `blocks`; `attr[1]` is the dtype |
| `tuple` | multiple results of one call |

Equal expressions are the same object: compare them with `is`.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from allnorm.compile.shapes import FP8, HALF


class NotUnderstood(Exception):  # noqa: N818 - not an error: the node stays opaque
    """A node cannot be expressed and becomes opaque; the report shows the message, if any."""


@dataclass(eq=False, repr=False, slots=True)
class Value:
    """One expression.

    Attributes:
        op: the operation, as in the table above; `args` are its operands.
        attr: the operation's attribute, as in the table above.
        dtype: the dtype of the tensors that hold the expression; None for a tuple or an unknown
            dtype.
        order: its position in the order in which expressions were created.
        column: whether it has one element per row.
        note: why the pass cannot look further into the expression; shown in the report.
        users: expressions that have it as an operand.
        definers: nodes that compute it, or compute it inside a decomposed operator.
        holders: nodes whose tensors hold it.
        readers: (node, its argument) for each read.
        questions: (node, its argument) for each call that only queries the shape or dtype.
    """

    op: str
    args: tuple[Value, ...]
    attr: Any
    dtype: torch.dtype | None
    order: int
    column: bool = False
    note: str = ""
    users: list[Value] = field(default_factory=list)
    definers: list[Node] = field(default_factory=list)
    holders: list[Node] = field(default_factory=list)
    readers: list[tuple[Node, Node]] = field(default_factory=list)
    questions: list[tuple[Node, Node]] = field(default_factory=list)

    def other(self, operand: Value) -> Value:
        """Returns the other operand of a commutative operation."""
        return self.args[1] if self.args[0] is operand else self.args[0]

    def derives_from(self, origin: Value) -> bool:
        """Returns whether this expression is `origin` or is computed from it."""
        pending, seen = [self], {self}
        for value in pending:
            if value is origin:
                return True
            # An expression is created after its operands.
            newer = [operand for operand in value.args if operand.order >= origin.order]
            pending += [operand for operand in newer if operand not in seen]
            seen.update(newer)
        return False

    def __repr__(self) -> str:
        attr = [] if self.attr is None else [str(self.attr)]
        return f"{self.op}({', '.join([*map(repr, self.args), *attr])})"


class Algebra:
    """Creates each expression once, in a normal form. Simplifies only if the result is exact."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], Value] = {}
        self._by_op: dict[str, list[Value]] = {}
        self._columns: dict[tuple[Value, int], Value | None] = {}
        self._count = 0

    def all_of(self, op: str) -> list[Value]:
        """Returns every expression with this outermost operation, in graph order."""
        return self._by_op.get(op, [])

    def find(self, op: str, args: tuple[Value, ...], attr: Any = None) -> Value | None:
        """Returns the expression with these parts; None if it does not exist."""
        return self._made.get((op, args, attr))

    def make(
        self,
        op: str,
        args: tuple[Value, ...] = (),
        attr: Any = None,
        dtype: torch.dtype | None = torch.float32,
    ) -> Value:
        """Returns the expression with these parts, without simplification."""
        key = (op, args, attr)
        if key not in self._made:
            self._made[key] = self._new(op, args, attr, dtype)
        return self._made[key]

    def _new(self, op: str, args: tuple[Value, ...], attr: Any, dtype: torch.dtype | None) -> Value:
        self._count += 1
        value = Value(op, args, attr, dtype, self._count)
        value.column = op in ("mean", "sum", "amax", "column") or (
            op not in ("opaque", "leaf", "const", "reduced", "tuple", "zeros", "columns")
            and all(operand.column or operand.op == "const" for operand in args)
        )
        for operand in dict.fromkeys(args):
            operand.users.append(value)
        self._by_op.setdefault(op, []).append(value)
        return value

    def opaque(self, args: tuple[Value, ...], dtype: torch.dtype | None, note: str = "") -> Value:
        """Creates an unknown expression, which is never equal to another one."""
        value = self._new("opaque", args, None, dtype)
        value.note = note
        return value

    def const(self, number: float) -> Value:
        """Returns the expression of a Python number; -0.0 differs from 0.0."""
        return self.make("const", (), number.hex())

    def up(self, value: Value) -> Value:
        """Returns a tensor's values converted to float32, which is exact."""
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
        """Returns a float32 expression rounded to `dtype`."""
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
        """Returns rows of length `before` regrouped into rows of length `after`."""
        if value.op == "rows":
            value, before = value.args[0], value.attr[0]
        if before == after:
            return value
        return self.make("rows", (value,), (before, after), value.dtype)

    def choice(self, value: Value, attr: tuple[int, int]) -> Value:
        """Returns row `attr[0]` of every `attr[1]` successive rows."""
        return self.make("choice", (value,), attr, value.dtype)

    def column(self, value: Value, index: int) -> Value | None:
        """Returns one column of an expression of `columns`; None if it is no such expression."""
        # Kept, because an expression that is used twice at each of many steps has many paths.
        if (value, index) not in self._columns:
            self._columns[value, index] = self._column(value, index)
        return self._columns[value, index]

    def _column(self, value: Value, index: int) -> Value | None:
        if value.op == "const":
            return value
        if value.op == "columns":
            return value.args[index]
        if value.op == "reduced":
            is_wide = bool(value.args) and value.args[0].op == "columns"
            return self.make("column", (value,), index, value.dtype) if is_wide else None
        parts = [self.column(operand, index) for operand in value.args]
        operands = [part for part in parts if part is not None]
        if len(operands) != len(parts) or not parts:
            return None
        if value.op in ("add", "mul", "div", "pow"):
            return self.binary(value.op, *operands)
        if value.op in ("square", "rsqrt", "sqrt", "reciprocal", "abs"):
            return self.unary(value.op, *operands)
        return None

    def clamp(self, value: Value, low: float | None, high: float | None) -> Value:
        """Returns the value limited to at least `low`, then at most `high`; NaN stays NaN."""
        low, high = (None if bound is None else as_float32(bound) for bound in (low, high))
        if value.op == "clamp" and high is not None and low is None and value.attr[1] is None:
            value, low = value.args[0], value.attr[0]
        return self.make("clamp", (value,), (low, high))

    def unary(self, op: str, a: Value) -> Value:
        """Returns `square`, `rsqrt`, `sqrt`, `reciprocal` or `abs` of an expression."""
        if op == "square" and a.op == "abs":
            a = a.args[0]
        if op == "reciprocal" and a.op == "sqrt":
            return self.make("rsqrt", a.args)
        return self.make(op, (a,))

    def binary(self, op: str, a: Value, b: Value) -> Value:
        """Returns `add`, `mul`, `div` or `pow` of two expressions."""
        number = number_of(b)
        if op in ("add", "mul") and number_of(a) is not None and number is None:
            a, b, number = b, a, number_of(a)
        if op in ("mul", "div") and number == 1.0:  # PyTorch's form of 1.0 / x
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
    """Returns whether rounding a float32 expression to `dtype` changes nothing."""
    if value.op in ("abs", "amax", "rows", "choice"):
        return _fits(value.args[0], dtype)
    return value.op == "up" and value.args[0].dtype == dtype


def as_float32(number: float) -> float:
    """Returns a number rounded to float32."""
    return ctypes.c_float(number).value


def number_of(value: Value) -> float | None:
    """Returns the value of a constant; None for anything else."""
    return float.fromhex(value.attr) if value.op == "const" else None


def bare(value: Value) -> Value:
    """Returns an expression without its outermost roundings and conversions."""
    while value.op in ("up", "round"):
        value = value.args[0]
    return value
