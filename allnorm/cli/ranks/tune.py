"""Measures inside one rank what `allnorm tune` stores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

import allnorm
from allnorm import policy
from allnorm.cli import crossovers
from allnorm.cli.bench_modes import Mode
from allnorm.cli.crossovers import Candidate, Times
from allnorm.cli.options import Shape
from allnorm.cli.ranks import clock, peers
from allnorm.cli.ranks.arms import Arm, own_arm
from allnorm.cli.ranks.bench import describe_error
from allnorm.cli.ranks.case import NUM_SETS, Case, make_case
from allnorm.testing import report

_CUDA_ROUNDS = 5


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


def epilogue_of(quant: str) -> str:
    """The name that tables have for a spec."""
    return quant.partition(":")[0] or "norm"


def run(rank: int, world_size: int, job: Job) -> list[dict[str, Any]]:
    """Measures every curve. Collective.

    Returns:
        One record per curve, the same on every rank: `dtype`, `quant`, `hidden_size`, `times`
        (microseconds of the slowest rank, by tokens and candidate), `wrong` (what is wrong with a
        candidate's bits, by candidate), and `reason` ("" or why there is no such curve).
    """
    device = torch.device(job.device, rank) if job.device == "cuda" else torch.device("cpu")
    curves = [(d, q, h) for d in job.dtypes for q in job.quants for h in job.hidden_sizes]
    records = []
    with allnorm.Communicator(device=device) as comm:
        for index, (dtype, quant, hidden_size) in enumerate(curves):
            text = f"{hidden_size} columns, {dtype}, {quant or 'norm'}"
            report({"text": text, "done": index, "total": len(curves)})
            curve = _Curve(comm, job, dtype, Mode(quant), hidden_size)
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
    return records


class _Curve:
    """What is measured for one dtype, epilogue and hidden size.

    Attributes:
        wrong: what is wrong with a candidate's bits; it is not timed again.
        obstacle: why nothing can be measured; "" if it can.
    """

    def __init__(
        self, comm: allnorm.Communicator, job: Job, dtype: str, mode: Mode, hidden_size: int
    ) -> None:
        self._comm, self._job = comm, job
        self._dtype, self._mode, self._hidden_size = dtype, mode, hidden_size
        self.wrong: dict[Candidate, str] = {}
        self.obstacle = self._case(1).obstacle(mode.quant)

    def _case(self, num_tokens: int) -> Case:
        comm = self._comm
        shape = Shape(num_tokens, self._hidden_size)
        return make_case(
            *(shape, self._dtype, "rounded", comm.device, comm.rank, comm.world_size),
            seed=num_tokens,
        )

    def measure(self, num_tokens: int) -> Times:
        """Times of the candidates at so many tokens, after a look at their bits. Collective."""
        case, num_sms = self._case(num_tokens), 0
        if self._job.device == "cuda":
            num_sms = torch.cuda.get_device_properties(case.device).multi_processor_count
        arms = {}
        for candidate in crossovers.candidates(self._job.algorithms, num_tokens, num_sms):
            if candidate in self.wrong:
                continue
            arm = candidate_arm(self._comm, case, self._mode, candidate)
            if arm is None:
                continue
            error = _wrong_bits(arm, case, self._mode)
            if error:
                self.wrong[candidate] = f"{case.shape}: {error}"
            else:
                arms[candidate] = arm
        return self._time(arms, num_tokens)

    def _time(self, arms: dict[Candidate, Arm], num_tokens: int) -> Times:
        if self._job.device == "cpu":
            samples = clock.time_cpu(list(arms.values()), self._job.seconds)
        else:
            graphs = [(arm, clock.capture(arm, num_tokens)) for arm in arms.values()]
            samples = clock.time_cuda(graphs, num_tokens, rounds=_CUDA_ROUNDS)
        own = [clock.summary(samples[arm.name])["p50_us"] for arm in arms.values()]
        # What all ranks go by: the slowest one's.
        everybody: list[list[float]] = [own] * self._comm.world_size
        dist.all_gather_object(everybody, own)
        return dict(zip(arms, map(max, zip(*everybody, strict=True)), strict=True))


def candidate_arm(
    comm: allnorm.Communicator, case: Case, mode: Mode, candidate: Candidate
) -> Arm | None:
    """A call that a table of this candidate alone decides, as a stored one would.

    None if it cannot run. The table is in force from the arm's `reset` on, until another one's.
    """
    force = forced(comm, case, mode, candidate)
    force()
    arm = own_arm(comm, case, mode, str(candidate), "auto")
    plan = comm.plan(
        case.num_rows, case.shape.hidden_size, case.dtype, case.spec(mode.quant), algorithm="auto"
    )
    if isinstance(arm, str) or plan.algorithm != candidate.algorithm:
        return None
    return replace(arm, reset=force)


def forced(
    comm: allnorm.Communicator, case: Case, mode: Mode, candidate: Candidate
) -> Callable[[], None]:
    """Lets a communicator choose this candidate, and nothing else, for calls of a case."""
    step = policy.Step(None, candidate.algorithm, candidate.num_blocks)
    name = (str(case.dtype).removeprefix("torch."), epilogue_of(mode.quant))
    curve = policy.Curve(case.shape.hidden_size, (step,))
    table = policy.Table(f"candidate {candidate}", {name: [curve]})
    return lambda: comm._use_tables((table,))


def _wrong_bits(arm: Arm, case: Case, mode: Mode) -> str:
    """What is wrong with a candidate's result on any rank; "" if nothing is. Collective."""
    arm.reset()
    errors = [describe_error(arm, arm.call(index), case, index, mode) for index in range(NUM_SETS)]
    return peers.agree(next(filter(None, errors), ""))
