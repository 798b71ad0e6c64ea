"""The torch operators: schemas, implementations, and what compilers must know of them.

Functional: they return new tensors and alias nothing. What a call does not produce is a tensor of
no elements. A communicator is passed by its name, and a spec of quantization by its fields, since
an operator's arguments must be traceable. The name of a process group is that of its communicator
too, which is made when it is needed: so compiled code may come from a cache.

Collective operators have an effect that their results do not show: every peer waits for it. So no
tracer or compiler may drop one whose result is unused, merge two that are alike, or change their
order. Fakes see nothing but their arguments: what depends on the rank or the number of ranks is an
argument, so that it is part of what a compiler's caches ask for.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch._higher_order_ops import effects

from allnorm import lowering
from allnorm.communicator import communicator
from allnorm.core import local
from allnorm.core.dispatch import Dispatcher
from allnorm.core.operators import OPERATORS, Operator
from allnorm.core.registry import dispatchers
from allnorm.core.tensors import has_tangent, wants_gradient
from allnorm.quant import Fp8PerTensor

_Tensor = torch.Tensor
_BACKENDS = ("CPU", "CUDA")
_dispatchers = dispatchers()
_library = torch.library.Library("allnorm", "DEF")


def _run(operator: Operator, *arguments: Any) -> Any:
    """Runs a call of an operator; a tensor of no elements stands for what is no result of it."""
    x = arguments[0]
    fields, comm_name, residual_rows = operator.fields(arguments)
    dispatcher = _dispatchers.get((comm_name, x.is_cuda)) or _other_dispatcher(comm_name, x)
    try:
        results = dispatcher.call(**fields)
    except TypeError:
        plain = _without_subclasses(arguments)
        if plain is None:
            raise
        return _run(operator, *plain)
    if residual_rows is not None:
        _check_rows(results[operator.results.index("residual_out")], residual_rows)
    if operator.is_quantized:
        quantized, scale, residual, normed = results
        if isinstance(fields["quant"], Fp8PerTensor):
            scale = scale.new_empty(0)  # it may not return an input
        return quantized, scale, residual, x.new_empty(0) if normed is None else normed
    if results.__class__ is tuple and results[0] is None:
        return x.new_empty(0), results[1]
    return results


def _other_dispatcher(comm_name: str, x: _Tensor) -> Dispatcher:
    """Returns that of a communicator which is not open yet; without a name, that of one rank."""
    if not comm_name:
        return local.dispatcher(x)
    return communicator(comm_name, x.device.type)._dispatcher


def _check_rows(residual: _Tensor, rows: int) -> None:
    """Raises unless the new residual has as many rows as the caller reckoned with.

    After the call, so that other ranks, which were right, do not wait for this one.
    """
    found = math.prod(residual.shape[:-1])
    if found != rows:
        raise ValueError(
            f"residual_rows={rows}: expected {found}, this rank's rows. A traced graph is for the "
            "rank, and the number of ranks, that traced it."
        )


_AFTER_AUTOGRAD = torch._C._AutoDispatchBelowAutograd
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_num_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
_is_functional: Callable[[_Tensor], bool] = torch._is_functional_tensor


def _define(row: Operator) -> None:
    # TorchScript drops what is unused, and merges what is alike, of operators whose schema says
    # all.
    _library.define(row.schema, "CONSERVATIVE" if row.is_collective else "")
    operator = getattr(torch.ops.allnorm, row.name).default

    def without_gradient(*arguments: Any) -> Any:
        x = arguments[0]
        is_plain = x.__class__ in _PLAIN and _num_modes() == 0 and _transform() is None
        if is_plain and not _is_functional(x):
            return _run(row, *arguments)  # which refuses what requires a gradient
        _refuse_gradients(operator, arguments)
        with _AFTER_AUTOGRAD():
            return operator(*arguments)

    for key in _BACKENDS:
        _library.impl(row.name, functools.partial(_run, row), key)
        _library.impl(row.name, without_gradient, f"Autograd{key}")

    def fake(*arguments: Any) -> Any:
        lowering.keep_order(COLLECTIVES)
        return row.fake(*arguments)

    torch.library.register_fake(f"allnorm::{row.name}", fake, lib=_library)


def _without_subclasses(arguments: tuple[Any, ...]) -> list[Any] | None:
    """Returns the arguments with plain tensors for those of subclasses; None if none can be.

    The dispatcher has been asked before an operator runs. So a subclass without a
    `__torch_dispatch__` of its own, such as most subclasses of Parameter, has its values in its
    memory. Calls of methods refuse all subclasses: their `__torch_function__` was not asked.
    """
    plain = [
        argument.as_subclass(torch.Tensor)
        if isinstance(argument, torch.Tensor)
        and argument.__class__ not in _PLAIN
        and type(argument).__torch_dispatch__ is _NO_DISPATCH
        else argument
        for argument in arguments
    ]
    changed = any(new is not given for new, given in zip(plain, arguments, strict=True))
    return plain if changed else None


_NO_DISPATCH = torch._C._disabled_torch_dispatch_impl


def _refuse_gradients(operator: torch._ops.OpOverload, arguments: tuple[Any, ...]) -> None:
    """Raises ValueError if a gradient of a result could be asked for, in either direction."""
    names = [argument.name for argument in operator._schema.arguments]
    given = [
        (name, argument)
        for name, argument in zip(names, arguments, strict=False)
        if isinstance(argument, torch.Tensor)
    ]
    for refused, what, mode in (
        (wants_gradient, "requires_grad=True", "torch.no_grad() or torch.inference_mode()"),
        (has_tangent, "a tangent of forward-mode differentiation", "torch.inference_mode()"),
    ):
        found = [name for name, tensor in given if refused(tensor)]
        if found:
            raise ValueError(
                f"{' and '.join(found)} of allnorm::{operator._opname} with {what}: expected none "
                "while gradients are enabled, because results carry no gradient. Call it under "
                f"{mode}, or pass detach() of them."
            )


def _keep_in_order(operator: torch._ops.OpOverload) -> None:
    """Makes tracers and compilers keep each call of a collective operator, and their order.

    By torch's effect tokens: AOTAutograd makes each such call need a token of the one before.
    Passes over graphs of other tracers, which have no tokens, only remove what is unused. The order
    inside Inductor is lowering.py's.
    """
    effects._register_effectful_op(operator, effects._EffectType.ORDERED)
    for target in (operator.overloadpacket, operator):
        torch.fx.node.has_side_effect(target)


for _row in OPERATORS.values():
    _define(_row)
COLLECTIVES = frozenset(
    getattr(torch.ops.allnorm, row.name).default for row in OPERATORS.values() if row.is_collective
)
"""The operators that are calls among ranks."""
for _operator in COLLECTIVES:
    _keep_in_order(_operator)
