"""Finds RMSNorms of rows that are spread over the ranks, which reduce only sums of squares.

The grammar, in float32 arithmetic, where `z` is this rank's slice of the rows:

    square  = sum(square(z)) | mean(square(z)) | div(square, number)
    total   = reduced(square) | column i of reduced(columns(square of tensor 0, square of ...))
            | div(total, number)
    rstd    = rsqrt(add(total, eps))

The numbers must divide the sum by the length of a row on all ranks. The norm's result is then as in
`allnorm.compile.norms`. Where a graph divides several times, every quotient is rounded, which the
call does not repeat: like the order of the additions, this changes the last bits of the mean.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.fx import Node

from allnorm.compile.candidate import Fused, Missed, Weight, mode_of
from allnorm.compile.expressions import Algebra, Value, as_float32, bare, number_of
from allnorm.compile.fit import numbers_of, weight_of
from allnorm.compile.norms import Norm, Output, norms_by, outputs_of
from allnorm.compile.reductions import Reduction
from allnorm.compile.safety import check_order, is_answered
from allnorm.compile.shapes import is_contiguous, same_shape
from allnorm.compile.values import Values
from allnorm.compile.vocabulary import asks_only, is_pure, operation, written
from allnorm.core import _native
from allnorm.core.arguments import MAX_HIDDEN_SIZE


@dataclass(frozen=True)
class Slice:
    """One tensor of the call.

    Attributes:
        x: this rank's slice of the rows, [..., local_size].
        weight: the weight's slice.
        norm: the norm in the graph; its `hidden_size` is local_size.
        normed: the normed tensor's expression.
        nodes: the nodes that compute it, which a result of the call replaces.
    """

    x: Node
    weight: Weight
    norm: Norm
    normed: Value
    nodes: list[Node]


@dataclass
class ShardedMatch:
    """A call of `rms_norm_sharded`. Attributes that a `Match` has too mean the same.

    A call may replace several reductions; `reduction` is then the first one.

    Attributes:
        slices: the tensors that it norms.
        world_size: the number of ranks by which the graph divides.
    """

    reduction: Reduction
    slices: list[Slice]
    numerics: str
    world_size: int
    numbers: dict[Node, object] = field(default_factory=dict)
    members: list[Node] = field(default_factory=list)
    late: bool = False
    note: str = ""
    chose_view: bool = False

    @property
    def x(self) -> Node:
        """The first tensor that it norms."""
        return self.slices[0].x

    @property
    def eps(self) -> float:
        """The number that is added to the mean squares."""
        return self.slices[0].norm.eps

    @property
    def weight_bias(self) -> float:
        """The number that is added to the weights."""
        return self.slices[0].weight.bias

    @property
    def boundary(self) -> str:
        """A description, as text, of the call."""
        count = len(self.slices)
        return "rows over ranks" + ("" if count == 1 else f" of {count} tensors")

    @property
    def served(self) -> list[Value]:
        """The expressions that the call returns."""
        return [one.normed for one in self.slices]

    @property
    def inputs(self) -> list[Node]:
        """Every node of the graph that the call reads."""
        given = [node for one in self.slices for node in (one.x, one.weight.source)]
        return list(dict.fromkeys(node for node in given if isinstance(node, Node)))

    def served_nodes(self, values: Values) -> dict[Node, None]:
        """Returns every node that one of the call's results replaces."""
        return dict.fromkeys(node for one in self.slices for node in one.nodes)


@dataclass(frozen=True)
class _Square:
    """A sum of squares of `z`, which has `size` columns, divided by `divisor`."""

    z: Value
    size: int
    divisor: float


def reduces_squares(values: Values, reduction: Reduction) -> bool:
    """Returns whether a reduction sums squares of rows over the ranks."""
    if reduction.problem or reduction.x is None or reduction.scatters:
        return False
    held = bare(values.held[reduction.x])
    columns = held.args if held.op == "columns" else (held,)
    return any(_is_rounded_square(column) for column in columns)


def match_sharded(
    values: Values, reduction: Reduction, accepted: Sequence[Fused], why: str
) -> ShardedMatch:
    """Returns the call that norms the rows whose squares are reduced. Raises Missed if none can.

    `accepted` has the matches that were accepted before. `why` is the reason why this graph's
    in-place reductions cannot be fused.
    """
    if reduction.in_place:
        raise Missed(f"it works in place, {why}")
    assert reduction.x is not None
    held, reduced = values.held[reduction.x], values.reduced[reduction.node]
    squares = held.args if held.op == "columns" else (held,)
    limit = _native.MAX_SLICES
    if len(squares) > limit:
        raise Missed(f"it reduces {len(squares)} sums of squares: expected at most {limit}")
    found = []
    for index, square in enumerate(squares):
        parsed = _square(square)
        if parsed is None and (_is_rounded_square(square) or bare(square).op == "columns"):
            dtype = _rounded_to(square)
            raise Missed(f"its squares or their sums are rounded to {dtype}: expected float32")
        if parsed is None:
            raise Missed(f"column {index} of the tensor that it reduces is no sum of squares")
        total = reduced
        if held.op == "columns":
            column = values.algebra.find("column", (reduced,), index)
            if column is None:
                raise Missed(f"column {index} of its result is not read by itself")
            total = column
        found.append(list(_norms(values.algebra, parsed, total)))
        if not found[-1]:
            raise Missed(_why_no_norm(values, total, parsed))
    first: Missed | None = None
    for norms in itertools.product(*found):
        numerics = mode_of(True, *(norm.output for norm in norms))
        if not numerics:
            continue  # a later combination leaves a weight in the graph
        try:
            return _fit(values, reduction, norms, numerics, accepted)
        except Missed as missed:
            first = first or missed
    assert first is not None
    raise first


def _square(value: Value) -> _Square | None:
    """Returns the sum of squares that an expression is; None if it is none."""
    divisor = _divisor(value)
    if divisor is not None:
        inner = _square(value.args[0])
        return inner and _Square(inner.z, inner.size, inner.divisor * divisor)
    if value.op not in ("sum", "mean") or value.args[0].op != "square":
        return None
    return _Square(value.args[0].args[0], value.attr, value.attr if value.op == "mean" else 1.0)


def _is_rounded_square(value: Value) -> bool:
    """Returns whether an expression is a sum of squares, except for roundings."""
    value = bare(value)
    if _divisor(value) is not None:
        return _is_rounded_square(value.args[0])
    return value.op in ("sum", "mean") and bare(value.args[0]).op == "square"


def _rounded_to(value: Value) -> torch.dtype | None:
    """Returns the dtype to which a sum of squares, or its squares, are rounded, or None."""
    if value.op == "round":
        return value.dtype
    if value.op == "up":
        return value.args[0].dtype
    return _rounded_to(value.args[0]) if value.op in ("div", "mul", "sum", "mean") else None


def _divisor(value: Value) -> float | None:
    """Returns the number by which an expression divides its first operand, or None."""
    number = number_of(value.args[1]) if value.op in ("div", "mul") else None
    if number is None or not number or number != as_float32(number):
        return None
    if value.op == "div":
        return number
    # Multiplication by the reciprocal of a power of two is exact.
    return 1.0 / number if math.frexp(number)[0] == 0.5 else None


@dataclass(frozen=True)
class _Found:
    norm: Norm
    output: Output
    world_size: int


def _norms(algebra: Algebra, square: _Square, total: Value) -> Iterator[_Found]:
    """Yields the results of the norms that divide by the root of `total`."""
    for rstd, eps, divisor in _roots(total, square.divisor):
        ranks = divisor / square.size
        rstd.note = ""  # it is not the root of a mean of this rank's squares
        if not math.isfinite(as_float32(eps)) or eps < 0:
            rstd.note = f"eps={eps} is not a finite number >= 0 in float32"
        elif not math.isfinite(ranks) or ranks < 1 or ranks % 1:
            rstd.note = (
                f"the sum of squares is divided by {divisor:g}: expected the length of a row, "
                f"which is a multiple of {square.size}"
            )
        else:
            for norm in norms_by(rstd, square.z, eps, square.size):
                for output in outputs_of(norm, algebra, _dtype_of(square.z)):
                    yield _Found(norm, output, int(ranks))


def _roots(total: Value, divisor: float) -> Iterator[tuple[Value, float, float]]:
    """Yields each (rsqrt(total + eps), eps, number by which the sum of squares is divided)."""
    for user in total.users:
        number = _divisor(user)
        if number is not None and user.args[0] is total:
            yield from _roots(user, divisor * number)
        elif user.op == "rsqrt":
            yield user, 0.0, divisor
        elif user.op == "add" and number_of(user.args[1]) is not None:
            for root in user.users:
                if root.op == "rsqrt":
                    yield root, number_of(user.args[1]) or 0.0, divisor


def _dtype_of(z: Value) -> torch.dtype:
    dtype = z.args[0].dtype if z.op == "up" else z.dtype
    return dtype or torch.float32


def _why_no_norm(values: Values, total: Value, square: _Square) -> str:
    queue, seen = [total], {total}
    for value in queue:
        if value.op == "mul" and number_of(value.args[1]) is not None and _divisor(value) is None:
            number = number_of(value.args[1])
            return f"the sum of squares is multiplied by {number:g}: allnorm divides it instead"
        if value.note and value is not total:
            return value.note
        new = [user for user in value.users if user not in seen and user.op != "opaque"]
        seen.update(new)
        queue += new
    names = dict.fromkeys(str(node) for node, _ in total.readers if node not in total.definers)
    text = ", ".join([*names][:3])
    if not text:
        return "its result is not used"
    return f"no RMSNorm of the rows follows it: the sum of squares is used by {text}"


def _fit(
    values: Values,
    reduction: Reduction,
    found: Sequence[_Found],
    numerics: str,
    accepted: Sequence[Fused],
) -> ShardedMatch:
    """Returns the match of these norms, one per tensor. Raises Missed, with the reason."""
    reduced = values.reduced[reduction.node]
    slices = [_slice(values, one, reduced) for one in found]
    check_slices(values, slices, found[0].world_size)
    if len({one.world_size for one in found}) > 1:
        raise Missed("its sums of squares are divided by different numbers of ranks")
    match = ShardedMatch(reduction, slices, numerics, found[0].world_size)
    match.members = _members(values, match)
    if values.shapes.has_real_examples:
        match.numbers = numbers_of(values, [*_upstream(values, match), *match.members])
    holders = [node for value in match.served for node in value.holders]
    for node in (*match.members, *match.inputs, *holders):
        if values.written_by(node):
            raise Missed(values.written_by(node))
        if node in holders and values.maker_of(node) in values.context.differentiated:
            raise Missed(
                "its result needs a gradient, which the fused call does not compute: run under "
                "torch.no_grad(), or fuse after autograd, as inductor_pass does"
            )
    problem = check_order(values, match, accepted)
    if problem:
        raise Missed(problem)
    return match


def check_slices(values: Values, slices: Sequence[Slice], world_size: int) -> None:
    """Raises Missed, with the reason, unless one call can norm these slices.

    The number of slices is not checked.
    """
    tensors = [_tensor(values, one.x) for one in slices]
    for one, tensor in zip(slices[1:], tensors[1:], strict=True):
        for what, mine, first in (
            ("eps", one.norm.eps, slices[0].norm.eps),
            ("weight bias", one.weight.bias, slices[0].weight.bias),
            ("dtype", tensor.dtype, tensors[0].dtype),
            ("device", tensor.device, tensors[0].device),
        ):
            if repr(mine) != repr(first):  # a bias of 0.0 is not one of -0.0
                raise Missed(
                    f"{one.x} is normed with {what} {mine}, {slices[0].x} with {first}: one call "
                    "has the same for all tensors"
                )
        if not same_shape(tensor.shape[:-1], tensors[0].shape[:-1]):
            raise Missed(f"{one.x} and {slices[0].x} have different leading dimensions")
    columns = [one.norm.hidden_size for one in slices]
    longest = max(sum(columns), max(columns) * world_size)
    if longest > MAX_HIDDEN_SIZE:
        raise Missed(f"{longest} columns in all: expected at most {MAX_HIDDEN_SIZE}")


def _tensor(values: Values, node: Node) -> Tensor:
    tensor = values.shapes.of(node)
    assert tensor is not None
    return tensor


def _slice(values: Values, found: _Found, reduced: Value) -> Slice:
    norm, output = found.norm, found.output
    nodes = values.made_by(output.normed)
    if not nodes or not values.is_used(output.normed):
        name = norm.rstd.definers[0] if norm.rstd.definers else reduced.definers[0]
        raise Missed(f"the tensor that {name} norms is not used")
    normed = _tensor(values, nodes[0])
    if norm.hidden_size != normed.shape[-1]:
        raise Missed(
            f"the norm covers {norm.hidden_size} of the {normed.shape[-1]} elements of a row"
        )
    source = norm.z.args[0] if norm.z.op == "up" else norm.z
    x = values.holder(source, normed.shape, normed.dtype, normed.device)
    if x is None or source.derives_from(reduced):
        raise Missed(f"no tensor of the shape and dtype of {nodes[0]} holds what it norms")
    for node in nodes:
        tensor = _tensor(values, node)
        if not is_contiguous(tensor):
            raise Missed(
                f"{node} has strides {tuple(tensor.stride())}: the results of the fused call are "
                "contiguous"
            )
        if not same_shape(tensor.shape, normed.shape):
            raise Missed(f"{node} and {nodes[0]} hold the same normed tensor in different shapes")
    weight = weight_of(values, reduced, output, normed)
    return Slice(x, weight or Weight(None, -0.0), norm, output.normed, nodes)


def _members(values: Values, match: ShardedMatch) -> list[Node]:
    """Returns the nodes between the reduction and the normed tensors; raises if others read them.

    Nodes whose results are unused are members too.
    """
    served, name = match.served_nodes(values), values.name_of
    found = dict.fromkeys([match.reduction.node])
    pending = list(found)
    for node in pending:
        for user in [user for user in node.users if user not in served and user not in found]:
            asserts = asks_only(user) and not user.users and not is_answered(values, user)
            ends = user.op == "output" or user in values.reduced or not _may_go(user)
            if asserts or (ends and user in values.live):
                end = "the output of the graph" if user.op == "output" else name(user)
                raise Missed(
                    f"{name(node)}, computed from the reduced sum of squares, is also used by "
                    f"{end}: the fused call returns only the normed tensors"
                )
            found[user] = None
            pending.append(user)
    return sorted(found, key=values.position.__getitem__)


def _may_go(node: Node) -> bool:
    return operation(node) == "wait" or (is_pure(node) and not written(node))


def _upstream(values: Values, match: ShardedMatch) -> list[Node]:
    """Returns the nodes that compute the sums of squares from the slices."""
    ends = {values.held[one.x] for one in match.slices}
    found: dict[Node, None] = {}
    pending = list(match.reduction.node.all_input_nodes)
    for node in pending:
        if node.op in ("placeholder", "get_attr") or node in found or values.held[node] in ends:
            continue
        found[node] = None
        pending += node.all_input_nodes
    return list(found)
