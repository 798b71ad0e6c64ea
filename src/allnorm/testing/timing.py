"""Timing of calls: one by one on CPU, in replays of CUDA graphs on GPUs.

The method for CUDA: capture many calls in one graph, replay the graph at least 25 times, time each
replay with CUDA events, divide by the number of calls, take the median over the replays, then the
maximum over ranks. To exclude cache effects, pass multiple callables that use different buffers.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import numpy
import torch
import torch.distributed as dist

from allnorm.testing.agreement import gather

Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Time per call in microseconds.

    Attributes:
        p50_us: the median.
        p90_us: the 90th percentile.
        p99_us: the 99th percentile.
        calls: number of timed calls.
    """

    p50_us: float
    p90_us: float
    p99_us: float
    calls: int


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns the smallest value that at least `percent` percent of the values do not exceed."""
    return float(numpy.percentile(values, percent, method="higher"))


def percentiles(times_us: Sequence[float]) -> dict[str, float]:
    """Returns `p50_us`, `p90_us` and `p99_us`; NaN if nothing was timed."""
    return {
        f"p{p}_us": percentile(times_us, p) if len(times_us) else math.nan for p in (50, 90, 99)
    }


def max_over_ranks(timing: Timing, group: dist.ProcessGroup | None = None) -> Timing:
    """Returns the slowest rank's time for each percentile. Collective.

    Args:
        timing: this rank's timing; every rank must have made the same number of calls.
        group: None is WORLD, or this process alone without torch.distributed.
    """
    ranks = [asdict(each).values() for each in gather(timing, group)]
    p50_us, p90_us, p99_us, calls = map(max, zip(*ranks, strict=True))
    return Timing(p50_us, p90_us, p99_us, calls)


# ---- with the wall clock -------------------------------------------------------------------------


def time_cpu(
    fn: Call | Sequence[Call],
    *,
    min_calls: int = 50,
    max_calls: int = 20_000,
    budget_s: float = 0.5,
    warmup_calls: int = 10,
    group: dist.ProcessGroup | None = None,
) -> Timing:
    """Times each call separately with the wall clock.

    Collective if torch.distributed is initialized: all ranks of the group call it and make the same
    number of calls. The result is this rank's; see `max_over_ranks`.

    Args:
        fn: the call, or multiple calls (on different buffers) to alternate between.
        min_calls: minimum number of timed calls.
        max_calls: maximum number of timed calls.
        budget_s: approximate time of all calls on the slowest rank; the limits above take priority.
        warmup_calls: number of untimed calls beforehand, at least 1.
        group: None is WORLD, or this process alone without torch.distributed.

    Returns:
        Percentiles over this rank's calls.
    """
    turns = itertools.cycle([fn] if callable(fn) else fn)
    warmup = itertools.islice(turns, max(1, warmup_calls))
    calls = calls_that_fit(warmup, budget_s, min_calls, max_calls, group)
    return Timing(**percentiles(time_calls(itertools.islice(turns, calls))), calls=calls)


def calls_that_fit(
    warmup: Iterable[Call],
    budget_s: float,
    least: int,
    most: int,
    group: dist.ProcessGroup | None = None,
) -> int:
    """Runs the warm-up and returns how many such calls take `budget_s` on the slowest rank."""
    times_us = time_calls(warmup)
    slowest_us = max(gather(sum(times_us) / len(times_us), group))
    return max(least, min(most, int(budget_s * 1e6 / max(slowest_us, 1e-3))))


def time_calls(calls: Iterable[Call]) -> list[float]:
    """Runs the calls and returns the wall time of each in microseconds."""
    clock, times_us = time.perf_counter_ns, []
    for call in calls:
        before = clock()
        call()
        times_us.append((clock() - before) / 1e3)
    return times_us


# ---- with replays of CUDA graphs -----------------------------------------------------------------


def calls_per_graph(num_tokens: int) -> int:
    """Returns the calls per graph: enough that differences in ranks' start times do not matter.

    Args:
        num_tokens: rows per call; the more rows, the longer a call, the fewer calls.
    """
    if num_tokens <= 256:
        return 200
    return 20 if num_tokens <= 1024 else 5


@contextlib.contextmanager
def capture(
    inside: AbstractContextManager[Any] = nullcontext(),  # noqa: B008 - it holds nothing
) -> Iterator[torch.cuda.CUDAGraph]:
    """Captures the kernels that the block launches in a graph, and yields the graph.

    Every kernel must have run before, because kernels are loaded at their first launch, and a
    capture does not allow loading.

    Args:
        inside: context in which to capture, entered before the capture starts.

    Yields:
        The graph; it can be replayed after the block.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # thread_local: NCCL's watchdog thread queries events, which must not invalidate the capture.
    with inside, torch.cuda.graph(graph, capture_error_mode="thread_local"):
        yield graph


def capture_turns(
    fns: Sequence[Call],
    num_tokens: int,
    warmup_replays: int,
    inside: AbstractContextManager[Any] = nullcontext(),  # noqa: B008 - it holds nothing
) -> torch.cuda.CUDAGraph:
    """Captures `calls_per_graph` calls that alternate over `fns`, then runs warm-up replays."""
    with capture(inside) as graph:
        for fn in itertools.islice(itertools.cycle(fns), calls_per_graph(num_tokens)):
            fn()
    for _ in range(warmup_replays):
        graph.replay()
    return graph


def time_cuda_graph(
    fns: Sequence[Call],
    num_tokens: int,
    *,
    replays: int = 25,
    warmup_replays: int = 3,
    warmup_calls: int = 3,
) -> Timing:
    """Times calls in a CUDA graph on the current device.

    Collective if the calls are. The result is this rank's: percentiles over the replays of the time
    per call; see `max_over_ranks`.

    Args:
        fns: calls to alternate between, one per buffer set.
        num_tokens: determines the number of calls per graph, see `calls_per_graph`.
        replays: number of timed replays; use at least 25 for published results.
        warmup_replays: number of untimed replays beforehand.
        warmup_calls: number of eager calls of each function before the capture.

    Returns:
        Percentiles over this rank's replays; `calls` counts all replayed calls.
    """
    calls = calls_per_graph(num_tokens)
    for fn in [*fns] * warmup_calls:
        fn()
    graph = capture_turns(fns, num_tokens, warmup_replays)
    times_us = [us / calls for us in time_steps(itertools.repeat(graph.replay, replays))]
    return Timing(**percentiles(times_us), calls=calls * replays)


def time_steps(steps: Iterable[Call]) -> list[float]:
    """Enqueues work on the current stream and returns the GPU time of each step in microseconds.

    The host runs ahead of the GPU. On return, all work has finished.
    """
    steps = list(steps)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(steps) + 1)]
    events[0].record()
    for step, event in zip(steps, events[1:], strict=True):
        step()
        event.record()
    events[-1].synchronize()
    return [begin.elapsed_time(end) * 1e3 for begin, end in itertools.pairwise(events)]
