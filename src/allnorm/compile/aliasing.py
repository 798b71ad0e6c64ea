"""Preserves how a graph's results and inputs share memory when the graph is rewritten."""

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


def occurrences(graph: Graph) -> list[Node]:
    """Returns the nodes that a graph returns, in order, including repetitions."""
    found: list[Node] = []
    map_arg(graph.output_node().args, found.append)
    return found


def keep_aliasing(
    graph: Graph,
    shapes: Shapes,
    before: Sequence[Tensor | None],
    inputs: Mapping[object, tuple[Node, Tensor]],
) -> str:
    """Makes the results share memory exactly as before the rewrite.

    Returns "", or the reason why that is impossible. The graph must then be discarded.
    `before` has the fake tensors of the graph's `occurrences` before the rewrite. `inputs` maps
    each storage to the input that owns it and to that input's fake tensor.
    """
    output, nodes = graph.output_node(), occurrences(graph)
    roots = dict(inputs)
    taken = {shapes.storage(node): storage for storage, (node, _) in inputs.items()}

    def add(target: Any, *args: Any, **kwargs: Any) -> Node:
        with graph.inserting_before(output):
            node = graph.call_function(target, args, kwargs)
        shapes.describe(node)
        return node

    known = [(index, t) for index, t in enumerate(before) if t is not None]
    # Larger tensors first, because smaller ones may be views of them.
    for index, theirs in sorted(known, key=lambda item: -(static_size(elems(item[1].shape)) or 0)):
        node, mine = nodes[index], shapes.of(nodes[index])
        if mine is None or storage_of(theirs) is None:
            continue
        alike, storage = same_layout(mine, theirs), storage_of(theirs)
        if storage in roots:
            root, looks = roots[storage]
            if shapes.storage(node) == shapes.storage(root) and alike:
                continue
            view = _view(add, root, looks, theirs)
            if view is None:
                return f"{node} shares memory with {root} in a way that no view can express"
            nodes[index] = view
            continue
        owner = taken.setdefault(shapes.storage(node), storage)
        if not alike and not (is_contiguous(theirs) and same_shape(mine.shape, theirs.shape)):
            return f"{node} would have different strides in a graph without in-place operations"
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


def _view(add: Add, root: Node, looks: Tensor, tensor: Tensor) -> Node | None:
    """Returns a view of `root` that has the layout of `tensor`; None if no such view exists.

    `looks` is the fake tensor of `root`.
    """
    at_once = statically_known_true(looks.storage_offset() == tensor.storage_offset())
    if looks.dtype != tensor.dtype:
        return None
    if at_once and same_layout(looks, tensor):
        return root
    sizes = [static_size(size) for size in tensor.shape]
    whole = statically_known_true(elems(looks.shape) == elems(tensor.shape))
    is_reshaped = at_once and whole and is_contiguous(looks) and is_contiguous(tensor)
    if is_reshaped and sizes.count(None) < 2:
        shape = [-1 if size is None else size for size in sizes]
        return add(torch.ops.aten.view.default, root, shape)
    strides = [static_size(stride) for stride in tensor.stride()]
    offset = static_size(tensor.storage_offset() - looks.storage_offset())
    if None in (*sizes, *strides, offset):
        return None
    return add(view_of, root, sizes, strides, offset)


def view_of(root: Tensor, sizes: list[int], strides: list[int], offset: int) -> Tensor:
    """Returns a view that begins at element `offset` of `root`."""
    return root.as_strided(sizes, strides, root.storage_offset() + offset)
