"""Evaluates a node to the expression that it computes, with the roundings that PyTorch makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch.fx import GraphModule, Node

from allnorm.compile import decompose
from allnorm.compile.expressions import NotUnderstood, Value
from allnorm.compile.operands import Operands
from allnorm.compile.rules import MODULES, RULES
from allnorm.compile.shapes import Shapes
from allnorm.compile.vocabulary import module_of, not_plain, operation, state_of


@dataclass
class Evaluator(Operands):
    """Evaluates single nodes, by the rules of `allnorm.compile.rules`.

    Attributes:
        decompositions: functions that compute the results of custom operators.
        on_the_way: expressions computed inside such a function, by the node that it computes.
    """

    decompositions: decompose.Decompositions
    on_the_way: dict[Node, list[Value]] = field(default_factory=dict)

    def _inside(self, module: GraphModule, held: Callable[[Node], Value]) -> Evaluator:
        """Returns an evaluator for the trace of a function that computes a node's result."""
        shapes = Shapes(module, {}, None)
        shapes.examples = self.shapes.examples  # the trace has the sizes of these examples
        return Evaluator(self.algebra, shapes, held, self.parameter, {})

    def evaluate(self, node: Node) -> Value:
        """Returns the node's result; for an in-place call, its first argument's new contents."""
        note = ""
        try:
            function = decompose.find(node, self.decompositions)
            if function is not None:
                self._check_plain(node)
                value, self.on_the_way[node] = decompose.evaluate(
                    self, node, function, lambda module, held: self._inside(module, held).evaluate
                )
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
            note = f"{node} computes with a number that float64 cannot represent"
        out = self.shapes.of(node)
        inputs = tuple(self.held(source) for source in node.all_input_nodes)
        return self.algebra.opaque(inputs, None if out is None else out.dtype, note)

    def _check_plain(self, node: Node) -> None:
        """Raises if a node computes with a DTensor: its result would be a DTensor too."""
        operands = {str(source): self.shapes.of(source) for source in node.all_input_nodes}
        for name, tensor in (operands | state_of(node)).items():
            problem = "" if tensor is None else not_plain(name, tensor)
            if problem:
                raise NotUnderstood(f"{node} computes with {problem}")
