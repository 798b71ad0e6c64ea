"""The record of who waits for whom, and turns under signal handlers: without ranks."""

from __future__ import annotations

import ctypes
import itertools
import sys
import threading
import time
from types import FrameType
from typing import Any

import pytest

from allnorm.core import notes, turn
from allnorm.core.notes import DIED, INTERRUPTED, LATE, LEFT, Cause


def make(count: int) -> tuple[list[notes.SharedNotes], Any]:
    """The notes of some ranks in memory of this process."""
    memory = (ctypes.c_char * (notes.NOTE_BYTES * count))()
    start = ctypes.addressof(memory)
    addresses = [start + rank * notes.NOTE_BYTES for rank in range(count)]
    return [notes.SharedNotes(addresses, rank) for rank in range(count)], memory


def nobody(rank: int) -> bool:
    return False


def test_a_chain_of_waits_ends_at_the_rank_that_does_not_wait() -> None:
    """Ranks 2 and 3 wait for 0, which waits for 1, which stands still between two waits."""
    ranks, _memory = make(4)
    for one in ranks:
        one.enter((0, 1, 2, 3))
        one.leave()
    ranks[0].enter((0, 1))
    for rank in (2, 3):
        ranks[rank].enter((2, 3))
        ranks[rank].leave()
        ranks[rank].enter((0, 2) if rank == 2 else (1, 3))
    ranks[2].enter((0, 1, 2, 3))
    for rank in (0, 2, 3):
        found = ranks[rank].settle(nobody)
        assert found is not None
        assert (found.rank, found.kind) == (1, LATE)
        assert ranks[rank].find(nobody) is None, "nothing is certain"


def test_causes_are_found_through_ranks_that_wait() -> None:
    ranks, _memory = make(3)
    ranks[2].post(Cause(2, INTERRUPTED, "Stop"))
    ranks[2].post(Cause(0, LATE))  # the first stays
    ranks[1].enter((1, 2))
    ranks[0].enter((0, 1))
    ranks[0].leave()
    ranks[0].enter((0, 1))
    assert ranks[0].find(nobody) == Cause(2, INTERRUPTED, "Stop")
    assert ranks[1].find(nobody) == Cause(2, INTERRUPTED, "Stop")
    assert ranks[1].first() == Cause(2, INTERRUPTED, "Stop")


def test_a_rank_that_has_done_its_part_may_leave() -> None:
    ranks, _memory = make(3)
    for one in ranks:
        one.enter((0, 1, 2))
    ranks[1].leave()
    ranks[1].post(Cause(1, LEFT))
    assert ranks[0].find(nobody) is None
    assert ranks[0].first() is None
    assert ranks[0].find(lambda rank: rank == 1) is None
    assert ranks[0].find(lambda rank: rank == 2) == Cause(2, DIED)
    ranks[0].leave()
    ranks[0].enter((0, 1))
    assert ranks[0].find(nobody) == Cause(1, LEFT)


def test_a_rank_that_stands_still_within_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, _memory = make(3)
    for one in ranks:
        one.enter((0, 1, 2))
    now = time.monotonic_ns() + 5_000_000_000
    monkeypatch.setattr(notes.time, "monotonic_ns", lambda: now)
    ranks[0].beat()
    ranks[2].beat()
    found = ranks[0].settle(nobody)
    assert found is not None
    assert (found.rank, found.kind) == (1, LATE)
    ranks[1].beat()
    assert ranks[0].settle(nobody) is None, "they wait for each other"


def test_long_reasons_and_torn_notes() -> None:
    ranks, _memory = make(2)
    ranks[0].post(Cause(0, INTERRUPTED, "é" * 9000))
    said = ranks[1].said_by(0)
    assert said is not None
    assert said.why.startswith("éé")
    ranks[0]._own.cause_crc ^= 1
    assert ranks[1].said_by(0) is None
    ranks[0].close()
    ranks[0].enter((0, 1))  # touches its own memory only
    assert ranks[1]._notes[0].tick == 0


class HandlerError(Exception):
    pass


def call(one: turn.Turn) -> bool:
    """A call as Endpoint makes it."""
    try:
        if not one.try_take(sys._getframe()):
            one.wait(sys._getframe())
        return one.is_here()
    finally:
        one.end(sys._getframe())


def at_line(number: int, action: Any) -> Any:
    """Makes a trace function that acts once, before line `number` that a call runs."""
    lines = itertools.count()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        own = frame.f_code.co_filename == turn.__file__ or frame.f_code is call.__code__
        if own and event == "line" and next(lines) == number:
            sys.settrace(None)
            action()
        return trace

    return trace


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.timeout(120)
def test_a_handler_at_every_line_of_a_turn(raises: bool) -> None:
    """A handler that calls, or raises, anywhere: the next call of any thread gets its turn."""
    before = sys.gettrace()
    met = 0
    for number in itertools.count():
        one = turn.Turn()
        happened: list[bool] = []

        def action(one: turn.Turn = one, happened: list[bool] = happened) -> None:
            happened.append(True)
            if raises:
                raise HandlerError
            if not one.is_here():  # else it is refused
                assert call(one)

        sys.settrace(at_line(number, action))
        try:
            assert call(one)
        except HandlerError:
            assert raises
        finally:
            sys.settrace(before)
        if not happened:
            break
        met += 1
        results: list[bool] = []
        other = threading.Thread(target=lambda one=one, out=results: out.append(call(one)))
        other.start()
        other.join(60)
        assert results == [True], number
        assert call(one)
        assert not one.lock.locked()
    assert met > 8
