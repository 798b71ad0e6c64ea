"""Finds the next layer's input in plain PyTorch, made from the new streams of a fused call.

The grammar, in float32 arithmetic, where S are the streams, [..., n, hidden_size]:

    unit   = the product of a norm of S as rows of n * hidden_size elements: compile/norms.py
    raw    = linear(unit, fn) | matmul(unit, transposed fn)
    logits = add(mul(part of raw, element of scale), part of base)    n, n and n * n columns
    pre    = add(sigmoid(logits 0), hc_eps)
    post   = mul(sigmoid(logits 1), number) | sigmoid(logits 1)
    comb   = over_columns(add(softmax(logits 2), hc_eps)) | over_columns(over_rows(comb))
    over_* = div(matrix, add(sum(matrix), hc_eps))                    sums of columns or of rows
    x      = round(sum over n of mul(pre, S)) | the same, not rounded
    normed = a norm's result, in the dtype of x

Parts are slices, or results of a split. Views that keep the order of elements may come anywhere.
`hyper_connection_input` computes the same, but it multiplies by rstd after the product, and by
reciprocals of the sums, and its order of additions and its exponential are its own. Float32 numbers
therefore differ in their last bits, so such an input is replaced only if the caller allows it. All
ranks must replace it, because its bits are not the graph's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from allnorm.compile.candidate import Match, Missed, PlainInput, mode_of
from allnorm.compile.expressions import Value
from allnorm.compile.fit import weight_of
from allnorm.compile.norms import Norm, outputs_of, rounded, stored32
from allnorm.compile.parts import Part, Parts
from allnorm.compile.shapes import FLOATS, HALF, is_row, same_shape, static_size
from allnorm.compile.values import Values
from allnorm.compile.vocabulary import argument, asks_only, is_pure, operation, plain_name


class _Logits(NamedTuple):
    """`raw[part] * scale + base`, of parts with one column for each of the sum's."""

    raw: Part
    scale: Part
    base: Part


def place_input(
    values: Values, norms: dict[Value, list[Norm]], match: Match, *, approximate: bool
) -> None:
    """Finds the next layer's input that is made from a match's streams.

    It becomes `match.plain_input`; if it cannot, `match.next_input` says why.

    Args:
        values: the graph's expressions.
        norms: all norms, from `find_norms`.
        match: a hyper-connection.
        approximate: whether the input may be replaced.
    """
    reader = _Reader(values, norms, match)
    try:
        for raw, fn, eps in reader.projections():
            found = reader.read(raw, fn, eps)
            if not approximate:
                raise Missed(
                    "its float32 numbers would differ in their last bits. Pass "
                    "approximate_streams=True to fuse it"
                )
            match.plain_input = found
            return
    except Missed as missed:
        match.next_input = str(missed)


class _Reader(Parts):
    """Reads the input that is made from one call's streams."""

    def __init__(self, values: Values, norms: dict[Value, list[Norm]], match: Match) -> None:
        assert match.candidate.summed is not None
        assert match.candidate.streams is not None
        super().__init__(values.shapes)
        self._values, self._norms = values, norms
        self._streams = match.candidate.summed
        self._nodes = list(match.reduction.node.graph.nodes)
        tensor = self.shapes.of(self._streams.definers[0])
        assert tensor is not None
        assert tensor.dtype is not None
        self._tokens, self._dtype = tensor.shape[:-2], tensor.dtype
        self._count, self._width = match.candidate.streams.count, int(tensor.shape[-1])

    def projections(self) -> Iterator[tuple[Node, Node, float]]:
        """Yields each product of the normed streams and a matrix, as (product, matrix, eps)."""
        count, row = self._count, self._count * self._width
        norms = [norm for found in self._norms.values() for norm in found]
        units = {
            norm.product: norm
            for norm in norms
            if norm.hidden_size == row and any(map(self._is_streams, norm.z.holders))
        }
        for node in self._nodes:
            name = plain_name(node)
            if not units or name not in ("linear", "mm", "matmul", "__matmul__"):
                continue
            given, matrix = argument(node, 0, "input"), argument(node, 1, "weight", "mat2", "other")
            norm = units.get(self._values.held[given]) if isinstance(given, Node) else None
            if norm is None or not isinstance(matrix, Node) or argument(node, 2, "bias"):
                continue
            matrix = self.settled(matrix) if name == "linear" else self.untransposed(matrix)
            if matrix is not None and self._is_parameter(matrix, (count * (count + 2), row)):
                yield node, matrix, norm.eps

    def read(self, raw: Node, fn: Node, stream_eps: float) -> PlainInput:
        """Returns the input that is made from a product of the normed streams."""
        n = self._count
        columns = (0, n), (n, 2 * n), (2 * n, n * (n + 2))
        found = self._coefficients(raw)
        made = [found.get(start) for start, _ in columns]
        if None in made:
            raise _different(raw, "coefficients")
        parts = [logits for _, logits in filter(None, made)]
        scale, base = parts[0].scale.source, parts[0].base.source
        expected = [
            _Logits(Part(raw, *both), Part(scale, group, group + 1), Part(base, *both))
            for group, both in enumerate(columns)
        ]
        inputs, outputs, matrix = (node for node, _ in filter(None, made))
        is_activated = [plain_name(node) == "sigmoid" for node in (inputs, outputs, matrix)]
        pre, hc_eps = self.with_number(inputs, "add")
        rows, same_eps = self.with_number(matrix, "add")
        if (
            parts != expected
            or is_activated != [True, True, False]
            or not self._is_parameter(scale, (3,))
            or not self._is_parameter(base, (n * (n + 2),))
            or pre is None
            or rows is None
            or hc_eps != same_eps
        ):
            raise _different(raw, "coefficients")
        comb, iterations = self._sinkhorn(rows, hc_eps)
        if not iterations:
            raise _different(raw, "Sinkhorn steps")
        post, post_scale = self.with_number(outputs, "mul")
        if post is None:
            post, post_scale = outputs, 1.0
        total = self._total(pre)
        if total is None:
            raise _different(raw, "weighted streams")
        found_norm = self._normed(total)
        if found_norm is None:
            raise _different(raw, "normed streams")
        normed, *norm = found_norm
        arguments = (fn, scale, base, *norm, stream_eps, hc_eps, iterations, post_scale)
        return self._complete(arguments, normed, post, comb)

    # ---- coefficients ---------------------------------------------------------------------------

    def _coefficients(self, raw: Node) -> dict[int, tuple[Node, _Logits]]:
        """Returns each sigmoid and softmax of a part of `raw`, keyed by the part's first column."""
        found: dict[int, tuple[Node, _Logits]] = {}
        for node in self._nodes:
            operand = self._activated(node)
            logits = None if operand is None else self._logits(operand, raw)
            if logits is not None:
                found.setdefault(logits.raw.start, (node, logits))
        return found

    def _activated(self, node: Node) -> Any:
        """Returns the operand of a sigmoid, or of a softmax over the last dimension."""
        name, operand = plain_name(node), argument(node, 0, "input", "self")
        if name == "sigmoid":
            return operand
        tensor = self.shapes.of(node)
        if tensor is None:
            return None
        if name in ("softmax", "_softmax"):
            is_last = argument(node, 1, "dim") in (-1, tensor.dim() - 1)
            is_matrix = same_shape(tensor.shape[-2:], [self._count] * 2)
            return operand if is_last and is_matrix and tensor.dtype == torch.float32 else None
        quotient = self._per_row(node, "div")
        powers, total = quotient or (node, None)
        if plain_name(powers) != "exp" or not self._reduces(total, "sum", powers, -1):
            return None
        exponent = self.plain(argument(powers, 0, "input", "self"))
        shifted, greatest = self._per_row(exponent, "sub") or (None, None)
        return shifted if self._reduces(greatest, "amax", shifted, -1) else None

    def _per_row(self, node: Any, name: str, place: int = -1) -> tuple[Node, Node] | None:
        """Returns the operands of a node that combines a matrix with one number per row (-1).

        With place -2, with one number per column. Returns None for other nodes.
        """
        operands = node.args if isinstance(node, Node) else ()
        if len(operands) != 2 or node.kwargs or name not in (operation(node), plain_name(node)):
            return None
        whole, part, out = (self._tensor(each) for each in (*operands, node))
        sizes = [1 if axis == place else self._count for axis in (-2, -1)]
        if whole is None or part is None or out is None or not same_shape(out.shape, whole.shape):
            return None
        found = self.plain(operands[0]), self.plain(operands[1])
        return found if same_shape(part.shape[-2:], sizes) else None

    def _tensor(self, operand: Any) -> Tensor | None:
        return self.shapes.of(operand) if isinstance(operand, Node) else None

    def _logits(self, operand: Any, raw: Node) -> _Logits | None:
        node = self.plain(operand)
        for product, bias in self.operands(node, "add"):
            for part, factor in self.operands(self.plain(product), "mul"):
                parts = [self.part(each) for each in (part, factor, bias)]
                found = [each for each in parts if each is not None]
                if len(found) == 3 and found[0].source is raw and self._match(node, product, bias):
                    return _Logits(*found)
        return None

    def _match(self, node: Node, product: Node, bias: Node) -> bool:
        """Returns whether a sum adds the bias's elements to those of each token, in order."""
        total, given, row = map(self.shapes.of, (node, product, bias))
        if total is None or given is None or row is None or total.dtype != torch.float32:
            return False
        is_matrix = row.dim() > 1 and not is_row(row.shape)
        inner = row.shape[-2:] if is_matrix else row.shape[-1:]
        is_small = all(static_size(size) == 1 for size in row.shape[: row.dim() - len(inner)])
        elements = [self._count] * 2 if is_matrix else inner
        return (
            is_small
            and same_shape(inner, elements)
            and same_shape(given.shape, total.shape)
            and same_shape(given.shape[-len(inner) :], inner)
        )

    def _sinkhorn(self, matrix: Node, eps: float) -> tuple[Node, int]:
        """Returns the matrix after Sinkhorn's steps, and their number; 0 if there are none."""
        iterations = 0
        rows: Node | None = matrix
        while rows is not None:
            columns = self._divided(rows, -2, eps)
            if columns is None:
                break
            matrix, iterations = columns, iterations + 1
            rows = self._divided(matrix, -1, eps)
        return matrix, iterations

    def _divided(self, matrix: Node, place: int, eps: float) -> Node | None:
        """Returns the matrix divided by the sums over a dimension, each plus eps."""
        for user in self.readers(matrix):
            whole, total = self._per_row(user, "div", place) or (None, None)
            inner, number = self.number_in(total, "add")
            is_sum = self._reduces(self.plain(inner), "sum", matrix, place)
            if whole is matrix and number == eps and is_sum:
                return user
        return None

    # ---- the input ------------------------------------------------------------------------------

    def _total(self, pre: Node) -> Node | None:
        """Returns the sum of the streams, each times its factor."""
        for product in self.readers(pre):
            for factors, given in self.operands(product, "mul"):
                tensors = [self.shapes.of(node) for node in (factors, given, product)]
                shapes = [tensor.shape[-2:] for tensor in tensors if tensor is not None]
                sizes = [[self._count, 1], [self._count, self._width], [self._count, self._width]]
                if (
                    self.plain(factors) is pre
                    and self._is_streams(given)
                    and len(shapes) == 3
                    and all(map(same_shape, shapes, sizes))
                    and same_shape(tensors[2].shape, tensors[1].shape)  # type: ignore[union-attr]
                    and tensors[2].dtype == torch.float32  # type: ignore[union-attr]
                ):
                    for total in self.readers(product):
                        if self._reduces(total, "sum", product, -2, self._width):
                            return total
        return None

    def _normed(self, total: Node) -> tuple[Any, ...] | None:
        """Returns (nodes of the normed input, weight, eps, weight_bias, numerics)."""
        algebra, held = self._values.algebra, self._values.held
        for dtype in (self._dtype,) if self._dtype in HALF else FLOATS:
            stored = rounded(held[total], algebra, dtype)
            z = None if stored is None else stored32(stored, algebra, dtype)
            if stored is None or z is None:
                continue
            for norm in self._norms.get(z, ()):
                for output in outputs_of(norm, algebra, dtype):
                    nodes = tuple(self._values.made_by(output.normed))
                    run = None if not stored.holders else self.shapes.of(stored.holders[0])
                    if not nodes or run is None or norm.hidden_size != self._width:
                        continue
                    weight = weight_of(self._values, self._streams, output, run)
                    if weight is None or not isinstance(weight.source, Node):
                        continue
                    tensor = self.shapes.of(weight.source)
                    kinds = {dtype, torch.float32 if self._dtype in HALF else dtype}
                    if tensor is not None and tensor.dim() == 1 and tensor.dtype in kinds:
                        mode = mode_of(True, output)
                        return nodes, weight.source, norm.eps, weight.bias, mode
        return None

    def _complete(
        self, arguments: tuple[Any, ...], normed: Sequence[Node], post: Node, comb: Node
    ) -> PlainInput:
        """Returns the input, if no other nodes read what computes it. Raises Missed otherwise."""
        results = dict.fromkeys((*normed, post, comb))
        derived, needed = set(self._streams.holders), set(results)
        for node in self._nodes:
            if not derived.isdisjoint(node.all_input_nodes) and not asks_only(node):
                derived.add(node)
        for node in reversed(self._nodes):
            if node in derived and not needed.isdisjoint(node.users):
                needed.add(node)
        needed.difference_update(self._streams.holders)
        for node in (*needed, *(each for each in arguments if isinstance(each, Node))):
            overwritten = self._values.written_by(node)
            if overwritten:
                raise Missed(overwritten)
        for node in needed:
            for user in () if node in results else node.users:
                if user not in needed and (user.users or not is_pure(user)):
                    raise Missed(f"{node}, from which the next input is made, is read by {user}")
        for node in results:
            inner = 2 if node is comb else 1
            tensor = self.shapes.of(node)
            if tensor is None or not same_shape(tensor.shape[:-inner], self._tokens):
                raise Missed(f"{node} is not shaped like the streams")
        return PlainInput(arguments, tuple(normed), post, comb)

    # ---- nodes ----------------------------------------------------------------------------------

    def _is_streams(self, node: Node) -> bool:
        """Returns whether a tensor has all elements of the streams, in order."""
        return self._values.held.get(self.plain(node)) is self._streams

    def _is_parameter(self, node: Node, shape: Sequence[int]) -> bool:
        tensor = self.shapes.of(node)
        return (
            tensor is not None
            and tensor.dtype == torch.float32
            and same_shape(tensor.shape, shape)
            and not self._values.held[node].derives_from(self._streams)
        )

    def _reduces(
        self, node: Any, kind: str, source: Any, place: int, width: int | None = None
    ) -> bool:
        """Returns whether a node reduces a matrix per token over its rows (-2) or columns (-1)."""
        if not isinstance(node, Node) or operation(node) != kind:
            return False
        given = argument(node, 0, "input", "self")
        tensor, out = self.shapes.of(given), self.shapes.of(node)
        dims = argument(node, 1, "dim", "axis")
        dims = list(dims) if isinstance(dims, list | tuple) else [dims]
        return (
            self.plain(given) is source
            and tensor is not None
            and out is not None
            and out.dtype == torch.float32
            and same_shape(tensor.shape[-2:], (self._count, width or self._count))
            and dims in ([place], [tensor.dim() + place])
        )


def _different(raw: Node, what: str) -> Missed:
    return Missed(f"{raw} projects the streams, but the {what} are not those of the fused call")
