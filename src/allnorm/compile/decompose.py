"""Traces PyTorch functions that compute the same results as custom operators.

A framework's own norm is a single node of the graph. The caller passes a PyTorch function that
computes the same result. The trace of this function is evaluated like any other graph. The node
stays in the graph unless it becomes part of a fused call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from allnorm.compile.expressions import NotUnderstood
from allnorm.compile.shapes import Shapes
from allnorm.compile.vocabulary import qualified_name, schema_of, whole_bases

UNTRACED = "is decomposed by a function that cannot be traced"

Decompositions = Mapping[str, Callable[..., Any]]


def by_name(table: Mapping[Any, Callable[..., Any]]) -> Decompositions:
    """Returns a caller's table, keyed by the operators' `namespace::name`."""
    return {
        op.replace(".", "::", 1) if isinstance(op, str) else qualified_name(op): function
        for op, function in table.items()
    }


def find(node: Node, table: Decompositions) -> Callable[..., Any] | None:
    """Returns the function that computes a node's result from its arguments; None if unknown.

    If the node is the wrapper that makes a mutating operator functional, the returned function does
    the same as the wrapper: it returns the operator's own results, then the new values of the
    changed arguments, in argument order.
    """
    if not table or node.op != "call_function":
        return None
    if isinstance(node.target, HigherOrderOperator) and node.args:
        return _mutating(node.args[0], table)
    return table.get(qualified_name(node.target))


def _mutating(op: Any, table: Decompositions) -> Callable[..., Any] | None:
    function = table.get(qualified_name(op))
    if function is None:
        return None

    schema = schema_of(op)

    def changed(_: Any, **kwargs: Any) -> Any:
        bases = kwargs.pop("_all_bases", None)
        places = None if bases is None else _give_bases(schema, kwargs, bases)
        results = function(**kwargs)
        results = results if isinstance(results, tuple) else (results,)
        if places is not None:
            results = tuple(results[places.index(i)] for i in range(len(places)))
        return (*(None for _ in range(max(1, len(schema.returns)))), *results)

    return changed


def _give_bases(schema: Any, kwargs: dict[str, Any], bases: list[Any]) -> list[int]:
    """Replaces the arguments of `auto_functionalized_v2` with the wrapped operator's arguments.

    Returns:
        The index of each changed argument's base. The wrapper returns new values in base order.
    """
    places = whole_bases(schema, kwargs)
    if places is None or sorted(places.values()) != list(range(len(bases))):
        raise NotImplementedError("it changes only a part of a tensor")
    for name, place in places.items():
        kwargs.pop(f"_{name}_base_index")
        kwargs.pop(f"_{name}_alias", None)
        kwargs[name] = bases[place]
    return list(places.values())


def trace(
    shapes: Shapes, node: Node, function: Callable[..., Any], sources: list[Node]
) -> GraphModule:
    """Returns the trace of a node's function, with the nodes in `sources` as its inputs.

    Raises NotUnderstood if the function cannot be traced.
    """

    def call(*tensors: Tensor) -> Any:
        given = dict(zip(sources, tensors, strict=True))

        def value(source: Node) -> Any:
            return given.get(source, shapes.any_of(source))

        args, kwargs = map_arg((node.args, node.kwargs), value)
        return function(*args, **kwargs)

    fakes: list[Any] = [shapes.of(source) for source in sources]
    try:
        # The mode also makes the tensors that the function creates fake.
        with torch.no_grad(), shapes.fake_mode or contextlib.nullcontext():
            return make_fx(call)(*fakes)
    except Exception as error:  # noqa: BLE001 - a caller's function may raise anything
        raise NotUnderstood(f"{node} {UNTRACED}: {error}") from None
