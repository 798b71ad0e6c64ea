"""How arms are timed: calls by the wall clock on CPUs, replays of CUDA graphs on GPUs.

Arms take turns, round after round, so that what changes in the machine hits all of them alike.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from allnorm.cli.ranks.arms import Arm
from allnorm.cli.ranks.case import NUM_SETS
from allnorm.testing import calls_per_graph
from allnorm.testing.timing import elapsed_us, percentile

Samples = dict[str, list[float]]
"""Microseconds per call, by the name of the arm."""

_CUDA_ROUNDS = 9
_REPLAYS_PER_ROUND = 3
_WARM_UP_REPLAYS = 2
_CPU_ROUNDS = 10
_CPU_CALLS = (5, 1000)  # least and most timed calls of an arm
_CPU_WARM_UP = 2  # beside the checked calls
_EAGER_CALLS = 200


def time_cpu(arms: Sequence[Arm], seconds: float) -> Samples:
    """Wall time of every call. Collective.

    Args:
        arms: each is known to run.
        seconds: roughly how long one arm is timed.
    """
    samples: Samples = {arm.name: [] for arm in arms}
    calls = {arm.name: _calls_that_fit(arm, seconds) for arm in arms}
    for turn in range(_CPU_ROUNDS):
        for arm in arms:
            arm.reset()
            _start_together()
            for call, _ in enumerate(range(turn, calls[arm.name], _CPU_ROUNDS)):
                begin = time.perf_counter_ns()
                arm.call(call % NUM_SETS)
                samples[arm.name].append((time.perf_counter_ns() - begin) / 1e3)
    return samples


def _calls_that_fit(arm: Arm, seconds: float) -> int:
    """Calls that take roughly `seconds`, the same on all ranks."""
    begin = time.perf_counter()
    for call in range(_CPU_WARM_UP):
        arm.call(call % NUM_SETS)
    slowest = torch.tensor((time.perf_counter() - begin) / _CPU_WARM_UP)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return max(_CPU_CALLS[0], min(_CPU_CALLS[1], int(seconds / max(float(slowest), 1e-6))))


def time_cuda(
    arms: Sequence[tuple[Arm, torch.cuda.CUDAGraph]], num_tokens: int, rounds: int = _CUDA_ROUNDS
) -> Samples:
    """Time per call of replays. Collective.

    Args:
        arms: with what `capture` made of them.
        num_tokens: as given to `capture`.
        rounds: how often each has its turn, of three timed replays.
    """
    samples: Samples = {arm.name: [] for arm, _ in arms}
    calls = calls_per_graph(num_tokens)
    for _ in range(rounds):
        for arm, graph in arms:
            with _naming(arm):
                samples[arm.name] += [us / calls for us in _time_replays(arm, graph)]
    return samples


@contextlib.contextmanager
def _naming(arm: Arm) -> Iterator[None]:
    """Says which arm an error was met with: a kernel that fails ends what its process can do."""
    try:
        yield
    except Exception as error:
        error.add_note(f"while {arm.name} was timed")
        raise


def _time_replays(arm: Arm, graph: torch.cuda.CUDAGraph) -> list[float]:
    """Microseconds of each of a round's replays; all have ended."""
    arm.reset()
    # Untimed: aligns the ranks and keeps the GPU busy while the host launches the next.
    graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_REPLAYS_PER_ROUND + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    events[-1].synchronize()
    return elapsed_us(events)


def capture(arm: Arm, num_tokens: int) -> torch.cuda.CUDAGraph:
    """A graph of many calls over rotating buffer sets; warm afterwards. Collective.

    Args:
        arm: has been called before.
        num_tokens: decides how many calls, see `calls_per_graph`.
    """
    graph = torch.cuda.CUDAGraph()
    arm.reset()
    torch.cuda.synchronize()
    # thread_local: NCCL's watchdog thread queries events, which must not end the capture.
    with arm.capturing(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for call in range(calls_per_graph(num_tokens)):
            arm.call(call % NUM_SETS)
    for _ in range(_WARM_UP_REPLAYS):
        graph.replay()
    torch.cuda.synchronize()
    return graph


def time_eager(arm: Arm, synchronize: Callable[[], None]) -> dict[str, float]:
    """Calls one after the other without a graph. Collective.

    Args:
        arm: has been called before.
        synchronize: waits for the device.

    Returns:
        `host_us`: the median time that enqueuing a call takes the host; `eager_us`: time per call
        until all of them are done.
    """
    arm.reset()
    synchronize()
    _start_together()
    samples = []
    with _naming(arm):
        start = time.perf_counter_ns()
        for call in range(_EAGER_CALLS):
            begin = time.perf_counter_ns()
            arm.call(call % NUM_SETS)
            samples.append((time.perf_counter_ns() - begin) / 1e3)
        synchronize()
        whole = (time.perf_counter_ns() - start) / 1e3
    return {"host_us": percentile(sorted(samples), 0.5), "eager_us": whole / _EAGER_CALLS}


def summary(samples: Sequence[float]) -> dict[str, float]:
    """`p50_us`, `p90_us` and `p99_us`; NaN where nothing was timed."""
    ordered = sorted(samples) or [math.nan]
    return {f"p{percent}_us": percentile(ordered, percent / 100) for percent in (50, 90, 99)}


def _start_together() -> None:
    dist.all_reduce(torch.zeros(1))
