"""Runs every arm of one batch on the reference arm's tokens, before anything is timed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from allnorm.bench.e2e import compare, sites
from allnorm.bench.e2e.compare import Trace
from allnorm.bench.e2e.generation import Generation, Runner
from allnorm.bench.e2e.job import REFERENCE, Job
from allnorm.bench.e2e.sites import Arm
from allnorm.testing import RankFailedError, all_or_none

_KEPT_TRACES = 4  # at most: the reference, the torch arm, and one or two more


@dataclass(frozen=True)
class Yardstick:
    """Two all-reduces whose results differ in their roundings.

    Attributes:
        what: they are, or why there are none.
        pair: the arms; empty if there are none.
    """

    what: str
    pair: tuple[Arm, ...] = ()


@dataclass
class Checked:
    """The arms of one batch.

    Attributes:
        runners: those to time, by name.
        found: what is known about those of the job, by name, see `_figures`.
        missing: why another library's arm failed, by name.
    """

    runners: dict[str, Runner] = field(default_factory=dict)
    found: dict[str, dict[str, Any]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def make_yardstick(job: Job, device: torch.device) -> Yardstick:
    """The pair, or why there is none; the same on every rank. Collective."""
    try:
        what, pair = all_or_none(sites.yardstick, device)
    except RankFailedError as error:
        return Yardstick(f"none ({error})")
    return Yardstick(what, tuple(Arm(sites.then_torch(r, job.model.eps)) for r in pair))


def check(
    job: Job, arms: Mapping[str, Arm], generation: Generation, yardstick: Yardstick
) -> Checked:
    """Runs and compares the arms. Collective.

    Args:
        job: what to run.
        arms: by name, those that are always run among them.
        generation: the batch.
        yardstick: what the differences from the torch arm are shown beside.
    """
    checked = Checked()

    def runner(name: str) -> Runner:
        captured = job.device == "cuda"
        if name not in checked.runners:
            checked.runners[name] = Runner(generation, arms[name], captured)
        return checked.runners[name]

    reference = runner(REFERENCE)
    steps = compare.num_steps(reference, _KEPT_TRACES)
    first = compare.trace(reference, steps)
    known = {
        REFERENCE: first,
        job.torch_arm: compare.trace(runner(job.torch_arm), steps, first.tokens),
    }
    spread = _spread(generation, yardstick, first)

    def trace(name: str) -> Trace:
        return compare.trace(runner(name), steps, first.tokens)

    for name, arm in arms.items():
        try:
            own = all_or_none(trace, name) if arm.foreign else trace(name)
        except RankFailedError as error:
            checked.runners.pop(name, None)
            checked.missing[name] = str(error)
            continue
        checked.found[name] = _figures(own, known[REFERENCE], known[job.torch_arm]) | spread
    return checked


def _spread(generation: Generation, yardstick: Yardstick, first: Trace) -> dict[str, Any]:
    """How far the yardstick's arms are apart, given the reference's tokens. Collective."""
    largest = mean = torch.nan
    if yardstick.pair:
        # Without graphs: a graph computes the same, and these are not timed.
        one, two = (
            compare.trace(Runner(generation, arm, captured=False), len(first.logits), first.tokens)
            for arm in yardstick.pair
        )
        apart = compare.compare(one, two)
        largest, mean = apart.largest, apart.mean
    return {"yardstick": yardstick.what, "yardstick_max": largest, "yardstick_mean": mean}


def _figures(own: Trace, reference: Trace, torch_arm: Trace) -> dict[str, Any]:
    """What one arm's logits are like, given the reference's tokens.

    `steps_checked`; `steps_equal_unfused` have the reference's bits; `finite`; `logits_max_diff`
    and `logits_mean_diff` against the torch arm; `choices_equal_torch` of the tokens are its own.
    """
    other = compare.compare(own, torch_arm)
    return {
        "steps_checked": len(own.logits),
        "steps_equal_unfused": compare.compare(own, reference).equal_steps,
        "finite": own.finite,
        "logits_max_diff": other.largest,
        "logits_mean_diff": other.mean,
        "choices_equal_torch": other.equal_choices,
    }
