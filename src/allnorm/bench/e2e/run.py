"""The code that runs in every rank: it builds the model, compares the arms and times them.

The comparison forces all arms to continue with the tokens that the reference arm chose. Otherwise
two arms that choose one different token would generate different text, whose logits cannot be
compared.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import allnorm
from allnorm.bench.e2e import sites, weights
from allnorm.bench.e2e.generation import Generation, Runner
from allnorm.bench.e2e.models import LOCAL, MAX_LOGITS_BYTES, PEER_ARMS, REFERENCE, Job
from allnorm.bench.e2e.sites import Arm
from allnorm.testing import DTYPES, RankFailedError, all_or_none, report, same_bits, start_together
from allnorm.testing.rank import device
from allnorm.testing.timing import percentile, time_calls, time_steps

_SEED = 20
_KEPT_TRACES = 4  # maximum: reference, torch arm, and two more


def run(rank: int, world_size: int, job: Job) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Checks and times every arm at every batch size. Collective.

    Returns:
        A record per batch size and arm, in the same order on every rank: fields of a
        `report.Result` with this rank's values. And the reason per missing arm, by name.
    """
    dtype, model, where = DTYPES[job.dtype], job.model, device()
    report({"text": "making weights", "done": 0, "total": len(job.batch_sizes)})
    parameters = weights.make(model, rank, world_size, dtype, where)
    peers, peer_arms, missing = sites.peer_arms(
        [name for name in job.arms if name in PEER_ARMS],
        *(where, dtype, model, max(job.batch_sizes) * job.prompt),
    )
    records: list[dict[str, Any]] = []
    with allnorm.Communicator(device=where) as comm:
        names = dict.fromkeys([*(n for n in job.arms if n not in PEER_ARMS), *job.always])
        arms = {name: sites.make(name, comm, model) for name in names} | peer_arms
        yardstick, pair = make_yardstick(job, where)
        for index, batch_size in enumerate(job.batch_sizes):
            progress = {"done": index, "total": len(job.batch_sizes)}
            prompts = make_prompts(job, batch_size).to(where)
            generation = Generation(model, parameters, prompts, job.tokens, job.product)
            report({"text": f"batch {batch_size}: checking", **progress})
            runners, figures = check(job, arms, pair, generation, missing)
            report({"text": f"batch {batch_size}: timing", **progress})
            samples = measure(runners, job.rounds)
            comm.check()
            found = _records(job, generation, samples, figures)
            records += [{**record, "yardstick": yardstick} for record in found]
            del runners, generation
    peers.close()
    return records, missing


def make_prompts(job: Job, batch_size: int) -> Tensor:
    """Returns random prompts [batch_size, prompt] int64 on the CPU, different in every row."""
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randint(job.model.vocab_size, (batch_size, job.prompt), generator=generator)


# ---- comparing logits ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Trace:
    """The tokens and logits of an arm on one batch."""

    tokens: Tensor  # [batch_size, steps] int64, the arm's choice at each step
    logits: list[Tensor]  # per step: [batch_size, this rank's part of the vocabulary]

    @property
    def finite(self) -> bool:
        """Whether all logits are finite."""
        return all(bool(torch.isfinite(step).all()) for step in self.logits)


@dataclass
class Difference:
    """The difference between the logits of two arms on this rank."""

    equal_steps: int = 0  # number of steps with bit-identical logits
    largest: float = 0.0  # largest absolute difference
    mean: float = 0.0  # mean absolute difference
    equal_choices: int = 0  # number of equal tokens


def trace(runner: Runner, steps: int, forced: Tensor | None = None) -> Trace:
    """Generates and keeps the logits. Collective.

    With `forced` tokens, [batch_size, steps], it continues with those instead of the arm's choices.
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
        if forced is not None:
            generation.token.copy_(forced[:, step])
    return Trace(torch.stack(tokens, dim=1), logits)


def compare(own: Trace, other: Trace) -> Difference:
    """Compares two traces that continued with the same tokens. Not collective."""
    result = Difference(equal_choices=int((own.tokens == other.tokens).sum()))
    for ours, theirs in zip(own.logits, other.logits, strict=True):
        result.equal_steps += same_bits(ours, theirs)
        distance = (ours.float() - theirs.float()).abs()
        result.largest = max(result.largest, float(distance.max()))
        result.mean += float(distance.mean()) / len(own.logits)
    return result


def make_yardstick(job: Job, device: torch.device) -> tuple[str, tuple[Arm, ...]]:
    """Returns a description and two arms whose all-reduces round differently. Collective.

    If they cannot be made, there are no arms and the description says why; equal on every rank.
    """
    try:
        what, pair = all_or_none(sites.yardstick, device)
    except RankFailedError as error:
        return f"none ({error})", ()
    return what, tuple(Arm(sites.then_torch(r, job.model)) for r in pair)


def check(
    job: Job,
    arms: Mapping[str, Arm],
    yardstick: tuple[Arm, ...],
    generation: Generation,
    missing: dict[str, str],
) -> tuple[dict[str, Runner], dict[str, dict[str, Any]]]:
    """Runs and compares the arms. Collective.

    Drops arms of other libraries that fail, and adds the reason to `missing`.

    Returns:
        The arms to time, and per arm the fields of a `report.Result` about its logits.
    """
    runners: dict[str, Runner] = {}
    logits = generation.logits
    room = MAX_LOGITS_BYTES // (_KEPT_TRACES * logits.numel() * logits.element_size())
    steps = int(max(1, min(generation.num_tokens, room)))

    def traced(name: str, forced: Tensor | None) -> Trace:
        if name not in runners:
            runners[name] = Runner(generation, arms[name], captured=job.device == "cuda")
        return trace(runners[name], steps, forced)

    reference = traced(REFERENCE, None)
    torch_arm = traced(job.torch_arm, reference.tokens)
    apart = Difference(largest=math.nan, mean=math.nan)
    if yardstick:
        # Without graphs, because these are not timed and a graph computes the same.
        plain = (Runner(generation, arm, captured=False) for arm in yardstick)
        apart = compare(*(trace(runner, steps, reference.tokens) for runner in plain))
    figures = {}
    for name, arm in arms.items():
        arguments = (name, reference.tokens)
        try:
            own = all_or_none(traced, *arguments) if arm.foreign else traced(*arguments)
        except RankFailedError as error:
            runners.pop(name, None)
            missing[name] = str(error)
            continue
        other = compare(own, torch_arm)
        figures[name] = {
            "steps_checked": steps,
            "steps_equal_unfused": compare(own, reference).equal_steps,
            "finite": own.finite,
            "logits_max_diff": other.largest,
            "logits_mean_diff": other.mean,
            "choices_equal_torch": other.equal_choices,
            "yardstick_max": apart.largest,
            "yardstick_mean": apart.mean,
        }
    return runners, figures


# ---- timing --------------------------------------------------------------------------------------


@dataclass
class Samples:
    """The times and tokens of an arm on one batch; lists have one item per round."""

    ttft_us: list[float] = field(default_factory=list)  # time until the first tokens
    steps_us: list[list[float]] = field(default_factory=list)  # time of each further token
    # [batch_size, num_tokens] on the CPU.
    outputs: list[Tensor] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        """Returns times of a `report.Result`: medians over rounds, percentiles over all steps."""
        steps = [step for one_round in self.steps_us for step in one_round]
        tpot_us = statistics.median(map(statistics.fmean, self.steps_us))
        return {
            "ttft_ms": statistics.median(self.ttft_us) / 1e3,
            "tpot_ms": tpot_us / 1e3,
            "itl_p50_ms": percentile(steps, 50) / 1e3,
            "itl_p99_ms": percentile(steps, 99) / 1e3,
        }


def measure(arms: dict[str, Runner], rounds: int) -> dict[str, Samples]:
    """Times whole generations, with the arms interleaved. Collective. Every arm must have run."""
    samples = {name: Samples() for name in arms}
    for _ in range(rounds):
        for name, runner in arms.items():
            generation = runner.generation
            generation.reset()
            on_gpu = generation.token.device.type == "cuda"
            if on_gpu:
                torch.cuda.synchronize()
            start_together()
            phases = [runner.prefill, *[runner.step] * (generation.num_tokens - 1)]
            ttft_us, *steps_us = time_steps(phases) if on_gpu else time_calls(phases)
            samples[name].ttft_us.append(ttft_us)
            samples[name].steps_us.append(steps_us)
            samples[name].outputs.append(generation.outputs.to("cpu", copy=True))
    return samples


def _records(
    job: Job,
    generation: Generation,
    samples: dict[str, Samples],
    figures: dict[str, dict[str, Any]],
) -> list[dict[str, Any]]:
    def equal(name: str, other: str) -> int:
        """Returns how many tokens equal the other arm's first round; the minimum over rounds."""
        first = samples[other].outputs[0]
        return min(int((outputs == first).sum()) for outputs in samples[name].outputs)

    return [
        {
            "batch_size": generation.batch_size,
            "arm": name,
            **samples[name].figures(),
            "local_ms": samples[LOCAL].figures()["tpot_ms"],
            "num_tokens": generation.batch_size * generation.num_tokens,
            "tokens_equal_unfused": equal(name, REFERENCE),
            "tokens_equal_torch": equal(name, job.torch_arm),
            **figures[name],
        }
        for name in job.arms
        if name in figures
    ]
