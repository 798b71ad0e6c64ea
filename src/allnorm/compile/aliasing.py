"""Which results of a graph share memory with each other, and with its inputs, after a rewrite."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg

from allnorm.compile.shapes import (
    Shapes,
    elems,
    is_contiguous,
    same_layout,
    same_shape,
    static_size,
    storage_of,
)

Add = Callable[..., Node]


def results_of(graph: Graph) -> list[Node]:
    """What a graph returns, each node once."""
    return list(dict.fromkeys(occurrences(graph)))


def occurrences(graph: Graph) -> list[Node]:
    """What a graph returns, in order."""
    found: list[Node] = []
    map_arg(graph.output_node().args, found.append)
    return found


def keep_aliasing(
    graph: Graph,
    shapes: Shapes,
    before: Sequence[Tensor | None],
    inputs: Mapping[object, tuple[Node, Tensor]],
) -> str:
    """Makes results share memory where they did before, and only there.

    Args:
        graph: is changed.
        shapes: of the graph.
        before: fake tensors of its `occurrences` as they were before.
        inputs: by storage, the graph's inputs, and what they look like.

    Returns:
        Why it cannot; empty if it can. Then the graph is of no use.
    """
    output, nodes = graph.output_node(), occurrences(graph)
    roots = dict(inputs)
    taken = {shapes.storage(node): storage for storage, (node, _) in inputs.items()}

    def add(target: Any, *args: Any, **kwargs: Any) -> Node:
        with graph.inserting_before(output):
            node = graph.call_function(target, args, kwargs)
        shapes.describe(node)
        return node

    known = [index for index, tensor in enumerate(before) if storage_of(tensor) is not None]
    for index in sorted(known, key=lambda index: -_size(before[index])):
        node, theirs, mine = nodes[index], before[index], shapes.of(nodes[index])
        if mine is None or theirs is None:
            continue
        alike, storage = same_layout(mine, theirs), storage_of(theirs)
        if storage in roots:
            root, looks = roots[storage]
            if shapes.storage(node) == shapes.storage(root) and alike:
                continue
            view = _view(add, root, looks, theirs)
            if view is None:
                return f"{node} shares memory with {root} in a way that cannot be repeated"
            nodes[index] = view
            continue
        owner = taken.setdefault(shapes.storage(node), storage)
        if not alike and not (is_contiguous(theirs) and same_shape(mine.shape, theirs.shape)):
            return f"{node} would have other strides in a graph that does not write in place"
        if not alike:
            layout = torch.contiguous_format
            nodes[index] = add(torch.ops.aten.clone.default, node, memory_format=layout)
        elif owner != storage:
            nodes[index] = add(torch.ops.aten.clone.default, node)
        roots[storage] = (nodes[index], theirs)
    if nodes != occurrences(graph):
        remaining = iter(nodes)
        output.args = map_arg(output.args, lambda _: next(remaining))
    return ""


def _size(tensor: Tensor | None) -> int:
    return 0 if tensor is None else static_size(elems(tensor.shape)) or 0


def _view(add: Add, root: Node, looks: Tensor, tensor: Tensor) -> Node | None:
    """A view of `root`, of which we know what it looks like, that looks like `tensor`."""
    at_once = statically_known_true(looks.storage_offset() == tensor.storage_offset())
    if looks.dtype != tensor.dtype:
        return None
    if at_once and same_layout(looks, tensor):
        return root
    sizes = [static_size(size) for size in tensor.shape]
    whole = statically_known_true(elems(looks.shape) == elems(tensor.shape))
    if (
        at_once
        and whole
        and is_contiguous(looks)
        and is_contiguous(tensor)
        and sizes.count(None) < 2
    ):
        shape = [-1 if size is None else size for size in sizes]
        return add(torch.ops.aten.view.default, root, shape)
    strides = [static_size(stride) for stride in tensor.stride()]
    offset = static_size(tensor.storage_offset() - looks.storage_offset())
    if None in (*sizes, *strides, offset):
        return None
    return add(view_of, root, sizes, strides, offset)


def view_of(root: Tensor, sizes: list[int], strides: list[int], offset: int) -> Tensor:
    """A view of `root`, `offset` elements behind its first one."""
    return root.as_strided(sizes, strides, root.storage_offset() + offset)
