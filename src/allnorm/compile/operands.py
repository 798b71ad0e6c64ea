"""Gives the rules that evaluate nodes access to a node's result and operands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from allnorm.compile.expressions import Algebra, NotUnderstood, Value
from allnorm.compile.shapes import FLOATS, Shapes, elems, leads_to, same_shape, static_size


@dataclass
class Operands:
    """The tensors of a graph's nodes, as expressions.

    `held` returns the expression that a node's tensor holds. `parameter` returns the expression of
    a called module's parameter, given its path and tensor.
    """

    algebra: Algebra
    shapes: Shapes
    held: Callable[[Node], Value]
    parameter: Callable[[str, Tensor], Value]

    def node(self, value: Any) -> Node:
        """Returns an argument if it is a node; raises otherwise."""
        if not isinstance(value, Node):
            raise NotUnderstood
        return value

    def out(self, node: Node) -> Tensor:
        """Returns a node's result. Raises unless it is float32, float16 or bfloat16."""
        out = self.shapes.of(node)
        if out is None:
            raise NotUnderstood
        if out.dtype not in FLOATS:
            raise NotUnderstood(f"{node} is {out.dtype}: {_EXPECTED_DTYPES}")
        return out

    def tensor(self, operand: Any, node: Node) -> tuple[Value, Tensor]:
        """Returns a tensor operand's expression in float32, and its fake tensor."""
        tensor = self.shapes.of(operand) if isinstance(operand, Node) else None
        if tensor is None:
            raise NotUnderstood
        if tensor.dtype not in FLOATS:
            raise NotUnderstood(f"{node} computes with {tensor.dtype}: {_EXPECTED_DTYPES}")
        return self.algebra.up(self.held(operand)), tensor

    def operand(self, operand: Any, node: Node, out: Tensor) -> Value:
        """Returns the expression of an operand: a number, or a tensor that broadcasts to `out`."""
        number = self.shapes.any_of(operand) if isinstance(operand, Node) else operand
        if isinstance(number, int | float) and not isinstance(number, bool):
            return self.algebra.const(float(number))
        self.check_known(operand, node)
        value, tensor = self.tensor(operand, node)
        if tensor.dim() == 0 and tensor.dtype != out.dtype:
            raise NotUnderstood(f"{node} computes with the scalar tensor {operand}")
        if not _broadcasts(tensor.shape, out.shape, column=value.column):
            before, after = list(tensor.shape), list(out.shape)
            raise NotUnderstood(f"{node} broadcasts {operand} of shape {before} to {after}")
        return value

    def check_known(self, operand: Any, node: Node) -> None:
        """Raises if an operand is a number that is unknown until the graph runs."""
        if _is_symbolic(self.shapes, operand):
            raise NotUnderstood(f"{node} computes with {operand}, {_SYMBOL}")


_SYMBOL = (
    "a number that the tracer keeps symbolic, as torch.compile(dynamic=True) does with floats: "
    "the fused call takes constants. Set torch._dynamo.config.specialize_float = True"
)


def _is_symbolic(shapes: Shapes, operand: Any) -> bool:
    """Returns whether an operand is a number that is unknown until the graph runs.

    In Inductor's graphs such numbers are float64 scalars, or results computed from them.
    """
    if not isinstance(operand, Node):
        return False
    if isinstance(shapes.any_of(operand), torch.SymFloat | torch.SymInt):
        return True
    tensor = shapes.of(operand)
    while tensor is not None and tensor.dim() == 0 and operand.op == "call_function":
        sources = operand.all_input_nodes
        if len(sources) != 1:
            return False
        operand, tensor = sources[0], shapes.of(sources[0])
    if tensor is None or operand.op != "placeholder":
        return False
    return tensor.dim() == 0 and tensor.dtype == torch.float64


_EXPECTED_DTYPES = "expected float32, float16 or bfloat16"


def _broadcasts(shape: Any, out: Any, *, column: bool) -> bool:
    """Returns whether an operand has the result's shape, or the shape of its columns or rows."""
    if same_shape(shape, out) or all(static_size(size) == 1 for size in shape):
        return True
    if leads_to(shape, out) and len(shape) > 1:
        return True
    if same_shape(shape, [*out[:-1], 1]):
        return True
    is_row = not column and statically_known_true(elems(shape) == shape[-1])
    return is_row and same_shape(shape[-1:], out[-1:])
