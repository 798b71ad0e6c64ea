"""Removes effect tokens from allnorm's calls in Inductor's graphs.

AOTAutograd replaces a call of an operator with effects by `with_effects(token, op, *args)`, which
returns the next token and the results of `op`. The pass does not match calls with tokens. Inductor
does not need the tokens: `allnorm.lowering` keeps such calls and their order.
"""

from __future__ import annotations

from typing import Any

from torch._higher_order_ops.effects import with_effects
from torch.fx import Graph, Node

from allnorm.ops import COLLECTIVES


def remove_tokens(graph: Graph) -> None:
    """Replaces `with_effects(token, op, *args)` by `op(*args)` for allnorm's operators."""
    for node in graph.find_nodes(op="call_function", target=with_effects):
        if node.args[1] in COLLECTIVES:
            _remove(graph, node)


def _remove(graph: Graph, node: Node) -> None:
    given: tuple[Any, ...] = node.args
    token, target, *arguments = given
    with graph.inserting_before(node):
        call = graph.call_function(target, tuple(arguments), node.kwargs)
    is_tuple = len(target._schema.returns) > 1
    call.meta = dict(node.meta)
    if "val" in node.meta:
        _, *results = node.meta["val"]
        call.meta["val"] = tuple(results) if is_tuple else results[0]
    for item in list(node.users):
        index: Any = item.args[1]
        if index and is_tuple:
            item.args = (call, index - 1)
        else:
            item.replace_all_uses_with(call if index else token)
            graph.erase_node(item)
    graph.erase_node(node)
