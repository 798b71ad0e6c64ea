"""The pass: reductions, their matches, the rewrite, the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule, Node

from allnorm.communicator import Communicator
from allnorm.compile.candidate import Match, Missed
from allnorm.compile.groups import communicator_name, is_closed
from allnorm.compile.match import Matcher
from allnorm.compile.reductions import Reduction, find_reductions
from allnorm.compile.report import FusionReport, Site
from allnorm.compile.rewrite import Rewriter
from allnorm.compile.shapes import Shapes, printable
from allnorm.compile.values import Values
from allnorm.errors import CommunicatorClosedError


def fuse(
    graph_module: GraphModule,
    example_inputs: Sequence[Any] | None = None,
    communicator: Communicator | None = None,
    *,
    all_reduce_ops: Sequence[Any] = (),
) -> FusionReport:
    """Fuses every all-reduce of a graph with the residual add and RMSNorm behind it, if it can.

    A site is only fused if one of the rounding modes computes what the graph computes, operation by
    operation as PyTorch does it eagerly. Only the order of additions in the mean square, and the
    last bit of the reciprocal root, may differ.

    Args:
        graph_module: is changed in place, and recompiled if anything was fused. Graphs of
            submodules are fused too.
        example_inputs: arguments of the graph, real or fake; needed if its nodes have no metadata
            ("val" or "example_value") of shapes and dtypes.
        communicator: runs the fused calls; reductions over other groups are missed. None uses the
            oldest open one of the reduction's group and device, or makes one.
        all_reduce_ops: custom operators that sum their first tensor argument over the ranks of the
            communicator: names ("vllm::all_reduce"), operators or overloads.

    Returns:
        What became of every reduction.

    Raises:
        TypeError: an argument is of a wrong type.
        ValueError: fewer example_inputs than the graph has inputs.
        CommunicatorClosedError: `communicator` is closed.
        AllnormError: a communicator could not be made.

    Collective if it makes a communicator: every rank must fuse the same graphs in the same order,
    as ranks do that compile the same model.
    """
    if not isinstance(graph_module, GraphModule):
        raise TypeError(
            f"graph_module is a {type(graph_module).__name__}: expected a torch.fx.GraphModule."
        )
    check_communicator(communicator)
    sites = _fuse_one(graph_module, example_inputs, communicator, all_reduce_ops)
    for child in graph_module.children():
        if isinstance(child, GraphModule):
            sites += fuse(child, None, communicator, all_reduce_ops=all_reduce_ops).sites
    return FusionReport(sites)


def check_communicator(communicator: object) -> None:
    """Raises unless this is None or an open communicator."""
    if communicator is None:
        return
    if not isinstance(communicator, Communicator):
        raise TypeError(
            f"communicator is a {type(communicator).__name__}: expected an allnorm.Communicator."
        )
    if is_closed(communicator):
        raise CommunicatorClosedError(
            f"communicator {communicator.name} is closed: pass an open one."
        )


def _fuse_one(
    module: GraphModule,
    example_inputs: Sequence[Any] | None,
    communicator: Communicator | None,
    all_reduce_ops: Sequence[Any],
) -> list[Site]:
    graph = module.graph
    reductions = find_reductions(graph, all_reduce_ops)
    if not reductions:
        return []
    shapes = Shapes(module, reductions, example_inputs)
    values = Values(graph, shapes, reductions)
    matcher = Matcher(values)
    sites: list[Site] = []
    calls: list[tuple[Match, str]] = []
    for reduction in reductions.values():
        try:
            match = matcher.match(reduction)
            x = shapes.of(match.x)
            assert x is not None
            name = communicator_name(reduction, x.device, communicator)
        except Missed as missed:
            sites.append(_site(values, reduction, None, str(missed)))
        else:
            sites.append(_site(values, reduction, match, name))
            calls.append((match, name))
    rewriter = Rewriter(graph, values)
    for call in calls:
        rewriter.apply(*call)
    if calls:
        module.recompile()
    return sites


def _site(values: Values, reduction: Reduction, match: Match | None, text: str) -> Site:
    """The report's line; `text` is the name of the communicator, or the reason."""
    x = None if reduction.x is None else values.shapes.of(reduction.x)
    shape, dtype = (None, None) if x is None else (printable(x.shape), x.dtype)
    group = reduction.group or reduction.comm_name or ""
    if match is None:
        return Site((reduction.node.name,), shape, dtype, group, reason=text)
    nodes, numerics = _path(values, match), match.candidate.numerics
    quant = None if match.candidate.quantised is None else str(match.candidate.quantised)
    return Site(nodes, shape, dtype, group or text, numerics, None, quant, match.note)


def _path(values: Values, match: Match) -> tuple[str, ...]:
    """Names from the reduction to the norm, or to the quantisation."""

    def place(node: Node) -> int:
        return values.position[node]

    end = max(place(value.definers[0]) for value in match.candidate.served)
    return tuple(node.name for node in match.members if place(node) <= end)
