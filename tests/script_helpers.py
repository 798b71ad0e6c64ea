"""Loads repository scripts that are not part of the package as modules."""

from __future__ import annotations

import functools
import importlib.util
import pathlib
from types import ModuleType

ROOT = pathlib.Path(__file__).resolve().parent.parent


@functools.cache
def script(path: str) -> ModuleType:
    """Loads the module of a file, such as `benchmarks/pictures.py`."""
    file = ROOT / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
