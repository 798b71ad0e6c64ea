"""Evaluates a node to the expression that it computes, including PyTorch's roundings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from allnorm.compile import decompose
from allnorm.compile.expressions import NotUnderstood, Value
from allnorm.compile.operands import Operands
from allnorm.compile.rules import MODULES, RULES
from allnorm.compile.shapes import Shapes
from allnorm.compile.vocabulary import module_of, not_plain, operation, state_of, written


@dataclass
class Evaluator(Operands):
    """Evaluates single nodes, using the rules in `allnorm.compile.rules`.

    Attributes:
        decompositions: functions that compute the results of custom operators.
        on_the_way: the intermediate expressions of these functions, keyed by the decomposed node.
    """

    decompositions: decompose.Decompositions
    on_the_way: dict[Node, list[Value]] = field(default_factory=dict)

    def evaluate(self, node: Node) -> Value:
        """Returns a node's result; for an in-place call, its first argument's new contents."""
        note = ""
        try:
            function = decompose.find(node, self.decompositions)
            if function is not None:
                self._check_plain(node)
                return self._decomposed(node, function)
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

    def _decomposed(self, node: Node, function: Callable[..., Any]) -> Value:
        """Returns the result of a node's function; stores its intermediate expressions."""
        sources = [source for source in node.all_input_nodes if self.shapes.of(source) is not None]
        traced = decompose.trace(self.shapes, node, function, sources)
        shapes = Shapes(traced, {}, None)
        shapes.examples = self.shapes.examples  # the trace has the sizes of these examples
        placeholders = traced.graph.find_nodes(op="placeholder")
        held = {p: self.held(s) for p, s in zip(placeholders, sources, strict=True)}
        inside = Evaluator(self.algebra, shapes, held.__getitem__, self.parameter, {})
        for inner in traced.graph.nodes:
            if written(inner):
                raise NotUnderstood(
                    f"{node} is decomposed by a function that changes its arguments"
                )
            if inner.op not in ("placeholder", "output"):
                held[inner] = inside.evaluate(inner)
        self.on_the_way[node] = [held[inner] for inner in held if inner not in placeholders]
        (output,) = traced.graph.output_node().args
        if isinstance(output, Node):
            return held[output]
        assert isinstance(output, tuple | list)
        inputs = tuple(map(self.held, node.all_input_nodes))
        results = [
            held[item] if isinstance(item, Node) else self.algebra.opaque(inputs, None)
            for item in output
        ]
        return self.algebra.make("tuple", tuple(results), node, None)

    def _check_plain(self, node: Node) -> None:
        """Raises if a node computes with a DTensor, because its result would be a DTensor too."""
        operands = {str(source): self.shapes.of(source) for source in node.all_input_nodes}
        for name, tensor in (operands | state_of(node)).items():
            problem = "" if tensor is None else not_plain(name, tensor)
            if problem:
                raise NotUnderstood(f"{node} computes with {problem}")
