"""Data classes: an interpretation of the graph around a reduction, and a fused call."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch.fx import Node

from allnorm.compile.expressions import Value
from allnorm.compile.norms import Branch, Norm, Output
from allnorm.compile.quantize import Quantization
from allnorm.compile.reductions import Reduction
from allnorm.compile.shapes import same_shape
from allnorm.compile.values import Values


class Fused(Protocol):
    """Any fused call: the attributes of a `Match` on which the order of calls depends."""

    late: bool
    members: list[Node]

    @property
    def reduction(self) -> Reduction:
        """The reduction that the call replaces."""

    @property
    def inputs(self) -> list[Node]:
        """Every node of the graph that the call reads."""

    def served_nodes(self, values: Values) -> dict[Node, None]:
        """Returns every node that one of the call's results replaces."""


class Missed(Exception):  # noqa: N818 - a result, with the reason as its text
    """The reduction cannot be fused this way; the exception's message is the reason."""


@dataclass(frozen=True)
class Coefficients:
    """The node of a hyper-connection's factors; `transposed` if its last two axes are swapped."""

    node: Node
    transposed: bool = False


@dataclass(frozen=True)
class Streams:
    """A hyper-connection: the reduced sum enters several residual streams.

    Attributes:
        count: number of streams.
        residual: the streams, [..., count, hidden_size].
        post: factors of the reduced sum, [..., count].
        mix: factors of the streams, [..., count, count].
        values: every expression that the fused call replaces, excluding its inputs.
    """

    count: int
    residual: Node
    post: Coefficients
    mix: Coefficients
    values: tuple[Value, ...]

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The nodes that the call reads in addition to `x`."""
        return self.residual, self.post.node, self.mix.node


@dataclass
class Candidate:
    """One interpretation of the graph around a reduction.

    Attributes:
        reduced: the expression of the reduced tensor.
        branch: the post norm and the scale factor that are applied before the residual is added.
        sum32: the float32 sum of branch and residual; without a residual, the float32 branch.
        summed: the stored sum, which the fused call returns; None if the graph never stores it.
        norm: the norm after the residual is added; None if the graph has only a post norm.
        output: how the graph multiplies and rounds the norm's result.
        numerics: the rounding mode that gives bit-identical results.
        quantization: the quantization of the normed tensor, if the call includes it.
        is_local: whether a tensor (a bias, a shared expert, a delta) is added to the reduced tensor
            and the result is rounded before the residual is added. `reduced` is then this result,
            and the fused call does not reduce: it adds the residual and norms.
        streams: the hyper-connection, which has no norm; or None.
    """

    reduction: Reduction
    reduced: Value
    branch: Branch
    residual: Value | None
    sum32: Value
    summed: Value | None
    norm: Norm | None
    output: Output | None
    numerics: str
    quantization: Quantization | None = None
    is_local: bool = False
    streams: Streams | None = None

    @property
    def normed(self) -> Value | None:
        """The result of the norm after the residual is added."""
        return None if self.output is None else self.output.normed

    @property
    def norms(self) -> list[Norm]:
        """The post norm and the norm, as far as they are present."""
        return [norm for norm in (self.branch.norm, self.norm) if norm is not None]

    @property
    def boundary(self) -> str:
        """A list, as text, of what the call does in addition to a residual add and one norm."""
        if self.streams is not None:
            return f"{self.streams.count} residual streams"
        begins = ["tensor added after the reduction"] if self.is_local else []
        ends = [] if self.norm is not None else ["no second norm"]
        return ", ".join([*begins, *filter(None, [str(self.branch)]), *ends])

    @functools.cached_property
    def values(self) -> list[Value]:
        """Every expression that the fused call replaces, excluding its inputs."""
        if self.streams is not None:
            return list(self.streams.values)
        found: dict[Value, None] = {}
        pending = [*self.served, *(norm.product for norm in self.norms)]
        while pending:
            value = pending.pop()
            if value not in found:
                found[value] = None
                if value is self.reduced:
                    continue
                pending += [operand for operand in value.args if not self._is_input(operand)]
        if self.is_local:
            found.pop(self.reduced, None)
        return [value for value in found if value.op != "const"]

    def _is_input(self, operand: Value) -> bool:
        inputs = [output.gain for output in (self.branch.output, self.output) if output]
        if self.quantization is not None:
            inputs += [self.quantization.static, self.quantization.inverse]
        if self.residual is not None and operand is not self.reduced:
            inputs.append(self.residual)
            if operand.op == "up" and self.residual in operand.args:
                return True
        return operand in inputs

    @functools.cached_property
    def served(self) -> list[Value]:
        """The expressions that the fused call returns."""
        results = [self.summed, self.normed]
        if self.quantization is not None:
            results += [self.quantization.quantized, self.quantization.scale]
        return list(dict.fromkeys(filter(None, results)))


def mode_of(is_rounded: bool, *outputs: Output | None) -> str:
    """Returns the rounding mode in which all these norms are computed; "" if none exists.

    `is_rounded` says whether the norms' input is the rounded sum.
    """
    orders = {output.rounds_first for output in outputs if output is not None} - {None}
    if len(orders) == 2:
        return ""
    names = ("rounded", "transformers") if is_rounded else ("unrounded", "vllm")
    return names[True in orders]


@dataclass(frozen=True)
class Weight:
    """A norm's weight: a node, a parameter's path, or None for all ones. `bias` is added to it."""

    source: Node | str | None
    bias: float


@dataclass(frozen=True)
class Experts:
    """The experts' rows, which the call sums before it reduces.

    Attributes:
        rows: [num_tokens, top_k, hidden_size], in the reduction's dtype.
        top_k: number of rows per token.
        weights: float32 [num_tokens, top_k] or [num_tokens, top_k, 1], or None.
        shared: the shared expert's output, in the shape of the reduced tensor, or None.
    """

    rows: Node
    top_k: int
    weights: Node | None
    shared: Node | None


@dataclass(frozen=True)
class PlainInput:
    """The next layer's input in plain PyTorch, as nodes of the graph.

    Attributes:
        arguments: the arguments of `hyper_connection_input` after the streams.
        normed: the nodes that compute the normed input.
        post: the node of the factors of the layer's output, [..., streams].
        comb: the node of the matrix, [..., old stream, new stream].
    """

    arguments: tuple[Any, ...]
    normed: tuple[Node, ...]
    post: Node
    comb: Node

    @property
    def constants(self) -> tuple[object, ...]:
        """The arguments that are not tensors."""
        return tuple(each for each in self.arguments if not isinstance(each, Node))


@dataclass
class Match:
    """A fused call.

    Attributes:
        shape: the shape of the call's inputs and results.
        x: the tensor that it reduces.
        weight: the norm's weight; None without a norm.
        post_weight: the post norm's weight; None without a post norm.
        view_x: a view that the graph takes of the reduced tensor, and that is applied to `x`
            instead; or None.
        views: maps each node that a result replaces to the view that converts the result to the
            node's shape.
        scale_shape: the shape of the computed scales in the graph; None: the operator's shape.
        scale_layout: the layout of the computed scales, as passed to the operator.
        experts: the rows that the call sums to get `x`, or None.
        note: why an additional part of the graph was not fused; empty if all of it was.
        next_input: why the call does not make the next layer's input from its streams; empty if it
            does, and None if the graph does not make it.
        plain_input: the next layer's input, which the graph makes in plain PyTorch and a call of
            `hyper_connection_input` replaces; or None.
        lead_x: number of leading dimensions of size 1 that are added to `x`.
        lead_residual: number of leading dimensions of size 1 that are added to the residual.
        numbers: maps nodes to the numbers they compute, which the call takes as constants.
        members: nodes that the call replaces; they are removed unless other nodes read them.
        dead: other nodes that are computed from the reduced tensor but never read.
        late: whether any input comes after the reduction in the graph.
    """

    candidate: Candidate
    shape: Sequence[object]
    x: Node
    residual: Node | None
    weight: Weight | None
    post_weight: Weight | None
    view_x: Node | None = None
    views: dict[Node, Node] = field(default_factory=dict)
    scale_shape: list[int] | None = None
    scale_layout: str = "row_major"
    static_scale: Node | None = None
    experts: Experts | None = None
    note: str = ""
    next_input: str | None = None
    plain_input: PlainInput | None = None
    lead_x: int = 0
    lead_residual: int = 0
    numbers: dict[Node, object] = field(default_factory=dict)
    members: list[Node] = field(default_factory=list)
    dead: list[Node] = field(default_factory=list)
    late: bool = False
    _handed_over: dict[Value, list[Node]] = field(default_factory=dict, repr=False)

    @property
    def boundary(self) -> str:
        """A list, as text, of what the call does in addition to a residual add and one norm."""
        before = "" if self.experts is None else f"sum of {self.experts.top_k} experts' rows"
        rows = "own rows" if self.candidate.reduction.scatters else ""
        return ", ".join(filter(None, (before, self.candidate.boundary, rows)))

    @property
    def reduction(self) -> Reduction:
        """The reduction that the call replaces."""
        return self.candidate.reduction

    @property
    def served(self) -> list[Value]:
        """The expressions that the call returns."""
        return self.candidate.served

    @property
    def chose_view(self) -> bool:
        """Whether views were chosen only by shape, which can be ambiguous if a size is 1."""
        view, reduced = self.view_x, self.candidate.reduced
        follows = view is None or view.all_input_nodes[0] in reduced.holders
        return bool(self.views) or not follows

    @property
    def inputs(self) -> list[Node]:
        """Every node of the graph that the call reads."""
        weights = [weight.source for weight in (self.weight, self.post_weight) if weight]
        x: tuple[Node | None, ...] = (self.x,)
        if self.experts is not None:
            x = (self.experts.rows, self.experts.weights, self.experts.shared)
        streams = self.candidate.streams
        factors = () if streams is None else streams.inputs
        given = (*x, self.residual, *weights, self.static_scale, *factors)
        nodes = [node for node in given if isinstance(node, Node)]
        if self.view_x is not None:
            nodes += self.view_x.all_input_nodes[1:]
        return list(dict.fromkeys(nodes))

    def handed_over(self, values: Values, value: Value) -> list[Node]:
        """Returns the nodes that one of the call's results replaces.

        Copies, and views that change the shape, stay: only their source is replaced. Call this
        method for each value before the graph is changed; later calls return the same nodes.
        """
        if value not in self._handed_over:
            self._handed_over[value] = self._find_handed_over(values, value)
        return self._handed_over[value]

    def _find_handed_over(self, values: Values, value: Value) -> list[Node]:
        owners = {values.shapes.storage(node) for node in values.computed_by(value)}
        made = [values.shapes.of(node) for node in values.made_by(value)]
        shapes = [self.shape if tensor is None else tensor.shape for tensor in made]

        def is_one(node: Node) -> bool:
            tensor = values.shapes.of(node)
            same = tensor is None or any(same_shape(tensor.shape, shape) for shape in shapes)
            return same and values.shapes.storage(node) in owners

        return list(filter(is_one, value.holders))

    def served_nodes(self, values: Values) -> dict[Node, None]:
        """Returns every node that one of the call's results replaces."""
        served = self.candidate.served
        return dict.fromkeys(node for value in served for node in self.handed_over(values, value))
