"""A call that ranks make alike, or not: its arguments, its memory, what it must give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

import allnorm
from allnorm import reference
from allnorm.testing import all_inputs, same_bits, shared_input


@dataclass(frozen=True)
class Call:
    """A call that all ranks should make alike."""

    algorithm: str = "one_shot"
    shape: tuple[int, int] = (24, 1024)
    dtype: torch.dtype = torch.bfloat16
    op: str = "norm"
    has_residual: bool = True
    sharded: bool = False
    quant: Any = None
    float32_weight: bool = False
    eps: float = 1e-6
    weight_bias: float = 0.0
    numerics: str = "rounded"


def check(comm: allnorm.Communicator, call: Call, number: int) -> bool:
    """Makes the call; whether all its results are the reference's."""
    got = method_of(comm, call)(**arguments_of(comm, call, number))
    pairs = zip(got, wanted_of(comm, call, number), strict=True)
    return all(a is b if b is None else same_bits(a, b) for a, b in pairs)


def wanted_of(comm: allnorm.Communicator, call: Call, number: int) -> list[Any]:
    """What the call must return, by the reference."""
    xs = all_inputs(comm.world_size, call.shape, call.dtype, call=number, device=comm.device)
    whole = arguments_of(comm, replace(call, sharded=False), number)
    options = {k: whole[k] for k in ("residual", "weight", "eps", "weight_bias", "numerics")}
    if call.quant is None:
        wanted: Any = reference.all_reduce_add_rms_norm(xs, **options)
    else:
        wanted = reference.all_reduce_add_rms_norm_quant(xs, quant=call.quant, **options)
    wanted = list(wanted)
    position = 1 if call.quant is None else 2
    if call.sharded:
        lo, hi = comm.row_shard(call.shape[0])
        wanted[position] = wanted[position][lo:hi]
    return wanted


def method_of(comm: allnorm.Communicator, call: Call) -> Callable[..., Any]:
    """The method that makes such a call."""
    if call.op == "norm":
        quantised = call.quant is not None
        return comm.all_reduce_add_rms_norm_quant if quantised else comm.all_reduce_add_rms_norm
    return getattr(comm, call.op)


def arguments_of(comm: allnorm.Communicator, call: Call, number: int) -> dict[str, Any]:
    """What that method is given on this rank; other numbers give other inputs."""
    inputs = all_inputs(comm.world_size, call.shape, call.dtype, call=number, device=comm.device)
    x = inputs[comm.rank]
    if call.op == "all_reduce":
        return {"x": x, "algorithm": call.algorithm}
    lo, hi = comm.row_shard(call.shape[0])
    if call.op == "all_gather_rows":
        return {"residual_shard": x[lo:hi].clone(), "num_tokens": call.shape[0]}
    shared = shared_input(call.shape, call.dtype, "residual", call=number, device=comm.device)
    residual = shared[lo:hi].clone() if call.sharded else shared
    weight = shared_input(call.shape[1:], call.dtype, "weight", device=comm.device)
    arguments = {
        "x": x,
        "residual": residual if call.has_residual else None,
        "weight": weight.float() if call.float32_weight else weight,
        "eps": call.eps,
        "weight_bias": call.weight_bias,
        "numerics": call.numerics,
        "algorithm": call.algorithm,
        "residual_sharded": call.sharded,
    }
    return arguments if call.quant is None else arguments | {"quant": call.quant}


def memory_for(comm: allnorm.Communicator, call: Call) -> dict[str, torch.Tensor]:
    """Memory for what a call returns, none of it NaN."""
    where: dict[str, Any] = {"device": comm.device}
    if call.op != "norm":
        return {"out": torch.zeros(call.shape, dtype=call.dtype, **where)}
    lo, hi = comm.row_shard(call.shape[0]) if call.sharded else (0, call.shape[0])
    summed = torch.zeros((hi - lo, call.shape[1]), dtype=call.dtype, **where)
    if call.quant is None:
        return {"out": torch.zeros(call.shape, dtype=call.dtype, **where), "residual_out": summed}
    groups = 1
    if isinstance(call.quant, allnorm.Fp8PerGroup):
        groups = call.shape[1] // call.quant.group_size
    scale = torch.zeros((call.shape[0], groups), **where)
    return {"scale_out": scale, "residual_out": summed}
