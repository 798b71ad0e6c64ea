"""The pass: reductions, their matches, the rewrite, the report."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from allnorm.communicator import Communicator
from allnorm.compile.candidate import Match, Missed
from allnorm.compile.decompose import Decompositions, by_name
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
    all_reduce_groups: Collection[str] = (),
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    approximate_quant: bool = False,
) -> FusionReport:
    """Fuses every all-reduce of a graph with the residual add and RMSNorm behind it, if it can.

    A site is only fused if one of the rounding modes computes what the graph computes, operation by
    operation as PyTorch does it eagerly. Only the order of additions in the mean square, and the
    last bit of the reciprocal root, may differ; with `approximate_quant`, rare FP8 elements too.

    Args:
        graph_module: is changed in place, and recompiled if anything was fused. Graphs of
            submodules are fused too.
        example_inputs: arguments of the graph, real or fake; needed if its nodes have no metadata
            ("val" or "example_value") of shapes and dtypes.
        communicator: runs the fused calls; reductions over other groups are missed. None uses the
            oldest open one of the reduction's group and device, or makes one; it stays open until
            it is closed.
        all_reduce_ops: custom operators that sum their first tensor argument over the ranks of the
            communicator: names ("vllm::all_reduce"), operators or overloads.
        all_reduce_groups: what such an operator calls the communicator's group, in its first string
            argument; those over other groups are missed. Empty: all of them are taken to be over
            the communicator's group.
        decompositions: custom operators, by name or as operators, and the function that computes
            what each does, with the same arguments, in PyTorch: a framework's own norm, say. Inside
            the wrapper that makes a mutating operator functional, it takes that wrapper's keywords
            and returns the new values of what is changed. A function must add tensors in the shape
            of its first result.
        approximate_quant: also fuse quantisations that multiply by the reciprocal of the scale, or
            whose scale has another lower bound, of up to 1 / 512 on amax or 1 / (448 * 512) on the
            scale. The fused call divides, and bounds amax by 1e-10. So a quantised element may be
            the next FP8 number, if its quotient is within one float32 ulp of the middle between
            both; and rows (or groups) without a value of 1 / 512 have a smaller scale, with which
            their elements are more precise. All other scales are the same.

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
    options = _Options(
        tuple(all_reduce_ops),
        frozenset(all_reduce_groups),
        by_name(decompositions or {}),
        approximate_quant,
    )
    return FusionReport(_fuse_all(graph_module, example_inputs, communicator, options))


@dataclass(frozen=True)
class _Options:
    """What the caller says of operators of its own, and allows."""

    all_reduce_ops: Sequence[Any]
    all_reduce_groups: frozenset[str]
    decompositions: Decompositions
    approximate_quant: bool


def _fuse_all(
    module: GraphModule,
    example_inputs: Sequence[Any] | None,
    communicator: Communicator | None,
    options: _Options,
) -> list[Site]:
    sites = _fuse_one(module, example_inputs, communicator, options)
    for child in module.children():
        if isinstance(child, GraphModule):
            sites += _fuse_all(child, None, communicator, options)
    return sites


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
    options: _Options,
) -> list[Site]:
    graph = module.graph
    reductions = find_reductions(graph, options.all_reduce_ops)
    if not reductions:
        return []
    shapes = Shapes(module, reductions, example_inputs)
    values = Values(graph, shapes, reductions, options.decompositions)
    matcher = Matcher(values, approximate_quant=options.approximate_quant)
    sites: list[Site] = []
    calls: list[tuple[Match, str]] = []
    for reduction in reductions.values():
        try:
            _check_group(reduction, options.all_reduce_groups)
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


def _check_group(reduction: Reduction, groups: Collection[str]) -> None:
    if groups and reduction.named_by_caller and reduction.group not in groups:
        names = ", ".join(sorted(groups))
        raise Missed(f"it is over group {reduction.group!r}, the communicator over {names}")


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
