"""Finds the expression that each tensor of a functional graph holds, and the nodes that read it.

If a graph could not be made functional, `Context.written` lists the memory that it writes. Tensors
in this memory may have wrong expressions, which is harmless: nothing that uses them is fused.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from allnorm.compile.decompose import Decompositions
from allnorm.compile.evaluate import Evaluator
from allnorm.compile.expressions import Algebra, Value
from allnorm.compile.reductions import Reduction
from allnorm.compile.shapes import Shapes, leads_to, same_shape
from allnorm.compile.vocabulary import asks_only, checks_inputs, is_pure, operation, written


@dataclass(frozen=True)
class Context:
    """Properties of the graph that the caller passed, before it was made functional.

    Attributes:
        makers: maps each node of the functional graph to the original graph's node for which it was
            recorded.
        in_place: the original graph's in-place reductions.
        differentiated: the original graph's nodes whose results need a gradient.
        written: maps each storage that is written to a message that names the node that writes to
            it; empty for functional graphs.
    """

    makers: Mapping[Node, Node] = field(default_factory=dict)
    in_place: frozenset[Node] = frozenset()
    differentiated: frozenset[Node] = frozenset()
    written: Mapping[object, str] = field(default_factory=dict)


class Values:
    """A graph's expressions.

    Attributes:
        algebra: all expressions.
        position: maps each node to its index in the graph.
        held: maps each node to the expression that its tensor holds.
        reduced: maps each reduction's node to the expression of its sum over ranks.
        parameters: maps the paths of parameters and buffers to their tensors, fake or real.
        pending: nodes whose tensors must not be read except through a wait.
    """

    def __init__(
        self,
        graph: Graph,
        shapes: Shapes,
        reductions: dict[Node, Reduction],
        decompositions: Decompositions,
        context: Context,
    ) -> None:
        self.algebra = Algebra()
        self.shapes = shapes
        self.context = context
        self.position = {node: position for position, node in enumerate(graph.nodes)}
        self.held: dict[Node, Value] = {}
        self.reduced: dict[Node, Value] = {}
        self.parameters: dict[str, Tensor] = {}
        self.pending: set[Node] = set()
        self._copies: set[Node] = set()
        self._evaluator = Evaluator(
            self.algebra, shapes, self.held.__getitem__, self._parameter, decompositions
        )
        for node in graph.nodes:
            self._visit(node, reductions.get(node))

    def maker_of(self, node: Node) -> Node:
        """Returns the original graph's node for which a node was recorded, or the node itself."""
        return self.context.makers.get(node, node)

    def name_of(self, node: Node) -> str:
        """Returns a node's name in the original graph."""
        return self.maker_of(node).name

    def results_of(self, node: Node) -> tuple[Value, ...]:
        """Returns the expressions of a node's results."""
        value = self.held.get(node)
        if value is None:
            return ()
        return value.args if value.op == "tuple" else (value,)

    def computed_by(self, value: Value) -> list[Node]:
        """Returns the nodes that compute `value` or are views of it, but no copies."""
        return [node for node in value.definers if node not in self._copies]

    def made_by(self, value: Value) -> list[Node]:
        """Returns the nodes that compute `value`, but no copies or views."""

        def is_view(node: Node) -> bool:
            memory = self.shapes.storage(node)
            sources = [source for source in node.all_input_nodes if self.held[source] is value]
            return any(self.shapes.storage(source) == memory for source in sources)

        return [node for node in self.computed_by(value) if not is_view(node)]

    def written_by(self, node: Node) -> str:
        """Returns a message naming the node that writes to this node's memory; "" if none does."""
        if not self.context.written:
            return ""
        found = (self.context.written.get(memory) for memory in memories(node, self.shapes))
        return next(filter(None, found), "")

    @functools.cached_property
    def live(self) -> set[Node]:
        """The nodes that have effects, and those that the graph's results depend on."""
        found: set[Node] = set()
        for node in reversed(self.position):
            used = not found.isdisjoint(node.users)
            if used or node.op == "output" or not is_pure(node):
                found.add(node)
        return found

    def is_used(self, value: Value) -> bool:
        """Returns whether live nodes read a value, not counting nodes that hold it."""
        return any(node in self.live for node, _ in value.readers if node not in value.holders)

    def holder(
        self,
        value: Value,
        shape: Sequence[Any],
        dtype: torch.dtype | None,
        device: torch.device,
        *,
        leading_ones: bool = False,
    ) -> Node | None:
        """Returns a node whose tensor holds `value` with this shape, dtype and device, or None.

        If `leading_ones`, the tensor must lack one or more leading dimensions of size 1.
        """
        for node in value.holders:
            tensor = self.shapes.of(node)
            if tensor is None or (tensor.dtype, tensor.device) != (dtype, device):
                continue
            if (leads_to if leading_ones else same_shape)(
                tensor.shape, shape
            ) and node not in self.pending:
                return node
        return None

    @functools.cached_property
    def ordered(self) -> dict[Node, int]:
        """The nodes that must keep their order, because they have effects or use written memory."""
        found: dict[Node, int] = {}
        for node in self.position:
            if node.op in ("placeholder", "get_attr", "output") or node in self.reduced:
                continue
            touched = (node, *node.all_input_nodes) if self.context.written else ()
            if operation(node) != "wait" and (
                not is_pure(node) or any(map(self.written_by, touched))
            ):
                found[node] = len(found)
        return found

    def _visit(self, node: Node, reduction: Reduction | None) -> None:
        if node.op in ("placeholder", "get_attr"):
            self._hold(node, self._leaf(node))
            return
        asks = asks_only(node) or checks_inputs(node)
        targets = [] if reduction is not None or asks else written(node)
        overwritten = targets[0] if operation(node) == "copy" and targets else None
        for source in node.all_input_nodes:
            if source is not overwritten or source in node.args[1:]:
                held = self.held[source]
                (held.questions if asks else held.readers).append((node, source))
        if node.op == "output":
            return
        if asks:
            value = self.algebra.opaque((), None)
        elif reduction is not None:
            value = self._reduction(node, reduction)
        elif targets:
            value = self._opaque(node)
        else:
            value = self._evaluator.evaluate(node)
            if self._only_copies(node, value):
                self._copies.add(node)
        self._hold(node, value)
        for inner in self._evaluator.on_the_way.get(node, ()):
            if not inner.definers and inner not in self.results_of(node):
                inner.definers.append(node)

    def _only_copies(self, node: Node, value: Value) -> bool:
        """Returns whether a node only copies its input to new memory."""
        if operation(node) not in ("same", "cast", "dropout") or not node.all_input_nodes:
            return False
        source = node.all_input_nodes[0]
        shared = self.shapes.storage(node) == self.shapes.storage(source)
        return self.held[source] is value and not shared

    def _reduction(self, node: Node, reduction: Reduction) -> Value:
        x = None if reduction.x is None else self.shapes.of(reduction.x)
        inputs = tuple(self.held[source] for source in node.all_input_nodes)
        value = self.algebra.make("reduced", inputs, node, None if x is None else x.dtype)
        self.reduced[node] = value
        value.column = reduction.x is not None and self.held[reduction.x].column
        if reduction.pending:
            self.pending.add(node)
        if reduction.result is None:
            return value
        before = [self._opaque(node) for _ in range(reduction.result)]
        return self.algebra.make("tuple", (*before, value), node, None)

    def _leaf(self, node: Node) -> Value:
        tensor = self.shapes.of(node)
        if node.op == "get_attr" and tensor is not None:
            return self._parameter(str(node.target), tensor)
        return self.algebra.make("leaf", (), node, None if tensor is None else tensor.dtype)

    def _parameter(self, path: str, tensor: Tensor) -> Value:
        self.parameters[path] = tensor
        return self.algebra.make("leaf", (), path, tensor.dtype)

    def _opaque(self, node: Node) -> Value:
        tensor = self.shapes.of(node)
        inputs = tuple(self.held[source] for source in node.all_input_nodes)
        return self.algebra.opaque(inputs, None if tensor is None else tensor.dtype)

    def _hold(self, node: Node, value: Value) -> None:
        self.held[node] = value
        value.holders.append(node)
        value.definers.append(node)


def memories(node: Node, shapes: Shapes) -> set[object]:
    """Returns a node's memory; if its value is unknown, also the memory of its possible bases."""
    pending, found = [node], set()
    for one in pending:
        found.add(shapes.storage(one))
        if shapes.any_of(one) is None and one.op.startswith("call"):
            pending += [source for source in one.all_input_nodes if source not in pending]
    return found
