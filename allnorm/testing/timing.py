"""Timing of calls, on CPU call by call, on CUDA through graphs.

The method for CUDA: many calls in one graph, the graph replayed at least 25 times, the time of a
replay from CUDA events divided by its calls, the median over the replays, then the maximum over the
ranks. Inputs larger than a cache hides need several callables over different buffers.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

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


def percentile(sorted_values: Sequence[float], fraction: float) -> float:
    """The nearest-rank percentile of values in ascending order; `fraction` in 0..1."""
    if not sorted_values:
        raise ValueError("no values: expected at least one measurement")
    return sorted_values[min(len(sorted_values) - 1, int(fraction * len(sorted_values)))]


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
    turns = itertools.cycle([fn] if callable(fn) else list(fn))
    warmup_calls = max(1, warmup_calls)
    start = time.perf_counter()
    for _ in range(warmup_calls):
        next(turns)()
    estimate_s = _max((time.perf_counter() - start) / warmup_calls, group)
    calls = max(min_calls, min(max_calls, int(budget_s / max(estimate_s, 1e-9))))
    times = [0] * calls
    clock = time.perf_counter_ns
    for i in range(calls):
        call = next(turns)
        before = clock()
        call()
        times[i] = clock() - before
    return _timing([ns / 1000 for ns in times], calls)


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
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    calls = calls_per_graph(num_tokens)
    with torch.cuda.stream(stream):
        for fn in [*fns] * warmup_calls:
            fn()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for fn in itertools.islice(itertools.cycle(fns), calls):
            fn()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    with torch.cuda.stream(stream):
        for _ in range(warmup_replays):
            graph.replay()
        for event in events[:-1]:
            event.record(stream)
            graph.replay()
        events[-1].record(stream)
    stream.synchronize()
    torch.cuda.current_stream().wait_stream(stream)
    times = [us / calls for us in elapsed_us(events)]
    return _timing(times, calls * replays)


def elapsed_us(events: Sequence[torch.cuda.Event]) -> list[float]:
    """Microseconds from each recorded event to the next; the last one has happened."""
    return [begin.elapsed_time(end) * 1e3 for begin, end in itertools.pairwise(events)]


def max_over_ranks(timing: Timing, group: dist.ProcessGroup | None = None) -> Timing:
    """The slowest rank's figure for each percentile. Collective.

    Args:
        timing: this rank's; every rank made the same number of calls.
        group: None is WORLD, or this process alone without torch.distributed.
    """
    figures = (timing.p50_us, timing.p90_us, timing.p99_us)
    p50_us, p90_us, p99_us = (max(column) for column in zip(*_gather(figures, group), strict=True))
    return Timing(p50_us, p90_us, p99_us, timing.calls)


def _timing(times_us: list[float], calls: int) -> Timing:
    times_us.sort()
    p50_us, p90_us, p99_us = (percentile(times_us, fraction) for fraction in (0.5, 0.9, 0.99))
    return Timing(p50_us, p90_us, p99_us, calls)


def _max(value: float, group: dist.ProcessGroup | None) -> float:
    return max(row[0] for row in _gather((value,), group))


def _gather(
    figures: tuple[float, ...], group: dist.ProcessGroup | None
) -> Sequence[tuple[float, ...]]:
    if not dist.is_available() or not dist.is_initialized():
        return [figures]
    rows: list[tuple[float, ...]] = [figures] * dist.get_world_size(group)
    dist.all_gather_object(rows, figures, group=group)
    return rows
