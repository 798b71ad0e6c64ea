"""The torch operators: schemas, implementations, and their effects for compilers.

The operators are functional: they return new tensors and alias nothing. An empty tensor means "no
result". An operator's arguments must be traceable, so a communicator is passed by name and a
quantization spec by its fields. A process group's name also identifies its communicator, which is
created when needed, because compiled code may come from a cache.

Every peer waits for a collective operator, an effect that its results do not show. Therefore no
tracer or compiler may drop a call with an unused result, merge two equal calls, or reorder calls.
Fake implementations see only their arguments. Values that depend on the rank or the number of ranks
are therefore arguments, which makes them part of the keys of compiler caches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch._higher_order_ops import effects

from allnorm import lowering
from allnorm.communicator import communicator
from allnorm.core import local, stream_input
from allnorm.core.dispatch import Dispatcher
from allnorm.core.operators import OPERATORS, Operator
from allnorm.core.registry import dispatchers
from allnorm.core.tensors import has_tangent, wants_gradient
from allnorm.quant import Fp8PerTensor

_Tensor = torch.Tensor
_BACKENDS = ("CPU", "CUDA")
_dispatchers = dispatchers()
_library = torch.library.Library("allnorm", "DEF")


def _implementation(operator: Operator) -> Callable[..., Any]:
    """Returns the function that runs an operator; an empty tensor means "no result"."""
    pass_on, positions = operator.pass_on, operator.positions
    name_at, rows_at = positions.get("comm_name"), positions.get("residual_rows", len(positions))

    hint_at = positions.get("prefetch", len(positions))
    takes_lists, only_quantizes = operator.takes_lists, len(operator.results) == 2

    def run(*arguments: Any) -> Any:
        if len(arguments) > hint_at and isinstance(arguments[hint_at], _Tensor):
            # Engines have weights of subclasses. A refused call that is repeated takes 0.4 ms.
            arguments = tuple(_without_subclasses(arguments) or arguments)
        x = arguments[0][0] if takes_lists else arguments[0]
        comm_name = "" if name_at is None else arguments[name_at]
        dispatcher = _dispatchers.get((comm_name, x.is_cuda)) or _other_dispatcher(comm_name, x)
        try:
            results = pass_on(dispatcher.call, *arguments)
        except TypeError:
            plain = _without_subclasses(arguments)
            if plain is None:
                raise
            return run(*plain)
        if len(arguments) > rows_at and arguments[rows_at] is not None:
            _check_rows(results[operator.results.index("residual_out")], arguments[rows_at])
        if operator.is_quantized:
            quantized, scale = results[0], results[1]
            if arguments[positions["quant_kind"]] == Fp8PerTensor.kind:
                scale = scale.new_empty(0)  # an operator must not return an input
            if only_quantizes:
                return quantized, scale
            _, _, residual, normed = results
            return quantized, scale, residual, x.new_empty(0) if normed is None else normed
        if results.__class__ is tuple and results[0] is None:
            return x.new_empty(0), results[1]
        return results

    return run


def _implementation_with_input(operator: Operator) -> Callable[..., Any]:
    """Returns the function that runs an operator whose results include the next layer's input."""
    pass_on, name_at = operator.pass_on, operator.positions["comm_name"]

    def run(*arguments: Any) -> tuple[_Tensor, ...]:
        # Before the call, because peers raise if a call that they make too is refused here.
        arguments = tuple(_without_subclasses(arguments) or arguments)
        x, comm_name = arguments[0], arguments[name_at]
        dispatcher = _dispatchers.get((comm_name, x.is_cuda)) or _other_dispatcher(comm_name, x)
        normed, streams, connection = pass_on(dispatcher.call_with_input, *arguments)
        return normed, streams, *connection

    return run


def _other_dispatcher(comm_name: str, x: _Tensor) -> Dispatcher:
    """Returns the dispatcher of a communicator that is not open yet, or of a one-rank call."""
    if not comm_name:
        return local.dispatcher(x)
    return communicator(comm_name, x.device.type)._dispatcher


def _check_rows(residual: _Tensor, rows: int) -> None:
    """Raises unless the new residual has the declared number of rows.

    This check runs after the call, so that the other ranks, whose arguments were right, do not wait
    for this one.
    """
    found = math.prod(residual.shape[:-1])
    if found != rows:
        raise ValueError(
            f"residual_rows={rows}: expected {found}, the rows of this rank. A traced graph is "
            "valid only for the rank and world size that traced it: trace it again."
        )


_AFTER_AUTOGRAD = torch._C._AutoDispatchBelowAutograd
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_num_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
_is_functional: Callable[[_Tensor], bool] = torch._is_functional_tensor


def _define(row: Operator) -> None:
    # TorchScript drops unused calls and merges equal ones, unless alias analysis is conservative.
    _library.define(row.schema, "CONSERVATIVE" if row.is_collective else "")
    operator = getattr(torch.ops.allnorm, row.name).default
    run = (_implementation_with_input if row.makes_input else _implementation)(row)

    def without_gradient(*arguments: Any) -> Any:
        x = arguments[0][0] if row.takes_lists else arguments[0]
        is_plain = x.__class__ in _PLAIN and _num_modes() == 0 and _transform() is None
        if is_plain and not _is_functional(x):
            return run(*arguments)  # rejects tensors that require a gradient
        _refuse_gradients(operator, arguments)
        with _AFTER_AUTOGRAD():
            return operator(*arguments)

    for key in _BACKENDS:
        _library.impl(row.name, run, key)
        _library.impl(row.name, without_gradient, f"Autograd{key}")

    def fake(*arguments: Any) -> Any:
        lowering.keep_order(COLLECTIVES)
        return row.fake(*arguments)

    torch.library.register_fake(f"allnorm::{row.name}", fake, lib=_library)


def _define_stream_input() -> None:
    """Defines hyper_connection_input, which is not a call: nothing is exchanged or dispatched."""
    name = "hyper_connection_input"
    _library.define(
        f"{name}(Tensor streams, Tensor fn, Tensor scale, Tensor base, Tensor weight, float eps, "
        "float weight_bias, str numerics, float stream_eps, float hc_eps, int iterations, "
        "float post_scale) -> (Tensor normed, Tensor post, Tensor mix)"
    )
    operator = torch.ops.allnorm.hyper_connection_input.default

    def run(*arguments: Any) -> Any:
        return stream_input.run(*(_without_subclasses(arguments) or arguments))

    def without_gradient(*arguments: Any) -> Any:
        _refuse_gradients(operator, arguments)
        with _AFTER_AUTOGRAD():
            return operator(*arguments)

    def fake(streams: _Tensor, *rest: Any) -> Any:
        return stream_input.allocate(streams, rest[3])

    for key in _BACKENDS:
        _library.impl(name, run, key)
        _library.impl(name, without_gradient, f"Autograd{key}")
    torch.library.register_fake(f"allnorm::{name}", fake, lib=_library)


def _without_subclasses(arguments: tuple[Any, ...]) -> list[Any] | None:
    """Returns the arguments with plain tensors in place of subclasses; None if nothing changes.

    The torch dispatcher runs before an operator. So a subclass without its own
    `__torch_dispatch__`, such as most subclasses of Parameter, keeps its values in its memory.
    Methods reject all subclasses, because their `__torch_function__` did not run.
    """
    changed = False

    def plain(argument: Any) -> Any:
        nonlocal changed
        if isinstance(argument, list):
            return [plain(each) for each in argument]
        if (
            isinstance(argument, torch.Tensor)
            and argument.__class__ not in _PLAIN
            and type(argument).__torch_dispatch__ is _NO_DISPATCH
        ):
            changed = True
            return argument.as_subclass(torch.Tensor)
        return argument

    found = [plain(argument) for argument in arguments]
    return found if changed else None


_NO_DISPATCH = torch._C._disabled_torch_dispatch_impl


def _refuse_gradients(operator: torch._ops.OpOverload, arguments: tuple[Any, ...]) -> None:
    """Raises ValueError if a result would need a gradient, forward or backward."""
    names = [argument.name for argument in operator._schema.arguments]
    given = [
        (name, each)
        for name, argument in zip(names, arguments, strict=False)
        for each in (argument if isinstance(argument, list) else [argument])
        if isinstance(each, torch.Tensor)
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
                f"{mode}, or pass their detach()."
            )


def _keep_in_order(operator: torch._ops.OpOverload) -> None:
    """Makes tracers and compilers keep every call of a collective operator, in order.

    With torch's effect tokens, AOTAutograd makes each call depend on the token of the previous one.
    Passes over graphs of other tracers, which have no tokens, only remove unused calls. Inside
    Inductor, lowering.py keeps the order.
    """
    effects._register_effectful_op(operator, effects._EffectType.ORDERED)
    for target in (operator.overloadpacket, operator):
        torch.fx.node.has_side_effect(target)


for _row in OPERATORS.values():
    _define(_row)
_define_stream_input()
COLLECTIVES = frozenset(
    getattr(torch.ops.allnorm, row.name).default for row in OPERATORS.values() if row.is_collective
)
"""The operators that involve all ranks."""
for _operator in COLLECTIVES:
    _keep_in_order(_operator)
