"""Finds the weight that the next GEMM after a fused call reads, which the call can prefetch."""

from __future__ import annotations

from torch import SymInt
from torch.fx import Node

from allnorm.compile.shapes import Shapes
from allnorm.compile.vocabulary import plain_name, qualified_name
from allnorm.core.operators import results_of

# Views whose tensor starts where its source starts, and has all of its elements.
_WHOLE_VIEWS = frozenset(
    {
        *("t", "permute", "transpose", "numpy_T", "T", "mT", "view", "reshape", "_unsafe_view"),
        *("unsqueeze", "squeeze", "flatten", "unflatten", "detach", "alias"),
    }
)
_ROWS = _WHOLE_VIEWS | {"getitem", "select", "slice", "contiguous", "clone", "to", "_to_copy"}


def next_weight(call: Node, shapes: Shapes) -> Node | None:
    """Returns the input of the graph that is the weight of the next GEMM, or None.

    The next GEMM is the first node, in the order of the graph, that reads normed rows of `call` and
    a matrix that comes from the graph's inputs by views alone. If several matrices do, the largest
    is the weight.
    """
    found: dict[Node, Node] = {}
    results = results_of(qualified_name(call.target).partition("::")[2])
    residual = [user for user in call.users if results[user.args[1]] == "residual_out"]  # type: ignore[index]
    pending, seen = [call], {call, *residual}
    while pending:
        for user in pending.pop().users:
            if user in seen:
                continue
            seen.add(user)
            if _name(user) in _ROWS:
                pending.append(user)
                continue
            weight = _weight_of(user, seen, shapes)
            if weight is not None:
                found[user] = weight
    return next((found[node] for node in call.graph.nodes if node in found), None)


def _weight_of(node: Node, rows: set[Node], shapes: Shapes) -> Node | None:
    """Returns the largest matrix that a node reads, apart from its `rows`, if it is an input."""
    best, most = None, 0
    for source in node.all_input_nodes:
        tensor = shapes.of(source)
        if source in rows or tensor is None or tensor.dim() != 2:
            continue
        root = source
        while _name(root) in _WHOLE_VIEWS:
            root = root.all_input_nodes[0]
        size = _hint(tensor.numel())
        if root.op in ("placeholder", "get_attr") and size > most:
            best, most = root, size
    return best


def _hint(size: int | SymInt) -> int:
    """Returns a size; for a symbolic one its example, because comparing would add a guard."""
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else 1


def _name(node: Node) -> str:
    return str(node.args[1]) if node.target is getattr else plain_name(node)
