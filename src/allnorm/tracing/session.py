"""The trace: a profiler, and profiler ranges around modules and calls of this library.

The ranges exist only during a trace. At other times a call has no extra cost.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.profiler import record_function
from torch.nn.modules import module as nn_module

from allnorm.core import fast_call
from allnorm.core.dispatch import Dispatcher
from allnorm.errors import AllnormError
from allnorm.tracing.collect import CALL, MODULE, Collector
from allnorm.tracing.report import FUSED, NORM, REDUCTION, TraceReport


@contextlib.contextmanager
def trace() -> Iterator[TraceReport]:
    """Counts this rank's reductions, both fused and unfused.

        with allnorm.trace() as report:
            model.generate(...)
        print(report)

    The trace uses the PyTorch profiler, which keeps every event in memory, so trace only a few
    forward passes. It counts calls in eager mode, in compiled graphs and, on GPUs, in replays of
    CUDA graphs. In replays it identifies kernels by name only, and counts a plain `all_reduce` of
    this library as fused.

    Yields:
        The report, which is empty until the block ends. It is complete even if the block raised.

    Raises:
        AllnormError: a profiler is already running.

    Not collective: each rank counts its own calls. A CUDA graph capture must not cross the start or
    end of the block.
    """
    if torch.autograd.profiler._is_profiler_enabled:
        raise AllnormError(
            "allnorm.trace() needs the PyTorch profiler, which is already running: stop that "
            "profile first."
        )
    report = TraceReport()
    if dist.is_available() and dist.is_initialized():
        report.rank, report.world_size = dist.get_rank(), dist.get_world_size()
    profile = _profile()
    with _call_ranges(), _module_ranges():
        profile.__enter__()
        try:
            yield report
        finally:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            profile.__exit__(None, None, None)
            found = Collector(profile.function_events)
            report.passes = found.passes
            report.entries = tuple(found.tally.entries())


def _profile() -> Any:
    # Serving engines run forward passes in separate threads.
    settings = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    # torch.profiler.profile would keep every process group alive, also after
    # destroy_process_group(): a worker of gloo that still runs while the interpreter exits aborts
    # the process if it releases a tensor.
    return torch.autograd.profiler.profile(
        use_device="cuda" if torch.cuda.is_available() else None,
        use_kineto=True,
        experimental_config=settings,
        acc_events=True,
    )


@contextlib.contextmanager
def _call_ranges() -> Iterator[None]:
    launch_call = Dispatcher._launch

    def launch_in_range(self: Dispatcher, prepared: Any, *args: Any) -> None:
        with record_function(CALL + _describe(prepared)):
            launch_call(self, prepared, *args)

    Dispatcher._launch = launch_in_range  # type: ignore[method-assign,assignment]
    try:
        with fast_call.watched():
            yield
    finally:
        Dispatcher._launch = launch_call  # type: ignore[method-assign]


def _describe(prepared: Any) -> str:
    algorithm = prepared.plan.algorithm
    if algorithm == "local":
        return f"{NORM}|allnorm local"
    if prepared.op == "all_gather_rows":
        return "gather|all_gather_rows"
    if prepared.op == "all_reduce":
        return f"{REDUCTION}|allnorm all_reduce, {algorithm}"
    return f"{REDUCTION}|allnorm unfused" if algorithm == "unfused" else f"{FUSED}|{algorithm}"


class _Stack(threading.local):
    """The modules that a thread has entered, with their ranges."""

    def __init__(self) -> None:
        self.entered: list[tuple[torch.nn.Module, Any]] = []


class _Modules:
    """Hooks that run each module in a range that contains its path in the outermost module."""

    def __init__(self) -> None:
        self._stack = _Stack()
        self._paths: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()

    def enter(self, module: torch.nn.Module, args: Any) -> None:
        """Starts a module's range; a forward pre-hook."""
        if torch.compiler.is_compiling():
            return
        stack = self._stack.entered
        if not stack:
            for path, child in module.named_modules():
                self._paths[child] = path
        path = self._paths.get(module, "")
        entered = record_function(f"{MODULE}{path}|{type(module).__name__}")
        entered.__enter__()
        stack.append((module, entered))

    def leave(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        """Ends a module's range; a forward hook, which runs even if the forward raised."""
        if torch.compiler.is_compiling():
            return
        stack = self._stack.entered
        if not any(entered is module for entered, _ in stack):
            return
        while stack:
            entered, span = stack.pop()
            span.__exit__(None, None, None)
            if entered is module:
                return


@contextlib.contextmanager
def _module_ranges() -> Iterator[None]:
    modules = _Modules()
    hooks = (
        nn_module.register_module_forward_pre_hook(modules.enter),
        nn_module.register_module_forward_hook(modules.leave, always_call=True),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
