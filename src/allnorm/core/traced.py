"""Calls as tracers see them: one operator, and a copy into each preallocated result.

This is for torch.compile, torch.export, make_fx, other dispatch modes and fake tensors, and for
torch.jit.trace and the transforms of torch.func. Errors that are visible in shapes and dtypes are
raised. Overlapping memory is not visible, and does no harm, because results are copied afterwards.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from allnorm.core import arguments, checks, operators, tensors
from allnorm.core.call import TENSORS, Call, CallWithInput, Runner
from allnorm.core.shards import row_shard
from allnorm.core.slices import Slices
from allnorm.hyper_connection import HyperConnection
from allnorm.quant import Fp8PerTensor

_Tensor = torch.Tensor


class Operators(Runner):
    """Runs each call as a torch operator, for tracers that see only operators.

    `name` is the name of the communicator; "" for calls of one rank alone.
    """

    def __init__(self, name: str = "", rank: int = 0, world_size: int = 1) -> None:
        self._name, self._rank, self._world_size = name, rank, world_size

    def run(self, call: Call) -> Any:
        """Runs a call, after checking what is visible in shapes and dtypes."""
        arguments.check_algorithm(call.algorithm)
        if call.scale_out is not None:
            raise ValueError(
                "scale_out in a traced call: expected None, because a tracer does not see the "
                "padding between its columns. Use the returned scale."
            )
        if call.slices is not None:
            return self._run_slices(call, call.slices)
        tensors.check_all_fake(x=call.x, residual=call.residual, weight=call.weight)
        if call.connection is not None:
            tensors.check_all_fake(x=call.x, post=call.post, mix=call.mix)
        fields, rows = operators.results_of(call.op), None
        if call.residual_sharded:
            num_tokens = math.prod(call.shape[:-1])
            lo, hi = row_shard(num_tokens, self._world_size, self._rank)
            rows = hi - lo
        for field in fields:
            memory = getattr(call, field)
            if memory is not None:
                name = "normed_out" if field == "out" and call.quant is not None else field
                arguments.check_like(name, memory, operators.result_like(call, field, rows))
        given = operators.arguments(call, self._name, rows if call.residual is None else None)
        results = getattr(torch.ops.allnorm, call.op)(*given)
        if len(fields) == 1:
            return _into(getattr(call, fields[0]), results)
        return tuple(
            _into(getattr(call, field), result)
            if operators.has_result(call, field)
            else _given(call, field)
            for field, result in zip(fields, results, strict=True)
        )

    def call_with_input(self, **fields: Any) -> tuple[_Tensor, _Tensor, HyperConnection]:
        """Runs a call and the next layer's input as one operator."""
        call = CallWithInput(**fields)
        arguments.check_algorithm(call.algorithm)
        parts = call.next_input.operands
        given = {name: parts[name] for name in ("fn", "scale", "base", "weight")}
        tensors.check_all_fake(
            x=call.x, residual=call.residual, post=call.post, mix=call.mix, **given
        )
        if call.residual_out is not None:
            like = operators.result_like(call, "residual_out", None)
            arguments.check_like("residual_out", call.residual_out, like)
        normed, streams, post, mix = torch.ops.allnorm.all_reduce_hyper_connection_input(
            *operators.arguments(call, self._name, None)
        )
        return normed, _into(call.residual_out, streams), HyperConnection(post, mix)

    def _run_slices(self, call: Call, slices: Slices) -> list[_Tensor]:
        checks.check_whole_rows(call, self._world_size)
        tensors.check_all_fake(**{str(number): x for number, x in enumerate(slices.given)})
        outs = slices.outs or (None,) * len(slices.tensors)
        for number, (x, out) in enumerate(zip(slices.tensors, outs, strict=True)):
            if out is not None:
                like = arguments.Like(x.shape, x.dtype, x.device, f"that of tensors[{number}]")
                arguments.check_like(f"out[{number}]", out, like)
        results = torch.ops.allnorm.rms_norm_sharded(
            *(list(slices.tensors), list(slices.weights), float(call.eps)),
            *(float(call.weight_bias), call.numerics, self._name, call.algorithm),
        )
        return [_into(out, result) for out, result in zip(outs, results, strict=True)]


def check_intercepted(call: Call) -> None:
    """Raises for wrong arguments that an operator would accept, or report differently."""
    for name, tensor in (("x", call.x), ("residual", call.residual), ("weight", call.weight)):
        if not isinstance(tensor, torch.Tensor) and (tensor is not None or name == "x"):
            tensors.check_kind(name, tensor)  # raises, and explains why
    for name, tensor in zip(TENSORS, call.tensors, strict=True):
        if isinstance(tensor, torch.Tensor):
            tensors.check_layout(name, tensor)
    if call.slices is not None:
        for number, tensor in enumerate(call.slices.tensors):
            tensors.check_kind(f"tensors[{number}]", tensor)
    if call.connection is not None:
        checks.check_stream_kinds(call)
    if call.has_norm or call.slices is not None:
        arguments.check_norm_constants(call)
    if call.has_norm:
        arguments.check_has_norm(call)


def _given(call: Call, field: str) -> _Tensor | None:
    """Returns the value of a result that the operator does not compute."""
    if field == "scale_out" and isinstance(call.quant, Fp8PerTensor):
        return call.quant.scale
    return None


def _into(memory: _Tensor | None, result: _Tensor) -> _Tensor:
    if memory is None:
        return result
    if tensors.is_batched(result) and not tensors.is_batched(memory):
        raise ValueError(
            "preallocated result without a dimension of torch.vmap, which maps over the inputs: "
            "expected None. Use the returned result."
        )
    return memory.copy_(result)
