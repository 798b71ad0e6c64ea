"""Sample measurements."""

from __future__ import annotations

from typing import Any

from allnorm.bench import report as bench_report
from allnorm.bench.layers import ARMS, ChainTimes
from allnorm.bench.modes import Mode, Shape
from allnorm.bench.report import Measurement
from allnorm.bench.run import Job

SHAPES = [Shape(1, 4096, 1e-5, model="llama-3.1-8b"), Shape(16, 4096)]
MODES = [Mode()]
TIMES = {"allnorm": 4.0, "gloo+torch": 99.0, "gloo+local": 49.0}
GBPS = 350.0


def record(shape: int, arm: str, p50_us: float, error: str = "", mode: int = 0) -> dict[str, Any]:
    times = {"p50_us": p50_us, "p90_us": p50_us * 2, "p99_us": p50_us * 3}
    return {"shape": shape, "mode": mode, "arm": arm, "error": error, "reason": "", **times}


def merge(ranks: list[list[dict[str, Any]]], modes: list[Mode] = MODES) -> list[Measurement]:
    job = Job(tuple(SHAPES), tuple(modes), "bfloat16", "rounded", (), "cpu")
    return bench_report.merge(ranks, job, GBPS)


def two_ranks(error: str = "") -> list[Measurement]:
    """Returns measurements of two shapes and three arms.

    Rank 1 takes 1 us longer, and has the error in "allnorm".
    """
    cells = [(shape, arm, us * (1 + shape)) for shape in (0, 1) for arm, us in TIMES.items()]
    plain = [record(shape, arm, us) for shape, arm, us in cells]
    late = [record(s, arm, us + 1, error if arm == "allnorm" else "") for s, arm, us in cells]
    return merge([plain, late])


def measurement(arm: str, p50_us: float, **changes: Any) -> Measurement:
    """Returns a measurement of one arm at 16x4096 on two ranks."""
    place: dict[str, Any] = {"shape": SHAPES[1], "mode": Mode(), "world_size": 2, "arm": arm}
    times = {"p50_us": p50_us, "p90_us": p50_us * 1.1, "p99_us": p50_us * 1.2}
    return Measurement(**{**place, **times, **changes})


def chain(num_tokens: int, gain_us: float, error: str = "", model: str = "tiny") -> ChainTimes:
    """Returns times of a chain in which each call gains this much."""
    us = {arm: {"p50_us": 50.0 - 2 * gain_us * ahead} for arm, ahead in ARMS.items()}
    errors = {"prefetch:off": "", "prefetch:on": error}
    return ChainTimes(model, 256, num_tokens, 3, 4 << 20, True, us, errors)
