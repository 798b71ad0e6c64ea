"""Builds the model in one rank, checks the arms against each other and times them."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import torch

import allnorm
from allnorm.cli.e2e_models import Transformer
from allnorm.cli.ranks.data import DTYPES
from allnorm.cli.ranks.e2e import clock, compare, sites, weights
from allnorm.cli.ranks.e2e.generation import Generation, Runner
from allnorm.cli.ranks.peers import agree
from allnorm.cli.ranks.peers.base import first_line
from allnorm.testing import report
from allnorm.testing.timing import percentile

REFERENCE = "allnorm:unfused"
LOCAL = "local"
_SEED = 20


@dataclass(frozen=True)
class Job:
    """What to run; the same on every rank.

    Attributes:
        model: its dimensions.
        batch_sizes: numbers of prompts.
        prompt: tokens of a prompt.
        tokens: to generate, at least 2.
        arms: what to time and compare, of `cli.e2e.arm_names`.
        dtype: name of the dtype of weights and activations.
        device: "cuda" or "cpu".
        rounds: how often each arm generates everything.
    """

    model: Transformer
    batch_sizes: tuple[int, ...]
    prompt: int
    tokens: int
    arms: tuple[str, ...]
    dtype: str
    device: str
    rounds: int

    @property
    def torch_arm(self) -> str:
        """The arm that stands for what others compute."""
        return "nccl+torch" if self.device == "cuda" else "gloo+torch"


@dataclass(frozen=True)
class Yardstick:
    """Two all-reduces whose results differ in their roundings.

    Attributes:
        what: they are, or why there are none.
        pair: the arms; empty if there are none.
    """

    what: str
    pair: tuple[sites.Site, ...] = ()


def run(rank: int, world_size: int, job: Job) -> list[dict[str, Any]]:
    """Checks and times every arm at every batch size. Collective.

    Returns:
        One record per batch size and arm, in the same order on every rank: `batch_size`, `arm`,
        what `_times` and `_checked` say, `local_us` (a decode step without communication),
        `yardstick` (what it compares), `yardstick_max`, `yardstick_mean`.
    """
    device = torch.device(job.device, rank) if job.device == "cuda" else torch.device("cpu")
    dtype = DTYPES[job.dtype]
    report({"text": "making weights", "done": 0, "total": len(job.batch_sizes)})
    made = weights.make(job.model, rank, world_size, dtype, device)
    records = []
    with allnorm.Communicator(device=device) as comm:
        yardstick = _yardstick(job, device)
        for index, batch_size in enumerate(job.batch_sizes):
            progress = {"done": index, "total": len(job.batch_sizes)}
            prompts = make_prompts(job, batch_size).to(device)
            generation = Generation(job.model, made, prompts, job.tokens)
            report({"text": f"batch {batch_size}: checking", **progress})
            runners, checked = _check(job, comm, generation, yardstick)
            report({"text": f"batch {batch_size}: timing", **progress})
            samples = clock.measure(runners, job.rounds)
            comm.check()
            records += _records(job, generation, samples, checked)
            del runners, generation
    return records


def make_prompts(job: Job, batch_size: int) -> torch.Tensor:
    """[batch_size, prompt] int64: random tokens, other ones in every row; on the CPU."""
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randint(job.model.vocab_size, (batch_size, job.prompt), generator=generator)


def _yardstick(job: Job, device: torch.device) -> Yardstick:
    """The pair, or why there is none; the same on every rank. Collective."""
    try:
        what, pair = sites.yardstick(device)
        reason = ""
    except Exception as error:  # noqa: BLE001 - without the second algorithm there is no yardstick
        reason = first_line(error)
    reason = agree(reason)
    if reason:
        return Yardstick(f"none: {reason}")
    return Yardstick(what, tuple(sites.then_torch(reduce, job.model.eps) for reduce in pair))


def _check(
    job: Job, comm: allnorm.Communicator, generation: Generation, yardstick: Yardstick
) -> tuple[dict[str, Runner], dict[str, dict[str, Any]]]:
    """Runs every arm on the reference's tokens; returns the arms to time and what was found."""
    eps, on_gpu = job.model.eps, job.device == "cuda"

    def runner(name: str) -> Runner:
        return Runner(generation, sites.make(name, comm, eps), captured=on_gpu)

    reference = runner(REFERENCE)
    steps = compare.num_steps(reference, num_traces=3)
    first = compare.trace(reference, steps)
    arms = {name: runner(name) for name in job.arms if name != REFERENCE}
    torch_runner = arms.get(job.torch_arm) or runner(job.torch_arm)
    other = compare.trace(torch_runner, steps, first.tokens)
    spread = compare.Difference()
    if yardstick.pair:
        # Without graphs: a graph computes the same, and these are not timed.
        one, two = (
            compare.trace(Runner(generation, site, captured=False), steps, first.tokens)
            for site in yardstick.pair
        )
        spread = compare.compare(one, {"": two}).against[""]
        del one, two
    common = {
        "yardstick": yardstick.what,
        "yardstick_max": spread.largest if yardstick.pair else torch.nan,
        "yardstick_mean": spread.mean if yardstick.pair else torch.nan,
    }
    known = {REFERENCE: first, job.torch_arm: other}
    checked = {}
    for name in job.arms:
        own = compare.trace(reference if name == REFERENCE else arms[name], steps, first.tokens)
        checked[name] = _checked(job, compare.compare(own, known)) | common
    # The reference's own tokens are compared with those of the others as they were timed.
    timed = {name: reference if name == REFERENCE else arms[name] for name in job.arms}
    timed = {REFERENCE: reference, job.torch_arm: torch_runner, **timed, LOCAL: runner(LOCAL)}
    return timed, checked


def _checked(job: Job, outcome: compare.Outcome) -> dict[str, Any]:
    """What one arm's logits are like, given the reference's tokens.

    `steps` were checked; `equal_steps` have the reference's bits; `finite`; `logits_max_diff` and
    `logits_mean_diff` against the torch arm; `equal_choices` of the tokens are the torch arm's.
    """
    reference, other = outcome.against[REFERENCE], outcome.against[job.torch_arm]
    return {
        "steps": reference.steps,
        "equal_steps": reference.equal_steps,
        "finite": outcome.finite,
        "logits_max_diff": other.largest,
        "logits_mean_diff": other.mean,
        "equal_choices": other.equal_choices,
    }


def _records(
    job: Job,
    generation: Generation,
    samples: dict[str, clock.Samples],
    checked: dict[str, dict[str, Any]],
) -> list[dict[str, Any]]:
    first = {name: samples[name].outputs[0] for name in (REFERENCE, job.torch_arm)}
    local_us = _times(samples[LOCAL])["tpot_us"]
    records = []
    for name in job.arms:
        outputs = samples[name].outputs
        equal = {
            other: min(int((own == tokens).sum()) for own in outputs)
            for other, tokens in first.items()
        }
        records.append(
            {
                "batch_size": generation.batch_size,
                "arm": name,
                **_times(samples[name]),
                "local_us": local_us,
                "num_tokens": generation.batch_size * generation.num_tokens,
                "equal_tokens": equal[REFERENCE],
                "equal_tokens_torch": equal[job.torch_arm],
                **checked[name],
            }
        )
    return records


def _times(samples: clock.Samples) -> dict[str, float]:
    """`ttft_us` and `tpot_us`, the medians over the rounds; `itl_p50_us`, `itl_p99_us`."""
    steps = sorted(step for one_round in samples.steps_us for step in one_round)
    return {
        "ttft_us": statistics.median(samples.ttft_us),
        "tpot_us": statistics.median(statistics.fmean(steps) for steps in samples.steps_us),
        "itl_p50_us": percentile(steps, 0.5),
        "itl_p99_us": percentile(steps, 0.99),
    }
