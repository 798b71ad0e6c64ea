"""Measures inside one rank what `allnorm tune` stores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import allnorm
from allnorm import policy, tuning
from allnorm.cli import bench_floor, crossovers
from allnorm.cli.bench_modes import Mode
from allnorm.cli.crossovers import Candidate, Times
from allnorm.cli.options import Shape
from allnorm.cli.ranks import clock, peers
from allnorm.cli.ranks.arms import Arm, own_arm
from allnorm.cli.ranks.bench import describe_error
from allnorm.cli.ranks.case import NUM_SETS, Case, make_case
from allnorm.testing import report

_CUDA_ROUNDS = 5
_Key = TypeVar("_Key")

# The rate of the link is what makes this fastest: so many rows that all else hides behind it.
LINK_SHAPE = Shape(8192, 4096)
# Rates tried, as shares of what is reached without one. H200, 2 ranks, 2026-11: 341 GB/s is
# reached, and 369 is the best; from 384 on it makes no difference.
_LINK_SHARES = tuple(1 + percent / 100 for percent in range(13))


@dataclass(frozen=True)
class Job:
    """What to measure; the same on every rank.

    Attributes:
        dtypes: names of the dtypes of the inputs.
        quants: what follows the norm, as `bench_modes.quant_name` writes it.
        hidden_sizes: columns.
        tokens: the coarse grid of rows, ascending.
        algorithms: by name.
        device: "cuda" or "cpu".
        seconds: on CPU, roughly how long one candidate of one shape is timed.
    """

    dtypes: tuple[str, ...]
    quants: tuple[str, ...]
    hidden_sizes: tuple[int, ...]
    tokens: tuple[int, ...]
    algorithms: tuple[str, ...]
    device: str
    seconds: float = 0.1


@dataclass(frozen=True)
class Result:
    """What was measured, the same on every rank.

    Attributes:
        curves: one record each: `dtype`, `quant`, `hidden_size`, `times` (microseconds of the
            slowest rank, by tokens and candidate), `wrong` (what is wrong with a candidate's bits,
            by candidate), and `reason` ("" or why there is no such curve).
        link_gbps: at which they were measured, as of a policy.Plan.
        link_us: microseconds of LINK_SHAPE by the rates that were tried.
        link_wrong: what is wrong with the bits at a rate, by rate.
    """

    curves: list[dict[str, Any]]
    link_gbps: float = 0.0
    link_us: dict[float, float] = field(default_factory=dict)
    link_wrong: dict[float, str] = field(default_factory=dict)


def epilogue_of(quant: str) -> str:
    """The name that tables have for a spec."""
    return quant.partition(":")[0] or "norm"


def run(rank: int, world_size: int, job: Job) -> Result:
    """Measures every curve, on GPUs the rate of the link before. Collective."""
    device = torch.device(job.device, rank) if job.device == "cuda" else torch.device("cpu")
    curves = [(d, q, h) for d in job.dtypes for q in job.quants for h in job.hidden_sizes]
    records: list[dict[str, Any]] = []
    result = Result(records)
    with allnorm.Communicator(device=device) as comm:
        if job.device == "cuda":
            report({"text": "rate of the link", "done": 0, "total": len(curves)})
            us, wrong = _try_link_rates(comm, job)
            result = Result(records, crossovers.link_rate(us), us, wrong)
        for index, (dtype, quant, hidden_size) in enumerate(curves):
            text = f"{hidden_size} columns, {dtype}, {quant or 'norm'}"
            report({"text": text, "done": index, "total": len(curves)})
            curve = _Curve(comm, job, dtype, Mode(quant), hidden_size, result.link_gbps)
            records.append(
                {
                    "dtype": dtype,
                    "quant": quant,
                    "hidden_size": hidden_size,
                    "reason": curve.obstacle,
                    "times": {} if curve.obstacle else crossovers.search(curve.measure, job.tokens),
                    "wrong": curve.wrong,
                }
            )
        comm.check()
    return result


def _try_link_rates(
    comm: allnorm.Communicator, job: Job
) -> tuple[dict[float, float], dict[float, str]]:
    """Microseconds of LINK_SHAPE, or what is wrong with its bits, by the rate; 0: none."""
    case = _make_case(comm, LINK_SHAPE, "bfloat16")
    mode = Mode("")
    # What is sent is the same in both; at two ranks one_shot sends it in one hop.
    candidate = Candidate("one_shot" if comm.world_size == 2 else "two_shot")
    wrong: dict[float, str] = {}

    def time(rates: Sequence[float]) -> dict[float, float]:
        arms = {}
        for rate in rates:
            arm = candidate_arm(comm, case, mode, candidate, rate)
            if arm is None:  # a workspace that is too small for a row
                return {}
            error = _wrong_bits(arm, case, mode)
            if error:
                wrong[rate] = f"{case.shape}, {rate:.0f} GB/s: {error}"
            else:
                arms[rate] = replace(arm, name=f"{rate:.1f} GB/s")
        return _time(comm, job, arms, LINK_SHAPE.num_tokens)

    us = time([0.0])
    if 0.0 in us:
        shape = LINK_SHAPE
        element_bytes = case.dtype.itemsize
        sent = bench_floor.wire_bytes(
            comm.world_size, shape.num_tokens, shape.hidden_size, element_bytes, mode
        )
        rates = [round(share * sent / us[0.0] / 1e3, 1) for share in _LINK_SHARES]
        least, most = tuning.LINK_GBPS
        us |= time([rate for rate in rates if least <= rate <= most])
    return us, wrong


def _make_case(comm: allnorm.Communicator, shape: Shape, dtype: str) -> Case:
    return make_case(
        *(shape, dtype, "rounded", comm.device, comm.rank, comm.world_size), seed=shape.num_tokens
    )


def _time(
    comm: allnorm.Communicator, job: Job, arms: Mapping[_Key, Arm], num_tokens: int
) -> dict[_Key, float]:
    """Median microseconds of each arm, of the slowest rank: what all ranks go by. Collective."""
    if job.device == "cpu":
        samples = clock.time_cpu(list(arms.values()), job.seconds)
    else:
        graphs = [(arm, clock.capture(arm, num_tokens)) for arm in arms.values()]
        samples = clock.time_cuda(graphs, num_tokens, rounds=_CUDA_ROUNDS)
    own = [clock.summary(samples[arm.name])["p50_us"] for arm in arms.values()]
    everybody: list[list[float]] = [own] * comm.world_size
    dist.all_gather_object(everybody, own)
    return dict(zip(arms, map(max, zip(*everybody, strict=True)), strict=True))


class _Curve:
    """What is measured for one dtype, epilogue and hidden size.

    Attributes:
        wrong: what is wrong with a candidate's bits; it is not timed again.
        obstacle: why nothing can be measured; "" if it can.
    """

    def __init__(
        self,
        comm: allnorm.Communicator,
        job: Job,
        dtype: str,
        mode: Mode,
        hidden_size: int,
        link_gbps: float,
    ) -> None:
        self._comm, self._job, self._link_gbps = comm, job, link_gbps
        self._dtype, self._mode, self._hidden_size = dtype, mode, hidden_size
        self.wrong: dict[Candidate, str] = {}
        self.obstacle = self._case(1).obstacle(mode.quant)

    def _case(self, num_tokens: int) -> Case:
        return _make_case(self._comm, Shape(num_tokens, self._hidden_size), self._dtype)

    def measure(self, num_tokens: int) -> Times:
        """Times of the candidates at so many tokens, after a look at their bits. Collective."""
        case, num_sms = self._case(num_tokens), 0
        if self._job.device == "cuda":
            num_sms = torch.cuda.get_device_properties(case.device).multi_processor_count
        arms = {}
        for candidate in crossovers.candidates(self._job.algorithms, num_tokens, num_sms):
            if candidate in self.wrong:
                continue
            arm = candidate_arm(self._comm, case, self._mode, candidate, self._link_gbps)
            if arm is None:
                continue
            error = _wrong_bits(arm, case, self._mode)
            if error:
                self.wrong[candidate] = f"{case.shape}: {error}"
            else:
                arms[candidate] = arm
        return _time(self._comm, self._job, arms, num_tokens)


def candidate_arm(
    comm: allnorm.Communicator, case: Case, mode: Mode, candidate: Candidate, link_gbps: float
) -> Arm | None:
    """A call that a table of this candidate and rate alone decides, as a stored one would.

    None if it cannot run. The table is in force from the arm's `reset` on, until another one's.
    """
    force = forced(comm, case, mode, candidate, link_gbps)
    force()
    arm = own_arm(comm, case, mode, str(candidate), "auto")
    plan = comm.plan(
        case.num_rows, case.shape.hidden_size, case.dtype, case.spec(mode.quant), algorithm="auto"
    )
    if isinstance(arm, str) or plan.algorithm != candidate.algorithm:
        return None
    return replace(arm, reset=force)


def forced(
    comm: allnorm.Communicator, case: Case, mode: Mode, candidate: Candidate, link_gbps: float
) -> Callable[[], None]:
    """Lets a communicator choose this candidate, and nothing else, for calls of a case."""
    step = policy.Step(None, candidate.algorithm, candidate.num_blocks)
    name = (str(case.dtype).removeprefix("torch."), epilogue_of(mode.quant))
    curve = policy.Curve(case.shape.hidden_size, (step,))
    table = policy.Table(f"candidate {candidate}", {name: [curve]}, link_gbps)
    return lambda: comm._use_tables((table,))


def _wrong_bits(arm: Arm, case: Case, mode: Mode) -> str:
    """What is wrong with a candidate's result on any rank; "" if nothing is. Collective."""
    arm.reset()
    errors = [describe_error(arm, arm.call(index), case, index, mode) for index in range(NUM_SETS)]
    return peers.agree(next(filter(None, errors), ""))
