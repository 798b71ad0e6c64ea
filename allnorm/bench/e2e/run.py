"""Builds the model in one rank, checks the arms against each other and times them."""

from __future__ import annotations

import statistics
from typing import Any

import torch

import allnorm
from allnorm.cli.ranks.data import DTYPES
from allnorm.cli.ranks.e2e import check, clock, sites, weights
from allnorm.cli.ranks.e2e.generation import Generation
from allnorm.cli.ranks.e2e.job import LOCAL, REFERENCE, Job
from allnorm.cli.ranks.e2e.peer_sites import ARMS as PEER_ARMS
from allnorm.cli.ranks.e2e.peer_sites import PeerSites
from allnorm.testing import report
from allnorm.testing.timing import percentile

_SEED = 20

Found = tuple[list[dict[str, Any]], dict[str, str]]
"""Records, and why arms are missing by their names."""


def run(rank: int, world_size: int, job: Job) -> Found:
    """Checks and times every arm at every batch size. Collective.

    Returns:
        One record per batch size and arm, in the same order on every rank: `batch_size`, `arm`,
        what `_times` and `check` say, `local_us` (a decode step without communication),
        `yardstick` (what it compares), `yardstick_max`, `yardstick_mean`. And what is missing.
    """
    device = torch.device(job.device, rank) if job.device == "cuda" else torch.device("cpu")
    dtype, model = DTYPES[job.dtype], job.model
    report({"text": "making weights", "done": 0, "total": len(job.batch_sizes)})
    made = weights.make(model, rank, world_size, dtype, device)
    peers = PeerSites(
        [name for name in job.arms if name in PEER_ARMS],
        *(device, dtype, model.hidden_size, max(job.batch_sizes) * job.prompt, model.eps),
    )
    missing = dict(peers.missing)
    records = []
    with allnorm.Communicator(device=device) as comm:
        own = dict.fromkeys([name for name in job.arms if name not in PEER_ARMS] + [*job.always])
        arms = {name: sites.make(name, comm, model.eps) for name in own} | peers.arms
        yardstick = check.make_yardstick(job, device)
        for index, batch_size in enumerate(job.batch_sizes):
            progress = {"done": index, "total": len(job.batch_sizes)}
            prompts = make_prompts(job, batch_size).to(device)
            generation = Generation(model, made, prompts, job.tokens)
            report({"text": f"batch {batch_size}: checking", **progress})
            checked = check.check(job, arms, generation, yardstick)
            report({"text": f"batch {batch_size}: timing", **progress})
            samples = clock.measure(checked.runners, job.rounds)
            comm.check()
            records += _records(job, generation, samples, checked.found)
            missing |= checked.missing
            del checked, generation
    peers.close()
    return records, missing


def make_prompts(job: Job, batch_size: int) -> torch.Tensor:
    """[batch_size, prompt] int64: random tokens, other ones in every row; on the CPU."""
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randint(job.model.vocab_size, (batch_size, job.prompt), generator=generator)


def _records(
    job: Job,
    generation: Generation,
    samples: dict[str, clock.Samples],
    found: dict[str, dict[str, Any]],
) -> list[dict[str, Any]]:
    first = {name: samples[name].outputs[0] for name in (REFERENCE, job.torch_arm)}
    local_us = _times(samples[LOCAL])["tpot_us"]
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
                "local_us": local_us,
                "num_tokens": generation.batch_size * generation.num_tokens,
                "equal_tokens": equal[REFERENCE],
                "equal_tokens_torch": equal[job.torch_arm],
                **found[name],
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
