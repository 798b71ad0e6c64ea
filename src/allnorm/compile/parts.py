"""Follows nodes through views, copies, slices and splits, for patterns that expressions lack."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from allnorm.compile.shapes import HALF, Shapes, same_shape, static_size
from allnorm.compile.streams import order_of
from allnorm.compile.vocabulary import argument, operation, plain_name

_FLAT = ("view", "same", "cast")  # operations that may keep all elements, in order


class Part(NamedTuple):
    """Columns `start` to `stop - 1` of a tensor's last dimension."""

    source: Node
    start: int
    stop: int


class Parts:
    """Reads the operands of nodes: which elements of which tensor they are."""

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes

    def _before(self, node: Node) -> Node | None:
        """Returns the tensor of which a node has all elements, in order and not rounded."""
        if not node.all_input_nodes or (operation(node) not in _FLAT and not _adds_ones(node)):
            return None
        source = node.all_input_nodes[0]
        before, after = self.shapes.of(source), self.shapes.of(node)
        if before is None or after is None or before.device != after.device:
            return None
        is_exact = before.dtype in HALF and after.dtype == torch.float32
        if before.dtype == after.dtype or (is_exact and operation(node) == "cast"):
            return source
        return None

    def plain(self, node: Any) -> Any:
        """Returns the node that computes a tensor, without views, copies and exact conversions."""
        while isinstance(node, Node):
            before = self._before(node)
            if before is None:
                break
            node = before
        return node

    def readers(self, node: Node) -> list[Node]:
        """Returns the nodes that read a tensor, in any shape."""
        found: dict[Node, None] = {}
        pending = [node]
        for one in pending:
            for user in one.users:
                if self._before(user) is one:
                    pending.append(user)
                else:
                    found[user] = None
        return list(found)

    def settled(self, node: Node) -> Node:
        """Returns a parameter without copies and conversions to its own dtype."""
        before = self._before(node)
        while before is not None and operation(node) != "view":
            tensors = [self.shapes.of(each) for each in (before, node)]
            if len({tensor.dtype for tensor in tensors if tensor is not None}) > 1:
                break
            node, before = before, self._before(before)
        return node

    def untransposed(self, node: Node) -> Node | None:
        """Returns the matrix that a node transposes."""
        name = str(node.args[1]) if node.target is getattr else plain_name(node)
        is_swapped = name in ("t", "T", "numpy_T") or order_of(node, 2) == [1, 0]
        return self.settled(node.all_input_nodes[0]) if is_swapped else None

    def operands(self, node: Any, kind: str) -> Iterator[tuple[Node, Node]]:
        """Yields the two tensors of an addition or multiplication, in both orders."""
        if not isinstance(node, Node) or operation(node) != kind or len(node.args) < 2:
            return
        a, b = node.args[:2]
        if isinstance(a, Node) and isinstance(b, Node) and "alpha" not in node.kwargs:
            yield a, b
            yield b, a

    def number_in(self, node: Any, kind: str) -> tuple[Any, float]:
        """Returns (tensor, number) of an addition or multiplication; (None, 0.0) for others."""
        if isinstance(node, Node) and operation(node) == kind and len(node.args) > 1:
            for tensor, number in (node.args[:2], node.args[1::-1]):
                is_number = isinstance(number, int | float) and not isinstance(number, bool)
                if isinstance(tensor, Node) and is_number and "alpha" not in node.kwargs:
                    return tensor, float(number)  # type: ignore[arg-type]
        return None, 0.0

    def with_number(self, node: Node, kind: str) -> tuple[Node | None, float]:
        """Returns the only reader of a tensor, which adds a number or multiplies by it."""
        readers = [user for user in self.readers(node) if user.users]
        tensor, number = self.number_in(readers[0], kind) if len(readers) == 1 else (None, 0.0)
        return (readers[0], number) if self.plain(tensor) is node else (None, 0.0)

    def part(self, operand: Node) -> Part | None:
        """Returns which columns of which tensor an operand has; those of a row for one element."""
        node = operand
        while True:
            tensor = self.shapes.of(node)
            sliced = self._sliced(node)
            if sliced is not None:
                source, start, stop = sliced
                whole = self.plain(source)
                last = [self.shapes.of(each).shape[-1:] for each in (source, whole)]  # type: ignore[union-attr]
                return Part(whole, start, stop) if same_shape(*last) else None
            before = self._before(node)
            if before is None:
                size = None if tensor is None or not tensor.dim() else static_size(tensor.shape[-1])
                return None if size is None else Part(node, 0, size)
            node = before

    def _sliced(self, node: Node) -> tuple[Node, int, int] | None:
        """Returns (source, start, stop) of a node that takes columns of a tensor's last dimension.

        An element of a tensor with one dimension counts as one column.
        """
        source, kind = argument(node, 0, "input", "self"), operation(node)
        if not isinstance(source, Node):
            return None
        if kind == "getitem" and operation(source) == "pieces":
            return self._piece(source, node.args[1])
        tensor = self.shapes.of(source)
        size = None if tensor is None or not tensor.dim() else static_size(tensor.shape[-1])
        if tensor is None or size is None:
            return None
        last = (-1, tensor.dim() - 1)
        index: Any = None
        if kind == "getitem":
            index = node.args[1]
            if isinstance(index, tuple):
                if len(index) != 2 or index[0] is not Ellipsis:
                    return None
                index = index[1]
            elif tensor.dim() != 1:
                return None
        elif kind == "slice" and argument(node, 1, "dim", default=0) in last:
            step = argument(node, 4, "step", default=1)
            index = slice(argument(node, 2, "start"), argument(node, 3, "end"), step)
        elif kind == "select" and argument(node, 1, "dim") in last and tensor.dim() == 1:
            index = argument(node, 2, "index")
        if isinstance(index, int) and tensor.dim() == 1:
            index = slice(index, index + 1 or None)
        if not isinstance(index, slice):
            return None
        if not all(isinstance(i, int | None) for i in (index.start, index.stop, index.step)):
            return None
        taken = range(size)[index]
        return (source, taken.start, taken.stop) if taken.step == 1 and taken else None

    def _piece(self, pieces: Node, index: Any) -> tuple[Node, int, int] | None:
        """Returns (source, start, stop) of one result of a split along the last dimension."""
        source, results = argument(pieces, 0, "input", "self"), self.shapes.any_of(pieces)
        tensor = self.shapes.of(source)
        unbinds = plain_name(pieces) == "unbind"
        dim = argument(pieces, 1 if unbinds else 2, "dim", default=0)
        if tensor is None or dim not in (-1, tensor.dim() - 1) or not isinstance(index, int):
            return None
        if unbinds:
            return (source, index, index + 1) if tensor.dim() == 1 else None
        sizes = [static_size(each.shape[-1]) for each in results or ()]
        if None in sizes or not 0 <= index < len(sizes):
            return None
        start = sum(int(size or 0) for size in sizes[:index])
        return source, start, start + int(sizes[index] or 0)


def _adds_ones(node: Node) -> bool:
    """Returns whether a node only adds dimensions of size 1, such as `x[..., None]`."""
    if operation(node) != "getitem" or not isinstance(node.args[1], tuple):
        return False
    return all(part in (None, Ellipsis, slice(None)) for part in node.args[1])
