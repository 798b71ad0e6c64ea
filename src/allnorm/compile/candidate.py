"""A reading of the graph around a reduction, and the fused call that it leads to."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.fx import Node

from allnorm.compile.expressions import Value
from allnorm.compile.norms import Branch, Norm, Output
from allnorm.compile.quantise import Quantised
from allnorm.compile.reductions import Reduction
from allnorm.compile.shapes import same_shape
from allnorm.compile.values import Values


class Missed(Exception):  # noqa: N818 - a result, with the reason as its text
    """The reduction cannot be fused this way."""


@dataclass
class Candidate:
    """One reading of the graph around a reduction.

    Attributes:
        reduction: what communicates.
        reduced: its result.
        branch: what that goes through before the residual is added.
        residual: what is added; None if nothing is.
        sum32: the float32 sum; that of the branch if nothing is added.
        summed: the sum as stored, which the fused call returns; None if the graph never stores it.
        norm: what follows; None if only a post norm does.
        output: what the graph makes of that.
        numerics: the mode that computes this.
        quantised: how the normed tensor is quantised; None if that is left to the graph.
        is_local: whether `reduced` is the result with a tensor added to it (a bias, a shared
            expert, a delta), which is rounded before the residual is added: the call only adds the
            residual and norms, after the reduction.
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
    quantised: Quantised | None = None
    is_local: bool = False

    @property
    def normed(self) -> Value | None:
        """The result of the norm behind the residual."""
        return None if self.output is None else self.output.normed

    @property
    def norms(self) -> list[Norm]:
        """Both norms, as far as they are there."""
        return [norm for norm in (self.branch.norm, self.norm) if norm is not None]

    @property
    def boundary(self) -> str:
        """What is beside a residual and one norm, in words."""
        begins = ["tensor added after the reduction"] if self.is_local else []
        ends = [] if self.norm is not None else ["no second norm"]
        return ", ".join([*begins, *filter(None, [str(self.branch)]), *ends])

    @functools.cached_property
    def values(self) -> list[Value]:
        """Every expression that the fused call stands for, without its inputs."""
        found: dict[Value, None] = {}
        pending = [*self.served, *(norm.product for norm in self.norms)]
        while pending:
            value = pending.pop()
            if value not in found:
                found[value] = None
                if value is self.reduced:
                    continue
                pending += [operand for operand in value.args if not self._is_input(operand)]
        computed = [value for value in found if value.op != "const"]
        return [value for value in computed if not (self.is_local and value is self.reduced)]

    def _is_input(self, operand: Value) -> bool:
        outputs = (self.branch.output, self.output)
        if any(output is not None and operand is output.gain for output in outputs):
            return True
        quantised = self.quantised
        if quantised is not None and operand in (quantised.static, quantised.inverse):
            return True
        if self.residual is None or operand is self.reduced:
            return False
        return operand is self.residual or (operand.op == "up" and self.residual in operand.args)

    @functools.cached_property
    def served(self) -> list[Value]:
        """What the fused call returns."""
        results = [self.summed, self.normed]
        if self.quantised is not None:
            results += [self.quantised.quantized, self.quantised.scale]
        return list(dict.fromkeys(value for value in results if value is not None))


@dataclass(frozen=True)
class Weight:
    """What a norm multiplies by.

    Attributes:
        source: a node, the path of a parameter, or None for ones.
        bias: added to it.
    """

    source: Node | str | None
    bias: float


@dataclass(frozen=True)
class Experts:
    """What the call sums before it reduces.

    Attributes:
        rows: [num_tokens, top_k, hidden_size], of the dtype of the reduction.
        top_k: how many rows a token has.
        weights: float32 [num_tokens, top_k] or [num_tokens, top_k, 1], or None.
        shared: of the shape of the reduced tensor, or None.
    """

    rows: Node
    top_k: int
    weights: Node | None
    shared: Node | None


@dataclass
class Match:
    """A fused call.

    Attributes:
        candidate: what it stands for.
        shape: of its inputs and results.
        x: reduced by it.
        residual: added by it, or None.
        weight: of the norm; None if there is none.
        post_weight: of the post norm; None if there is none.
        view_x: the view of the reduced tensor to repeat on `x` first; None if there is none.
        views: by node that a result replaces, the view to repeat on that result first, where the
            shape of the node is not `shape`.
        scale_shape: in which the graph has the computed scales; None: in that of the operator.
        scale_layout: of the computed scales, as the operator takes it.
        static_scale: the given scale.
        experts: what `x` is the sum of, if the call makes that too.
        note: what else could have been fused, and why not.
        lead_x: so many dimensions of size 1 are put before those of `x`.
        lead_residual: the same for the residual.
        numbers: nodes that compute what the call is made with, and what they compute.
        members: nodes that it makes superfluous, unless somebody else needs them.
        dead: other nodes that are computed from the reduced tensor, for nobody.
        late: whether an input stands behind the reduction.
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
    lead_x: int = 0
    lead_residual: int = 0
    numbers: dict[Node, object] = field(default_factory=dict)
    members: list[Node] = field(default_factory=list)
    dead: list[Node] = field(default_factory=list)
    late: bool = False
    _handed_over: dict[Value, list[Node]] = field(default_factory=dict, repr=False)

    @property
    def boundary(self) -> str:
        """What is beside a residual and one norm, in words."""
        before = "" if self.experts is None else f"sum of {self.experts.top_k} experts' rows"
        return ", ".join(filter(None, (before, self.candidate.boundary)))

    @property
    def chose_view(self) -> bool:
        """Returns whether a view is repeated only because its shapes fit."""
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
        given = (*x, self.residual, *weights, self.static_scale)
        nodes = [node for node in given if isinstance(node, Node)]
        if self.view_x is not None:
            nodes += self.view_x.all_input_nodes[1:]
        return list(dict.fromkeys(nodes))

    def handed_over(self, values: Values, value: Value) -> list[Node]:
        """Returns the nodes whose readers read a result of the call instead.

        Copies stay, and so do views that change the shape: what they view is replaced. The graph
        must not have changed before the first call for a value.
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
        """Every node that a result of the call stands for."""
        served = self.candidate.served
        return dict.fromkeys(node for value in served for node in self.handed_over(values, value))
