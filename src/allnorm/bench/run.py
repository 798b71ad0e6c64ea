"""Checks and times arms inside one rank."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import allnorm
from allnorm import islands
from allnorm.bench import arms, bounds, clock, modes, peers
from allnorm.bench.arms import Arm
from allnorm.bench.case import NUM_SETS, Case, make_case
from allnorm.bench.clock import Product
from allnorm.bench.modes import YARDSTICKS, Mode, Shape
from allnorm.testing import DTYPES, RankFailedError, agree, all_or_none, report, same_bits
from allnorm.testing.rank import device
from allnorm.testing.timing import percentile, percentiles


@dataclass(frozen=True)
class Job:
    """What to measure; the same on every rank."""

    shapes: tuple[Shape, ...]  # in the order they are measured
    modes: tuple[Mode, ...]  # what the calls return; every shape is measured in each
    dtype: str  # name of the dtype of the inputs
    numerics: str  # rounding mode of what allnorm computes
    arms: tuple[str, ...]  # names of arms and peers, of which a mode takes those that it has
    device: str  # "cuda" or "cpu"
    seconds: float = 0.7  # on CPU, roughly how long one arm of one shape is timed
    tuning_dir: str | None = None  # as of a Communicator
    # Columns of the matrix product in front of every timed call; 0: none, calls follow each other
    # in a chain. Everything is measured with each of them.
    products: tuple[int, ...] = (0,)
    max_blocks: int = 0  # as of a Communicator; 0 for no limit
    island_size: int = 0  # ranks of each island, one after the other; 0: islands are found


@dataclass
class _Trial:
    """One arm in one mode of one shape; the same on every rank but for the times."""

    name: str  # of the arm, or of the peer that has none here
    arm: Arm | None = None  # what runs, as long as it is right; None if it cannot, or is not
    reason: str = ""  # why it does not run; not its fault
    error: str = ""  # what is wrong with its result
    times: dict[str, float] = field(default_factory=lambda: percentiles([]))
    over_ranks: str = ""  # how all ranks' times have been put together; "" if they have not

    def attempt(self, step: Callable[..., Any], *arguments: Any, where: str = "") -> Any:
        """A collective step with the arm.

        If it fails in another library on some rank, every rank drops the arm.
        """
        assert self.arm is not None
        if not self.arm.foreign:
            return step(*arguments)
        try:
            return all_or_none(step, *arguments)
        except RankFailedError as absent:
            self.reason, self.arm = f"{where}{absent}", None
            return None


def run(rank: int, world_size: int, job: Job) -> list[dict[str, Any]]:
    """Checks, then times every arm at every shape in every mode. Collective.

    The records of a shape and mode are also reported at once, as `records`, so that a run that is
    stopped keeps them.

    Returns:
        One record per shape, mode, product and arm, in the same order on every rank: `shape` and
        `mode` (their indices), `product`, `arm`, `reason` ("" if it ran, else why it cannot),
        `error` ("" if its result was right), `p50_us`, `p90_us`, `p99_us` of this rank, and on GPUs
        `host_us` and `eager_us` of calls without a graph. Behind a product the times are those of
        all ranks together, `over_ranks` says how, and they are what is beyond the product's own,
        `product_us`; `beyond_empty_us` is p50 beyond an empty kernel's, `empty_us`, in the same
        place. What did not run, or was wrong, has no times.
    """
    if job.island_size:
        # To NCCL each island is a host, so that what it does between them is what it does there.
        os.environ.setdefault("NCCL_HOSTID", f"island{rank // job.island_size}")
    records, where = [], device()
    usable = {name for mode in job.modes for name in modes.peer_names(job.device, mode)}
    names = [name for name in peers.REGISTRY if name in job.arms and name in usable]
    others = peers.Peers(names, where, DTYPES[job.dtype], job.shapes)
    with allnorm.Communicator(
        device=where,
        numerics=job.numerics,
        tuning_dir=job.tuning_dir,
        max_blocks=job.max_blocks or None,
        islands=islands.of_size(job.island_size, world_size),
    ) as comm:
        for index, shape in enumerate(job.shapes):
            report({"text": str(shape), "done": index, "total": len(job.shapes)})
            plain = make_case(
                *(shape, job.dtype, job.numerics, where, rank, world_size),
                seed=index,
                islands=comm.islands,
            )
            for (number, mode), product in itertools.product(enumerate(job.modes), job.products):
                case = plain.of(mode)
                trials = _trials(comm, others, case, mode, job, bool(product))
                for trial, arm in _running(trials):
                    trial.error = agree(trial.attempt(check_arm, arm, case, mode) or "")
                    trial.arm = None if trial.error else trial.arm
                before = case.checksums()
                _measure(trials, case, job, product)
                changed = agree("" if case.checksums() == before else f"{shape}")
                if changed:
                    raise RuntimeError(
                        f"an arm has overwritten what all arms read ({changed}): the others were "
                        "timed on other values. Take arms of other libraries out with --arms."
                    )
                place = {"shape": index, "mode": number, "product": product}
                new = [
                    {
                        **place,
                        "arm": t.name,
                        "reason": t.reason,
                        "error": t.error,
                        **t.times,
                        "over_ranks": t.over_ranks,
                    }
                    for t in trials
                ]
                report({"records": new})
                records += new
            del case, plain
        comm.check()
        others.close()
    return records


def _trials(
    comm: allnorm.Communicator,
    others: peers.Peers,
    case: Case,
    mode: Mode,
    job: Job,
    yardsticks: bool,
) -> list[_Trial]:
    """The arms of the job that the mode has, in the order of the table."""
    found: list[tuple[str, Arm | str]] = []
    obstacle = case.obstacle(mode.quant)
    for name in modes.arm_names(job.device, mode, job.island_size):
        if name in job.arms:
            blocked = obstacle if name != "allnorm16" else ""
            found.append((name, blocked or arms.make_arm(comm, case, mode, name)))
    for name in modes.peer_names(job.device, mode):
        if name in job.arms:
            of_peer = obstacle or others.arms(name, case, mode)
            several = [of_peer] if isinstance(of_peer, str) else of_peer
            found += [(name, arm) for arm in several]
    if yardsticks:
        found += [(name, arms.yardstick(name, case, _runnable(case, mode))) for name in YARDSTICKS]
    return [
        _Trial(name, reason=arm) if isinstance(arm, str) else _Trial(arm.name, arm)
        for name, arm in found
    ]


def _runnable(case: Case, mode: Mode) -> Mode:
    """The mode, without quantisation where rows of this width cannot be quantised so."""
    return replace(mode, quant="", return_normed=False) if case.obstacle(mode.quant) else mode


def _running(trials: list[_Trial]) -> list[tuple[_Trial, Arm]]:
    return [(trial, trial.arm) for trial in trials if trial.arm is not None]


def check_arm(arm: Arm, case: Case, mode: Mode) -> str:
    """Runs an arm once on every buffer set; what is wrong on this rank. Collective."""
    arm.reset()
    # All of them, also after an error: the other ranks may know of none.
    errors = [describe_error(arm, arm.call(index), case, index, mode) for index in range(NUM_SETS)]
    return next(filter(None, errors), "")


def describe_error(arm: Arm, result: Any, case: Case, index: int, mode: Mode) -> str:
    """What is wrong with the result of one call, in words; "" if nothing is."""
    if arm.check is not None:
        return arm.check(result, index)
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


def _measure(trials: list[_Trial], case: Case, job: Job, columns: int) -> None:
    if columns:
        _measure_behind(Product(case, columns), trials, case, job)
        return
    samples = _time(trials, case, job)
    for trial, arm in _running(trials):
        if arm.name in samples:
            trial.times = percentiles(samples[arm.name])
            if job.device == "cuda":
                trial.times |= clock.time_eager(arm, torch.cuda.synchronize)


def _measure_behind(product: Product, trials: list[_Trial], case: Case, job: Job) -> None:
    """Each arm behind a product, beside the product alone."""
    for trial, arm in _running(trials):
        trial.arm = product.before(arm)
    alone = product.alone()
    own = _time([_Trial("", alone), *trials], case, job)
    all_ranks = clock.together(own, [alone, *(arm for _, arm in _running(trials))])
    samples, product_us = product.take_off(all_ranks)
    product.restore()
    empty_us = percentile(samples["empty"], 50) if "empty" in samples else math.nan
    for trial, arm in _running(trials):
        if arm.name in samples:
            trial.times = percentiles(samples[arm.name])
            trial.times["beyond_empty_us"] = trial.times["p50_us"] - empty_us
            trial.times |= {"product_us": product_us, "empty_us": empty_us}
            trial.over_ranks = clock.over_ranks(arm)


def _time(trials: list[_Trial], case: Case, job: Job) -> clock.Samples:
    """Samples of each arm; what another library cannot capture is dropped on all ranks."""
    if job.device == "cpu":
        return clock.time_cpu([arm for _, arm in _running(trials)], job.seconds)
    graphs = [
        (arm, trial.attempt(clock.capture, arm, case.num_rows, where="in a CUDA graph: "))
        for trial, arm in _running(trials)
    ]
    return clock.time_cuda([pair for pair in graphs if pair[1] is not None], case.num_rows)
