"""The graph pass: finds reductions, matches them, rewrites the graph and reports."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from allnorm.communicator import Communicator
from allnorm.compile import agreement, guards
from allnorm.compile.aliasing import keep_aliasing, occurrences
from allnorm.compile.candidate import Match, Missed
from allnorm.compile.decompose import Decompositions, by_name
from allnorm.compile.functional import Functional, NotFunctional, make_functional, writers
from allnorm.compile.groups import check_group, communicator_name, group_of
from allnorm.compile.match import Matcher
from allnorm.compile.merge import merge
from allnorm.compile.next_inputs import join_inputs, streams_in
from allnorm.compile.reductions import Reduction, find_reductions, only_all_reduces
from allnorm.compile.report import FusionReport, Site
from allnorm.compile.rewrite import Rewriter
from allnorm.compile.shapes import Freedom, Shapes, printable, static_size, storage_of
from allnorm.compile.sharded import ShardedMatch
from allnorm.compile.values import Context, Values, memories
from allnorm.compile.vocabulary import attribute_of, module_of
from allnorm.core.verdicts import Step
from allnorm.errors import CommunicatorClosedError

_INPUTS = frozenset({"placeholder", "get_attr"})


def fuse(
    graph_module: GraphModule,
    example_inputs: Sequence[Any] | None = None,
    communicator: Communicator | None = None,
    *,
    all_reduce_ops: Sequence[Any] = (),
    all_reduce_groups: Collection[str] = (),
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    approximate_quant: bool = False,
    approximate_streams: bool = False,
) -> FusionReport:
    """Fuses each all-reduce in a graph with the residual add and RMSNorm after it, where possible.

    All-reduces of sums of squares, by which rows that are spread over the ranks are normed, become
    calls of `rms_norm_sharded`. Those that follow each other become one call, if their tensors do
    not depend on each other's norms.

    A `hyper_connection_input` of new residual streams is made in the call that makes the streams.

    A site is fused only if one of the rounding modes reproduces the graph's operations, including
    PyTorch's roundings in eager mode. Only the order of additions in the mean square and the last
    bit of the reciprocal root may differ, the order in which residual streams are added, and the
    roundings of a mean square that the graph divides more than once. With `approximate_quant`,
    a few FP8 elements may differ too; with `approximate_streams`, elements of residual streams.

    Args:
        graph_module: the graph. It is changed in place, and recompiled if anything was fused.
            Graphs in its submodules are fused too. A graph that writes in place is first made
            functional by PyTorch; if that would lose any of its effects, the graph stays unchanged.
        example_inputs: the graph's arguments, real or fake. Required if its nodes have no metadata
            ("val" or "example_value") with shapes and dtypes.
        communicator: runs the fused calls; reductions over other groups are missed. None: the
            oldest open communicator for the reduction's group and device. If none exists, the pass
            creates one, which stays open.
        all_reduce_ops: custom operators that sum their first tensor argument over the ranks of the
            communicator: names ("vllm::all_reduce"), operators or overloads.
        all_reduce_groups: the names that these operators' first string argument has for the
            communicator's group; operators with a different name are missed. Empty: all of these
            operators are assumed to reduce over the communicator's group.
        decompositions: maps custom operators (names or operators), such as a framework's own norm,
            to PyTorch functions that take the same arguments and compute the same results. For a
            mutating operator in its functional wrapper, the function takes the wrapper's keywords
            and returns the new values of the changed tensors. A function must add tensors in the
            shape of its first result.
        approximate_quant: also fuses quantizations that multiply by the reciprocal of the scale, or
            have a different lower bound: up to 1 / 512 for amax, or 1 / (448 * 512) for the scale.
            The fused call divides, and bounds amax by 1e-10. A quantized element may therefore be
            the adjacent FP8 number if its quotient is within one float32 ulp of the midpoint. Rows
            or groups with no value above 1 / 512 get a smaller scale, and more precise elements.
            All other scales stay the same.
        approximate_streams: also fuses hyper-connections that round a part of the new streams to 16
            bits before they add it to the other part. The fused call rounds only the sum. An
            element differs by the roundings that are omitted, each of which is at most half a unit
            in the last place of the part. The call then also makes a next input that is computed in
            plain PyTorch; its float32 numbers differ in their last bits.

    Returns:
        The report: every reduction, fused or missed, and why it was missed.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: `example_inputs` is shorter than the graph's list of inputs.
        CommunicatorClosedError: `communicator` is closed.
        AllnormError: a communicator could not be created, or peers that do not compile this graph
            may be running a differently fused version.

    Either all ranks fuse a graph or none does. A rank waits for peers that do not compile the graph
    for at most a quarter of the timeout, and at most 60 s. Collective if it creates a communicator.
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
        approximate_streams,
    )
    sites: list[Site] = []
    inputs: dict[GraphModule, Sequence[Any] | None] = {graph_module: example_inputs}
    known: dict[GraphModule, Shapes] = {}
    for child in list(graph_module.modules()):
        if isinstance(child, GraphModule):
            sites += _fuse_one(child, inputs, known, communicator, options)
    if any(site.fused for site in sites):
        _check_sizes(graph_module, known)
    return FusionReport(sites)


def _check_sizes(module: GraphModule, known: dict[GraphModule, Shapes]) -> None:
    """Adds a check of the input sizes to the graph if the fusion relies on the examples' sizes."""
    shapes, ones = known.get(module), any(shapes.assumed.ones for shapes in known.values())
    checked = module.graph.find_nodes(op="call_function", target=guards.check_inputs)
    assumed = ones or any(shapes.assumed.sizes for shapes in known.values())
    traced = shapes is not None and shapes.meta_key == "val" and not TracingContext.try_get()
    if shapes is None or checked or not (traced if shapes.env is None else assumed):
        return
    inputs = module.graph.find_nodes(op="placeholder")
    looks = ((node, shapes.of(node)) for node in inputs)
    given = {node: tensor for node, tensor in looks if tensor is not None}
    sizes = guards.sizes_of([*given.values()])
    if shapes.env is None:
        rule = guards.rule_of_tracer(sizes)
    else:
        rule = guards.rule_of(shapes.env, sizes, bounds=ones)
    if rule:
        with module.graph.inserting_after(inputs[-1]):
            module.graph.call_function(guards.check_inputs, ((), 0, tuple(given), rule))
        module.recompile()


@dataclass(frozen=True)
class _Options:
    """The keyword arguments of `fuse`."""

    all_reduce_ops: Sequence[Any]
    all_reduce_groups: frozenset[str]
    decompositions: Decompositions
    approximate_quant: bool
    approximate_streams: bool


def check_communicator(communicator: object) -> None:
    """Raises unless the argument is None or an open communicator."""
    if communicator is None:
        return
    if not isinstance(communicator, Communicator):
        raise TypeError(
            f"communicator is a {type(communicator).__name__}: expected an allnorm.Communicator."
        )
    if communicator.is_closed:
        raise CommunicatorClosedError(
            f"communicator {communicator.name} is closed: pass an open one."
        )


@dataclass
class _Found:
    """A reduction in the original graph (`before`) and in the searched graph, and what was found.

    Either a match was found (`match`, with its communicator's `name`), or `reason` says why not.
    `call` is then the match, or a call that several matches were merged into.
    """

    before: Reduction
    reduction: Reduction
    match: Match | ShardedMatch | None = None
    call: Match | ShardedMatch | None = None
    name: str = ""
    reason: str = ""

    def miss(self, reason: str) -> None:
        """Drops the match."""
        self.match, self.call, self.reason = None, None, reason


def _fuse_one(
    module: GraphModule,
    inputs: dict[GraphModule, Sequence[Any] | None],
    known_of: dict[GraphModule, Shapes],
    communicator: Communicator | None,
    options: _Options,
) -> list[Site]:
    reductions = find_reductions(module.graph, options.all_reduce_ops)
    children = [node for node in module.graph.nodes if isinstance(module_of(node), GraphModule)]
    if not reductions and not children:
        _join_inputs(module, inputs.get(module))
        return []
    given = _Given(module, reductions, inputs.get(module), communicator, options)
    search = given.search()
    shapes, values, sites = search.shapes, search.values, search.sites
    known_of[module] = shapes
    for node in children:
        _note_inputs(node, shapes, inputs)
    _merge(sites, values, communicator)
    _agree(sites, values, communicator)
    if any(one.match is not None and one.match.chose_view for one in sites):
        # Sizes of 1 are not symbols, so they need a check, except in the last dimension.
        tensors = [value for value in shapes.examples or () if isinstance(value, Tensor)]
        shapes.assumed.ones |= any(1 in map(static_size, t.shape[:-1]) for t in tensors)
    report = [_site(values, shapes, one) for one in sites]
    problem = _rewrite(module, sites, values, search.functional, shapes.meta_key)
    if problem:
        for one in [one for one in sites if one.match is not None]:
            one.miss(problem)
        report = [_site(values, shapes, one) for one in sites]
    if all(one.match is None for one in sites):
        _join_inputs(module, inputs.get(module))
    return [_with_input(site, one.match) for site, one in zip(report, sites, strict=True)]


def _join_inputs(module: GraphModule, examples: Sequence[Any] | None) -> None:
    """Joins the inputs in a graph without matches to the calls that make their streams."""
    graph = module.graph
    if streams_in(graph):
        names = [node.name for node in occurrences(graph)]
        if "" in join_inputs(graph, Shapes(module, {}, examples)).values():
            _keep_names(graph, names)
            module.recompile()


def _with_input(site: Site, match: Match | ShardedMatch | None) -> Site:
    """Returns a site's entry in the report with what happened to the next layer's input."""
    why = match.next_input if isinstance(match, Match) else None
    if why is None:
        return site
    if why:
        return replace(site, note=site.note or f"the next layer's input is not fused: {why}")
    return replace(site, boundary=f"{site.boundary}, next layer's input")


@dataclass
class _Search:
    """The original graph's shapes, and the expressions and reductions of the searched graph.

    `functional` is the searched graph; None if the original graph itself was searched.
    """

    shapes: Shapes
    values: Values
    functional: Functional | None
    sites: list[_Found]

    @property
    def fused(self) -> tuple[int, int]:
        """The number of reductions with a match, and the number of matches without a note."""
        matches = [one.match for one in self.sites if one.match is not None]
        return len(matches), sum(not match.note for match in matches)


@dataclass(frozen=True)
class _Given:
    """A graph to search, its reductions, and the arguments of `fuse`."""

    module: GraphModule
    reductions: dict[Node, Reduction]
    examples: Sequence[Any] | None
    communicator: Communicator | None
    options: _Options

    def search(self) -> _Search:
        """Searches for matches that are valid for as many input sizes as possible.

        The examples' sizes are assumed only if that fuses more. The number of rows is assumed only
        if a call's arguments depend on it, in which case the call allows no other number anyway.
        """
        best = self._search(Freedom.DISTINCT)
        if not best.shapes.has_real_examples:
            return best
        for freedom in (Freedom.EQUAL, Freedom.ROWS, Freedom.NONE):
            if best.fused == (len(best.sites), len(best.sites)):
                break
            other = self._search(freedom)
            numbers = any(one.match is not None and one.match.numbers for one in other.sites)
            if other.fused > best.fused and (freedom is not Freedom.NONE or numbers):
                best = other
            elif freedom is Freedom.NONE:  # these reasons contain numbers instead of symbols
                for one, same in zip(best.sites, other.sites, strict=True):
                    one.reason = one.reason and (same.reason or one.reason)
        return best

    def _search(self, freedom: Freedom) -> _Search:
        """Searches for matches that are valid for the sizes that `freedom` allows."""
        module, reductions = self.module, self.reductions
        shapes = Shapes(module, reductions, self.examples, freedom)
        differentiated = _differentiated(module, shapes)
        functional, context, why = None, Context(differentiated=differentiated), ""
        writing = writers(module.graph, shapes, reductions) if reductions else {}
        if writing:
            try:
                given = only_all_reduces(reductions)
                functional = make_functional(module, shapes, given, differentiated)
            except NotFunctional as reason:
                why = f"in a graph that cannot be made functional: {reason}"
                context = replace(context, written=_written(writing, shapes, why))
        if functional is None:
            graph, made, found = module.graph, reductions, {}
        else:
            graph, found = functional.module.graph, functional.reductions
            made = {reduction.node: reduction for reduction in found.values()}
            in_place = frozenset(node for node, one in reductions.items() if one.in_place)
            context = replace(context, makers=functional.makers, in_place=in_place)
        known = shapes if functional is None else Shapes(functional.module, {}, None)
        values = Values(graph, known, made, self.options.decompositions, context)
        sites = [_Found(before, found.get(node, before)) for node, before in reductions.items()]
        _match(sites, values, self.communicator, self.options, why)
        return _Search(shapes, values, functional, sites)


def _written(writing: dict[Node, str], shapes: Shapes, why: str) -> dict[object, str]:
    """Maps each storage that is written to a message that names the node that writes to it."""
    found = {}
    for target, node in writing.items():
        text = f"{node} writes to the memory of {target}, {why}"
        own = [storage_of(attribute_of(target))] if target.op == "get_attr" else []
        found.update(dict.fromkeys([*memories(target, shapes), *own], text))
    return found


def _note_inputs(
    node: Node, shapes: Shapes, inputs: dict[GraphModule, Sequence[Any] | None]
) -> None:
    """Records a nested graph's arguments in `inputs`; None if they are not known for certain."""
    inner = module_of(node)
    assert isinstance(inner, GraphModule)
    given = [shapes.any_of(arg) if isinstance(arg, Node) else arg for arg in node.args]
    count = len(inner.graph.find_nodes(op="placeholder"))
    known = not node.kwargs and len(given) == count and all(value is not None for value in given)
    inputs[inner] = given if known and inner not in inputs else None


def _differentiated(module: GraphModule, shapes: Shapes) -> frozenset[Node]:
    """Returns the nodes whose results are known to need a gradient."""
    if shapes.examples is None:
        known = ((node, shapes.of(node)) for node in module.graph.nodes)
        return frozenset(node for node, t in known if t is not None and t.requires_grad)
    if not torch.is_grad_enabled():
        return frozenset()
    places = module.graph.find_nodes(op="placeholder")
    given = zip(places, shapes.examples, strict=False)
    found = {node for node, t in given if isinstance(t, Tensor) and t.requires_grad}
    for node in module.graph.nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return frozenset(found)


def _match(
    found: Sequence[_Found],
    values: Values,
    communicator: Communicator | None,
    options: _Options,
    why: str,
) -> None:
    """Stores each reduction's match or reason; `why` is passed to `Matcher.match`."""
    matcher = Matcher(
        values,
        approximate_quant=options.approximate_quant,
        approximate_streams=options.approximate_streams,
    )
    for one in found:
        try:
            _check_group(one.before, options.all_reduce_groups)
            match = matcher.match(one.reduction, why)
            check_group(one.before, _device(values, match), communicator)
            if isinstance(match, ShardedMatch):
                _check_world_size(match, one.before, communicator)
        except Missed as missed:
            one.reason = str(missed)
        else:
            one.match = match
            matcher.accept(match)


def _check_world_size(
    match: ShardedMatch, reduction: Reduction, communicator: Communicator | None
) -> None:
    group = group_of(reduction, communicator)
    if group is None:
        raise Missed("the number of ranks that it reduces over is unknown: pass communicator=")
    if match.world_size != group.size():
        size = match.slices[0].norm.hidden_size
        raise Missed(
            f"its sum of squares is divided by {match.world_size * size}: expected "
            f"{group.size() * size}, the length of a row on {group.size()} ranks"
        )


def _merge(found: Sequence[_Found], values: Values, communicator: Communicator | None) -> None:
    """Stores each match's call: one call may replace several reductions."""
    over = [(group_of(one.before, communicator), one.before.comm_name) for one in found]
    for one, call in zip(found, merge(values, [one.match for one in found], over), strict=True):
        one.call = call


def _device(values: Values, match: Match | ShardedMatch) -> torch.device:
    x = values.shapes.of(match.x)
    assert x is not None
    return x.device


def _agree(found: Sequence[_Found], values: Values, communicator: Communicator | None) -> None:
    """Drops matches that not all ranks have; sets the communicator names of the remaining matches.

    Raises:
        AllnormError: ranks that do not compile this graph may be running a fused version of it.
    """
    groups = {one.before.node: group_of(one.before, communicator) for one in found}
    for group in dict.fromkeys(groups.values()):
        if group is None:
            continue
        mine = [one for one in found if groups[one.before.node] is group]
        steps = [Step(_action(one.call, values), one.reason) for one in mine]
        known = [_described(one.before, values) for one in mine]
        reason = agreement.settle(group, communicator, known, steps)
        for one in mine if reason else ():
            if one.match is not None:
                one.miss(reason)
    for one in found:
        if one.match is not None:
            device = _device(values, one.match)
            one.name = communicator_name(one.before, device, communicator)


def _described(reduction: Reduction, values: Values) -> str:
    """Returns a description of a reduction that is equal on all ranks: dtype and row size."""
    x = None if reduction.x is None else values.shapes.of(reduction.x)
    kind = "reduce-scatter " if reduction.scatters else ""
    return "?" if x is None or not x.dim() else f"{kind}{x.dtype} {printable(x.shape[-1:])}"


def _action(match: Match | ShardedMatch | None, values: Values) -> str:
    """Returns, as text, the parts of a fused call that all ranks must agree on; "" if not fused."""
    if match is None:
        return ""
    if isinstance(match, ShardedMatch):
        # Merged reductions follow each other, so the number of tensors says which ones they are.
        sizes = [one.norm.hidden_size for one in match.slices]
        dtype = values.held[match.x].dtype
        return str((match.numerics, match.boundary, match.eps, match.weight_bias, sizes, dtype))
    candidate, experts = match.candidate, match.experts
    weights = [weight and weight.bias for weight in (match.weight, match.post_weight)]
    parts = (
        *(
            candidate.numerics,
            candidate.is_local,
            match.boundary,
            candidate.residual and candidate.residual.dtype,
            candidate.reduction.scatters,
            candidate.streams is not None,
            match.plain_input and match.plain_input.constants,
        ),
        *([norm.eps for norm in candidate.norms], weights, candidate.branch.scale),
        *(candidate.quantization and str(candidate.quantization), match.scale_layout),
        experts and (experts.top_k, experts.weights is None, experts.shared is None),
    )
    return str(parts)


def _rewrite(
    module: GraphModule,
    found: Sequence[_Found],
    values: Values,
    functional: Functional | None,
    meta_key: str | None,
) -> str:
    """Applies the matches. Returns why that is impossible, or ""."""
    calls = {id(one.call): (one.call, one.name) for one in found if one.call is not None}
    if not calls:
        return ""
    graph = module.graph if functional is None else functional.module.graph
    shapes = values.shapes
    results = [shapes.of(node) for node in occurrences(graph)]
    names = [node.name for node in occurrences(module.graph)]
    rewriter = Rewriter(graph, values)
    for call in calls.values():
        rewriter.apply(*call)
    rewriter.finish()
    for node, why in join_inputs(graph, shapes).items():
        if node in rewriter.streams:
            rewriter.streams[node].next_input = why
    if functional is not None:
        problem = functional.finish(shapes, [one.before for one in found], meta_key)
        if problem:
            return problem
        functional.install(module)
    else:
        inputs = graph.find_nodes(op="placeholder") + graph.find_nodes(op="get_attr")
        known = [(node, shapes.of(node)) for node in inputs]
        outside = {shapes.storage(node): (node, t) for node, t in known if t is not None}
        problem = keep_aliasing(graph, shapes, results, outside)
        if problem:
            raise RuntimeError(problem)
    _keep_names(module.graph, names)
    module.recompile()
    return ""


def _keep_names(graph: Graph, names: Sequence[str]) -> None:
    """Restores the names of a graph's results, because an exported program refers to them.

    If multiple results became a single node, aliases of that node get the other names.
    """
    output, found = graph.output_node(), [*zip(occurrences(graph), names, strict=True)]
    returned = {name: node for node, name in found if node.name == name}
    for node, name in found:
        if name in returned:
            continue
        again = node in returned.values() or node.op in _INPUTS
        if again and isinstance(node.meta.get("val"), Tensor):
            with graph.inserting_before(output):
                returned[name] = graph.call_function(torch.ops.aten.alias.default, (node,))
            returned[name].meta = dict(node.meta)
        else:
            returned[name] = node
    nodes = iter([returned[name] for name in names])
    output.args = map_arg(output.args, lambda node: next(nodes))
    taken = {node.name: node for node in graph.nodes}
    for name, node in returned.items():
        other = taken.get(name)
        if other is node or node.op in _INPUTS or (other is not None and other.op in _INPUTS):
            continue
        if other is not None:
            other._rename(f"{name}_before")
        graph._graph_namespace._used_names.discard(name)  # an erased node may have used this name
        node._rename(name)
        taken[name] = node


def _check_group(reduction: Reduction, groups: Collection[str]) -> None:
    if groups and reduction.named_by_caller and reduction.group not in groups:
        names = ", ".join(sorted(groups))
        raise Missed(
            f"it reduces over group {reduction.group!r}, the communicator over {names}: pass a "
            "communicator of its group"
        )


def _site(values: Values, shapes: Shapes, found: _Found) -> Site:
    """Returns the report's entry for a reduction."""
    reduction, match = found.before, found.match
    x, hints = None if reduction.x is None else shapes.of(reduction.x), shapes.has_real_examples
    shape, dtype = (None, None) if x is None else (printable(x.shape, hints=hints), x.dtype)
    group = reduction.group or reduction.comm_name or found.name
    if match is None:
        return Site((reduction.node.name,), shape, dtype, group, reason=found.reason)
    if isinstance(match, ShardedMatch):
        path = [*match.members, *match.served_nodes(values)]
        names = dict.fromkeys(map(values.name_of, path))
        call = found.call or match
        first = values.name_of(call.reduction.node)
        return Site(
            *(tuple(names), shape, dtype, group, match.numerics),
            boundary=call.boundary,
            merged_with="" if call.reduction is match.reduction else first,
        )
    candidate, nodes = match.candidate, _path(values, match)
    quant = None if candidate.quantization is None else str(candidate.quantization)
    return Site(
        *(nodes, shape, dtype, group, candidate.numerics, None, quant, match.note),
        match.boundary,
    )


def _path(values: Values, match: Match) -> tuple[str, ...]:
    """Returns the names of the replaced nodes, from the reduction to the last result."""

    def place(node: Node) -> int:
        return values.position[node]

    candidate = match.candidate
    end = max(place(value.definers[0]) for value in candidate.served)
    nodes = [node for node in match.members if place(node) <= end]
    if candidate.is_local:
        nodes = [*values.reduced[candidate.reduction.node].definers, match.x, *nodes]
    return tuple(dict.fromkeys(map(values.name_of, nodes)))
