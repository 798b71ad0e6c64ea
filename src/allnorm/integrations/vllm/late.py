"""Runs actions when a module is imported later.

An exception in an action would be raised by the engine's import statement. It is passed to a
handler instead.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Action = Callable[[ModuleType], None]
Failed = Callable[[Exception], None]


def when_imported(name: str, action: Action, failed: Failed) -> None:
    """Calls `action` with a module after its import; immediately if it is imported already.

    Args:
        name: the name of the module.
        action: called with the module.
        failed: called with the exception if `action` raises one.
    """

    def guarded(module: ModuleType) -> None:
        try:
            action(module)
        except Exception as error:  # noqa: BLE001 - the import is the engine's
            failed(error)

    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        guarded(module)
        return
    _finder.actions.setdefault(name, []).append(guarded)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


class _Finder(importlib.abc.MetaPathFinder):
    """A meta path finder: finds modules by the other finders, and wraps their loaders."""

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
        if spec is None or spec.loader is None:
            return None
        spec.loader = _Loader(spec.loader, self.actions.pop(fullname))
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, actions: list[Action]) -> None:
        self._loader = loader
        self._actions = actions

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        if (
            module.__spec__ is not None
        ):  # restores the original loader, which other code may inspect
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        for action in self._actions:
            action(module)


_finder = _Finder()
