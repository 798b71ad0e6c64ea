"""The torch operators: schemas, implementations, and what compilers must know of them.

Functional: they return new tensors and alias nothing. What a call does not produce is a tensor of
no elements. A communicator is passed by its name, and a spec of quantisation by its fields, since
an operator's arguments must be traceable. The name of a process group is that of its communicator
too, which is made when it is needed: so compiled code may come from a cache.

Collective operators have an effect that their results do not show: every peer waits for it. So no
tracer or compiler may drop one whose result is unused, merge two that are alike, or change their
order. Fakes see nothing but their arguments: what depends on the rank or the number of ranks is an
argument, so that it is part of what a compiler's caches ask for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch._higher_order_ops import effects

from allnorm import fakes, lowering
from allnorm.communicator import communicator
from allnorm.core.call import NO_CHANGE, NO_INPUTS, from_op_boundary, split_scale
from allnorm.core.local import add_rms_norm, add_rms_norm_quant
from allnorm.core.registry import open_calls
from allnorm.core.tensors import has_tangent, wants_gradient
from allnorm.expert_sum import ExpertSum
from allnorm.post_norm import PostNorm
from allnorm.quant import Fp8PerTensor, QuantizedNorm, from_op_arguments

_Tensor = torch.Tensor
_Four = tuple[_Tensor, _Tensor, _Tensor, _Tensor]

_QUANT = (
    "str quant_kind, int group_size, str scale_layout, str scale_format, Tensor? static_scale, "
    "bool return_normed"
)
_BACKENDS = ("CPU", "CUDA")
_open_calls = open_calls()
_library = torch.library.Library("allnorm", "DEF")
# residual_rows: how many rows of a sharded residual this rank has; needed where none is given and
# the call is traced, since a fake cannot ask for the rank.
_LATER = 'SymInt? residual_rows=None, str algorithm="auto"'
# What stands before the residual add: a post norm, a scale, and experts whose rows are summed.
_BOUNDARY = (
    "Tensor? post_weight=None, float post_eps=0.0, float post_weight_bias=0.0, float scale=1.0, "
    "bool experts=False, Tensor? expert_index=None, Tensor? expert_weights=None, "
    "Tensor? shared=None"
)
# TorchScript drops what is unused, and merges what is alike, of operators whose schema says all.
_PEERS = "CONSERVATIVE"
_library.define('all_reduce(Tensor x, str comm_name, str algorithm="auto") -> Tensor', _PEERS)
_library.define(
    "all_reduce_add_rms_norm(Tensor x, Tensor? residual, Tensor? weight, float eps, "
    "float weight_bias, str numerics, str comm_name, bool residual_sharded=False, "
    f"{_LATER}, {_BOUNDARY}) "
    "-> (Tensor, Tensor)",
    _PEERS,
)
_library.define(
    f"all_reduce_add_rms_norm_quant(Tensor x, Tensor? residual, Tensor weight, float eps, {_QUANT},"
    " float weight_bias, str numerics, str comm_name, bool residual_sharded=False, "
    f"{_LATER}, {_BOUNDARY}) "
    "-> (Tensor quantized, Tensor scale, Tensor residual, Tensor normed)",
    _PEERS,
)
_library.define(
    'all_gather_rows(Tensor shard, SymInt num_tokens, str comm_name, str algorithm="auto") '
    "-> Tensor",
    _PEERS,
)
_library.define(
    "add_rms_norm(Tensor x, Tensor? residual, Tensor? weight, float eps, float weight_bias, "
    f"str numerics, {_BOUNDARY}) -> (Tensor, Tensor)"
)
_library.define(
    f"add_rms_norm_quant(Tensor x, Tensor? residual, Tensor weight, float eps, {_QUANT}, "
    f"float weight_bias, str numerics, {_BOUNDARY}) "
    "-> (Tensor quantized, Tensor scale, Tensor residual, Tensor normed)"
)


def _all_reduce(x: _Tensor, comm_name: str, algorithm: str = "auto") -> _Tensor:
    result: _Tensor = _calls_of(comm_name, x)(
        *(x, None, None, None, *NO_INPUTS, None, None, None, None, "all_reduce", algorithm),
        *(0.0, 0.0, "rounded", False, None, False, 0, *NO_CHANGE),
    )
    return result


def _all_reduce_add_rms_norm(
    x: _Tensor,
    residual: _Tensor | None,
    weight: _Tensor | None,
    eps: float,
    weight_bias: float,
    numerics: str,
    comm_name: str,
    residual_sharded: bool = False,
    residual_rows: int | None = None,
    algorithm: str = "auto",
    *boundary: Any,
) -> tuple[_Tensor, _Tensor]:
    before, change = _boundary(boundary)
    normed, summed = _calls_of(comm_name, x)(
        *(x, residual, weight, None, *before, None, None, None, None),
        *("all_reduce_add_rms_norm", algorithm, eps, weight_bias, numerics, residual_sharded),
        *(None, False, 0, *change),
    )
    if residual_rows is not None:
        _check_rows(summed, residual_rows)
    return _or_nothing(normed, summed), summed


def _all_reduce_add_rms_norm_quant(
    x: _Tensor,
    residual: _Tensor | None,
    weight: _Tensor,
    eps: float,
    quant_kind: str,
    group_size: int,
    scale_layout: str,
    scale_format: str,
    static_scale: _Tensor | None,
    return_normed: bool,
    weight_bias: float,
    numerics: str,
    comm_name: str,
    residual_sharded: bool = False,
    residual_rows: int | None = None,
    algorithm: str = "auto",
    *boundary: Any,
) -> _Four:
    quant = from_op_arguments(quant_kind, group_size, scale_layout, scale_format, static_scale)
    spec, static_scale = split_scale(quant)
    before, change = _boundary(boundary)
    results = _calls_of(comm_name, x)(
        *(x, residual, weight, static_scale, *before, None, None, None, None),
        *("all_reduce_add_rms_norm_quant", algorithm, eps, weight_bias, numerics),
        *(residual_sharded, spec, return_normed, 0, *change),
    )
    if residual_rows is not None:
        _check_rows(results[2], residual_rows)
    return _four(QuantizedNorm(*results), static_scale if spec is Fp8PerTensor else None)


def _add_rms_norm(
    x: _Tensor,
    residual: _Tensor | None,
    weight: _Tensor | None,
    eps: float,
    weight_bias: float,
    numerics: str,
    *boundary: Any,
) -> tuple[_Tensor, _Tensor]:
    rows, post_norm, scale = _spoken(x, boundary)
    normed, summed = add_rms_norm(
        *(rows, residual, weight, eps),
        weight_bias=weight_bias,
        numerics=numerics,
        post_norm=post_norm,
        scale=scale,
    )
    return _or_nothing(normed, summed), summed


def _add_rms_norm_quant(
    x: _Tensor,
    residual: _Tensor | None,
    weight: _Tensor,
    eps: float,
    quant_kind: str,
    group_size: int,
    scale_layout: str,
    scale_format: str,
    static_scale: _Tensor | None,
    return_normed: bool,
    weight_bias: float,
    numerics: str,
    *boundary: Any,
) -> _Four:
    quant = from_op_arguments(quant_kind, group_size, scale_layout, scale_format, static_scale)
    rows, post_norm, scale = _spoken(x, boundary)
    result = add_rms_norm_quant(
        *(rows, residual, weight, eps, quant, return_normed),
        weight_bias=weight_bias,
        numerics=numerics,
        post_norm=post_norm,
        scale=scale,
    )
    return _four(result, static_scale if quant_kind == Fp8PerTensor.kind else None)


def _all_gather_rows(
    shard: _Tensor, num_tokens: int, comm_name: str, algorithm: str = "auto"
) -> _Tensor:
    result: _Tensor = _calls_of(comm_name, shard)(
        *(shard, None, None, None, *NO_INPUTS, None, None, None, None),
        *("all_gather_rows", algorithm),
        *(0.0, 0.0, "rounded", False, None, False, num_tokens, *NO_CHANGE),
    )
    return result


def _boundary(given: tuple[Any, ...]) -> Any:
    """The fields of a Call behind those arguments of _BOUNDARY that an operator was given."""
    if not given:
        return NO_INPUTS, NO_CHANGE
    return from_op_boundary(*given, *_BOUNDARY_DEFAULTS[len(given) :])


def _spoken(x: _Tensor, given: tuple[Any, ...]) -> Any:
    """The same as arguments of a function: x, post_norm and scale."""
    (weight, index, weights, shared), (eps, bias, scale, experts) = _boundary(given)
    rows = ExpertSum(x, weights, index, shared) if experts else x
    return rows, None if weight is None else PostNorm(weight, eps, bias), scale


_BOUNDARY_DEFAULTS = (None, *NO_CHANGE, None, None, None)


def _or_nothing(normed: _Tensor | None, summed: _Tensor) -> _Tensor:
    """An operator may not return None."""
    return summed.new_empty(0) if normed is None else normed


def _calls_of(name: str, x: _Tensor) -> Callable[..., Any]:
    """What makes the calls of a communicator: the fields of a Call -> its results."""
    is_cuda = x.is_cuda
    return (
        _open_calls.get((name, is_cuda)) or communicator(name, "cuda" if is_cuda else "cpu")._call
    )


def _check_rows(residual: _Tensor, rows: int) -> None:
    """Raises unless the new residual has as many rows as whoever made the call reckoned with.

    After the call, so that other ranks, which were right, do not wait for this one.
    """
    found = math.prod(residual.shape[:-1])
    if found != rows:
        raise ValueError(
            f"residual_rows={rows}: expected {found}, this rank's rows. A traced graph is for the "
            "rank, and the number of ranks, that traced it."
        )


def _four(result: QuantizedNorm, static_scale: _Tensor | None) -> _Four:
    """An operator may not return an input, nor None."""
    quantized, scale, residual, normed = result
    if static_scale is not None:
        scale = static_scale.new_empty(0)
    return quantized, scale, residual, _or_nothing(normed, residual)


_AFTER_AUTOGRAD = torch._C._AutoDispatchBelowAutograd
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_num_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
_is_functional: Callable[[_Tensor], bool] = torch._is_functional_tensor


def _implement(name: str, implementation: Callable[..., Any]) -> None:
    operator = getattr(torch.ops.allnorm, name).default

    def run(*arguments: Any) -> Any:
        try:
            return implementation(*arguments)
        except TypeError:
            plain = _without_subclasses(arguments)
            if plain is None:
                raise
        return implementation(*plain)

    def without_gradient(*arguments: Any) -> Any:
        x = arguments[0]
        is_plain = x.__class__ in _PLAIN and _num_modes() == 0 and _transform() is None
        if is_plain and not _is_functional(x):
            return run(*arguments)  # which refuses what requires a gradient
        _refuse_gradients(operator, arguments)
        with _AFTER_AUTOGRAD():
            return operator(*arguments)

    for key in _BACKENDS:
        _library.impl(name, run, key)
        _library.impl(name, without_gradient, f"Autograd{key}")


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


def _describe(name: str, fake: Callable[..., Any]) -> None:
    def traced(*arguments: Any) -> Any:
        lowering.keep_order(COLLECTIVES)
        return fake(*arguments)

    torch.library.register_fake(f"allnorm::{name}", traced, lib=_library)


def _keep_in_order(name: str) -> None:
    """Makes tracers and compilers keep each call of a collective operator, and their order.

    By torch's effect tokens: AOTAutograd makes each such call need a token of the one before.
    Passes over graphs of other tracers, which have no tokens, only remove what is unused. The order
    inside Inductor is lowering.py's.
    """
    operators = getattr(torch.ops.allnorm, name)
    effects._register_effectful_op(operators.default, effects._EffectType.ORDERED)
    for operator in (operators, operators.default):
        torch.fx.node.has_side_effect(operator)


_COLLECTIVE: dict[str, Callable[..., Any]] = {
    "all_reduce": _all_reduce,
    "all_reduce_add_rms_norm": _all_reduce_add_rms_norm,
    "all_reduce_add_rms_norm_quant": _all_reduce_add_rms_norm_quant,
    "all_gather_rows": _all_gather_rows,
}
_LOCAL: dict[str, Callable[..., Any]] = {
    "add_rms_norm": _add_rms_norm,
    "add_rms_norm_quant": _add_rms_norm_quant,
}
COLLECTIVES = frozenset(getattr(torch.ops.allnorm, _name).default for _name in _COLLECTIVE)
"""The operators that are calls among ranks."""
for _name, _implementation in (_COLLECTIVE | _LOCAL).items():
    _implement(_name, _implementation)
    _describe(_name, getattr(fakes, _name))
for _name in _COLLECTIVE:
    _keep_in_order(_name)
