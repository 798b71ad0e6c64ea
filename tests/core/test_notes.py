"""Tests ranks' notes about waits, and turn-taking with signal handlers, in a single process."""

from __future__ import annotations

import ctypes
import itertools
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import pytest
import torch.distributed

from allnorm.core import notes, turn
from allnorm.core.notes import DIED, INTERRUPTED, LATE, LEFT, Cause


def make(count: int) -> tuple[list[notes.SharedNotes], Any]:
    """Returns the notes of `count` ranks, stored in this process's memory."""
    memory = (ctypes.c_char * (notes.NOTE_BYTES * count))()
    start = ctypes.addressof(memory)
    addresses = [start + rank * notes.NOTE_BYTES for rank in range(count)]
    return [notes.SharedNotes(addresses, rank) for rank in range(count)], memory


def stuck(rank: int) -> Cause:
    return Cause(rank, LATE, "is stuck in this wait")


def no_rank(rank: int) -> bool:
    return False


def test_a_chain_of_waits_ends_at_the_rank_that_does_not_wait() -> None:
    """Ranks 2 and 3 wait for rank 0. Rank 0 waits for rank 1, which stopped between waits."""
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
        found = ranks[rank].settle(no_rank)
        assert found is not None
        assert (found.rank, found.kind) == (1, LATE)
        assert ranks[rank].find(no_rank) is None, "no cause is certain"


def test_causes_are_found_through_ranks_that_wait() -> None:
    ranks, _memory = make(3)
    ranks[2].post(Cause(2, INTERRUPTED, "Stop"))
    ranks[2].post(Cause(0, LATE))  # does not replace the first cause
    ranks[1].enter((1, 2))
    ranks[0].enter((0, 1))
    ranks[0].leave()
    ranks[0].enter((0, 1))
    assert ranks[0].find(no_rank) == Cause(2, INTERRUPTED, "Stop")
    assert ranks[1].find(no_rank) == Cause(2, INTERRUPTED, "Stop")
    assert ranks[1].first() == Cause(2, INTERRUPTED, "Stop")


def test_a_rank_that_has_done_its_part_may_leave() -> None:
    ranks, _memory = make(3)
    for one in ranks:
        one.enter((0, 1, 2))
    ranks[1].leave()
    ranks[1].post(Cause(1, LEFT))
    assert ranks[0].find(no_rank) is None
    assert ranks[0].first() is None
    assert ranks[0].find(lambda rank: rank == 1) is None
    assert ranks[0].find(lambda rank: rank == 2) == Cause(2, DIED)
    ranks[0].leave()
    ranks[0].enter((0, 1))
    assert ranks[0].find(no_rank) == Cause(1, LEFT)


class Machine:
    """Ranks with a simulated clock. A waiting rank stores the time ten times a second.

    Args:
        ranks: the ranks' notes.
        patch: replaces the real clock with the simulated one.
    """

    def __init__(self, ranks: list[notes.SharedNotes], patch: pytest.MonkeyPatch) -> None:
        self.ranks, self.now, self.beaten = ranks, 10**12, 10**12
        self.waiting: set[int] = set()
        self.at: dict[int, Callable[[], None]] = {}  # scheduled actions by time
        patch.setattr(notes, "time", self)

    def monotonic_ns(self) -> int:
        return self.now

    def sleep(self, seconds: float) -> None:
        end = self.now + int(seconds * 1e9)
        while self.now < end:
            self.now = min([end, self.beaten + 10**8, *(t for t in self.at if t < end)])
            if self.now == self.beaten + 10**8:
                self.beaten = self.now
                for rank in self.waiting:
                    self.ranks[rank].beat()
            if self.now in self.at:
                self.at.pop(self.now)()

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Schedules an action in the simulated future."""
        self.at[self.now + int(seconds * 1e9)] = action

    def enter(self, rank: int, peers: Sequence[int], waits: bool = True) -> None:
        """Writes a rank's note that it waits. If `waits` is false, the rank has stopped."""
        self.ranks[rank].enter(peers)
        (self.waiting.add if waits else self.waiting.discard)(rank)

    def leave(self, *ranks: int) -> None:
        for rank in ranks:
            self.ranks[rank].leave()
            self.waiting.discard(rank)


ISLANDS = ((0, 1), (2, 3), (4, 5))


def island_of(rank: int) -> tuple[int, ...]:
    return ISLANDS[rank // 2]


def same_place(rank: int) -> tuple[int, ...]:
    return tuple(range(rank % 2, 6, 2))


def test_a_starved_rank_is_not_blamed_for_one_that_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All ranks are in one wait. Rank 0 gets no CPU time for a while, and rank 5 has stopped."""
    ranks, _memory = make(6)
    machine = Machine(ranks, monkeypatch)
    for rank in range(6):
        machine.enter(rank, range(6), waits=rank != 5)
    machine.sleep(1.0)
    machine.waiting.discard(0)
    machine.sleep(2.0)
    for rank in (1, 2, 3, 4):
        assert ranks[rank].settle(no_rank) == stuck(5), rank
        assert ranks[rank].settle(no_rank, 5) == stuck(5), rank
    machine.waiting.add(0)
    assert ranks[0].settle(no_rank) == stuck(5)


@pytest.mark.parametrize("stopped", range(6))
@pytest.mark.parametrize("seconds", [0.0, 1.0, 2.9], ids=lambda s: f"stopped_after_{s:g}_s")
def test_a_rank_that_stops_within_launch_a(
    monkeypatch: pytest.MonkeyPatch, stopped: int, seconds: float
) -> None:
    """The stopped rank's island waits in the launch, other islands in a later exchange."""
    ranks, _memory = make(6)
    machine = Machine(ranks, monkeypatch)
    for rank in range(6):
        machine.enter(rank, island_of(rank))
    others = [rank for rank in range(6) if rank // 2 != stopped // 2]
    machine.leave(*others)
    for rank in others:
        machine.enter(rank, same_place(rank))
    machine.sleep(seconds)
    machine.waiting.discard(stopped)
    machine.sleep(3.0 - seconds)
    (neighbor,) = set(island_of(stopped)) - {stopped}
    for rank in others:
        found = ranks[rank].settle(no_rank)
        assert found is not None
        assert (found.rank, found.kind) == (stopped, LATE), rank
    assert ranks[neighbor].settle(no_rank, stopped) == stuck(stopped)


def test_a_rank_between_two_stages_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 waited for rank 2, and has not begun its next wait when rank 0 reads its notes."""
    ranks, _memory = make(3)
    machine = Machine(ranks, monkeypatch)
    for rank in range(3):
        machine.enter(rank, (0, 1, 2))
    machine.leave(0)
    machine.enter(0, (0, 1))
    machine.sleep(2.9)
    machine.leave(1, 2)
    machine.later(0.2, lambda: machine.enter(1, (1, 2)))
    machine.sleep(0.1)
    assert ranks[0].settle(no_rank) == Cause(2, LATE, "did not come")


def test_a_rank_that_comes_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 arrives while rank 0 looks for the cause, so it is late but has not stopped."""
    ranks, _memory = make(2)
    machine = Machine(ranks, monkeypatch)
    machine.enter(0, (0, 1))
    machine.sleep(3.0)
    machine.later(0.1, lambda: machine.enter(1, (0, 1)))
    machine.later(0.2, lambda: machine.leave(1))
    assert ranks[0].settle(no_rank) == Cause(1, LATE, "did not come")


def test_no_rank_is_blamed_for_a_suspended_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a suspension, the first rank to run sees old times in all other ranks' notes."""
    ranks, _memory = make(3)
    machine = Machine(ranks, monkeypatch)
    for rank in range(3):
        machine.enter(rank, (0, 1, 2))
    machine.now += 10**10
    machine.beaten = machine.now
    assert ranks[0].settle(no_rank) is None
    assert ranks[0].settle(no_rank, 1) is None


def test_ranks_that_wait_for_each_other_are_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, _memory = make(3)
    machine = Machine(ranks, monkeypatch)
    machine.enter(0, (0, 1, 2))
    machine.sleep(0.5)
    for rank in (1, 2):
        ranks[rank].enter((0, 1, 2))
    machine.waiting = {0, 1, 2}
    start = machine.now
    assert ranks[0].settle(no_rank) is None
    assert machine.now - start < 4e9
    machine.waiting = {0, 2}
    assert ranks[0].settle(no_rank) == stuck(1)


def test_without_notes_there_is_no_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeated calls write no notes, so only the native library knows which rank is late."""
    ranks, _memory = make(3)
    machine = Machine(ranks, monkeypatch)
    for rank in range(3):
        machine.enter(rank, (0, 1, 2))
    machine.leave(0, 1, 2)
    machine.sleep(5.0)
    assert ranks[0].settle(no_rank, 1) is None
    assert ranks[0].settle(no_rank) is None


def test_a_rank_that_still_waits_names_the_rank_it_waits_for() -> None:
    """Ranks are on different machines. Rank 1 waits too, and has not timed out yet."""
    store = torch.distributed.HashStore()
    first, second = (notes.StoreNotes(store, "notes", rank) for rank in range(2))
    first.enter((0, 1))
    second.enter((1, 2))
    assert second.find(no_rank) is None
    done = threading.Event()

    def wait() -> None:
        while not done.wait(0.05):
            second.find(no_rank)

    waits = threading.Thread(target=wait)
    waits.start()
    try:
        assert first.settle(no_rank) == Cause(2, LATE, "did not come")
    finally:
        done.set()
        waits.join()


def test_long_reasons_and_torn_notes() -> None:
    ranks, _memory = make(2)
    ranks[0].post(Cause(0, INTERRUPTED, "é" * 9000))
    said = ranks[1].said_by(0)
    assert said is not None
    assert said.why.startswith("éé")
    ranks[0]._own.cause_crc ^= 1
    assert ranks[1].said_by(0) is None
    ranks[0].close()
    ranks[0].enter((0, 1))  # after close(), rank 0 writes only to private memory
    assert ranks[1]._notes[0].tick == 0


class HandlerError(Exception):
    pass


def call(one: turn.Turn) -> bool:
    """Takes a turn and ends it, as Endpoint does for each call."""
    try:
        if not one.try_take(sys._getframe()):
            one.wait(sys._getframe())
        return one.is_here()
    finally:
        one.end(sys._getframe())


def at_line(number: int, action: Any) -> Any:
    """Returns a trace function that runs `action` once, before line `number` of a call."""
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
    """After a handler that calls or raises at any line, every thread can still take a turn."""
    before = sys.gettrace()
    met = 0
    for number in itertools.count():
        one = turn.Turn()
        happened: list[bool] = []

        def action(one: turn.Turn = one, happened: list[bool] = happened) -> None:
            happened.append(True)
            if raises:
                raise HandlerError
            if not one.is_here():  # a call within a call would be refused
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
