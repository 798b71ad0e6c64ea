"""The trace itself: a profiler, ranges for it to see, and what it has seen."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from allnorm.errors import AllnormError
from allnorm.tracing.collect import Collector
from allnorm.tracing.ranges import ranges
from allnorm.tracing.report import TraceReport


@contextlib.contextmanager
def trace() -> Iterator[TraceReport]:
    """Counts the reductions of this rank that run fused, and those that do not.

        with allnorm.trace() as report:
            model.generate(...)
        print(report)

    Everything happens in the PyTorch profiler, which keeps every event in memory: trace a few
    forward passes. Calls are seen in eager mode, in compiled graphs, and, on GPUs, in replays of
    CUDA graphs; there a kernel is known by its name only, and a plain `all_reduce` of this library
    counts as fused.

    Yields:
        The report, empty until the block ends, then complete also if it raised.

    Raises:
        AllnormError: a profiler is running already.

    Not collective; each rank sees itself. Not for CUDA graph capture: capture before, or inside
    from start to end.
    """
    if torch.autograd.profiler._is_profiler_enabled:
        raise AllnormError(
            "allnorm.trace() needs the PyTorch profiler, which is running already: end that "
            "profile first."
        )
    report = TraceReport()
    if dist.is_available() and dist.is_initialized():
        report.rank, report.world_size = dist.get_rank(), dist.get_world_size()
    profile = _profile()
    with ranges():
        profile.start()
        try:
            yield report
        finally:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            profile.stop()
            found = Collector(profile.events())
            report.passes = found.passes
            report.entries = tuple(found.tally.entries())


def _profile() -> Any:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    # Engines run their forward passes in threads of their own.
    settings = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    return torch.profiler.profile(
        activities=activities, experimental_config=settings, acc_events=True
    )
