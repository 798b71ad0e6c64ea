"""Runs steps in a thread, because they may wait longer than their caller can."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def start(step: Callable[[], Any]) -> tuple[threading.Thread, list[Any], list[BaseException]]:
    """Starts a step in a daemon thread; returns the thread, and lists for its result and error."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(step())
        except BaseException as error:  # noqa: BLE001 - the caller decides
            errors.append(error)

    thread = threading.Thread(target=run, name="allnorm-step", daemon=True)
    thread.start()
    return thread, results, errors


def run_bounded(step: Callable[[], Any], seconds: float) -> Any:
    """Returns the result of `step`, or raises its error; returns None if it takes longer.

    Steps use a store, which ignores deadlines if its process is stopped or its host unreachable.
    """
    thread, results, errors = start(step)
    thread.join(seconds)
    if errors:
        raise errors[0]
    return results[0] if results else None
