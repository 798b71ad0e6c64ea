"""Makes the next layer's input in the call that makes its streams.

This is the last step, on the graph in which the sites are already fused. A call of
`all_reduce_hyper_connection`, a site's or the graph's own, and a `hyper_connection_input` of its
result become one `all_reduce_hyper_connection_input` in the place of the first one.

Ranks need not agree: their peers may make the streams alone.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from allnorm.compile.shapes import Shapes
from allnorm.compile.vocabulary import is_pure, qualified_name, schema_of, written

_STREAMS = "allnorm::all_reduce_hyper_connection"
_INPUT = "allnorm::hyper_connection_input"
_PLACES = {0: 0, 1: 2, 2: 3}  # each result of _INPUT among the results of both


def streams_in(graph: Graph) -> list[Node]:
    """Returns a graph's calls of `all_reduce_hyper_connection`."""
    return [node for node in graph.nodes if qualified_name(node.target) == _STREAMS]


def join_inputs(graph: Graph, shapes: Shapes) -> dict[Node, str]:
    """Joins each input to the call that makes its streams, where that is safe.

    Returns:
        Maps each call whose streams have such an input to the reason why both stay; "" if the input
        was joined.
    """
    found = {}
    for call in streams_in(graph):
        inputs = [user for user in call.users if _reads(user, call)]
        if inputs:
            found[call] = _problem(call, inputs[0])
            if not found[call]:
                _join(call, inputs[0], shapes)
    return found


def _reads(user: Node, call: Node) -> bool:
    return qualified_name(user.target) == _INPUT and _named(user)["streams"] is call


def _named(call: Node) -> dict[str, Any]:
    """Returns the arguments of an operator's call, keyed by name."""
    names = [each.name for each in schema_of(call.target).arguments]
    return dict(zip(names, call.args, strict=False)) | call.kwargs


def _problem(call: Node, following: Node) -> str:
    """Returns why an input must stay after the call that makes its streams; "" if it need not."""
    if any(user.target is not operator.getitem for user in following.users):
        return f"{following} is used as a whole"
    node = call.next
    while node is not following:
        if written(node):
            return f"{node} writes to memory before {following} reads the streams"
        node = node.next
    late = _late(call, following)
    for node in late:
        if call in node.all_input_nodes:
            return f"{node}, an input of {following}, is computed from the streams"
        if not is_pure(node):
            return f"{node}, an input of {following}, comes after the reduction"
    return ""


def _late(call: Node, following: Node) -> list[Node]:
    """Returns the nodes between both calls on which the second one depends, in graph order."""
    between, needed = [], {following}
    node = following.prev
    while node is not call:
        if not needed.isdisjoint(node.users):
            needed.add(node)
            between.append(node)
        node = node.prev
    return between[::-1]


def _join(call: Node, following: Node, shapes: Shapes) -> None:
    """Replaces both calls by one in the place of the first."""
    for node in _late(call, following):
        call.prepend(node)
    first, second = _named(call), _named(following)
    joined = torch.ops.allnorm.all_reduce_hyper_connection_input.default
    given = first | second
    names = [each.name for each in joined._schema.arguments]
    args = tuple(given.pop(name) for name in names[: names.index("comm_name") + 1])
    kwargs = {name: given[name] for name in names if name in given}
    with call.graph.inserting_before(call):
        both = call.graph.call_function(joined, args, kwargs)
        streams = call.graph.call_function(operator.getitem, (both, 1))
    for node in (both, streams):
        shapes.describe(node)
        node.meta |= {key: call.meta[key] for key in ("stack_trace",) if key in call.meta}
    for user in list(following.users):
        user.args = (both, _PLACES[user.args[1]])  # type: ignore[index]
    call.graph.erase_node(following)
    call.replace_all_uses_with(streams)
    call.graph.erase_node(call)
