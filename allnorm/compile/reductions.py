"""The reductions of a graph, in every form in which a tracer writes them down."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._higher_order_ops.effects import with_effects
from torch.fx import Graph, Node

from allnorm.compile.vocabulary import argument, qualified_name, schema_of


@dataclass(frozen=True)
class Reduction:
    """One call that sums a tensor over ranks.

    Attributes:
        node: the call.
        x: what is reduced; None if that is not one tensor.
        in_place: whether the result is stored in `x`; else the call returns a new tensor.
        group: name of the process group; None if the graph does not say.
        comm_name: name of the communicator, for a reduction by allnorm itself.
        named_by_caller: a custom operator, of which only its name is known.
        problem: why such a call cannot be fused whatever surrounds it; empty if it can.
        result: which result of a tuple is the reduced tensor; None if the call returns it alone.
        pending: whether the result may only be read after a wait.
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

    @property
    def writes(self) -> list[Node]:
        """The tensors that it may change."""
        if self.in_place and self.x is not None:
            return [self.x]
        return self.node.all_input_nodes if self.problem == _UNKNOWN_FUNCTION else []


def find_reductions(graph: Graph, all_reduce_ops: Sequence[Any] = ()) -> dict[Node, Reduction]:
    """All reductions of a graph in its order.

    Args:
        graph: at the level of Dynamo, AOTAutograd or Inductor.
        all_reduce_ops: the caller's own operators: names such as "vllm::all_reduce", operators,
            overloads or functions. Their first tensor argument is reduced by summation.
    """
    names = {op.replace(".", "::", 1) for op in all_reduce_ops if isinstance(op, str)}
    names |= {qualified_name(op) for op in all_reduce_ops} - {""}
    functions = [op for op in all_reduce_ops if not isinstance(op, str) and not qualified_name(op)]
    found = {}
    for node in graph.nodes:
        if node.op == "call_function":
            reduction = _reduction(node, names, functions)
            if reduction is not None:
                found[node] = reduction
    return found


def _reduction(node: Node, names: set[str], functions: list[Any]) -> Reduction | None:
    name = qualified_name(node.target)
    if name in names or any(node.target is function for function in functions):
        return _custom(node, node.target, node.args, node.kwargs)
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
    if name in _FUNCTIONAL:
        return _functional(node, in_place=_FUNCTIONAL[name])
    called = _NAMED_FUNCTIONS.get(_full_name(node.target))
    return None if called is None else _function(node, in_place=called)


_ORDERED = (
    "AOTAutograd orders it by an effect token: fuse the graph before AOTAutograd, or Inductor's, "
    "by inductor_pass"
)
_FUNCTIONAL = {
    "_c10d_functional::all_reduce": False,
    "_c10d_functional_autograd::all_reduce": False,
    "c10d_functional::all_reduce": False,
    "_c10d_functional::all_reduce_": True,
}
_SCATTER = "it is a reduce-scatter: only all-reduce is fused"
_COALESCED = "it reduces several tensors at once: only single tensors are fused"
_NOT_ONE_SUM = {
    "_c10d_functional::all_reduce_coalesced": _COALESCED,
    "_c10d_functional::all_reduce_coalesced_": _COALESCED,
    "_c10d_functional::reduce_scatter_tensor": _SCATTER,
    "_c10d_functional_autograd::reduce_scatter_tensor": _SCATTER,
    "_c10d_functional::reduce_scatter_tensor_coalesced": _SCATTER,
    "c10d::allreduce_": "it is c10d's own operator: trace it as a functional collective",
}
_FUNCOL = "torch.distributed._functional_collectives"
_NAMED_FUNCTIONS = {
    "torch.distributed.distributed_c10d.all_reduce": True,
    f"{_FUNCOL}.all_reduce_inplace": True,
    f"{_FUNCOL}._remapped_allreduce": True,
    f"{_FUNCOL}.all_reduce": False,
}


def _full_name(target: Any) -> str:
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', '')}"


def _tensor(node: Node, index: int, *names: str) -> Node | None:
    value = argument(node, index, *names)
    return value if isinstance(value, Node) else None


def _functional(node: Node, *, in_place: bool) -> Reduction:
    op = argument(node, 1, "reduce_op", "reduceOp")
    x = _tensor(node, 0, "input", "self")
    return Reduction(node, x, in_place, _group_of(node), problem=_problem_of(op), pending=True)


def _function(node: Node, *, in_place: bool) -> Reduction:
    """`dist.all_reduce(tensor, op, group, async_op)` and what stands for it."""
    op = argument(node, 1, "op", "reduceOp", default=dist.ReduceOp.SUM)
    problem = _problem_of(op)
    if argument(node, 3, "async_op") is True:
        problem = "it is asynchronous: wait for it, or pass async_op=False"
    group = argument(node, 2, "group")
    x = _tensor(node, 0, "tensor", "self")
    return Reduction(node, x, in_place, group_name(group), problem=problem)


def _problem_of(op: Any) -> str:
    name = op if isinstance(op, str) else _NAME_OF_OP.get(op, str(op))
    return "" if name.lower() == "sum" else f"it reduces by {name!r}: only 'sum' is fused"


_NAME_OF_OP = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "avg",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.PRODUCT: "product",
}


def op_name(reduction: Reduction) -> str:
    """By which operation a call of PyTorch reduces, as functional collectives name it."""
    op = argument(reduction.node, 1, "op", "reduceOp", "reduce_op", default=dist.ReduceOp.SUM)
    return op.lower() if isinstance(op, str) else _NAME_OF_OP.get(op, "")


def _group_of(node: Node) -> str | None:
    """The group of a functional collective: the last of its arguments."""
    return group_name(node.kwargs.get("group_name", node.args[-1] if node.args else ""))


def group_name(group: Any) -> str | None:
    """The name of a process group, however a graph refers to it; None if it cannot be told."""
    if isinstance(group, str):
        return group
    if isinstance(group, Node):
        group = group.meta.get("val", group.meta.get("example_value"))
        return None if group is None else group_name(getattr(group, "real_obj", group))
    if group is None:
        group = dist.group.WORLD  # None unless torch.distributed is initialised
    name = getattr(group, "group_name", None)
    return name if isinstance(name, str) else None


def _auto_functionalized(node: Node) -> Any:
    """The operator inside the wrapper that makes a mutating operator functional."""
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator) and target.name() in (
        "auto_functionalized",
        "auto_functionalized_v2",
    ):
        return node.args[0]
    return None


_UNKNOWN_FUNCTION = "it is a Python function: whether it works in place cannot be told"


def _custom(node: Node, target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Reduction:
    values: Iterable[Any] = (*args, *kwargs.values())
    x = next((value for value in values if isinstance(value, Node)), None)
    schema = schema_of(target)
    in_place = schema is not None and any(
        described.alias_info is not None and described.alias_info.is_write
        for described in schema.arguments
    )
    problem = "" if x is not None else "it has no tensor argument"
    if schema is None:
        problem = _UNKNOWN_FUNCTION
    group = next((value for value in values if isinstance(value, str)), None)
    return Reduction(node, x, in_place, group, named_by_caller=True, problem=problem)


def _custom_functionalized(node: Node, target: Any) -> Reduction:
    """`auto_functionalized(op, x=x, ...)` returns what `op` returns, then the new `x`."""
    bases: Any = node.kwargs.get("_all_bases")
    values = (*(bases or ()), *node.kwargs.values())
    x = next((value for value in values if isinstance(value, Node)), None)
    group = next((value for value in node.kwargs.values() if isinstance(value, str)), None)
    mutated = [
        described.name
        for described in schema_of(target).arguments
        if described.alias_info is not None and described.alias_info.is_write
    ]
    problem = ""
    if len(mutated) != 1 or (bases is not None and len(bases) != 1):
        problem = "it changes more than one argument"
    elif bases is not None and f"_{mutated[0]}_size" in node.kwargs:
        problem = "it reduces a view of the tensor that it changes"
    returns = max(1, len(schema_of(target).returns))
    return Reduction(node, x, group=group, named_by_caller=True, problem=problem, result=returns)
