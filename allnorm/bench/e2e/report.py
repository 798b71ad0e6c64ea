"""From the ranks' records of `e2e` to figures, verdicts and tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from allnorm.cli import output
from allnorm.cli.e2e_models import Transformer

_SLOWEST = ("ttft_us", "tpot_us", "itl_p50_us", "itl_p99_us", "local_us")
_LARGEST = ("logits_max_diff", "yardstick_max")
_MEANS = ("logits_mean_diff", "yardstick_mean")
_FEWEST = ("equal_tokens", "equal_tokens_torch", "equal_choices", "equal_steps")


@dataclass(frozen=True)
class Result:
    """One arm at one batch size, over all ranks: of times the slowest rank's.

    Attributes:
        arm: which way.
        batch_size: prompts.
        world_size: ranks.
        ttft_ms: from the start of the prefill to the first tokens.
        tpot_ms: mean time of a further token of each sequence.
        itl_p50_ms: median time between two tokens.
        itl_p99_ms: 99th percentile of it.
        tokens_per_s: of all sequences, prefill included.
        comm_us_per_layer: what a decode step takes beyond one without communication, per layer.
        local_ms: tpot_ms without communication, allnorm's add + norm kernel in its place.
        num_tokens: generated in a round.
        tokens_equal_unfused: of them, as in the first round of "allnorm:unfused".
        tokens_equal_torch: of them, as in the first round of the all-reduce + PyTorch arm.
        steps_checked: steps whose logits were compared.
        steps_equal_unfused: of them, how many had the bits of "allnorm:unfused" on every rank.
        choices_equal_torch: tokens that it chose as the torch arm did, given the same ones before.
        logits_max_diff: the largest difference of a logit from the torch arm's.
        logits_mean_diff: the mean one.
        yardstick: two all-reduces that round differently.
        yardstick_max: the largest difference of a logit between those two.
        yardstick_mean: the mean one.
        finite: whether all logits were.
        error: "" if what must hold did, else what did not.
    """

    arm: str
    batch_size: int
    world_size: int
    ttft_ms: float
    tpot_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    tokens_per_s: float
    comm_us_per_layer: float
    local_ms: float
    num_tokens: int
    tokens_equal_unfused: int
    tokens_equal_torch: int
    steps_checked: int
    steps_equal_unfused: int
    choices_equal_torch: int
    logits_max_diff: float
    logits_mean_diff: float
    yardstick: str
    yardstick_max: float
    yardstick_mean: float
    finite: bool
    error: str

    @property
    def exact(self) -> bool:
        """Whether its bits must be those of "allnorm:unfused"."""
        return self.arm.startswith("allnorm")


def merge(ranks: Sequence[Sequence[dict[str, Any]]], model: Transformer) -> list[Result]:
    """Joins the records of all ranks.

    Args:
        ranks: the records that `cli.ranks.e2e.run.run` returned, in rank order.
        model: of that job.
    """
    return [_result(records, len(ranks), model.num_layers) for records in zip(*ranks, strict=True)]


def _result(records: Sequence[dict[str, Any]], world_size: int, num_layers: int) -> Result:
    one = dict(records[0])
    one |= {key: max(record[key] for record in records) for key in (*_SLOWEST, *_LARGEST)}
    one |= {key: min(record[key] for record in records) for key in _FEWEST}
    one |= {key: statistics.fmean(record[key] for record in records) for key in _MEANS}
    finite = all(record["finite"] for record in records)
    steps = one["num_tokens"] // one["batch_size"] - 1
    return Result(
        arm=one["arm"],
        batch_size=one["batch_size"],
        world_size=world_size,
        ttft_ms=one["ttft_us"] / 1e3,
        tpot_ms=one["tpot_us"] / 1e3,
        itl_p50_ms=one["itl_p50_us"] / 1e3,
        itl_p99_ms=one["itl_p99_us"] / 1e3,
        tokens_per_s=one["num_tokens"] * 1e6 / (one["ttft_us"] + steps * one["tpot_us"]),
        comm_us_per_layer=(one["tpot_us"] - one["local_us"]) / num_layers,
        local_ms=one["local_us"] / 1e3,
        num_tokens=one["num_tokens"],
        tokens_equal_unfused=one["equal_tokens"],
        tokens_equal_torch=one["equal_tokens_torch"],
        steps_checked=one["steps"],
        steps_equal_unfused=one["equal_steps"],
        choices_equal_torch=one["equal_choices"],
        logits_max_diff=one["logits_max_diff"],
        logits_mean_diff=one["logits_mean_diff"],
        yardstick=one["yardstick"],
        yardstick_max=one["yardstick_max"],
        yardstick_mean=one["yardstick_mean"],
        finite=finite,
        error=_error(one, finite),
    )


def _error(one: dict[str, Any], finite: bool) -> str:
    """What does not hold of an arm, in words."""
    wrong = [] if finite else ["logits are not finite"]
    if one["arm"].startswith("allnorm"):
        if one["equal_steps"] < one["steps"]:
            wrong.append(
                f"logits differ from allnorm:unfused at {one['steps'] - one['equal_steps']} of "
                f"{one['steps']} steps"
            )
        if one["equal_tokens"] < one["num_tokens"]:
            wrong.append(
                f"{one['num_tokens'] - one['equal_tokens']} of {one['num_tokens']} tokens differ "
                "from allnorm:unfused"
            )
    return "; ".join(wrong)


def json_row(result: Result, model: Transformer, common: dict[str, Any]) -> dict[str, Any]:
    """One line of the results file."""
    dimensions = asdict(model)
    return {**common, "model": dimensions.pop("name"), **dimensions, **asdict(result)}


def table(results: Sequence[Result], torch_arm: str) -> Table:
    """The figures of one batch size; the times beside those of the torch arm."""
    base = next((r.tpot_ms for r in results if r.arm == torch_arm), math.nan)
    columns = (
        *("arm", "TTFT ms", "TPOT ms", f"vs {torch_arm}", "ITL p50 (p99) ms", "tokens/s"),
        *("comm us/layer", "= unfused", f"= {torch_arm}", "logits max (mean) off"),
    )
    rows = [
        (
            r.arm,
            f"{r.ttft_ms:.2f}",
            f"{r.tpot_ms:.3f}",
            _relative(r.tpot_ms, base),
            f"{r.itl_p50_ms:.3f} ({r.itl_p99_ms:.3f})",
            f"{r.tokens_per_s:,.0f}",
            output.microseconds(r.comm_us_per_layer) if r.comm_us_per_layer > 0 else "~0",
            _verdict(r),
            f"{r.tokens_equal_torch}/{r.num_tokens}",
            f"{r.logits_max_diff:.3g} ({r.logits_mean_diff:.2g})",
        )
        for r in results
    ]
    one = results[0]
    ranks = output.ranks(one.world_size)
    return output.table(f"batch {one.batch_size}, {ranks}", columns, rows)


def _relative(tpot_ms: float, base: float) -> str:
    return f"{(tpot_ms / base - 1) * 100:+.1f} %" if math.isfinite(base) else "-"


def _verdict(r: Result) -> str:
    """How many tokens are those of "allnorm:unfused"; "bits" if all logits are, too."""
    same_bits = r.steps_equal_unfused == r.steps_checked
    text = f"{r.tokens_equal_unfused}/{r.num_tokens}" + (", bits" if same_bits else "")
    if r.error:
        return output.bad(f"WRONG {text}")
    return output.ok(text) if r.exact else text
