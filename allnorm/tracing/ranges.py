"""Ranges for the profiler, while a trace is active: modules, and calls of this library.

Nothing of this is in place at other times: a call costs what it costs without.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.nn.modules import module as nn_module

from allnorm.core import fast_call
from allnorm.core.dispatch import Dispatcher
from allnorm.tracing.names import CALL, MODULE
from allnorm.tracing.report import FUSED, NORM, REDUCTION


@contextlib.contextmanager
def ranges() -> Iterator[None]:
    """Ranges around every module's forward, and around every call of this library."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_call_ranges())
        stack.enter_context(_module_ranges())
        yield


@contextlib.contextmanager
def _call_ranges() -> Iterator[None]:
    launch_call = Dispatcher._launch

    def launch_in_range(self: Dispatcher, launch: Any, *args: Any) -> None:
        with record_function(CALL + _describe(launch)):
            launch_call(self, launch, *args)

    Dispatcher._launch = launch_in_range  # type: ignore[method-assign,assignment]
    try:
        with fast_call.watched():
            yield
    finally:
        Dispatcher._launch = launch_call  # type: ignore[method-assign]


def _describe(launch: Any) -> str:
    algorithm = launch.plan.algorithm
    if algorithm == "local":
        return f"{NORM}|allnorm local"
    if launch.op == "all_gather_rows":
        return "gather|all_gather_rows"
    if launch.op == "all_reduce":
        return f"{REDUCTION}|allnorm all_reduce, {algorithm}"
    return f"{REDUCTION}|allnorm unfused" if algorithm == "unfused" else f"{FUSED}|{algorithm}"


class _Modules:
    """The module that each thread is in, by its path in the outermost one."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._paths: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()

    def enter(self, module: torch.nn.Module, args: Any) -> None:
        """A forward pre-hook."""
        if torch.compiler.is_compiling():
            return
        stack = self._stack()
        if not stack:
            for path, child in module.named_modules():
                self._paths[child] = path
        path = self._paths.get(module, "")
        entered = record_function(f"{MODULE}{path}|{type(module).__name__}")
        entered.__enter__()
        stack.append((module, entered))

    def leave(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        """A forward hook, called also if the forward has raised."""
        if torch.compiler.is_compiling():
            return
        stack = self._stack()
        if not any(entered is module for entered, _ in stack):
            return
        while stack:
            entered, span = stack.pop()
            span.__exit__(None, None, None)
            if entered is module:
                return

    def _stack(self) -> list[tuple[torch.nn.Module, Any]]:
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        stack: list[tuple[torch.nn.Module, Any]] = self._local.stack
        return stack


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
