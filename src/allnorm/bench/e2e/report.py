"""Results: from the records of all ranks to figures and verdicts."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from allnorm.bench.e2e import run
from allnorm.bench.e2e.models import Job, Transformer
from allnorm.testing import OnMessage, run_ranks

_SECONDS = 3600.0  # that a run may take

# How the ranks' figures become one: of times the slowest counts.
_LARGEST = (
    *("ttft_ms", "tpot_ms", "itl_p50_ms", "itl_p99_ms", "local_ms"),
    *("logits_max_diff", "yardstick_max"),
)
_MEANS = ("logits_mean_diff", "yardstick_mean")
_LEAST = (
    *("tokens_equal_unfused", "tokens_equal_torch", "choices_equal_torch", "steps_equal_unfused"),
    "finite",
)


@dataclass(frozen=True)
class Result:
    """One arm at one batch size, over all ranks; times are the slowest rank's."""

    arm: str  # which way
    batch_size: int  # prompts
    world_size: int  # ranks
    ttft_ms: float  # from the start of the prefill to the first tokens
    tpot_ms: float  # mean time of a further token of each sequence
    # Percentiles of the time between two tokens.
    itl_p50_ms: float
    itl_p99_ms: float
    tokens_per_s: float  # of all sequences, prefill included
    comm_us_per_layer: float  # what a decode step takes beyond one without communication, per layer
    local_ms: float  # tpot_ms without communication, allnorm's add + norm kernel in its place
    num_tokens: int  # generated in a round
    tokens_equal_unfused: int  # of them, as in the first round of "allnorm:unfused"
    tokens_equal_torch: int  # of them, as in the first round of the all-reduce + PyTorch arm
    steps_checked: int  # steps whose logits were compared
    steps_equal_unfused: int  # of them, how many had the bits of "allnorm:unfused" on every rank
    # Tokens that it chose as the torch arm did, given the same ones before.
    choices_equal_torch: int
    # Differences of a logit from the torch arm's.
    logits_max_diff: float
    logits_mean_diff: float
    yardstick: str  # two all-reduces that round differently
    # Differences of a logit between those two.
    yardstick_max: float
    yardstick_mean: float
    finite: bool  # whether all logits were
    error: str  # "" if what must hold did, else what did not

    @property
    def exact(self) -> bool:
        """Whether its bits must be those of "allnorm:unfused"."""
        return self.arm.startswith("allnorm")


@dataclass(frozen=True)
class Report:
    """What all ranks found together."""

    results: list[Result]  # one per batch size and arm
    missing: dict[str, str]  # why an arm is missing, by its name


def measure(job: Job, world_size: int, on_message: OnMessage | None = None) -> Report:
    """Starts ranks and lets them generate.

    `on_message` takes a rank and its progress: `text`, `done` and `total`.

    Raises:
        RankError: a rank raised, died or was late.
    """
    ranks = run_ranks(
        run.run, world_size, device=job.device, args=(job,), timeout=_SECONDS, on_message=on_message
    )
    return Report(merge([found.records for found in ranks], job.model), ranks[0].missing)


def merge(ranks: Sequence[Sequence[dict[str, Any]]], model: Transformer) -> list[Result]:
    """Joins the records of all ranks, which `run.run` returned, in rank order."""
    return [_result(records, len(ranks), model.num_layers) for records in zip(*ranks, strict=True)]


def _result(records: Sequence[dict[str, Any]], world_size: int, num_layers: int) -> Result:
    one = dict(records[0])
    for keys, join in ((_LARGEST, max), (_LEAST, min), (_MEANS, statistics.fmean)):
        one |= {key: join([record[key] for record in records]) for key in keys}
    steps = one["num_tokens"] // one["batch_size"] - 1
    return Result(
        **one,
        world_size=world_size,
        tokens_per_s=one["num_tokens"] * 1e3 / (one["ttft_ms"] + steps * one["tpot_ms"]),
        comm_us_per_layer=(one["tpot_ms"] - one["local_ms"]) * 1e3 / num_layers,
        error=_error(one),
    )


def _error(one: dict[str, Any]) -> str:
    """What is wrong with an arm, in words; "" if nothing is."""
    wrong = [] if one["finite"] else ["logits are not finite"]
    if one["arm"].startswith("allnorm"):
        steps, tokens = one["steps_checked"], one["num_tokens"]
        if one["steps_equal_unfused"] < steps:
            apart = steps - one["steps_equal_unfused"]
            wrong.append(f"logits differ from allnorm:unfused at {apart} of {steps} steps")
        if one["tokens_equal_unfused"] < tokens:
            apart = tokens - one["tokens_equal_unfused"]
            wrong.append(f"{apart} of {tokens} tokens differ from allnorm:unfused")
    return "; ".join(wrong)


def json_row(result: Result, model: Transformer) -> dict[str, Any]:
    """One line of the results file."""
    dimensions = asdict(model)
    return {"model": dimensions.pop("name"), **dimensions, **asdict(result)}
