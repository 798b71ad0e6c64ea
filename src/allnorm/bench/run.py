"""The code that runs in every rank of a benchmark: it checks and times the arms."""

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
from allnorm.bench import arms, bounds, clock, modes, peers, sharded_norm, streams
from allnorm.bench.arms import Arm
from allnorm.bench.case import NUM_SETS, Case, make_case
from allnorm.bench.clock import Gemm
from allnorm.bench.modes import Mode, Shape
from allnorm.testing import DTYPES, RankFailedError, agree, all_or_none, report, same_bits
from allnorm.testing.rank import device
from allnorm.testing.timing import percentile, percentiles


@dataclass(frozen=True)
class Job:
    """The settings of a benchmark, equal on every rank."""

    shapes: tuple[Shape, ...]  # shapes, in the order of measurement
    modes: tuple[Mode, ...]  # modes; every shape is measured in each of them
    dtype: str  # name of the dtype of the inputs
    numerics: str  # rounding mode of allnorm's calls
    arms: tuple[str, ...]  # names of arms and peers; a mode ignores those that it does not support
    device: str  # "cuda" or "cpu"
    seconds: float = 0.7  # on CPU: approximate time per arm and shape
    tuning_dir: str | None = None  # as in Communicator
    # Input features (K) of the GEMM before every timed call; 0: no GEMM, a chain of calls. All
    # shapes and modes are measured with each of them.
    products: tuple[int, ...] = (0,)
    max_blocks: int = 0  # as in Communicator; 0 for no limit
    island_size: int = 0  # consecutive ranks per island; 0: detect islands


@dataclass
class _Trial:
    """One arm in one mode of one shape; equal on every rank except the times."""

    name: str  # name of the arm, or of a peer that cannot run here
    arm: Arm | None = None  # None if the arm cannot run or its result is wrong
    reason: str = ""  # why the arm cannot run
    error: str = ""  # error in its result
    times: dict[str, float] = field(default_factory=lambda: percentiles([]))
    over_ranks: str = ""  # how ranks' times were combined; "" if they were not

    def record(self) -> dict[str, Any]:
        """Returns the fields of a record about this arm."""
        text = {"arm": self.name, "reason": self.reason, "error": self.error}
        return {**text, **self.times, "over_ranks": self.over_ranks}

    def attempt(self, step: Callable[..., Any], *arguments: Any, where: str = "") -> Any:
        """Runs a collective step for the arm.

        If another library's code fails in the step on any rank, every rank drops the arm.
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
    """Checks and then times every arm at every shape in every mode. Collective.

    The records of each shape and mode are also reported immediately, as `records`, so that an
    interrupted run keeps them.

    Returns:
        One record per shape, mode, GEMM and arm, in the same order on every rank: `shape` and
        `mode` (indices), `product`, `arm`, `reason` (why it cannot run, or ""), `error` (what is
        wrong with its result, or ""), `p50_us`, `p90_us`, `p99_us` of this rank, and on GPUs
        `host_us` and `eager_us` of calls without a graph. After a GEMM, times are combined over
        ranks (see `clock.over_ranks`) and are in excess of the GEMM's time `product_us`;
        `beyond_empty_us` is p50 in excess of an empty kernel's time `empty_us`. Arms that did not
        run, or were wrong, have no times.
    """
    if job.island_size:
        # Makes NCCL treat each island as a host, so that islands communicate like hosts.
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
                        f"an arm has overwritten the inputs that all arms share ({changed}), so "
                        "the other times are invalid. Exclude arms of other libraries with --arms."
                    )
                place = {"shape": index, "mode": number, "product": product}
                new = [{**place, **trial.record()} for trial in trials]
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
    """Returns the job's arms that the mode supports, in table order."""
    found: list[tuple[str, Arm | str]] = []
    obstacle = case.obstacle(mode.quant)
    for name in modes.arm_names(job.device, mode, job.island_size):
        if name in job.arms:
            blocked = obstacle if name != "allnorm16" else ""
            make = sharded_norm.make_arm if mode.slices else arms.make_arm
            make = streams.make_arm if mode.streams else make
            found.append((name, blocked or make(comm, case, mode, name)))
    for name in modes.peer_names(job.device, mode):
        if name in job.arms:
            of_peer = obstacle or others.arms(name, case, mode)
            several = [of_peer] if isinstance(of_peer, str) else of_peer
            found += [(name, arm) for arm in several]
    if yardsticks:
        wanted = modes.yardstick_names(mode)
        found += [(name, arms.yardstick(name, case, _runnable(case, mode))) for name in wanted]
    return [
        _Trial(name, reason=arm) if isinstance(arm, str) else _Trial(arm.name, arm)
        for name, arm in found
    ]


def _runnable(case: Case, mode: Mode) -> Mode:
    """Returns the mode, without quantization if rows of this width cannot be quantized that way."""
    return replace(mode, quant="", return_normed=False) if case.obstacle(mode.quant) else mode


def _running(trials: list[_Trial]) -> list[tuple[_Trial, Arm]]:
    return [(trial, trial.arm) for trial in trials if trial.arm is not None]


def check_arm(arm: Arm, case: Case, mode: Mode) -> str:
    """Runs an arm once per buffer set; returns this rank's first error or "". Collective."""
    arm.reset()
    # Runs all sets, even after an error, because other ranks may have no error and continue.
    errors = [describe_error(arm, arm.call(index), case, index, mode) for index in range(NUM_SETS)]
    return next(filter(None, errors), "")


def describe_error(arm: Arm, result: Any, case: Case, index: int, mode: Mode) -> str:
    """Describes the error in one call's result; "" if there is none."""
    if arm.check is not None:
        return arm.check(result, index)
    case, mode = arm.of or (case, mode)
    got, quant = arm.outcome(result), mode.quant
    if not arm.exact:
        return bounds.describe_error(got, case, index, quant)
    normed, residual = case.expected[index]
    own, rows = slice(*got.rows) if got.rows else slice(None), None if got.gathered else got.rows
    expected = {"residual": residual[own]}
    if not quant or mode.return_normed:
        expected["normed"] = normed if rows is None else normed[own]
    if quant:
        whole = rows is None
        parts = case.quantized(quant)[index] if whole else case.quantized_rows(quant, index, rows)
        expected["quantized"], expected["scale"] = parts
    for name, wanted in expected.items():
        part = getattr(got, name)
        if part is None:
            return f"{name} is missing"
        if not same_bits(part, wanted):
            return f"{name} differs from the reference"
    return ""


def _measure(trials: list[_Trial], case: Case, job: Job, columns: int) -> None:
    if columns:
        _measure_after_gemm(Gemm(case, columns), trials, case, job)
        return
    samples = _time(trials, case, job)
    for trial, arm in _running(trials):
        if arm.name in samples:
            trial.times = percentiles(samples[arm.name])
            if job.device == "cuda":
                trial.times |= clock.time_eager(arm, torch.cuda.synchronize)


def _measure_after_gemm(gemm: Gemm, trials: list[_Trial], case: Case, job: Job) -> None:
    """Times each arm after a GEMM, and the GEMM alone."""
    for trial, arm in _running(trials):
        trial.arm = gemm.before(arm)
    alone = gemm.alone()
    own = _time([_Trial("", alone), *trials], case, job)
    all_ranks = clock.over_all_ranks(own, [alone, *(arm for _, arm in _running(trials))])
    samples, gemm_us = gemm.subtract(all_ranks)
    gemm.restore()
    empty_us = percentile(samples["empty"], 50) if "empty" in samples else math.nan
    for trial, arm in _running(trials):
        if arm.name in samples:
            trial.times = percentiles(samples[arm.name])
            trial.times["beyond_empty_us"] = trial.times["p50_us"] - empty_us
            trial.times |= {"product_us": gemm_us, "empty_us": empty_us}
            trial.over_ranks = clock.over_ranks(arm)


def _time(trials: list[_Trial], case: Case, job: Job) -> clock.Samples:
    """Times each arm; drops an arm on all ranks if another library cannot capture it."""
    if job.device == "cpu":
        return clock.time_cpu([arm for _, arm in _running(trials)], job.seconds)
    graphs = [
        (arm, trial.attempt(clock.capture, arm, case.shape.num_tokens, where="in a CUDA graph: "))
        for trial, arm in _running(trials)
    ]
    return clock.time_cuda([pair for pair in graphs if pair[1] is not None], case.shape.num_tokens)
