"""Results: merges the records of all ranks and checks them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from allnorm.bench.e2e import run
from allnorm.bench.e2e.models import Job, Transformer
from allnorm.testing import OnMessage, run_ranks

_SECONDS = 3600.0  # time limit of a run

# The way the ranks' values are merged: the largest time counts, and so on.
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

    arm: str  # name of the implementation
    batch_size: int  # number of prompts
    world_size: int  # number of ranks
    ttft_ms: float  # time from the start of the prefill to the first tokens
    tpot_ms: float  # mean time per further token of each sequence
    # Percentiles of the time between two tokens.
    itl_p50_ms: float
    itl_p99_ms: float
    tokens_per_s: float  # tokens per second of all sequences, including prefill
    comm_us_per_layer: float  # decode time in excess of a run without communication, per layer
    local_ms: float  # tpot_ms without communication: only allnorm's add + norm kernel
    num_tokens: int  # number of tokens generated per round
    tokens_equal_unfused: int  # tokens equal to those of the first round of "allnorm:unfused"
    tokens_equal_torch: int  # tokens equal to those of the first round of the torch arm
    steps_checked: int  # number of steps whose logits were compared
    steps_equal_unfused: int  # steps that are bit-identical to "allnorm:unfused" on every rank
    # Tokens equal to the torch arm's choice after the same previous tokens.
    choices_equal_torch: int
    # Differences between the logits and the torch arm's.
    logits_max_diff: float
    logits_mean_diff: float
    yardstick: str  # description of two all-reduces that round differently
    # Differences between the logits of those two all-reduces.
    yardstick_max: float
    yardstick_mean: float
    finite: bool  # whether all logits were finite
    error: str  # failed checks; "" if there are none

    @property
    def exact(self) -> bool:
        """Whether the arm must be bit-identical to "allnorm:unfused"."""
        return self.arm.startswith("allnorm")


@dataclass(frozen=True)
class Report:
    """The merged results of all ranks."""

    results: list[Result]  # one per batch size and arm
    missing: dict[str, str]  # reason per missing arm, by name


def measure(job: Job, world_size: int, on_message: OnMessage | None = None) -> Report:
    """Starts ranks that run the job, and returns their merged results.

    `on_message` takes a rank and its progress: `text`, `done` and `total`.

    Raises:
        RankError: a rank raised an error, died or timed out.
    """
    ranks = run_ranks(
        run.run, world_size, device=job.device, args=(job,), timeout=_SECONDS, on_message=on_message
    )
    return Report(merge([records for records, _ in ranks], job.model), ranks[0][1])


def merge(ranks: Sequence[Sequence[dict[str, Any]]], model: Transformer) -> list[Result]:
    """Merges the records of all ranks, which `run.run` returned, in rank order."""
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
    """Describes the failed checks of an arm; "" if there are none."""
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
    """Returns one row of the results file."""
    dimensions = asdict(model)
    return {"model": dimensions.pop("name"), **dimensions, **asdict(result)}
