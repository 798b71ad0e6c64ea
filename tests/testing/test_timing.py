"""Tests timing: percentiles, equal numbers of calls on all ranks, the slowest rank counts."""

from __future__ import annotations

import math
import time

import pytest
import torch
import torch.distributed as dist
from rank_helpers import on

from allnorm.testing import (
    RankPool,
    Timing,
    calls_per_graph,
    max_over_ranks,
    time_cpu,
    time_cuda_graph,
)
from allnorm.testing.timing import percentile, percentiles


def test_percentile() -> None:
    values = [float(i) for i in range(100)]
    assert [percentile(values, p) for p in (0, 50, 90, 99, 100)] == [0, 50, 90, 99, 99]
    assert percentile([3.0], 90) == 3.0


def test_percentiles() -> None:
    assert percentiles([3.0, 1.0, 2.0]) == {"p50_us": 2.0, "p90_us": 3.0, "p99_us": 3.0}
    assert all(math.isnan(value) for value in percentiles([]).values())


def test_time_cpu_alone() -> None:
    calls = []
    timing = time_cpu(lambda: calls.append(time.sleep(0.002)), min_calls=20, max_calls=20)
    assert timing.calls == 20
    assert len(calls) == 30
    assert 2000 <= timing.p50_us <= timing.p90_us <= timing.p99_us


def test_callables_take_turns() -> None:
    seen: list[int] = []
    time_cpu(
        [lambda: seen.append(0), lambda: seen.append(1)], min_calls=10, max_calls=10, warmup_calls=2
    )
    assert seen == [0, 1] * 6


def test_budget_decides_between_the_limits() -> None:
    slow = time_cpu(lambda: time.sleep(0.005), min_calls=3, max_calls=1000, budget_s=0.05)
    assert 3 <= slow.calls <= 12
    assert time_cpu(lambda: None, min_calls=3, max_calls=77, budget_s=0.05).calls == 77


def test_calls_per_graph_is_the_rule_of_the_page() -> None:
    assert [calls_per_graph(t) for t in (1, 256, 257, 1024, 1025)] == [200, 200, 20, 20, 5]


def timed_collective(rank: int, world_size: int) -> tuple[int, int, Timing]:
    """Times a collective on ranks of different speed, which would hang if call counts differed."""
    made = 0

    def call() -> None:
        nonlocal made
        made += 1
        time.sleep(0.001 * rank)
        dist.barrier()

    timing = time_cpu(call, min_calls=5, max_calls=500, budget_s=0.1, warmup_calls=3)
    skewed = Timing(10.0 * rank, 20.0, 30.0 - rank, 5)
    return made, timing.calls, max_over_ranks(skewed)


@on(cpu=(3,))
def test_ranks_make_the_same_calls_and_the_slowest_counts(pool: RankPool) -> None:
    results = pool.run(timed_collective)
    assert len({(made, calls) for made, calls, _ in results}) == 1
    assert results[0][0] == results[0][1] + 3
    assert all(slowest == Timing(20.0, 20.0, 30.0, 5) for _, _, slowest in results)


def test_max_over_ranks_alone() -> None:
    assert max_over_ranks(Timing(1.0, 2.0, 3.0, 4)) == Timing(1.0, 2.0, 3.0, 4)


@pytest.mark.gpu
def test_time_cuda_graph() -> None:
    small, large = (torch.zeros(n, device="cuda") for n in (1024, 64 << 20))
    quick = time_cuda_graph([lambda: small.add_(1)], 1)
    assert quick.calls == 25 * 200
    slow = time_cuda_graph([lambda: large.add_(1), lambda: large.mul_(2)], 4096)
    assert slow.calls == 25 * 5
    assert 0 < quick.p50_us < 20 < slow.p50_us <= slow.p90_us <= slow.p99_us
    # every call ran: 3 eager, then 3 + 25 replays of 200
    assert small[0].item() == 3 + 28 * 200
