"""Checks and times arms inside one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import allnorm
from allnorm.bench import arms, baselines, bounds, clock, modes, peers
from allnorm.bench.arms import Arm
from allnorm.bench.case import NUM_SETS, Case, make_case
from allnorm.bench.modes import Mode
from allnorm.bench.product import Product
from allnorm.bench.shapes import Shape
from allnorm.testing import DTYPES, RankFailedError, agree, all_or_none, report, same_bits
from allnorm.testing.rank import device


@dataclass(frozen=True)
class Job:
    """What to measure; the same on every rank.

    Attributes:
        shapes: in the order they are measured.
        modes: what the calls return; every shape is measured in each.
        dtype: name of the dtype of the inputs.
        numerics: rounding mode of what allnorm computes.
        arms: names of arms and peers, of which a mode takes those that it has.
        device: "cuda" or "cpu".
        seconds: on CPU, roughly how long one arm of one shape is timed.
        tuning_dir: as of a Communicator.
        product: columns of the matrix product in front of every timed call; 0 for none.
        max_blocks: as of a Communicator; 0 for no limit.
    """

    shapes: tuple[Shape, ...]
    modes: tuple[Mode, ...]
    dtype: str
    numerics: str
    arms: tuple[str, ...]
    device: str
    seconds: float = 0.7
    tuning_dir: str | None = None
    product: int = 0
    max_blocks: int = 0


@dataclass
class _Turn:
    """One mode of one shape: what runs, and what is known about what does not.

    Attributes:
        runs: the arms that are right so far.
        reasons: why an arm does not run, by name; not its fault.
        errors: what is wrong with an arm's result, by name.
        order: of the records.
        times: what was measured, by name.
    """

    runs: list[Arm] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    times: dict[str, dict[str, float]] = field(default_factory=dict)

    def add(self, name: str, found: Arm | str) -> None:
        """An arm, or why there is none of that name."""
        self.order.append(name)
        if isinstance(found, str):
            self.reasons[name] = found
        else:
            self.runs.append(found)

    def drop(self, arm: Arm, *, reason: str = "", error: str = "") -> None:
        """Takes an arm out, the same on every rank."""
        self.runs.remove(arm)
        if reason:
            self.reasons[arm.name] = reason
        if error:
            self.errors[arm.name] = error


def run(rank: int, world_size: int, job: Job) -> list[dict[str, Any]]:
    """Checks, then times every arm at every shape in every mode. Collective.

    What a shape and mode gave is also reported at once, as `records`: a run that is stopped later
    has not been in vain.

    Returns:
        One record per shape, mode and arm, in the same order on every rank: `shape` and `mode`
        (their indices), `arm`, `reason` ("" if it ran, else why it cannot), `error` ("" if its
        result was right), `p50_us`, `p90_us`, `p99_us` of this rank, and on GPUs `host_us` and
        `eager_us` of calls without a graph. Behind a product the times are what is beyond it, and
        `product_us` is its own. What did not run, or was wrong, has no times.
    """
    records, where = [], device()
    taking_part = {name for mode in job.modes for name in modes.peer_names(job.device, mode)}
    names = [name for name in peers.REGISTRY if name in job.arms and name in taking_part]
    others = peers.Peers(names, where, DTYPES[job.dtype], job.shapes)
    with allnorm.Communicator(
        device=where,
        numerics=job.numerics,
        tuning_dir=job.tuning_dir,
        max_blocks=job.max_blocks or None,
    ) as comm:
        for index, shape in enumerate(job.shapes):
            report({"text": str(shape), "done": index, "total": len(job.shapes)})
            case = make_case(shape, job.dtype, job.numerics, where, rank, world_size, seed=index)
            for number, mode in enumerate(job.modes):
                turn = _arms(comm, others, case, mode, job)
                _check(turn, case, mode)
                made = case.checksums()
                _measure(turn, case, job)
                changed = agree("" if case.checksums() == made else f"{shape}")
                if changed:
                    raise RuntimeError(
                        f"an arm has overwritten what all arms read ({changed}): the others were "
                        "timed on other values. Take arms of other libraries out with --arms."
                    )
                report({"records": _records(turn, index, number)})
                records += _records(turn, index, number)
            del case
        comm.check()
        others.close()
    return records


def _arms(
    comm: allnorm.Communicator, others: peers.Peers, case: Case, mode: Mode, job: Job
) -> _Turn:
    turn = _Turn()
    obstacle = case.obstacle(mode.quant)
    for name in modes.arm_names(job.device, mode):
        if name not in job.arms:
            continue
        if obstacle and name != "allnorm16":
            turn.add(name, obstacle)
        elif name.startswith("allnorm"):
            turn.add(name, arms.own_arms(comm, case, mode, name))
        else:
            turn.add(name, baselines.baseline(case, mode, name))
    for name in modes.peer_names(job.device, mode):
        if name in job.arms:
            found = obstacle or others.arms(name, case, mode)
            for arm in [found] if isinstance(found, str) else found:
                turn.add(name if isinstance(arm, str) else arm.name, arm)
    return turn


def _check(turn: _Turn, case: Case, mode: Mode) -> None:
    """Runs each arm once on every buffer set and compares; all ranks drop the same arms."""
    for arm in list(turn.runs):
        try:
            error = agree(_run(arm, check_arm, arm, case, mode))
        except RankFailedError as absent:
            turn.drop(arm, reason=str(absent))
        else:
            if error:
                turn.drop(arm, error=error)


def _run(arm: Arm, step: Callable[..., Any], *arguments: Any) -> Any:
    """A step with an arm: of one of another library, all ranks learn whether it failed on one."""
    return all_or_none(step, *arguments) if arm.foreign else step(*arguments)


def check_arm(arm: Arm, case: Case, mode: Mode) -> str:
    """Runs an arm once on every buffer set; what is wrong on this rank. Collective."""
    arm.reset()
    # All of them, also after an error: the other ranks may know of none.
    errors = [describe_error(arm, arm.call(index), case, index, mode) for index in range(NUM_SETS)]
    return next(filter(None, errors), "")


def describe_error(arm: Arm, result: Any, case: Case, index: int, mode: Mode) -> str:
    """What is wrong with the result of one call, in words; "" if nothing is."""
    got, quant = arm.outcome(result), "" if arm.name == "allnorm16" else mode.quant
    if not arm.exact:
        return bounds.describe_error(got, case, index, quant)
    normed, residual = case.expected[index]
    expected = {"residual": residual[slice(*got.rows)] if got.rows else residual}
    if not quant or mode.return_normed:
        expected["normed"] = normed
    if quant:
        expected["quantized"], expected["scale"] = case.quantized(quant)[index]
    for name, wanted in expected.items():
        part = getattr(got, name)
        if part is None:
            return f"{name} is missing"
        if not same_bits(part, wanted):
            return f"{name} differs from the reference"
    return ""


def _measure(turn: _Turn, case: Case, job: Job) -> None:
    if job.product:
        _measure_behind(Product(case, job.product), turn, case, job)
        return
    for name, values in _time(turn, case, job).items():
        turn.times[name] = clock.summary(values)
    if job.device == "cuda":
        for arm in turn.runs:
            turn.times[arm.name] |= clock.time_eager(arm, torch.cuda.synchronize)


def _measure_behind(product: Product, turn: _Turn, case: Case, job: Job) -> None:
    turn.runs = [product.alone(), *map(product.before, turn.runs)]
    samples, product_us = product.take_off(_time(turn, case, job))
    for name, values in samples.items():
        turn.times[name] = clock.summary(values) | {"product_us": product_us}
    product.restore()


def _time(turn: _Turn, case: Case, job: Job) -> clock.Samples:
    if job.device == "cpu":
        return clock.time_cpu(turn.runs, job.seconds)
    return clock.time_cuda(_capture(turn, case.num_rows), case.num_rows)


def _capture(turn: _Turn, num_tokens: int) -> list[tuple[Arm, torch.cuda.CUDAGraph]]:
    """A graph of each arm; what another library cannot capture is dropped on all ranks."""
    graphs = []
    for arm in list(turn.runs):
        try:
            graphs.append((arm, _run(arm, clock.capture, arm, num_tokens)))
        except RankFailedError as absent:
            turn.drop(arm, reason=f"in a CUDA graph: {absent}")
    return graphs


def _records(turn: _Turn, shape: int, mode: int) -> list[dict[str, Any]]:
    return [
        {
            "shape": shape,
            "mode": mode,
            "arm": name,
            "reason": turn.reasons.get(name, ""),
            "error": turn.errors.get(name, ""),
            **turn.times.get(name, clock.summary([])),
        }
        for name in turn.order
    ]
