"""Builds the model in one rank, checks the arms against each other and times them."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

import torch

import allnorm
from allnorm.bench.e2e import check, sites, weights
from allnorm.bench.e2e.generation import Generation, Runner
from allnorm.bench.e2e.job import LOCAL, PEER_ARMS, REFERENCE, Job
from allnorm.bench.e2e.peer_sites import PeerSites
from allnorm.testing import DTYPES, report, start_together
from allnorm.testing.rank import device
from allnorm.testing.timing import percentile, time_calls, time_steps

_SEED = 20


@dataclass
class Found:
    """What one rank found."""

    missing: dict[str, str]  # why an arm is missing, by its name
    # One per batch size and arm, in the same order on every rank: fields of a `report.Result`, this
    # rank's.
    records: list[dict[str, Any]] = field(default_factory=list)


def run(rank: int, world_size: int, job: Job) -> Found:
    """Checks and times every arm at every batch size. Collective."""
    dtype, model, where = DTYPES[job.dtype], job.model, device()
    report({"text": "making weights", "done": 0, "total": len(job.batch_sizes)})
    made = weights.make(model, rank, world_size, dtype, where)
    peers = PeerSites(
        [name for name in job.arms if name in PEER_ARMS],
        *(where, dtype, model.hidden_size, max(job.batch_sizes) * job.prompt, model.eps),
    )
    found = Found(dict(peers.missing))
    with allnorm.Communicator(device=where) as comm:
        own = dict.fromkeys([name for name in job.arms if name not in PEER_ARMS] + [*job.always])
        arms = {name: sites.make(name, comm, model.eps) for name in own} | peers.arms
        yardstick = check.make_yardstick(job, where)
        for index, batch_size in enumerate(job.batch_sizes):
            progress = {"done": index, "total": len(job.batch_sizes)}
            prompts = make_prompts(job, batch_size).to(where)
            generation = Generation(model, made, prompts, job.tokens)
            report({"text": f"batch {batch_size}: checking", **progress})
            checked = check.check(job, arms, generation, yardstick)
            report({"text": f"batch {batch_size}: timing", **progress})
            samples = measure(checked.runners, job.rounds)
            comm.check()
            found.records += _records(job, generation, samples, checked.found)
            found.missing |= checked.missing
            del checked, generation
    peers.close()
    return found


def make_prompts(job: Job, batch_size: int) -> torch.Tensor:
    """[batch_size, prompt] int64: random tokens, other ones in every row; on the CPU."""
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randint(job.model.vocab_size, (batch_size, job.prompt), generator=generator)


@dataclass
class Samples:
    """What one arm took on one batch."""

    ttft_us: list[float] = field(default_factory=list)  # of every round, until the first tokens
    steps_us: list[list[float]] = field(default_factory=list)  # of every round, each further token
    # Of every round, the tokens, [batch_size, num_tokens] on the CPU.
    outputs: list[torch.Tensor] = field(default_factory=list)


def measure(arms: dict[str, Runner], rounds: int) -> dict[str, Samples]:
    """Times whole generations; the arms take turns, round after round. Collective.

    Args:
        arms: by name; all of them have run before.
        rounds: how often each arm generates everything.
    """
    samples = {name: Samples() for name in arms}
    for _ in range(rounds):
        for name, runner in arms.items():
            runner.generation.reset()
            ttft_us, steps_us = _timed(runner)
            samples[name].ttft_us.append(ttft_us)
            samples[name].steps_us.append(steps_us)
            samples[name].outputs.append(runner.generation.outputs.to("cpu", copy=True))
    return samples


def _timed(runner: Runner) -> tuple[float, list[float]]:
    """One generation: time until the first token, and between the others."""
    on_gpu = runner.generation.token.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
    start_together()
    phases = [runner.prefill, *[runner.step] * (runner.generation.num_tokens - 1)]
    times = time_steps(phases) if on_gpu else time_calls(phases)
    return times[0], times[1:]


def _records(
    job: Job, generation: Generation, samples: dict[str, Samples], found: dict[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    first = {name: samples[name].outputs[0] for name in (REFERENCE, job.torch_arm)}
    local_ms = _times(samples[LOCAL])["tpot_ms"]
    records = []
    for name in job.arms:
        if name not in found:
            continue
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
                "local_ms": local_ms,
                "num_tokens": generation.batch_size * generation.num_tokens,
                "tokens_equal_unfused": equal[REFERENCE],
                "tokens_equal_torch": equal[job.torch_arm],
                **found[name],
            }
        )
    return records


def _times(samples: Samples) -> dict[str, float]:
    """`ttft_ms` and `tpot_ms`, the medians over the rounds; `itl_p50_ms`, `itl_p99_ms`."""
    steps = [step for one_round in samples.steps_us for step in one_round]
    tpot_us = statistics.median(statistics.fmean(steps) for steps in samples.steps_us)
    return {
        "ttft_ms": statistics.median(samples.ttft_us) / 1e3,
        "tpot_ms": tpot_us / 1e3,
        "itl_p50_ms": percentile(steps, 50) / 1e3,
        "itl_p99_ms": percentile(steps, 99) / 1e3,
    }
