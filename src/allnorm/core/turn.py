"""Turns: one thread at a time calls a communicator, whatever signal handlers do.

Python runs a signal handler between any two bytecodes of the main thread. A handler may use the
communicator that it interrupts, and may raise. So a turn is taken, and ended, by a single C call,
which no handler can interrupt: the lock and the record of its holder change together. The holder is
the frame of the call. A call is in progress while its frame is on a thread's stack, and no longer.
So if an exception has kept a turn from being ended, the next call notices this and ends the turn.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import operator
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

# Interval at which a waiting thread checks whether the call before it still runs.
_LOOK_SECONDS = 0.5
_call: Callable[[Any], Any] = operator.call


class Turn:
    """A communicator's turn, which one call at a time holds.

    Attributes:
        lock: held during a turn; csrc/python takes it directly.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._calls: collections.deque[FrameType] = collections.deque()

    def try_take(self, call: FrameType, seconds: float = 0) -> bool:
        """Takes the turn for the call of this frame; returns False if another call holds it."""
        # compress() yields the frame only if acquire() has returned True. All of this is C.
        taken = map(self.lock.acquire, (True,), (seconds,))
        self._calls.extend(itertools.compress((call,), taken))
        return call in self._calls

    def wait(self, call: FrameType) -> None:
        """Takes the turn for the call of this frame, after other threads' calls."""
        while not self.try_take(call, _LOOK_SECONDS):
            self._end_lost()

    def end(self, call: FrameType) -> None:
        """Ends the turn of a call. Idempotent; does nothing for a call without the turn."""
        steps: tuple[Callable[[], None], ...]
        steps = functools.partial(self._calls.remove, call), self.lock.release
        with contextlib.suppress(ValueError):
            # Runs both steps, or neither if the first raises. All of this is C.
            collections.deque(map(_call, steps), maxlen=0)

    def is_here(self) -> bool:
        """Returns whether the call that holds the turn runs in this thread."""
        return any(_is_on(sys._getframe(), call) for call in tuple(self._calls))

    def _end_lost(self) -> None:
        """Ends the turn of a call that is no longer on any stack."""
        for call in tuple(self._calls):
            if not any(_is_on(frame, call) for frame in sys._current_frames().values()):
                self.end(call)


def _is_on(frame: FrameType | None, call: FrameType) -> bool:
    """Returns whether `call` is a frame or one of its callers."""
    while frame is not None:
        if frame is call:
            return True
        frame = frame.f_back
    return False
