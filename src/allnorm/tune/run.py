"""Measures which candidate is fastest: starts the ranks, and holds the code that runs on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

import allnorm
from allnorm import policy, tuning
from allnorm.bench import clock, floor
from allnorm.bench.arms import Arm, allnorm_arm
from allnorm.bench.case import Case, make_case
from allnorm.bench.clock import Gemm
from allnorm.bench.modes import Mode, Shape
from allnorm.bench.run import check_arm
from allnorm.testing import DTYPES, OnMessage, agree, gather, report, run_ranks
from allnorm.testing.rank import device
from allnorm.testing.timing import percentile
from allnorm.tune import crossovers, prefetch
from allnorm.tune.crossovers import Candidate, Times
from allnorm.tune.prefetch import PrefetchTimes

# Two runs agree if no median differs by more than this share (docs/performance.md).
_STABLE = {"cuda": 0.02, "cpu": 0.1}
_MOST_RUNS = 4
_SECONDS = 3600.0  # time limit of a run
_CUDA_ROUNDS = 5
_Key = TypeVar("_Key")

# Maximum tokens of measurements after a GEMM. Beyond that, the noise of the GEMM's time exceeds the
# differences between candidates.
PRODUCT_TOKENS = 1024

# The shape for tuning the link rate: with this many rows, the link determines the time.
LINK_SHAPE = Shape(8192, 4096)
# Rates to try, as multiples of the rate that an unpaced call reaches.
_LINK_SHARES = tuple(1 + percent / 100 for percent in range(13))


@dataclass(frozen=True)
class Job:
    """The settings of a tuning run, equal on every rank."""

    dtypes: tuple[str, ...]  # names of the dtypes of the inputs
    quants: tuple[str, ...]  # quantizations, as `bench.modes.quant_name` writes them
    hidden_sizes: tuple[int, ...]  # numbers of columns
    tokens: tuple[int, ...]  # coarse grid of numbers of rows, ascending
    algorithms: tuple[str, ...]  # names of algorithms
    device: str  # "cuda" or "cpu"
    seconds: float = 0.1  # on CPU: approximate time per candidate and shape
    # Input features (K) of the GEMM before each call; 0: no GEMM, a chain of calls.
    product: int = 0
    # Models of `bench --layers` whose layers are timed with and without prefetch.
    layers: tuple[str, ...] = ()


@dataclass(frozen=True)
class CurveTimes:
    """The times for one dtype, epilogue and hidden size."""

    dtype: str  # name of the dtype
    quant: str  # quantization, as in Job
    hidden_size: int  # number of columns
    times: Mapping[int, Times]  # microseconds by tokens and candidate; these decide
    wrong: Mapping[Candidate, str]  # errors of candidates with wrong results; not timed again
    reason: str  # why nothing can be measured, or ""
    # Times in a chain of calls, in addition to `times` after a GEMM.
    chain: Mapping[int, Times] = field(default_factory=dict)

    @property
    def name(self) -> tuple[str, str]:
        """Dtype and epilogue: the key of the curve in a table."""
        return self.dtype, epilogue_of(self.quant)


@dataclass(frozen=True)
class LinkTimes:
    """The times of calls at different link rates."""

    # Maps each rate to the microseconds of LINK_SHAPE; rate 0 means unpaced.
    us: dict[float, float] = field(default_factory=dict)
    # Maps each rate to the error in the results at that rate.
    wrong: dict[float, str] = field(default_factory=dict)

    @property
    def gbps(self) -> float:
        """The best rate, as in `policy.Plan`."""
        return crossovers.link_rate(self.us)


@dataclass(frozen=True)
class Result:
    """All measurements, equal on every rank."""

    curves: list[CurveTimes]  # in the order of the job
    link: LinkTimes = field(default_factory=LinkTimes)  # curves were measured at its rate
    product: int = 0  # as in Job
    prefetch: PrefetchTimes = field(default_factory=PrefetchTimes)

    @property
    def wrong(self) -> set[Candidate]:
        """Candidates with a wrong result at some size, which are not used at any size."""
        return {candidate for curve in self.curves for candidate in curve.wrong}


def measure(job: Job, world_size: int, on_message: OnMessage | None = None) -> Result:
    """Starts ranks that measure, and returns their result.

    `on_message` takes a rank and its progress (`text`, `done` and `total`), or a result under
    `measured`: first the LinkTimes, if any, then each CurveTimes as soon as it is complete, last
    the PrefetchTimes.

    Raises:
        RankError: a rank raised an error, died or timed out.
        RuntimeError: the ranks have different times, which must not be stored.
    """
    results: list[Result] = run_ranks(
        run, world_size, device=job.device, args=(job,), timeout=_SECONDS, on_message=on_message
    )
    if any(other != results[0] for other in results):
        raise RuntimeError(
            "the ranks have different curves: this is a bug in allnorm tune; please report it"
        )
    return results[0]


def epilogue_of(quant: str) -> str:
    """Returns the name of a quantization spec in tables."""
    return quant.partition(":")[0] or "norm"


def run(rank: int, world_size: int, job: Job) -> Result:
    """Measures the link rate (on GPUs), then every curve, then prefetch. Collective."""
    curves = [(d, q, h) for d in job.dtypes for q in job.quants for h in job.hidden_sizes]
    with allnorm.Communicator(device=device()) as comm:
        tables = comm._endpoint.chooser.traits.tables
        result = Result([], product=job.product)
        if job.device == "cuda" and len(comm.islands) == 1:
            report({"text": "link rate", "done": 0, "total": len(curves)})
            result = Result([], _try_link_rates(comm, job), job.product)
            report({"measured": result.link})
        for index, (dtype, quant, hidden_size) in enumerate(curves):
            text = f"{hidden_size} columns, {dtype}, {quant or 'norm'}"
            report({"text": text, "done": index, "total": len(curves)})
            curve = _measure_curve(comm, job, dtype, Mode(quant), hidden_size, result.link.gbps)
            report({"measured": curve})
            result.curves.append(curve)
        if len(comm.islands) == 1:
            comm._use_tables(tables)  # not the last candidate's
            times = prefetch.measure(comm, job.layers, job.dtypes[0], job.device, job.seconds)
            report({"measured": times})
            result = replace(result, prefetch=times)
        comm.check()
    return result


def _try_link_rates(comm: allnorm.Communicator, job: Job) -> LinkTimes:
    case, mode = _make_case(comm, LINK_SHAPE, "bfloat16"), Mode()
    # Both algorithms send the same bytes with two ranks, but one_shot sends them in one hop.
    candidate = Candidate("one_shot" if comm.world_size == 2 else "two_shot")
    found = LinkTimes()

    def try_rates(rates: Sequence[float]) -> None:
        arms = {}
        for rate in rates:
            arm = candidate_arm(comm, case, mode, candidate, rate)
            if arm is None:  # the workspace is too small for a row
                return
            if error := agree(check_arm(arm, case, mode)):
                found.wrong[rate] = f"{case.shape}, {rate:.0f} GB/s: {error}"
            else:
                arms[rate] = replace(arm, name=f"{rate:.1f} GB/s")
        found.us.update(_time(job, arms, case.shape.num_tokens))

    try_rates([0.0])
    if 0.0 in found.us:
        size = (LINK_SHAPE.num_tokens, LINK_SHAPE.hidden_size, case.dtype.itemsize)
        gbps = floor.wire_bytes(comm.world_size, *size, mode) / found.us[0.0] / 1e3
        least, most = tuning.LINK_GBPS
        rates = [round(share * gbps, 1) for share in _LINK_SHARES]
        try_rates([rate for rate in rates if least <= rate <= most])
    return found


def _make_case(comm: allnorm.Communicator, shape: Shape, dtype: str) -> Case:
    return make_case(
        *(shape, dtype, "rounded", comm.device, comm.rank, comm.world_size), seed=shape.num_tokens
    )


def _time(
    job: Job, arms: Mapping[_Key, Arm], num_tokens: int, gemm: Gemm | None = None
) -> dict[_Key, float]:
    """Returns the median time of each arm in microseconds, equal on all ranks. Collective.

    In a chain of calls it is the slowest rank's median. After a GEMM it is the median of the
    shortest of the ranks' times per replay, in excess of the GEMM's time. Runs are repeated until
    two agree, up to _MOST_RUNS; then the smallest median of each arm counts.
    """
    alone: list[Arm] = []
    if gemm is not None:
        alone = [gemm.alone()]
        arms = {key: gemm.before(arm) for key, arm in arms.items()}
    timed = [*alone, *arms.values()]
    graphs = [] if job.device == "cpu" else [(arm, clock.capture(arm, num_tokens)) for arm in timed]
    least: dict[_Key, float] = {}
    for _ in range(_MOST_RUNS):
        if job.device == "cpu":
            samples = clock.time_cpu(timed, job.seconds)
        else:
            samples = clock.time_cuda(graphs, num_tokens, rounds=_CUDA_ROUNDS)
        if gemm is not None:
            samples, _ = gemm.subtract(clock.over_all_ranks(samples, timed))
        own = [percentile(samples[arm.name], 50) for arm in arms.values()]
        found = dict(zip(arms, map(max, zip(*gather(own), strict=True)), strict=True))
        stable = bool(least) and all(
            abs(us - least[key]) <= _STABLE[job.device] * abs(least[key])
            for key, us in found.items()
        )
        least = {key: min(us, least.get(key, us)) for key, us in found.items()}
        if stable:
            break
    if gemm is not None:
        gemm.restore()
    return least


def _measure_curve(
    comm: allnorm.Communicator, job: Job, dtype: str, mode: Mode, hidden_size: int, link_gbps: float
) -> CurveTimes:
    """Checks and times the candidates at as many sizes as the search needs."""
    wrong: dict[Candidate, str] = {}
    chain: dict[int, Times] = {}
    num_sms, row_bytes = 0, hidden_size * DTYPES[dtype].itemsize
    if job.device == "cuda":
        num_sms = torch.cuda.get_device_properties(comm.device).multi_processor_count

    def measure_at(num_tokens: int) -> Times:
        case, arms = _make_case(comm, Shape(num_tokens, hidden_size), dtype), {}
        for candidate in crossovers.candidates(job.algorithms, num_tokens, num_sms, row_bytes):
            if candidate in wrong:
                continue
            arm = candidate_arm(comm, case, mode, candidate, link_gbps)
            if arm is None:
                continue
            if error := agree(check_arm(arm, case, mode)):
                wrong[candidate] = f"{case.shape}: {error}"
            else:
                arms[candidate] = arm
        if not job.product or num_tokens > PRODUCT_TOKENS:
            return _time(job, arms, num_tokens)
        chain[num_tokens] = _time(job, arms, num_tokens)
        return _time(job, arms, num_tokens, Gemm(case, job.product))

    reason = _make_case(comm, Shape(1, hidden_size), dtype).obstacle(mode.quant)
    if len(comm.islands) > 1:
        reason = f"{len(comm.islands)} islands: tables support one island only"
    times = {} if reason else crossovers.search(measure_at, job.tokens)
    return CurveTimes(dtype, mode.quant, hidden_size, times, wrong, reason, chain)


def candidate_arm(
    comm: allnorm.Communicator, case: Case, mode: Mode, candidate: Candidate, link_gbps: float
) -> Arm | None:
    """Returns an arm that uses a table with only this candidate and rate; None if it cannot run.

    The arm's `reset` installs the table; it stays until the `reset` of a different arm.
    """
    force = forced(comm, case, mode, candidate, link_gbps)
    force()
    arm = allnorm_arm(comm, case, mode, str(candidate), "auto")
    plan = comm.plan(
        case.shape.num_tokens,
        case.shape.hidden_size,
        case.dtype,
        case.spec(mode.quant),
        algorithm="auto",
    )
    if isinstance(arm, str) or plan.algorithm != candidate.algorithm:
        return None
    return replace(arm, reset=force)


def forced(
    comm: allnorm.Communicator, case: Case, mode: Mode, candidate: Candidate, link_gbps: float
) -> Callable[[], None]:
    """Returns a function that makes a communicator use this candidate for a case's calls."""
    step = candidate.step(None)
    name = (str(case.dtype).removeprefix("torch."), epilogue_of(mode.quant))
    curve = policy.Curve(case.shape.hidden_size, (step,))
    table = policy.Table(f"candidate {candidate}", {name: [curve]}, link_gbps)
    return lambda: comm._use_tables((table,))
