"""Timing of calls, on CPU call by call, on CUDA through graphs.

The method for CUDA: many calls in one graph, the graph replayed at least 25 times, the time of a
replay from CUDA events divided by its calls, the median over the replays, then the maximum over the
ranks. Inputs larger than a cache hides need several callables over different buffers.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy
import torch
import torch.distributed as dist

from allnorm.testing.agreement import gather
from allnorm.testing.graphs import capture

Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Time per call in microseconds.

    Attributes:
        p50_us: median.
        p90_us: 90th percentile.
        p99_us: 99th percentile.
        calls: how many calls were timed.
    """

    p50_us: float
    p90_us: float
    p99_us: float
    calls: int


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least so many percent of the others do not exceed."""
    return float(numpy.percentile(values, percent, method="higher"))


def time_cpu(
    fn: Call | Sequence[Call],
    *,
    min_calls: int = 50,
    max_calls: int = 20_000,
    budget_s: float = 0.5,
    warmup_calls: int = 10,
    group: dist.ProcessGroup | None = None,
) -> Timing:
    """Times single calls by the wall clock.

    Collective where torch.distributed is initialised: all ranks of the group call it and make the
    same number of calls. The result is this rank's; see `max_over_ranks`.

    Args:
        fn: the call, or several that take turns (over different buffers).
        min_calls: at least so many calls are timed.
        max_calls: at most so many.
        budget_s: between the two, as many as take about this long on the slowest rank.
        warmup_calls: untimed calls before, at least 1.
        group: None is WORLD, or this process alone without torch.distributed.

    Returns:
        Percentiles over the calls of this rank.
    """
    turns = itertools.cycle([fn] if callable(fn) else fn)
    warmup = itertools.islice(turns, max(1, warmup_calls))
    calls = calls_that_fit(warmup, budget_s, min_calls, max_calls, group)
    return _timing(time_calls(itertools.islice(turns, calls)), calls)


def calls_that_fit(
    warmup: Iterable[Call],
    budget_s: float,
    least: int,
    most: int,
    group: dist.ProcessGroup | None = None,
) -> int:
    """Makes some calls, and says how many like them take about `budget_s` on the slowest rank."""
    times_us = time_calls(warmup)
    slowest_us = max(gather(sum(times_us) / len(times_us), group))
    return max(least, min(most, int(budget_s * 1e6 / max(slowest_us, 1e-3))))


def time_calls(calls: Iterable[Call]) -> list[float]:
    """Makes the calls; how many microseconds each took by the wall clock."""
    clock, times_us = time.perf_counter_ns, []
    for call in calls:
        before = clock()
        call()
        times_us.append((clock() - before) / 1e3)
    return times_us


def calls_per_graph(num_tokens: int) -> int:
    """Calls captured in one graph: with few short calls the ranks' start times would count."""
    if num_tokens <= 256:
        return 200
    return 20 if num_tokens <= 1024 else 5


def time_cuda_graph(
    fns: Sequence[Call],
    num_tokens: int,
    *,
    replays: int = 25,
    warmup_replays: int = 3,
    warmup_calls: int = 3,
) -> Timing:
    """Times calls that are captured in a CUDA graph on the current device.

    Collective if the calls are. The result is this rank's; see `max_over_ranks`.

    Args:
        fns: calls that take turns, one for each buffer set.
        num_tokens: decides how many calls a graph holds, see `calls_per_graph`.
        replays: timed replays, at least 25 for figures to be reported.
        warmup_replays: untimed replays before.
        warmup_calls: eager calls of each function before the capture.

    Returns:
        Percentiles over the replays of this rank, each divided by its calls.
    """
    calls = calls_per_graph(num_tokens)
    for fn in [*fns] * warmup_calls:
        fn()
    with capture() as graph:
        for fn in itertools.islice(itertools.cycle(fns), calls):
            fn()
    for _ in range(warmup_replays):
        graph.replay()
    times = [us / calls for us in time_steps(itertools.repeat(graph.replay, replays))]
    return _timing(times, calls * replays)


def time_steps(steps: Iterable[Call]) -> list[float]:
    """Enqueues work on the current stream; how many microseconds the GPU took for each step.

    All of it has ended. The host runs ahead of the GPU.
    """
    steps = list(steps)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(steps) + 1)]
    events[0].record()
    for step, event in zip(steps, events[1:], strict=True):
        step()
        event.record()
    events[-1].synchronize()
    return [begin.elapsed_time(end) * 1e3 for begin, end in itertools.pairwise(events)]


def max_over_ranks(timing: Timing, group: dist.ProcessGroup | None = None) -> Timing:
    """The slowest rank's figure for each percentile. Collective.

    Args:
        timing: this rank's; every rank made the same number of calls.
        group: None is WORLD, or this process alone without torch.distributed.
    """
    ranks = gather((timing.p50_us, timing.p90_us, timing.p99_us), group)
    p50_us, p90_us, p99_us = map(max, zip(*ranks, strict=True))
    return Timing(p50_us, p90_us, p99_us, timing.calls)


def _timing(times_us: list[float], calls: int) -> Timing:
    p50_us, p90_us, p99_us = (percentile(times_us, percent) for percent in (50, 90, 99))
    return Timing(p50_us, p90_us, p99_us, calls)
