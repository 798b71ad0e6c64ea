"""Operators of the caller that are read as what a function computes.

A framework's own norm is one node of the graph. The caller says which PyTorch function it stands
for; here that function is traced on the node's shapes, and the trace is read like any other graph.
The node itself stays as it is unless it becomes part of a fused call.
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

from allnorm.compile.expressions import NotUnderstood, Value
from allnorm.compile.operands import Operands
from allnorm.compile.vocabulary import qualified_name, schema_of, whole_bases, written

UNTRACED = "stands for a function that cannot be traced"

Decompositions = Mapping[str, Callable[..., Any]]


def by_name(table: Mapping[Any, Callable[..., Any]]) -> Decompositions:
    """A caller's table, by `namespace::name` of the operators."""
    return {
        op.replace(".", "::", 1) if isinstance(op, str) else qualified_name(op): function
        for op, function in table.items()
    }


def find(node: Node, table: Decompositions) -> Callable[..., Any] | None:
    """The function that a node stands for, from its arguments to its result; None if unknown.

    A mutating operator, in the wrapper that makes it functional, stands for the new values of the
    arguments that it changes, in their order, behind what it returns.
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
    """Gives `auto_functionalized_v2` the arguments of the operator that it is around.

    Returns:
        The base of each argument that is changed, which is the order of the wrapper's results.
    """
    places = whole_bases(schema, kwargs)
    if places is None or sorted(places.values()) != list(range(len(bases))):
        raise NotImplementedError("it changes a part of a tensor")
    for name, place in places.items():
        kwargs.pop(f"_{name}_base_index")
        kwargs.pop(f"_{name}_alias", None)
        kwargs[name] = bases[place]
    return list(places.values())


def evaluate(
    operands: Operands,
    node: Node,
    function: Callable[..., Any],
    evaluator_of: Callable[[GraphModule, Callable[[Node], Value]], Callable[[Node], Value]],
) -> tuple[Value, list[Value]]:
    """Returns the result of a node that stands for a function, and the expressions on the way.

    Args:
        operands: the operands of the graph that the node is in.
        node: the node.
        function: the function that it stands for.
        evaluator_of: returns what evaluates the nodes of the traced function, from the trace and
            the expressions that its nodes hold.

    Raises:
        NotUnderstood: the function cannot be traced, or changes its arguments.
    """
    sources = [source for source in node.all_input_nodes if operands.shapes.of(source) is not None]
    traced = _trace(operands, node, function, sources)
    placeholders = [inner for inner in traced.graph.nodes if inner.op == "placeholder"]
    held = {p: operands.held(s) for p, s in zip(placeholders, sources, strict=True)}
    evaluate_inside = evaluator_of(traced, held.__getitem__)
    for inner in traced.graph.nodes:
        if written(inner):
            raise NotUnderstood(f"{node} stands for a function that changes its arguments")
        if inner.op not in ("placeholder", "output"):
            held[inner] = evaluate_inside(inner)
    on_the_way = [value for inner, value in held.items() if inner not in placeholders]
    (output,) = traced.graph.output_node().args
    if isinstance(output, Node):
        return held[output], on_the_way
    assert isinstance(output, tuple | list)
    results = [_result(operands, node, held, item) for item in output]
    return operands.algebra.make("tuple", tuple(results), node, None), on_the_way


def _result(operands: Operands, node: Node, held: dict[Node, Value], item: Any) -> Value:
    if isinstance(item, Node):
        return held[item]
    return operands.algebra.opaque(tuple(map(operands.held, node.all_input_nodes)), None)


def _trace(
    operands: Operands, node: Node, function: Callable[..., Any], sources: list[Node]
) -> GraphModule:
    def call(*tensors: Tensor) -> Any:
        given = dict(zip(sources, tensors, strict=True))

        def value(source: Node) -> Any:
            return given.get(source, operands.shapes.any_of(source))

        args, kwargs = map_arg((node.args, node.kwargs), value)
        return function(*args, **kwargs)

    fakes: list[Any] = [operands.shapes.of(source) for source in sources]
    try:
        # In the mode, for tensors that the function makes.
        with torch.no_grad(), operands.shapes.fake_mode or contextlib.nullcontext():
            return make_fx(call)(*fakes)
    except Exception as error:  # noqa: BLE001 - whatever a caller's function raises
        raise NotUnderstood(f"{node} {UNTRACED}: {error}") from None
