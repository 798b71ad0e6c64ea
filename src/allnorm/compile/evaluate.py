"""From a node to the expression that it computes, with the roundings that PyTorch makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from allnorm.compile import decompose
from allnorm.compile.expressions import Algebra, NotUnderstood, Value
from allnorm.compile.rules import MODULES, RULES
from allnorm.compile.shapes import FLOATS, Shapes, elems, leads_to, same_shape, static_size
from allnorm.compile.vocabulary import module_of, not_plain, operation


class Evaluator:
    """Evaluates single nodes, by the rules of `allnorm.compile.rules`.

    Args:
        algebra: where expressions are made.
        shapes: of the graph.
        held: the expression that a node's tensor holds now.
        parameter: the expression of a parameter of a called module, by its path.
        decompositions: functions that operators stand for.

    Attributes:
        on_the_way: expressions inside of such a function, by the node that stands for it.
    """

    def __init__(
        self,
        algebra: Algebra,
        shapes: Shapes,
        held: Callable[[Node], Value],
        parameter: Callable[[str, Tensor], Value],
        decompositions: decompose.Decompositions,
    ) -> None:
        self.algebra = algebra
        self.shapes = shapes
        self.held = held
        self.parameter = parameter
        self.on_the_way: dict[Node, list[Value]] = {}
        self._decompositions = decompositions

    def inside(self, module: GraphModule, held: Callable[[Node], Value]) -> Evaluator:
        """An evaluator for the graph of a function that a node stands for."""
        shapes = Shapes(module, {}, None)
        shapes.examples = self.shapes.examples  # its sizes are theirs
        return Evaluator(self.algebra, shapes, held, self.parameter, {})

    def evaluate(self, node: Node) -> Value:
        """What the node computes: of a call in place, what its first argument holds then."""
        note = ""
        try:
            function = decompose.find(node, self._decompositions)
            if function is not None:
                self._check_plain(node)
                value, self.on_the_way[node] = decompose.evaluate(self, node, function)
                return value
            rule = RULES.get(operation(node))
            if node.op == "call_module":
                rule = MODULES.get(type(module_of(node)))
            if rule is not None:
                self._check_plain(node)
                return rule(self, node)
        except NotUnderstood as reason:
            note = str(reason)
        except OverflowError:
            note = f"{node} computes with a number beyond float64"
        out = self.shapes.of(node)
        inputs = tuple(self.held(source) for source in node.all_input_nodes)
        return self.algebra.opaque(inputs, None if out is None else out.dtype, note)

    def _check_plain(self, node: Node) -> None:
        """Raises if a node computes with a DTensor: its result would be one too."""
        operands = {str(source): self.shapes.of(source) for source in node.all_input_nodes}
        called = module_of(node) if node.op == "call_module" else None
        if called is not None:
            named = (*called.named_parameters(), *called.named_buffers())
            operands |= {f"{node.target}.{name}": tensor for name, tensor in named}
        for name, tensor in operands.items():
            problem = "" if tensor is None else not_plain(name, tensor)
            if problem:
                raise NotUnderstood(f"{node} computes with {problem}")

    # ---- what rules ask -------------------------------------------------------------------------

    def node(self, value: Any) -> Node:
        """An argument that must be a node."""
        if not isinstance(value, Node):
            raise NotUnderstood
        return value

    def out(self, node: Node) -> Tensor:
        """The result, which must be of a dtype that the pass knows."""
        out = self.shapes.of(node)
        if out is None:
            raise NotUnderstood
        if out.dtype not in FLOATS:
            raise NotUnderstood(f"{node} is {out.dtype}: {_EXPECTED_DTYPES}")
        return out

    def tensor(self, operand: Any, node: Node) -> tuple[Value, Tensor]:
        """A tensor operand in float32 arithmetic."""
        tensor = self.shapes.of(operand) if isinstance(operand, Node) else None
        if tensor is None:
            raise NotUnderstood
        if tensor.dtype not in FLOATS:
            raise NotUnderstood(f"{node} computes with {tensor.dtype}: {_EXPECTED_DTYPES}")
        return self.algebra.up(self.held(operand)), tensor

    def operand(self, operand: Any, node: Node, out: Tensor) -> Value:
        """An operand that broadcasts along rows or along columns, or a number."""
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
        """Raises if an operand is a number that the tracer does not know."""
        if _is_symbolic(self.shapes, operand):
            raise NotUnderstood(f"{node} computes with {operand}, {_SYMBOL}")


_SYMBOL = (
    "a number that the tracer keeps as a symbol, as torch.compile(dynamic=True) does with floats: "
    "the fused call takes numbers. Set torch._dynamo.config.specialize_float = True"
)


def _is_symbolic(shapes: Shapes, operand: Any) -> bool:
    """Returns whether an operand is a number that is not known until the graph runs.

    Inductor has float64 scalars on the CPU for them, and what is computed from those.
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
    """Whether an operand is of the shape of the result, one column of it, or one row."""
    if same_shape(shape, out) or all(static_size(size) == 1 for size in shape):
        return True
    if leads_to(shape, out) and len(shape) > 1:
        return True
    if same_shape(shape, [*out[:-1], 1]):
        return True
    is_row = not column and statically_known_true(elems(shape) == shape[-1])
    return is_row and same_shape(shape[-1:], out[-1:])
