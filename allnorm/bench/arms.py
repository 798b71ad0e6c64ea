"""What can be timed: allnorm's own calls, and how a call after another makes a new arm."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

import allnorm
from allnorm.bench.case import Case, Outcome
from allnorm.bench.modes import Mode
from allnorm.bench.quantizer import quantizer

Call = Callable[[int], Any]
"""Runs one call on the inputs of that buffer set."""


@dataclass(frozen=True)
class Arm:
    """One way to do the work of a mode on one case."""

    name: str  # in rows and tables
    call: Call  # what is timed
    outcome: Callable[[Any], Outcome]  # names the parts of what `call` returned
    # Whether its bits must be the reference's; else it must be within its roundings.
    exact: bool = False
    reset: Callable[[], object] = lambda: None  # restores what calls have overwritten. Not timed.
    # What the capture of a CUDA graph must happen in; entered by all ranks alike.
    capturing: Callable[[], AbstractContextManager[Any]] = nullcontext
    # Whether another library runs in it, whose failure is no failure of the benchmark.
    foreign: bool = False


@dataclass(frozen=True)
class Reduction:
    """A plain all-reduce of this rank's partial sum, to be followed by a norm."""

    name: str  # of the arm that it becomes, without what follows
    call: Callable[[int], torch.Tensor]  # returns the reduced sum of a buffer set
    # As of an Arm.
    reset: Callable[[], object] = lambda: None
    capturing: Callable[[], AbstractContextManager[Any]] = nullcontext
    foreign: bool = True

    def then(self, call: Call, name: str = "") -> Arm:
        """The arm whose `call` reduces by this, then returns what `outcome_of` takes."""
        return Arm(
            *(name or self.name, call, outcome_of),
            reset=self.reset,
            capturing=self.capturing,
            foreign=self.foreign,
        )


def outcome_of(result: Any) -> Outcome:
    """Of a call that returned an `allnorm.QuantizedNorm`, or else (normed, residual)."""
    if isinstance(result, allnorm.QuantizedNorm):
        return Outcome(result.residual, result.normed, result.quantized, result.scale)
    normed, residual = result
    return Outcome(residual, normed)


def own_arm(
    comm: allnorm.Communicator, case: Case, mode: Mode, name: str, algorithm: str
) -> Arm | str:
    """One of allnorm's algorithms, or "auto"; or why it cannot run this."""
    sharded = mode.residual_sharded
    plan = comm.plan(
        case.num_rows,
        case.shape.hidden_size,
        case.dtype,
        case.spec(mode.quant),
        sharded,
        return_normed=mode.return_normed,
        algorithm=algorithm,
    )
    if algorithm not in ("auto", plan.algorithm):
        return plan.reason
    rows = comm.row_shard(case.num_rows) if sharded else None
    held = slice(*rows) if rows else slice(None)
    options = case.options(mode) | {"algorithm": algorithm, "residual_sharded": sharded}
    arguments = [
        (x, batch.residual[held], batch.weight, case.shape.eps)
        for x, batch in zip(case.xs, case.batches, strict=True)
    ]
    method = comm.all_reduce_add_rms_norm_quant if mode.quant else comm.all_reduce_add_rms_norm

    def call(index: int) -> Any:
        return method(*arguments[index], **options)

    return Arm(name, call, lambda result: replace(outcome_of(result), rows=rows), exact=True)


def own_arms(comm: allnorm.Communicator, case: Case, mode: Mode, name: str) -> Arm | str:
    """The arm of allnorm's that has this name, or why it cannot run.

    "allnorm16" is the call without quantisation, "allnorm16+quant" a quantising kernel after it.
    """
    if not name.startswith("allnorm16"):
        return own_arm(comm, case, mode, name, name.partition(":")[2] or "auto")
    plain = own_arm(comm, case, replace(mode, quant="", return_normed=False), name, "auto")
    if isinstance(plain, str) or name == "allnorm16":
        return plain
    return then_quantize(plain, case, mode, name)


def then_quantize(arm: Arm, case: Case, mode: Mode, name: str) -> Arm:
    """An arm of 16-bit results, followed by a kernel that does nothing but quantise them."""
    spec = case.spec(mode.quant)
    assert spec is not None
    quantize = quantizer(spec, case.shape.hidden_size, case.device)

    def call(index: int) -> Any:
        result = arm.call(index)
        return result, quantize(result[0])

    def outcome(result: Any) -> Outcome:
        before, (quantized, scale) = result
        return replace(arm.outcome(before), quantized=quantized, scale=scale)

    return replace(arm, name=name, call=call, outcome=outcome, exact=False)


def then_norm(reduction: Reduction, case: Case, mode: Mode, name: str) -> Arm:
    """An all-reduce, followed by allnorm's local add + norm (+ quantise) kernel."""
    options, reduce = case.options(mode), reduction.call
    rest = [(batch.residual, batch.weight, case.shape.eps) for batch in case.batches]
    function = allnorm.add_rms_norm_quant if mode.quant else allnorm.add_rms_norm

    def call(index: int) -> Any:
        return function(reduce(index), *rest[index], **options)

    return reduction.then(call, name)
