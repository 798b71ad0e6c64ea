"""Runs actions when a module is imported later.

An exception in an action would make the engine's import statement raise. It is therefore passed to
a handler instead.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

Action = Callable[[ModuleType], None]


def when_imported(name: str, action: Action, failed: Callable[[Exception], None]) -> None:
    """Calls `action` with a module after its import; immediately if it is already imported.

    If `action` raises an exception, `failed` is called with the exception.
    """

    def guarded(module: ModuleType) -> None:
        try:
            action(module)
        except Exception as error:  # noqa: BLE001 - the engine's import must succeed
            failed(error)

    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        guarded(module)
        return
    _finder.actions.setdefault(name, []).append(guarded)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


class _Finder(importlib.abc.MetaPathFinder):
    """A meta path finder that lets the other finders find a module, then wraps its loader."""

    def __init__(self) -> None:
        self.actions: dict[str, list[Action]] = {}
        self._searching: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.actions or fullname in self._searching:
            return None
        self._searching.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching.discard(fullname)
        if spec is not None and spec.loader is not None:
            _follow(spec.loader, self.actions.pop(fullname))
        return spec


def _follow(loader: importlib.abc.Loader, actions: list[Action]) -> None:
    """Makes a loader call the actions after the next time it executes a module."""

    def exec_module(module: ModuleType) -> None:
        del loader.__dict__["exec_module"]  # other code may inspect the loader
        loader.exec_module(module)
        for action in actions:
            action(module)

    loader.__dict__["exec_module"] = exec_module


_finder = _Finder()
