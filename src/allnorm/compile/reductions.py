"""Finds a graph's reductions, in every form that tracers record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch._higher_order_ops.effects import with_effects
from torch.fx import Graph, Node

from allnorm.compile.vocabulary import (
    argument,
    changed_arguments,
    qualified_name,
    schema_of,
    whole_bases,
)


@dataclass(frozen=True)
class Reduction:
    """One call that sums a tensor over ranks.

    Attributes:
        x: the reduced tensor; None if the call does not reduce exactly one tensor.
        in_place: whether the call stores the result in `x`; otherwise it returns a new tensor.
        group: the name of the process group; None if the graph does not name it.
        comm_name: the communicator's name if allnorm's own operator reduces; otherwise None.
        named_by_caller: whether the call is a custom operator in the caller's `all_reduce_ops`.
        problem: why this call can never be fused; empty if it can.
        result: the index of the reduced tensor in the call's results; None for a single result.
        pending: whether the result must not be read before a wait.
        scatters: whether it is a reduce-scatter, whose result is this rank's share of the rows.
    """

    node: Node
    x: Node | None
    in_place: bool = False
    group: str | None = None
    comm_name: str | None = None
    named_by_caller: bool = False
    problem: str = ""
    result: int | None = None
    pending: bool = False
    scatters: bool = False

    @property
    def writes(self) -> list[Node]:
        """The tensors that the call may change."""
        if self.in_place and self.x is not None:
            return [self.x]
        return self.node.all_input_nodes if self.problem == _UNKNOWN_FUNCTION else []


def find_reductions(graph: Graph, all_reduce_ops: Sequence[Any] = ()) -> dict[Node, Reduction]:
    """Returns all of a graph's reductions, in graph order.

    Args:
        graph: a graph from Dynamo, AOTAutograd or Inductor.
        all_reduce_ops: as for `fuse`; functions are allowed too.
    """
    names = {op.replace(".", "::", 1) for op in all_reduce_ops if isinstance(op, str)}
    names |= {qualified_name(op) for op in all_reduce_ops} - {""}
    functions = [op for op in all_reduce_ops if not isinstance(op, str) and not qualified_name(op)]
    calls = [node for node in graph.nodes if node.op == "call_function"]
    found = {node: _reduction(node, names, functions) for node in calls}
    return {node: reduction for node, reduction in found.items() if reduction is not None}


def only_all_reduces(reductions: dict[Node, Reduction]) -> dict[Node, Reduction]:
    """Returns the reductions, with a problem for each reduce-scatter."""
    problem = "it is a reduce-scatter in a graph that works in place"
    return {
        node: replace(one, x=None, problem=problem) if one.scatters else one
        for node, one in reductions.items()
    }


def _reduction(node: Node, names: set[str], functions: list[Any]) -> Reduction | None:
    name = qualified_name(node.target)
    if name in names or any(node.target is function for function in functions):
        return _custom(node)
    if node.target is with_effects and qualified_name(node.args[1]) in (
        "allnorm::all_reduce",
        *names,
    ):
        return Reduction(node, None, problem=_ORDERED)
    wrapped = _auto_functionalized(node)
    if wrapped is not None and qualified_name(wrapped) in names:
        return _custom_functionalized(node, wrapped)
    if name == "allnorm::all_reduce":
        return Reduction(node, _tensor(node, 0, "x"), comm_name=argument(node, 1, "comm_name"))
    if name in _NOT_ONE_SUM:
        return Reduction(node, None, group=_group_of(node), problem=_NOT_ONE_SUM[name])
    if name in _SCATTERS:
        return replace(_functional(node, in_place=False), scatters=True)
    if name in _FUNCTIONAL:
        return _functional(node, in_place=_FUNCTIONAL[name])
    target = node.target
    full_name = f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', '')}"
    in_place = _NAMED_FUNCTIONS.get(full_name)
    return None if in_place is None else _function(node, in_place=in_place)


_ORDERED = (
    "AOTAutograd orders it by an effect token: fuse the graph before AOTAutograd, or use "
    "inductor_pass for Inductor's graph"
)
_FUNCTIONAL = {
    "_c10d_functional::all_reduce": False,
    "_c10d_functional_autograd::all_reduce": False,
    "c10d_functional::all_reduce": False,
    "_c10d_functional::all_reduce_": True,
}
_SCATTERS = (
    "_c10d_functional::reduce_scatter_tensor",
    "_c10d_functional_autograd::reduce_scatter_tensor",
)
_COALESCED_SCATTER = "it reduce-scatters several tensors at once: only one tensor is fused"
_COALESCED = "it reduces several tensors at once: only all-reduces of one tensor are fused"
_NOT_ONE_SUM = {
    "_c10d_functional::all_reduce_coalesced": _COALESCED,
    "_c10d_functional::all_reduce_coalesced_": _COALESCED,
    "_c10d_functional::reduce_scatter_tensor_coalesced": _COALESCED_SCATTER,
    "c10d::allreduce_": "it is c10d's own operator: trace it as a functional collective",
}
_FUNCOL = "torch.distributed._functional_collectives"
_NAMED_FUNCTIONS = {
    "torch.distributed.distributed_c10d.all_reduce": True,
    f"{_FUNCOL}.all_reduce_inplace": True,
    f"{_FUNCOL}._remapped_allreduce": True,
    f"{_FUNCOL}.all_reduce": False,
}


def _tensor(node: Node, index: int, *names: str) -> Node | None:
    value = argument(node, index, *names)
    return value if isinstance(value, Node) else None


def _functional(node: Node, *, in_place: bool) -> Reduction:
    op = argument(node, 1, "reduce_op", "reduceOp")
    x = _tensor(node, 0, "input", "self")
    return Reduction(node, x, in_place, _group_of(node), problem=_problem_of(op), pending=True)


def _function(node: Node, *, in_place: bool) -> Reduction:
    """Returns the reduction of `dist.all_reduce(tensor, op, group, async_op)` or a variant."""
    op = argument(node, 1, "op", "reduceOp", default=dist.ReduceOp.SUM)
    problem = _problem_of(op)
    if argument(node, 3, "async_op") is True:
        problem = "it is asynchronous: pass async_op=False"
    group = argument(node, 2, "group")
    x = _tensor(node, 0, "tensor", "self")
    return Reduction(node, x, in_place, group_name(group), problem=problem)


def _problem_of(op: Any) -> str:
    name = op if isinstance(op, str) else _NAME_OF_OP.get(op, str(op))
    return "" if name.lower() == "sum" else f"it reduces by {name!r}: only 'sum' is fused"


_NAMED_OPS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN)
_NAME_OF_OP = {op: op.name.lower() for op in (*_NAMED_OPS, dist.ReduceOp.PRODUCT)}


def op_name(reduction: Reduction) -> str:
    """Returns the reduce op of a torch collective, e.g. "sum"; empty if it has no such name."""
    op = argument(reduction.node, 1, "op", "reduceOp", "reduce_op", default=dist.ReduceOp.SUM)
    return op.lower() if isinstance(op, str) else _NAME_OF_OP.get(op, "")


def _group_of(node: Node) -> str | None:
    """Returns a functional collective's group, which is its last argument."""
    return group_name(node.kwargs.get("group_name", node.args[-1] if node.args else ""))


def group_name(group: Any) -> str | None:
    """Returns the name of the process group that a graph refers to; None if unknown."""
    if isinstance(group, str):
        return group
    if isinstance(group, Node):
        group = group.meta.get("val", group.meta.get("example_value"))
        return None if group is None else group_name(getattr(group, "real_obj", group))
    if group is None:
        group = dist.group.WORLD  # None unless torch.distributed is initialized
    name = getattr(group, "group_name", None)
    return name if isinstance(name, str) else None


def _auto_functionalized(node: Node) -> Any:
    """Returns the mutating operator that a functional wrapper calls; None for other nodes."""
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator) and target.name() in (
        "auto_functionalized",
        "auto_functionalized_v2",
    ):
        return node.args[0]
    return None


_UNKNOWN_FUNCTION = (
    "it is a Python function, which may work in place: register it as an operator with a schema"
)


def _custom(node: Node) -> Reduction:
    schema, args = schema_of(node.target), node.args
    if schema is None:
        x, group, problem = _first_of([*args, *node.kwargs.values()])
        problem = problem or _UNKNOWN_FUNCTION
        return Reduction(node, x, False, group, named_by_caller=True, problem=problem)
    named = dict(zip((each.name for each in schema.arguments), args, strict=False)) | node.kwargs
    x, group, problem = _first_of(_in_order(schema, named))
    changed = changed_arguments(schema)
    if changed and not problem:
        problem = _problem_of_change(changed, named, x)
    return Reduction(node, x, bool(changed), group, named_by_caller=True, problem=problem)


def _in_order(schema: Any, named: dict[str, Any]) -> list[Any]:
    """Returns the arguments in schema order."""
    return [named[each.name] for each in schema.arguments if each.name in named]


def _first_of(values: list[Any]) -> tuple[Node | None, str | None, str]:
    """Returns the first tensor and the first string among arguments, and a problem or ""."""
    x = next((value for value in values if isinstance(value, Node)), None)
    group = next((value for value in values if isinstance(value, str)), None)
    return x, group, "" if x is not None else "it has no tensor argument"


def _problem_of_change(changed: Sequence[str], named: dict[str, Any], x: Node | None) -> str:
    if len(changed) != 1:
        return "it changes more than one argument"
    if named.get(changed[0]) is not x:
        return "it changes an argument other than its first tensor, which it should reduce"
    return ""


def _custom_functionalized(node: Node, target: Any) -> Reduction:
    """Returns the reduction of `auto_functionalized(op, x=x, ...)`.

    The wrapper returns the results of `op`, then the new `x`.
    """
    schema, named = schema_of(target), dict(node.kwargs)
    bases: Any = named.pop("_all_bases", None)
    part = ""
    if bases:
        places = whole_bases(schema, named)
        if places is None or len(bases) != 1:
            part = "it reduces only a part of the tensor that it changes"
        named.update(dict.fromkeys(changed_arguments(schema), bases[0]))
    x, group, problem = _first_of(_in_order(schema, named))
    problem = problem or _problem_of_change(changed_arguments(schema), named, x) or part
    returns = max(1, len(schema.returns))
    return Reduction(node, x, group=group, named_by_caller=True, problem=problem, result=returns)
