"""What every tensor of a graph holds, as an expression.

The graph is functional, or made so (`functional.py`), but for calls of which nobody knows what they
do. Behind such a call all tensors that share memory with what it was given hold something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.fx import Graph, Node

from allnorm.compile.decompose import Decompositions
from allnorm.compile.evaluate import Evaluator
from allnorm.compile.expressions import Algebra, Value
from allnorm.compile.reductions import Reduction
from allnorm.compile.shapes import Shapes, same_shape
from allnorm.compile.vocabulary import asks_only, attribute_at, attribute_of, operation, written


@dataclass(frozen=True)
class Origin:
    """Where a graph that was made functional comes from.

    Attributes:
        makers: the node of that graph that each node was made by.
        position: of each node in that graph.
        writes: its writes to memory of the caller: (node, tensor of this graph, in that memory).
        in_place: its reductions in place.
    """

    makers: dict[Node, Node]
    position: dict[Node, int]
    writes: list[tuple[Node, Node]]
    in_place: set[Node]


@dataclass(frozen=True)
class Write:
    """A node may change memory, through a tensor in it."""

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
        origin: of a graph that was made functional.

    Attributes:
        algebra: all expressions.
        shapes: of the graph.
        differentiated: nodes that need a gradient, of the graph before it was made functional.
        stored: what inputs of the graph hold in the end.
        position: of each node in the graph's order.
        writes: every change of memory, in order.
        reduced: the sum over ranks that a reduction computes.
        defines: the expressions that a node computes.
        parameters: what is known of parameters and buffers, by path.
    """

    def __init__(
        self,
        graph: Graph,
        shapes: Shapes,
        reductions: dict[Node, Reduction],
        decompositions: Decompositions,
        origin: Origin | None = None,
    ) -> None:
        self.algebra = Algebra()
        self.differentiated: set[Node] = set()
        self.stored: dict[Node, Value] = {}
        self._module = graph.owning_module
        self._origin = origin
        self.shapes = shapes
        self.position: dict[Node, int] = {}
        self.writes: list[Write] = []
        self.reduced: dict[Node, Value] = {}
        self.defines: dict[Node, list[Value]] = {}
        self.parameters: dict[str, Tensor] = {}
        self._copies: set[Node] = set()
        self._pending: set[Node] = set()
        self._history: dict[Node, list[tuple[int, Value]]] = {}
        self._sharing: dict[object, list[Node]] = {}
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

    def held_by(self, node: Node) -> list[Value]:
        """What the tensor of `node` holds, at any time."""
        return [value for _, value in self._history.get(node, [])]

    def is_question(self, node: Node) -> bool:
        """Whether a node only asks for shapes or dtypes."""
        return asks_only(node)

    def maker_of(self, node: Node) -> Node:
        """The node of the graph before it was made functional, if it was."""
        return node if self._origin is None else self._origin.makers.get(node, node)

    def name_of(self, node: Node) -> str:
        """As it was called there."""
        return self.maker_of(node).name

    def was_in_place(self, reduction: Node) -> bool:
        """Whether a reduction stored its result in what it reduced."""
        return self._origin is not None and self.maker_of(reduction) in self._origin.in_place

    def writes_between(
        self, first: Node, last: Node, members: list[Node], served: list[Value]
    ) -> list[tuple[Node, Node]]:
        """What other nodes wrote to memory of the caller between two, before it was functional.

        Not what stores one of the results there.
        """
        if self._origin is None:
            return []
        made, place = set(map(self.maker_of, members)), self._origin.position
        begin, end = place[self.maker_of(first)], place.get(self.maker_of(last), len(place))
        writes, targets = self._origin.writes, [target for _, target in self._origin.writes]
        results = [t for t, value in self.stored.items() if value in served]
        return [
            (write, target)
            for write, target in writes
            if begin < place[write] < end
            and write not in made
            and not (target in results and targets.count(target) == 1)
        ]

    def is_pending(self, node: Node) -> bool:
        """Whether a tensor may only be read through a wait."""
        return node in self._pending

    def is_written(self, path: str) -> bool:
        """Whether the graph changes the memory of a parameter."""
        memory = _memory(attribute_at(self._module, path))
        targets = [write.target for write in self.writes if write.target.op == "get_attr"]
        return any(_memory(attribute_of(target)) == memory for target in targets)

    def others_of(self, reduction: Node) -> list[Value]:
        """What a reduction returns besides the reduced tensor."""
        results = [value for value in self.defines.get(reduction, []) if value.op == "tuple"]
        return [item for value in results for item in value.args if item.op != "reduced"]

    def results_of(self, node: Node) -> list[Value]:
        """What a node computes; of a tuple its items."""
        defined = self.defines.get(node, [])
        return [item for v in defined for item in (v.args if v.op == "tuple" else (v,))]

    def is_kept(self, node: Node, shape: Sequence[object]) -> bool:
        """Whether a node hands its input on as a copy, or in another shape than this."""
        tensor = self.shapes.of(node)
        in_another_shape = tensor is not None and not same_shape(tensor.shape, shape)
        return node in self._copies or (operation(node) == "view" and in_another_shape)

    def owners(self, value: Value) -> set[object]:
        """The memory in which the graph computes `value`; copies of it are elsewhere."""
        return {self.shapes.storage(node) for node in self.computed_by(value)}

    def computed_by(self, value: Value) -> list[Node]:
        """The nodes that compute `value`, or hand it on in the same memory."""
        return [node for node in value.definers if node not in self._copies]

    # ---- the walk -------------------------------------------------------------------------------

    def _visit(self, node: Node, reduction: Reduction | None) -> None:
        if node.op in ("placeholder", "get_attr"):
            self._hold(node, self._leaf(node))
            return
        targets = written(node) if reduction is None else reduction.writes
        overwritten = targets[0] if operation(node) == "copy" and targets else None
        for source in node.all_input_nodes:
            if source is not overwritten or source in node.args[1:]:
                held = self._held(source)
                (held.questions if asks_only(node) else held.readers).append((node, source))
        if node.op == "output":
            return
        if asks_only(node):
            value = self.algebra.opaque((), None)
        elif reduction is not None:
            value = self._reduction(node, reduction)
        elif targets:
            value = self._opaque(node)
        else:
            value = self._evaluator.evaluate(node)
            if value.op == "opaque" and not value.note:
                value.note = self._note_on_write(node)
            if self._only_copies(node, value):
                self._copies.add(node)
        for target in targets:
            self._write(target, node)
            if overwritten is target:
                self.stored[target] = self._held(node.all_input_nodes[1])
        self._hold(node, value)
        for inner in self._evaluator.on_the_way.get(node, ()):
            is_result = inner is value or (value.op == "tuple" and inner in value.args)
            if not inner.definers and not is_result:
                inner.definers.append(node)

    def _note_on_write(self, node: Node) -> str:
        maker = self.maker_of(node)
        targets = [] if self._origin is None or maker is node else written(maker)
        if not targets or maker in self._origin.in_place:  # type: ignore[union-attr]
            return ""
        return f"{maker} writes to the memory of {targets[0]} between the reduction and the norm"

    def _only_copies(self, node: Node, value: Value) -> bool:
        """Whether a node hands on what an input holds, in other memory."""
        if operation(node) not in ("same", "cast", "dropout") or not node.all_input_nodes:
            return False
        source = node.all_input_nodes[0]
        shared = self.shapes.storage(node) == self.shapes.storage(source)
        return self._held(source) is value and not shared

    def _reduction(self, node: Node, reduction: Reduction) -> Value:
        x = None if reduction.x is None else self.shapes.of(reduction.x)
        inputs = tuple(self._held(source) for source in node.all_input_nodes)
        value = self.algebra.make("reduced", inputs, node, None if x is None else x.dtype)
        self.reduced[node] = value
        if reduction.pending:
            self._pending.add(node)
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

    def _write(self, target: Node, by: Node) -> None:
        storage = self.shapes.storage(target)
        self.writes.append(Write(self.position[by], by, target, storage))
        for node in self._sharing.get(storage, [target]):
            note = f"{by} writes to the memory of {node} between the reduction and the norm"
            self._record(node, self._opaque(by, note), by)


def _memory(tensor: object) -> object:
    return tensor.untyped_storage()._cdata if isinstance(tensor, Tensor) else None
