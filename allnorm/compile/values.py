"""What every tensor of a graph holds at every point: single assignment over memory that is written.

A graph of Dynamo still has calls in place, and tensors that share memory. Walking the graph once in
order gives each tensor a history; a write gives a new expression to all tensors that share the
memory, an opaque one to those that see it in another shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from allnorm.compile.decompose import Decompositions
from allnorm.compile.evaluate import Evaluator
from allnorm.compile.expressions import Algebra, Value
from allnorm.compile.reductions import Reduction
from allnorm.compile.shapes import Shapes, elems, is_contiguous, same_shape
from allnorm.compile.vocabulary import is_in_place, operation, written


@dataclass(frozen=True)
class Write:
    """A node changes memory, through a tensor in it."""

    position: int
    node: Node
    target: Node
    storage: object


class Values:
    """The expressions of a graph.

    Args:
        graph: is not changed.
        shapes: of the graph.
        reductions: of the graph.
        decompositions: functions that operators stand for.

    Attributes:
        algebra: all expressions.
        shapes: of the graph.
        position: of each node in the graph's order.
        writes: every change of memory, in order.
        reduced: the sum over ranks that a reduction computes.
        defines: the expressions that a node computes or writes.
        parameters: what is known of parameters and buffers, by path.
    """

    def __init__(
        self,
        graph: Graph,
        shapes: Shapes,
        reductions: dict[Node, Reduction],
        decompositions: Decompositions,
    ) -> None:
        self.algebra = Algebra()
        self.shapes = shapes
        self.position: dict[Node, int] = {}
        self.writes: list[Write] = []
        self.reduced: dict[Node, Value] = {}
        self.defines: dict[Node, list[Value]] = {}
        self._copies: set[Node] = set()
        self._pending: set[Node] = set()
        self._reduced_in: dict[Value, object] = {}
        self._history: dict[Node, list[tuple[int, Value]]] = {}
        self._sharing: dict[object, list[Node]] = {}
        self._external: set[object] = set()
        self._writes_of: dict[Node, list[Write]] = {}
        self.parameters: dict[str, Tensor] = {}
        self._evaluator = Evaluator(
            self.algebra, shapes, self._held, self._parameter, decompositions
        )
        for position, node in enumerate(graph.nodes):
            self.position[node] = position
            self._visit(node, reductions.get(node))

    # ---- what the matcher asks ------------------------------------------------------------------

    def held_at(self, node: Node, position: int) -> Value | None:
        """What the tensor of `node` holds just before the node at `position` runs."""
        held = None
        for since, value in self._history.get(node, []):
            if since < position:
                held = value
        return held

    def held_since(self, node: Node, value: Value) -> int | None:
        """The position of the node that first made the tensor of `node` hold `value`."""
        return next((since for since, held in self._history.get(node, []) if held is value), None)

    def is_pending(self, node: Node) -> bool:
        """Whether a tensor may only be read through a wait."""
        return node in self._pending

    def is_written(self, node: Node) -> bool:
        """Whether the graph changes the memory of `node`."""
        storage = self.shapes.storage(node)
        return any(write.storage == storage for write in self.writes)

    def others_of(self, reduction: Node) -> list[Value]:
        """What a reduction returns besides the reduced tensor."""
        results = [value for value in self.defines.get(reduction, []) if value.op == "tuple"]
        return [item for value in results for item in value.args if item.op != "reduced"]

    def results_of(self, node: Node) -> list[Value]:
        """What a node computes or writes; of a tuple its items."""
        defined = self.defines.get(node, [])
        return [item for v in defined for item in (v.args if v.op == "tuple" else (v,))]

    def in_memory(self, storage: object) -> list[Node]:
        """All tensors in one memory."""
        return self._sharing.get(storage, [])

    def is_external(self, storage: object) -> bool:
        """Whether somebody outside the graph sees this memory."""
        return storage in self._external

    def writes_outside(self, node: Node) -> bool:
        """Whether a node changes memory that somebody outside the graph sees."""
        return any(self.is_external(write.storage) for write in self.writes_of(node))

    def is_kept(self, node: Node, shape: Sequence[object]) -> bool:
        """Whether a node hands its input on as a copy, or in another shape than this."""
        tensor = self.shapes.of(node)
        in_another_shape = tensor is not None and not same_shape(tensor.shape, shape)
        return node in self._copies or (operation(node) == "view" and in_another_shape)

    def owners(self, value: Value) -> set[object]:
        """The memory in which the graph computes `value`; copies of it are elsewhere."""
        found: set[object] = set()
        for node in self.computed_by(value):
            written_to = {write.storage for write in self.writes_of(node)}
            found |= written_to or {self.shapes.storage(node)}
        return found

    def computed_by(self, value: Value) -> list[Node]:
        """The nodes that compute `value`, or hand it on in the same memory."""
        return [node for node in value.definers if node not in self._copies]

    def writes_of(self, node: Node) -> list[Write]:
        """What memory a node changes."""
        return self._writes_of.get(node, [])

    # ---- the walk -------------------------------------------------------------------------------

    def _visit(self, node: Node, reduction: Reduction | None) -> None:
        if node.op in ("placeholder", "get_attr"):
            self._external.add(self.shapes.storage(node))
            self._hold(node, self._leaf(node))
            return
        targets = written(node)
        overwritten = targets[0] if operation(node) == "copy" and targets else None
        for source in node.all_input_nodes:
            if source is not overwritten or source in node.args[1:]:
                self._held(source).readers.append((node, source))
        if node.op == "output":
            return
        if reduction is not None:
            value = self._reduction(node, reduction)
            targets = [reduction.x] if reduction.in_place and reduction.x is not None else []
            understood = True
        else:
            value = self._evaluator.evaluate(node)
            understood = is_in_place(node) and targets == list(node.args[:1])
            if self._only_copies(node, value):
                self._copies.add(node)
        for target in targets:
            self._write(target, value if understood else self._opaque(node), node)
        self._hold(node, value if understood or not targets else self._opaque(node))
        for inner in self._evaluator.on_the_way.get(node, ()):
            is_result = inner is value or (value.op == "tuple" and inner in value.args)
            if not inner.definers and not is_result:
                inner.definers.append(node)

    def _only_copies(self, node: Node, value: Value) -> bool:
        """Whether a node hands on what an input holds, in other memory.

        The copy that Dynamo makes of an all-reduce in place is none: it belongs to the reduction.
        """
        name, inputs = operation(node), node.all_input_nodes
        if name == "copy" and len(inputs) == 2:
            target, source = inputs
            back = self._reduced_in.get(value) == self.shapes.storage(target)
        elif name in ("same", "cast", "dropout") and inputs:
            target, source, back = node, inputs[0], False
        else:
            return False
        shared = self.shapes.storage(target) == self.shapes.storage(source)
        return self._held(source) is value and not shared and not back

    def _reduction(self, node: Node, reduction: Reduction) -> Value:
        x = None if reduction.x is None else self.shapes.of(reduction.x)
        inputs = tuple(self._held(source) for source in node.all_input_nodes)
        value = self.algebra.make("reduced", inputs, node, None if x is None else x.dtype)
        self.reduced[node] = value
        if reduction.pending:
            self._pending.add(node)
        if reduction.x is not None:
            self._reduced_in[value] = self.shapes.storage(reduction.x)
        if reduction.result is None:
            return value
        before = [self._opaque(node) for _ in range(reduction.result)]
        return self.algebra.make("tuple", (*before, value), node, None)

    def _held(self, node: Node) -> Value:
        return self._history[node][-1][1]

    def _leaf(self, node: Node) -> Value:
        tensor = self.shapes.of(node)
        if node.op == "get_attr" and tensor is not None:
            return self._parameter(str(node.target), tensor)
        return self.algebra.make("leaf", (), node, None if tensor is None else tensor.dtype)

    def _parameter(self, path: str, tensor: Tensor) -> Value:
        self.parameters[path] = tensor
        return self.algebra.make("leaf", (), path, tensor.dtype)

    def _opaque(self, node: Node, note: str = "") -> Value:
        tensor = self.shapes.of(node)
        inputs = tuple(self._held(source) for source in node.all_input_nodes)
        return self.algebra.opaque(inputs, None if tensor is None else tensor.dtype, note)

    def _hold(self, node: Node, value: Value) -> None:
        if node not in self._history:
            shared = [self.shapes.storage(node)]
            if self.shapes.any_of(node) is None:  # it may be a view of anything that it was given
                shared += [self.shapes.storage(source) for source in node.all_input_nodes]
            for storage in dict.fromkeys(shared):
                self._sharing.setdefault(storage, []).append(node)
        self._record(node, value, node)

    def _record(self, node: Node, value: Value, by: Node) -> None:
        self._history.setdefault(node, []).append((self.position[by], value))
        value.holders.append(node)
        if by not in value.definers:
            value.definers.append(by)
            self.defines.setdefault(by, []).append(value)

    def _write(self, target: Node, value: Value, by: Node) -> None:
        storage = self.shapes.storage(target)
        write = Write(self.position[by], by, target, storage)
        self.writes.append(write)
        self._writes_of.setdefault(by, []).append(write)
        for node in self._sharing.get(storage, [target]):
            if self._sees_the_same(node, target):
                self._record(node, value, by)
            else:
                note = f"{by} writes to {target}, with which {node} shares memory"
                self._record(node, self._opaque(by, note), by)

    def _sees_the_same(self, node: Node, target: Node) -> bool:
        """Whether two tensors that share memory have the same elements in the same rows."""
        if node is target:
            return True
        a, b = self.shapes.of(node), self.shapes.of(target)
        if a is None or b is None or a.dtype != b.dtype or not a.dim() or not b.dim():
            return False
        if not statically_known_true(a.storage_offset() == b.storage_offset()):
            return False
        if same_shape(a.shape, b.shape) and same_shape(a.stride(), b.stride()):
            return True
        return (
            is_contiguous(a)
            and is_contiguous(b)
            and same_shape(a.shape[-1:], b.shape[-1:])
            and statically_known_true(elems(a.shape) == elems(b.shape))
        )
