"""Traces every process of an unmodified program that joins a process group.

`allnorm trace` runs the program with a `sitecustomize` that calls `install`. It loads this file by
path. Until a process group exists, this file imports only the standard library, so that the
program's other processes, such as a launcher, start without delay.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import json
import multiprocessing.util
import os
import pathlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

_MODULE = "torch.distributed.distributed_c10d"


def install(folder: str, own: str) -> None:
    """Traces this process from `init_process_group` to its end.

    Args:
        folder: folder for the reports, one file per rank.
        own: directory of the calling `sitecustomize`. It hides the environment's own
            `sitecustomize`, which is run too.
    """
    sys.meta_path.insert(0, _Finder(folder))
    paths = [path for path in sys.path if pathlib.Path(path).resolve() != pathlib.Path(own)]
    hidden = importlib.machinery.PathFinder.find_spec("sitecustomize", paths)
    if hidden is not None and hidden.loader is not None:
        hidden.loader.exec_module(importlib.util.module_from_spec(hidden))


class _Finder(importlib.abc.MetaPathFinder):
    """An import hook that wraps `init_process_group` once its module is imported."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def find_spec(
        self, fullname: str, path: Any, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Finds the module of `init_process_group` in the usual way, and wraps that function."""
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            module.init_process_group = _tracing(module.init_process_group, self._folder)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _tracing(init: Callable[..., None], folder: str) -> Callable[..., None]:
    """Returns a function that calls `init`, and starts the trace when it first succeeds."""
    started: list[bool] = []

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        init(*args, **kwargs)
        if not started:
            started.append(True)
            start(folder)

    return init_process_group


def start(folder: str) -> None:
    """Starts the trace of this process, which writes its report when the process exits."""
    from allnorm.tracing import trace

    context = trace()
    report = context.__enter__()
    owner = os.getpid()
    finished: list[bool] = []

    def finish() -> None:
        if finished or os.getpid() != owner:
            return
        finished.append(True)
        context.__exit__(None, None, None)
        path = pathlib.Path(folder, f"{report.rank}-{owner}.json")
        part = path.with_suffix(".part")
        part.write_text(json.dumps(report.to_dict()))
        part.rename(path)
        _skip_static_destructors()

    atexit.register(finish)
    # A forked child of multiprocessing exits without calling atexit functions.
    multiprocessing.util.Finalize(None, finish, exitpriority=100)


def _skip_static_destructors() -> None:
    """Makes exit() end this process with its exit code before C++ destroys static objects.

    After a profile, a thread of PyTorch's profiler (kineto) may still run, and destroying it aborts
    the process: "terminate called without an active exception" (pytorch/kineto#1497).
    """
    libc = ctypes.CDLL(None)
    # exit() runs handlers in reverse order of registration: fflush(NULL), then _exit(code).
    libc.on_exit(libc._exit, None)
    libc.__cxa_atexit(libc.fflush, None, None)
