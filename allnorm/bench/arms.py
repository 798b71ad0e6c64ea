"""What can be timed: allnorm's own calls, and how a call after another makes a new arm."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

import allnorm
from allnorm.cli.bench_modes import Mode
from allnorm.cli.ranks.case import Case, Outcome
from allnorm.cli.ranks.quantizer import Quantizer

Call = Callable[[int], Any]
"""Runs one call on the inputs of that buffer set."""


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Arm:
    """One way to do the work of a mode on one case.

    Attributes:
        name: in rows and tables.
        call: what is timed.
        outcome: names the parts of what `call` returned.
        exact: whether its bits must be the reference's; else it must be within its roundings.
        reset: restores what calls have overwritten. Not timed.
        capturing: what the capture of a CUDA graph must happen in; entered by all ranks alike.
        foreign: whether another library runs in it, whose failure is no failure of the benchmark.
    """

    name: str
    call: Call
    outcome: Callable[[Any], Outcome]
    exact: bool = False
    reset: Callable[[], None] = _nothing
    capturing: Callable[[], AbstractContextManager[Any]] = nullcontext
    foreign: bool = False


@dataclass(frozen=True)
class Reduction:
    """A plain all-reduce of this rank's partial sum, to be followed by a norm.

    Attributes:
        name: of the arm that it becomes, without what follows.
        call: returns the reduced sum of a buffer set.
        reset, capturing, foreign: as of an Arm.
    """

    name: str
    call: Callable[[int], torch.Tensor]
    reset: Callable[[], None] = _nothing
    capturing: Callable[[], AbstractContextManager[Any]] = nullcontext
    foreign: bool = True


def normed_outcome(result: Any) -> Outcome:
    """Of a call that returned (normed, residual)."""
    return Outcome(normed=result[0], residual=result[1])


def quantized_outcome(result: Any) -> Outcome:
    """Of a call that returned an `allnorm.QuantizedNorm`, or a tuple in its order."""
    quantized, scale, residual, normed = result
    return Outcome(residual, normed, quantized, scale)


def own_arm(
    comm: allnorm.Communicator, case: Case, mode: Mode, name: str, algorithm: str
) -> Arm | str:
    """One of allnorm's algorithms, or why it cannot run this.

    Args:
        comm: what runs it.
        case: the shape.
        mode: what it shall return.
        name: of the arm.
        algorithm: "auto" or one by name.
    """
    spec, sharded = case.spec(mode.quant), mode.residual_sharded
    plan = comm.plan(
        case.num_rows,
        case.shape.hidden_size,
        case.dtype,
        spec,
        sharded,
        return_normed=mode.return_normed,
        algorithm=algorithm,
    )
    if algorithm not in ("auto", plan.algorithm):
        return plan.reason
    rows = comm.row_shard(case.num_rows) if sharded else None
    options: dict[str, Any] = {"algorithm": algorithm, "residual_sharded": sharded}
    options |= case.norm_options()
    quantising = {**options, "quant": spec, "return_normed": mode.return_normed}
    arguments = []
    for x, batch in zip(case.xs, case.batches, strict=True):
        residual = batch.residual if rows is None else batch.residual[rows[0] : rows[1]]
        arguments.append((x, residual, batch.weight, case.shape.eps))
    fused, fused_quant = comm.all_reduce_add_rms_norm, comm.all_reduce_add_rms_norm_quant

    def norm(index: int) -> Any:
        return fused(*arguments[index], **options)

    def norm_quant(index: int) -> Any:
        return fused_quant(*arguments[index], **quantising)

    def outcome(result: Any) -> Outcome:
        found = quantized_outcome(result) if spec else normed_outcome(result)
        return replace(found, rows=rows)

    return Arm(name, norm_quant if spec else norm, outcome, exact=True)


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
    quantize = Quantizer(spec, case.shape.hidden_size, case.device)
    first, plain = arm.call, arm.outcome

    def call(index: int) -> Any:
        result = first(index)
        return result, quantize(result[0])

    def outcome(result: Any) -> Outcome:
        before, (quantized, scale) = result
        return replace(plain(before), quantized=quantized, scale=scale)

    return replace(arm, name=name, call=call, outcome=outcome, exact=False)


def then_norm(reduction: Reduction, case: Case, mode: Mode, name: str) -> Arm:
    """An all-reduce, followed by allnorm's local add + norm (+ quantise) kernel."""
    spec, eps, options = case.spec(mode.quant), case.shape.eps, case.norm_options()
    quantising = {**options, "quant": spec, "return_normed": mode.return_normed}
    rest = [(batch.residual, batch.weight, eps) for batch in case.batches]
    reduce = reduction.call

    def norm(index: int) -> Any:
        return allnorm.add_rms_norm(reduce(index), *rest[index], **options)

    def norm_quant(index: int) -> Any:
        return allnorm.add_rms_norm_quant(reduce(index), *rest[index], **quantising)

    return Arm(
        name,
        norm_quant if spec else norm,
        quantized_outcome if spec else normed_outcome,
        reset=reduction.reset,
        capturing=reduction.capturing,
        foreign=reduction.foreign,
    )
