"""Runs every arm of one batch before anything is timed, and compares them token by token.

All of them are given the tokens that the reference arm chose. Left to themselves, two arms that
once choose differently go on with different sentences, whose logits cannot be compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from allnorm.bench.e2e import sites
from allnorm.bench.e2e.generation import Generation, Runner
from allnorm.bench.e2e.job import REFERENCE, Job
from allnorm.bench.e2e.sites import Arm
from allnorm.testing import RankFailedError, all_or_none, same_bits

_KEPT_TRACES = 4  # at most: the reference, the torch arm, and one or two more
_MAX_BYTES = 4 << 30  # of logits kept for comparisons


@dataclass(frozen=True)
class Trace:
    """What an arm computed on one batch."""

    tokens: torch.Tensor  # [batch_size, steps] int64, what it chose at each step
    logits: list[torch.Tensor]  # of each step, [batch_size, this rank's part of the vocabulary]

    @property
    def finite(self) -> bool:
        """Whether all logits are."""
        return all(bool(torch.isfinite(step).all()) for step in self.logits)


@dataclass
class Difference:
    """How the logits of two arms differ on this rank."""

    equal_steps: int = 0  # how many had equal bits
    largest: float = 0.0  # the largest difference of a logit
    mean: float = 0.0  # of the absolute differences
    equal_choices: int = 0  # how many tokens are the same


def num_steps(runner: Runner, num_traces: int) -> int:
    """How many steps to compare, so that the kept logits of `num_traces` arms fit in memory."""
    logits = runner.generation.logits
    room = _MAX_BYTES // (num_traces * logits.numel() * logits.element_size())
    return int(max(1, min(runner.generation.num_tokens, room)))


def trace(runner: Runner, steps: int, given: torch.Tensor | None = None) -> Trace:
    """Generates and keeps the logits. Collective.

    Args:
        runner: the arm.
        steps: how many tokens.
        given: [batch_size, steps], the tokens to go on with; None: the arm's own.
    """
    generation = runner.generation
    generation.reset()
    tokens, logits = [], []
    for step in range(steps):
        if step:
            runner.step()
        else:
            runner.prefill()
        tokens.append(generation.token.clone())
        logits.append(generation.logits.clone())
        if given is not None:
            generation.token.copy_(given[:, step])
    return Trace(torch.stack(tokens, dim=1), logits)


def compare(own: Trace, other: Trace) -> Difference:
    """How a trace differs from another that was given the same tokens. Not collective."""
    found = Difference(equal_choices=int((own.tokens == other.tokens).sum()))
    for ours, theirs in zip(own.logits, other.logits, strict=True):
        found.equal_steps += same_bits(ours, theirs)
        distance = (ours.float() - theirs.float()).abs()
        found.largest = max(found.largest, float(distance.max()))
        found.mean += float(distance.mean()) / len(own.logits)
    return found


@dataclass(frozen=True)
class Yardstick:
    """Two all-reduces whose results differ in their roundings."""

    what: str  # they are, or why there are none
    pair: tuple[Arm, ...] = ()  # the arms; empty if there are none


@dataclass
class Checked:
    """The arms of one batch."""

    runners: dict[str, Runner] = field(default_factory=dict)  # those to time, by name
    # What is known about those of the job, by name, see `_figures`.
    found: dict[str, dict[str, Any]] = field(default_factory=dict)
    # Why another library's arm failed, by name.
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
    """Runs and compares the arms, those that are always run among them. Collective."""
    checked = Checked()

    def runner(name: str) -> Runner:
        captured = job.device == "cuda"
        if name not in checked.runners:
            checked.runners[name] = Runner(generation, arms[name], captured)
        return checked.runners[name]

    reference = runner(REFERENCE)
    steps = num_steps(reference, _KEPT_TRACES)
    first = trace(reference, steps)
    known = {REFERENCE: first, job.torch_arm: trace(runner(job.torch_arm), steps, first.tokens)}
    spread = _spread(generation, yardstick, first)

    def traced(name: str) -> Trace:
        return trace(runner(name), steps, first.tokens)

    for name, arm in arms.items():
        try:
            own = all_or_none(traced, name) if arm.foreign else traced(name)
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
            trace(Runner(generation, arm, captured=False), len(first.logits), first.tokens)
            for arm in yardstick.pair
        )
        apart = compare(one, two)
        largest, mean = apart.largest, apart.mean
    return {"yardstick": yardstick.what, "yardstick_max": largest, "yardstick_mean": mean}


def _figures(own: Trace, reference: Trace, torch_arm: Trace) -> dict[str, Any]:
    """What one arm's logits are like, given the reference's tokens.

    `steps_checked`; `steps_equal_unfused` have the reference's bits; `finite`; `logits_max_diff`
    and `logits_mean_diff` against the torch arm; `choices_equal_torch` of the tokens are its own.
    """
    other = compare(own, torch_arm)
    return {
        "steps_checked": len(own.logits),
        "steps_equal_unfused": compare(own, reference).equal_steps,
        "finite": own.finite,
        "logits_max_diff": other.largest,
        "logits_mean_diff": other.mean,
        "choices_equal_torch": other.equal_choices,
    }
