"""Keeps the order of collective operators in Inductor.

Inductor's scheduler reorders independent kernels to save memory. The effect tokens of AOTAutograd
do not help: in torch 2.13 their dependencies are lost in the lowering, and calls that a graph pass
inserts have none. So this lowering makes each call depend on the previous one.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._higher_order_ops.effects import with_effects

_MODULE = "torch._inductor.lowering"
# Maps each graph that is being compiled to the name of its last call.
_last: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def keep_order(operators: Iterable[torch._ops.OpOverload]) -> None:
    """Registers the lowerings of these operators if Inductor is loaded. Idempotent and quick.

    Call it whenever one of the operators is traced: Inductor traces before it compiles. Importing
    Inductor here would add seconds to programs that never use it.
    """
    inductor = sys.modules.get(_MODULE)
    if inductor is None or getattr(inductor.__spec__, "_initializing", False):
        return
    for operator in operators:
        if not getattr(inductor.lowerings.get(operator), "is_ordered", False):
            register: Any = inductor.register_lowering
            register(operator, type_promotion_kind=None)(_ordered(operator, inductor))
            inductor.lowerings[operator].is_ordered = True


def _ordered(operator: torch._ops.OpOverload, inductor: Any) -> Callable[..., Any]:
    from torch._inductor.virtualized import V

    fallback = inductor.fallback_handler(operator)

    def lower(*args: Any, **kwargs: Any) -> Any:
        graph: Any = V.graph
        node = graph.current_node
        traced = node.args[2:] if node.target is with_effects else node.args
        fakes = torch.fx.node.map_arg((traced, node.kwargs), lambda source: source.meta["val"])
        # Keep the strides of the traced tensors, because the kernels read rows.
        args, kwargs = inductor.constrain_to_fake_tensors(args, kwargs, *fakes)
        before = len(graph.operations)
        results = fallback(*args, **kwargs)
        (kernel,) = (
            operation
            for operation in graph.operations[before:]
            if getattr(operation, "op_overload", None) is operator
        )
        if graph in _last:
            graph.additional_buffer_deps[kernel.get_operation_name()].add(_last[graph])
        _last[graph] = kernel.get_name()
        return results

    return lower
