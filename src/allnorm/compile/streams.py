"""Finds a hyper-connection after a reduction: the sum enters several residual streams.

The grammar, where A is the reduced sum and all arithmetic is float32:

    result = round(total) | total          not rounded if the streams are float32
    total  = add(inject, mixed)
    inject = post[i] * A
    mixed  = sum over j of mix[i][j] * streams[j]

Products are broadcast multiplications, `matmul`, `bmm` or `einsum`, of tensors in any layout. The
fused call adds the streams one by one to `inject`; only the order of these float32 additions may
differ from the graph's. Expressions do not describe such products, so this file follows the nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from allnorm.compile.candidate import Candidate, Coefficients, Fused, Match, Missed, Streams
from allnorm.compile.expressions import Value
from allnorm.compile.fit import complete, place_results, place_x
from allnorm.compile.norms import Branch, rounded, stored32
from allnorm.compile.reductions import Reduction
from allnorm.compile.shapes import FLOATS, HALF, elems, same_shape, static_size
from allnorm.compile.values import Values
from allnorm.compile.vocabulary import argument, operation, written
from allnorm.core.checks import STREAMS


@dataclass(frozen=True)
class _Read:
    """A tensor of the graph, described as a view or an exact conversion of `source`.

    Attributes:
        leading: number of dimensions that count tokens; they come first.
        axes: for each other dimension, the axis of `source` after its tokens; None if all its
            elements are equal.
        nodes: the views and conversions between `source` and the tensor.
    """

    source: Node
    leading: int
    axes: tuple[int | None, ...]
    nodes: tuple[Node, ...] = ()


_Accepts = Callable[[Node, Tensor], bool]


def find_streams(
    values: Values,
    reduction: Reduction,
    reduced: Value,
    dtype: torch.dtype,
    accepted: list[Fused],
    *,
    approximate: bool = False,
) -> Match | None:
    """Returns the fused call of a hyper-connection; None if nothing after the reduction is one.

    With `approximate`, the graph may round parts of the new streams before it adds them.

    Raises:
        Missed: the graph has a hyper-connection that no fused call computes.
    """
    first: Missed | None = None
    held = (reduced, stored32(reduced, values.algebra, dtype))
    for product, total in _totals(held):
        shape = values.shapes.of(total)
        if shape is None or shape.dim() < 2:
            continue
        try:
            reader = _Reader(values, shape, held, approximate)
            for candidate in reader.candidates(reduction, dtype, product, total):
                try:
                    return _fit(values, candidate, accepted)
                except Missed as missed:
                    first = first or missed
        except Missed as missed:
            first = first or missed
    if first is not None:
        raise first
    return None


def _totals(held: tuple[Value, Value | None]) -> Iterator[tuple[Node, Node]]:
    """Yields each sum of a product with the reduced tensor, as (product, sum)."""
    holders = [node for value in held if value is not None for node in value.holders]
    for product in _users(holders):
        if operation(product) in _PRODUCTS and not written(product):
            for total in _users([product]):
                if operation(total) == "add" and not written(total):
                    yield product, total


def _users(nodes: list[Node]) -> list[Node]:
    """Returns the nodes that read these nodes or views of them."""
    found = dict.fromkeys(nodes)
    pending = list(nodes)
    for node in pending:
        for user in node.users:
            if user not in found:
                found[user] = None
                if _shows(user):
                    pending.append(user)
    return [node for node in found if node not in pending]


_PRODUCTS = ("mul", "matmul", "einsum")
_SUMS = (*_PRODUCTS, "sum")


def _shows(node: Node) -> bool:
    """Returns whether a node's elements are those of its first argument, in a different layout."""
    if operation(node) in ("view", "same", "expand", "permute", "cast", "slice"):
        return True
    if operation(node) == "getitem":
        index: Any = node.args[1]
        index = index if isinstance(index, tuple) else (index,)
        return all(part in (None, Ellipsis, slice(None)) for part in index)
    return node.target is getattr and node.args[1] == "mT"


def _exactly(before: Tensor, after: Tensor) -> bool:
    """Returns whether a conversion changes no value."""
    return before.dtype == after.dtype or (before.dtype in HALF and after.dtype == torch.float32)


def _is_float(_: Node, tensor: Tensor) -> bool:
    return tensor.dtype in FLOATS


class _Reader:
    """Reads the operands of one sum, whose shape is [..., streams, hidden_size]."""

    def __init__(
        self,
        values: Values,
        total: Tensor,
        held: tuple[Value, Value | None],
        approximate: bool,
    ) -> None:
        self._values, self._dtype, self._approximate = values, total.dtype, approximate
        self._reduced, self._held = held[0], held
        *self._tokens, self._streams, self._hidden = total.shape

    def candidates(
        self, reduction: Reduction, dtype: torch.dtype, product: Node, total: Node
    ) -> Iterator[Candidate]:
        """Yields the candidates of `total`, with streams in the reduced tensor's dtype first.

        Raises:
            Missed: `product` is the reduced tensor's part of new streams, but a different part
                does not match.
        """
        if argument(total, 2, "alpha", default=1) != 1 or len(total.args) < 2:
            return
        for operand, other in (total.args[:2], total.args[1::-1]):
            injected, found = self._whole(operand, product), self._inject(product)
            if injected is None or found is None:
                continue
            post, given = found
            count = self._values.shapes.in_example(self._streams)
            if count not in STREAMS:
                raise Missed(f"{total} adds to {count} residual streams: expected 2 to 8")
            nodes = (*given.nodes, product, *injected.nodes, total)
            held = (*self._held, *(self._values.held[node] for node in nodes))
            is_rounded = False
            for mix, residual in self._mixtures(product, total, other, dtype):
                tensor = self._values.shapes.of(residual)
                assert tensor is not None
                value = self._values.held[total]
                summed: Value | None = value if self._dtype == tensor.dtype else None
                if self._dtype == torch.float32 != tensor.dtype:
                    summed = rounded(value, self._values.algebra, tensor.dtype)
                if summed is None or not summed.holders:
                    continue
                is_rounded = True
                self._values.shapes.fix(self._streams)
                replaced = dict.fromkeys(value for value in (*held, summed) if value is not None)
                yield Candidate(
                    *(reduction, self._reduced, Branch(self._reduced)),
                    residual=self._values.held[residual],
                    sum32=value,
                    summed=summed,
                    norm=None,
                    output=None,
                    numerics="",
                    streams=Streams(int(self._streams), residual, post, mix, tuple(replaced)),
                )
            if not is_rounded:
                raise Missed(f"{total} is not rounded to {dtype}, the dtype of the old streams")

    def _mixtures(
        self, product: Node, total: Node, operand: Any, dtype: torch.dtype
    ) -> Iterator[tuple[Coefficients, Node]]:
        """Yields (mix, streams) of the mixed streams, for streams in `dtype` and in float32."""
        is_mixed = False
        for stream_dtype in dict.fromkeys((dtype, torch.float32)):
            mixed = self._mixed(operand, stream_dtype)
            if mixed is not None:
                is_mixed = True
                mix, streams, arithmetic = mixed
                if not self._approximate:
                    self._check_roundings((product, *arithmetic, total))
                yield mix, streams.source
        if is_mixed:
            return
        sizes = (self._streams, self._hidden)
        if self._read(operand, sizes, lambda node, _: operation(node) not in _SUMS) is not None:
            raise Missed(
                f"{total} adds residual streams that are not mixed: the fused call multiplies them "
                "by a matrix per token"
            )
        raise Missed(
            f"what {total} adds to the product of the reduced tensor is not a sum of streams, each "
            "times one number per token"
        )

    def _check_roundings(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            tensor = self._values.shapes.of(node)
            if tensor is not None and tensor.dtype != torch.float32:
                raise Missed(
                    f"{node} rounds a part of the new streams to {tensor.dtype}: the fused call "
                    "computes in float32 and rounds once. Pass approximate_streams=True to fuse it"
                )

    # ---- products -------------------------------------------------------------------------------

    def _inject(self, node: Node) -> tuple[Coefficients, _Read] | None:
        """Returns the factors of the reduced tensor, and how the product reads that tensor."""
        for a, b in _operands(node):
            post = self._read(a, (self._streams,), _is_float)
            given = self._read(b, (self._hidden,), self._is_reduced)
            if post is None or given is None or post.leading != given.leading:
                continue
            if operation(node) == "einsum":
                named = _einsum(node, a, (post, given))
                if named is not None and named[2] == (named[0][0], named[1][0]):
                    return self._coefficients(node, post, (0,)), given
            elif (post.axes, given.axes) == ((0, None), (None, 0)):
                return self._coefficients(node, post, (0,)), given
        return None

    def _mixed(
        self, operand: Any, dtype: torch.dtype
    ) -> tuple[Coefficients, _Read, tuple[Node, ...]] | None:
        """Returns the matrices, how the sum over streams reads the streams, and its nodes."""

        def is_sum(node: Node, _: Tensor) -> bool:
            return operation(node) in _SUMS and operation(node) != "mul"

        whole = self._read(operand, (self._streams, self._hidden), is_sum)
        if whole is None or whole.axes != (0, 1):
            return None
        node = whole.source
        product = _source(node) if operation(node) == "sum" else node
        if operation(product) not in _PRODUCTS:
            return None
        for a, b in _operands(product):
            mix = self._read(a, (self._streams, self._streams), _is_float)
            streams = self._read(b, (self._streams, self._hidden), lambda _, t: t.dtype == dtype)
            if mix is None or streams is None or mix.leading != streams.leading:
                continue
            axes = self._contraction(node, product, a, mix, streams)
            if axes is not None:
                self._whole_tokens(node, streams)
                return self._coefficients(node, mix, axes), streams, (product, node)
        return None

    def _contraction(
        self, node: Node, product: Node, first: Node, mix: _Read, streams: _Read
    ) -> tuple[int, ...] | None:
        """Returns the axes of `mix` for the new and the old streams; None if it is no such sum."""
        if operation(product) == "einsum":
            named = _einsum(product, first, (mix, streams))
            if named is None or node is not product:
                return None
            (rows, columns), (old, hidden), result = named
            if result == (rows, hidden) and old == columns:
                return (0, 1)
            return (1, 0) if result == (columns, hidden) and old == rows else None
        if operation(product) == "matmul":
            is_matrix = node is product and streams.axes == (0, 1) and len(mix.axes) == 2
            left = product.args[0] if product.args else None
            return _both(mix.axes) if is_matrix and left is first else None
        dims = argument(node, 1, "dim", "axis")
        dims = [dims] if isinstance(dims, int) else dims
        if node is product or not isinstance(dims, list | tuple) or len(dims) != 1:
            return None
        summed = dims[0] % (mix.leading + 3) - mix.leading
        if summed not in (0, 1) or argument(node, 2, "keepdim", default=False) is not False:
            return None
        kept = 1 - summed
        expected = (None, 0, 1) if summed else (0, None, 1)
        if streams.axes != expected or len(mix.axes) != 3 or mix.axes[2] is not None:
            return None
        return _both((mix.axes[kept], mix.axes[summed]))

    # ---- operands -------------------------------------------------------------------------------

    def _is_reduced(self, node: Node, _: Tensor) -> bool:
        return self._values.held.get(node) in self._held

    def _whole(self, operand: Any, product: Node) -> _Read | None:
        """Returns how an operand of the sum reads `product`: in its own layout; None otherwise."""
        sizes = (self._streams, self._hidden)
        read = self._read(operand, sizes, lambda node, _: node is product)
        return read if read is not None and read.axes == (0, 1) else None

    def _coefficients(self, node: Node, read: _Read, axes: tuple[int, ...]) -> Coefficients:
        self._whole_tokens(node, read)
        return Coefficients(read.source, transposed=axes == (1, 0))

    def _whole_tokens(self, node: Node, read: _Read) -> None:
        """Raises unless a tensor has the leading dimensions of the new streams."""
        tensor = self._values.shapes.of(read.source)
        assert tensor is not None
        if not same_shape(tensor.shape[: len(self._tokens)], self._tokens):
            raise Missed(
                f"{read.source}, an operand of {node}, has leading dimensions other than those of "
                "the new streams"
            )

    def _read(self, operand: Any, sizes: Sequence[Any], accepts: _Accepts) -> _Read | None:
        """Returns how a tensor reads an accepted tensor with these sizes per token.

        Of several accepted tensors, the first one in the graph is the source.
        """
        if not isinstance(operand, Node):
            return None
        tensor = self._values.shapes.of(operand)
        if tensor is None or operand in self._values.pending:
            return None
        if _shows(operand):
            inner = self._read(_source(operand), sizes, accepts)
            moved = None if inner is None else self._moved(inner, operand, tensor)
            if moved is not None:
                return moved
        if not accepts(operand, tensor):
            return None
        found = self._split(tensor.shape, sizes)
        if found is None:
            return None
        places = iter(range(len(sizes)))
        axes = tuple(None if static_size(size) == 1 else next(places) for size in found[1])
        return _Read(operand, found[0], axes)

    def _split(self, shape: Sequence[Any], sizes: Sequence[Any]) -> tuple[int, Any] | None:
        """Returns (number of leading dimensions, other sizes) of a tensor with `sizes` per token.

        Other sizes may include ones.
        """
        for tokens in (self._tokens, [elems(self._tokens)]):
            rest = shape[len(tokens) :]
            kept = [size for size in rest if static_size(size) != 1]
            if same_shape(shape[: len(tokens)], tokens) and same_shape(kept, sizes):
                return len(tokens), rest
        return None

    def _moved(self, inner: _Read, node: Node, after: Tensor) -> _Read | None:
        """Returns how a view or conversion of a tensor reads that tensor's source."""
        before = self._values.shapes.of(_source(node))
        assert before is not None
        nodes = (*inner.nodes, node)
        if not _exactly(before, after):
            return None
        order = order_of(node, before.dim())
        if order is not None:
            tokens = list(range(inner.leading))
            if order[: inner.leading] != tokens:
                return None
            axes = tuple(inner.axes[place - inner.leading] for place in order[inner.leading :])
            return replace(inner, axes=axes, nodes=nodes)
        if same_shape(before.shape, after.shape):
            return replace(inner, nodes=nodes)
        rest = zip(before.shape[inner.leading :], inner.axes, strict=True)
        if operation(node) == "expand":
            is_wider = before.dim() == after.dim() and all(
                inner.axes[place - inner.leading] is None
                if place >= inner.leading and static_size(before.shape[place]) == 1
                else same_shape(before.shape[place : place + 1], after.shape[place : place + 1])
                for place in range(before.dim())
            )
            return replace(inner, nodes=nodes) if is_wider else None
        if any(axis is None and static_size(size) != 1 for size, axis in rest):
            return None
        kept = [axis for axis in inner.axes if axis is not None]
        sizes = [before.shape[inner.leading + inner.axes.index(axis)] for axis in kept]
        found = self._split(after.shape, sizes)
        if found is None:
            return None
        places = iter(kept)
        axes = tuple(None if static_size(size) == 1 else next(places) for size in found[1])
        return _Read(inner.source, found[0], axes, nodes)


def _source(node: Node) -> Node:
    """Returns the tensor that a view or conversion reads."""
    source = argument(node, 0, "input", "self", "a", "tensor")
    return source if isinstance(source, Node) else node.all_input_nodes[0]


def _operands(node: Node) -> list[tuple[Node, Node]]:
    """Returns a product's two operands, in both orders."""
    if len(node.all_input_nodes) != 2:
        return []
    a, b = node.all_input_nodes
    return [(a, b), (b, a)]


def _both(axes: Sequence[int | None]) -> tuple[int, ...] | None:
    found = tuple(axis for axis in axes if axis is not None)
    return found if len(found) == 2 else None


def order_of(node: Node, dims: int) -> list[int] | None:
    """Returns the order of dimensions that a permutation makes; None for other nodes."""
    order = list(range(dims))
    if node.target is getattr:
        order[-2:] = order[:-3:-1]
        return order
    if operation(node) != "permute":
        return None
    given: list[Any] = [*node.args[1:], *node.kwargs.values()]
    if len(given) == 1 and isinstance(given[0], list | tuple):
        given = list(given[0])
    if not all(isinstance(place, int) for place in given):
        return []
    if len(given) == dims and "permute" in str(node.target):
        return [place % dims for place in given]
    if len(given) != 2:
        return []
    a, b = given[0] % dims, given[1] % dims
    order[a], order[b] = b, a
    return order


def _einsum(
    node: Node, first: Node, reads: Sequence[_Read]
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]] | None:
    """Returns the letters of an einsum's operands and of its result, without those of tokens.

    `first` is the operand that `reads[0]` describes. A letter stands for the source's axis.
    """
    if len(node.args) < 2:
        return None
    equation, operands = node.args[0], list(node.args[1:])
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = list(operands[0])
    if not isinstance(equation, str) or "->" not in equation or len(operands) != 2:
        return None
    given, _, result = equation.replace(" ", "").partition("->")
    names = given.split(",")
    if operands[0] is not first:
        names.reverse()
    tokens = ""
    found: list[tuple[str, ...]] = []
    for read, letters in zip(reads, [*names, None], strict=False):
        assert letters is not None
        count = len(read.axes)
        head, tail = letters[: len(letters) - count], letters[len(letters) - count :]
        if None in read.axes or len(tail) != count or (found and head != tokens):
            return None
        if head != "..." and (len(head) != read.leading or "." in head):
            return None
        by_axis = dict(zip(read.axes, tail, strict=True))
        found.append(tuple(by_axis[axis] for axis in range(count)))
        tokens = head
    if not result.startswith(tokens) or len(set(result)) != len(result) - 2 * ("..." in result):
        return None
    return found[0], found[1], tuple(result[len(tokens) :])


def _fit(values: Values, candidate: Candidate, accepted: list[Fused]) -> Match:
    """Returns the fused call of a hyper-connection. Raises Missed if it is not possible."""
    streams, origin = candidate.streams, values.reduced[candidate.reduction.node]
    assert streams is not None
    assert candidate.summed is not None
    if not values.is_used(candidate.summed):
        raise Missed(f"the result of {candidate.summed.definers[0]} is not used")
    for node in streams.inputs:
        if values.held[node].derives_from(origin):
            raise Missed(
                f"{node}, an input of the streams' sum, is computed from the reduced tensor"
            )
    x, residual = candidate.reduction.x, values.shapes.of(streams.residual)
    result = values.shapes.of(candidate.summed.definers[0])
    assert x is not None
    before = values.shapes.of(x)
    assert before is not None
    assert residual is not None
    assert result is not None
    if any(
        t.device != before.device for t in map(values.shapes.of, streams.inputs) if t is not None
    ):
        raise Missed(f"the streams or their factors are not on {before.device}")
    match = Match(candidate, result.shape, x, streams.residual, None, None)
    place_x(values, match, before, result.select(-2, 0))
    place_results(values, match, result)
    return complete(values, match, accepted)
