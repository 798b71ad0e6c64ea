"""The record of who waits for whom, which ranks keep for each other, and the cause of a failure.

Each rank has a note that its peers can read. While it waits on the host the note says so: for which
ranks, and in which of its waits. A rank that gives up adds the cause: the rank at fault, and what
happened to it. The first cause stays.

A rank whose wait fails follows the notes: from the ranks that it waits for to those that they wait
for, up to a rank that has given up (then its cause is the cause), whose process has ended, or that
stands still. Ranks that fail for one reason therefore name one rank. `find` returns what is known
for certain, and ends a wait early. `settle` also suspects ranks that stand still, which is right
only when a wait has lasted its whole timeout.

A thread that waits stores the time in its rank's note again and again, in Python and in the
library. It also does at both ends of a wait. A rank stands still if its note has not changed for a
while. So a rank that waits for another one, or has just left a wait, is not suspected. `settle`
looks until a rank that has just stopped can be told from those. It looks for a moment in any case,
because all processes of the machine may have been suspended. Of several suspects it names the one
with the oldest note: a rank that only lacks a processor has stored the time later than one that has
stopped.

Ranks of one machine keep notes in shared memory, next to the workspaces (workspace.py): only its
own rank writes a note, and it stays readable when that rank, or the store of the process group, is
gone. Between machines causes go through the store, and ranks publish what they waited for when they
fail.

Waits are counted: a note's tick is 2 k + 1 in wait number k and 2 k + 2 after it. All ranks make
the same calls and thereby the same waits in the same order, so ticks of different ranks compare: a
rank with a later tick has done its part of a wait.
"""

from __future__ import annotations

import abc
import contextlib
import ctypes
import json
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

# Of a rank's memory for its note.
NOTE_BYTES = 4096
# Kinds of causes.
DIED = "died"
LEFT = "left"
INTERRUPTED = "interrupted"
FAILED = "failed"
LATE = "late"
CROSSED = "crossed"
# What a rank at fault has done.
_TOO_LATE, _STANDS_STILL = "did not come", "stands still within it"
# A waiting rank refreshes its note about every 0.1 s. One that has not for so long stands still.
_STALE_NS = 1_500_000_000
# So long a rank that looks must have seen no change in the note of a suspect.
_UNCHANGED_NS = 300_000_000
# So long it looks for a suspect. Other ranks whose waits fail give up meanwhile, and say why.
_SETTLE_NS = 2 * _STALE_NS
# How long ranks of several machines wait for what the others publish.
_STORE_SECONDS = 2.0
_LOOK_SECONDS = 0.5
# How often a rank that waits looks whether it is asked for whom.
_ASKED_SECONDS = 0.1
_PAUSE_SECONDS = 0.01

IsDead = Callable[[int], bool]
"""Returns whether the process of a rank is known to have ended."""


class Cause(NamedTuple):
    """The cause of a failure.

    Attributes:
        rank: the rank at fault; -1: unknown.
        kind: DIED, LEFT, INTERRUPTED, FAILED, LATE, or CROSSED: two of its threads called at once.
        why: details in words; may be empty.
    """

    rank: int
    kind: str
    why: str = ""


class Notes(abc.ABC):
    """The notes of a communicator's ranks.

    Attributes:
        peers: the ranks of the current or latest wait.
    """

    peers: Sequence[int] = ()
    beat_address = 0
    """Where waits in the library store the time; 0: nowhere."""

    def enter(self, peers: Sequence[int]) -> None:
        """Notes that this rank begins to wait for `peers`, which may include itself."""
        self.peers = peers

    def leave(self) -> None:  # noqa: B027
        """Notes that the wait has succeeded."""

    def beat(self) -> None:  # noqa: B027
        """Notes that this rank still waits."""

    def close(self) -> None:  # noqa: B027
        """Reads and writes no shared memory any more, which is about to be released."""

    @abc.abstractmethod
    def post(self, cause: Cause) -> None:
        """Publishes why this rank has given up. The first cause stays."""

    @abc.abstractmethod
    def said_by(self, rank: int) -> Cause | None:
        """Returns the cause that a rank has published."""

    @abc.abstractmethod
    def first(self) -> Cause | None:
        """Returns a cause that any rank has published; the first one, if that is known."""

    @abc.abstractmethod
    def find(self, is_dead: IsDead) -> Cause | None:
        """Returns the cause that keeps the current wait from ending, if one is certain."""

    @abc.abstractmethod
    def settle(self, is_dead: IsDead, behind: int | None = None) -> Cause | None:
        """Returns the most likely cause after a wait has lasted its timeout. Bounded.

        Args:
            is_dead: as in `find`.
            behind: the rank that the library has found furthest behind, if the wait was one of the
                library; None: the wait is the current one, for `peers`.
        """


class NoNotes(Notes):
    """Notes of a rank without peers that could read them."""

    def post(self, cause: Cause) -> None:
        """Does nothing."""

    def said_by(self, rank: int) -> Cause | None:
        """Returns None."""
        return None

    def first(self) -> Cause | None:
        """Returns None."""
        return None

    def find(self, is_dead: IsDead) -> Cause | None:
        """Returns None."""
        return None

    def settle(self, is_dead: IsDead, behind: int | None = None) -> Cause | None:
        """Returns None."""
        return None


class _Note(ctypes.Structure):
    """A rank's note in shared memory. Fields of 8 bytes are written whole."""

    _fields_ = [
        ("tick", ctypes.c_uint64),
        ("peers", ctypes.c_uint64),  # bit mask
        ("beat_ns", ctypes.c_int64),  # monotonic clock of the machine
        ("cause_bytes", ctypes.c_uint32),  # 0: the rank has not given up
        ("cause_crc", ctypes.c_uint32),
        ("cause", ctypes.c_char * (NOTE_BYTES - 32)),
    ]


class _Behind(NamedTuple):
    """A rank that has not done its part of a wait.

    Attributes:
        rank: its number.
        reached: its tick.
        tick: of the wait.
    """

    rank: int
    reached: int
    tick: int


class SharedNotes(Notes):
    """Notes in shared memory.

    Args:
        addresses: of every rank's note, zeros at first.
        rank: this one.
    """

    def __init__(self, addresses: Sequence[int], rank: int) -> None:
        self._rank = rank
        self._notes = [_Note.from_address(address) for address in addresses]
        self._own = self._notes[rank]
        self.beat_address = addresses[rank] + _Note.beat_ns.offset
        self._tick = 0
        self._masks: dict[tuple[int, ...], int] = {}
        # Any thread may read; close() may not take the memory away meanwhile. Reentrant, since a
        # signal handler may come in between.
        self._lock = threading.RLock()

    def enter(self, peers: Sequence[int]) -> None:
        """Notes that this rank begins to wait for `peers`."""
        self.peers = peers
        own, key = self._own, tuple(peers)
        mask = self._masks.get(key)
        if mask is None:
            mask = self._masks[key] = sum(1 << peer for peer in set(key))
        own.peers = mask
        own.beat_ns = time.monotonic_ns()
        # Odd, also if the wait before was left by an exception.
        self._tick = (self._tick + 1) | 1
        own.tick = self._tick

    def leave(self) -> None:
        """Notes that the wait has succeeded."""
        self._tick += 1
        self._own.beat_ns = time.monotonic_ns()
        self._own.tick = self._tick

    def beat(self) -> None:
        """Notes that this rank still waits."""
        self._own.beat_ns = time.monotonic_ns()

    def post(self, cause: Cause) -> None:
        """Publishes why this rank has given up. The first cause stays."""
        why = cause.why
        while len(data := json.dumps(cause._replace(why=why)).encode()) >= NOTE_BYTES - 32:
            why = why[: len(why) // 2]
        with self._lock:
            if not self._own.cause_bytes:
                self._own.cause = data
                self._own.cause_crc = zlib.crc32(data)
                self._own.cause_bytes = len(data)  # last: readers look at it first

    def said_by(self, rank: int) -> Cause | None:
        """Returns the cause that a rank has published."""
        with self._lock:
            note = self._notes[rank]
            size = note.cause_bytes
            if not 0 < size < NOTE_BYTES - 32:
                return None
            data = ctypes.string_at(ctypes.addressof(note) + _Note.cause.offset, size)
            # Killed while it wrote, or not all of it is visible here yet.
            return Cause(*json.loads(data)) if zlib.crc32(data) == note.cause_crc else None

    def first(self) -> Cause | None:
        """Returns a cause that any rank has published."""
        causes = (self.said_by(rank) for rank in range(len(self._notes)))
        # A rank that has closed its communicator has not failed.
        return next((cause for cause in causes if cause is not None and cause.kind != LEFT), None)

    def find(self, is_dead: IsDead) -> Cause | None:
        """Returns the cause that keeps the current wait from ending, if one is certain."""
        with self._lock:
            return self._certain(self._behind(self.peers), is_dead)

    def settle(self, is_dead: IsDead, behind: int | None = None) -> Cause | None:
        """Returns the most likely cause after a wait has lasted its timeout. Bounded."""
        peers = self.peers if behind is None else (behind,)
        deadline = time.monotonic_ns() + _SETTLE_NS
        seen: dict[int, tuple[tuple[int, int], int]] = {}  # by rank: its note, and since when
        furthest: _Behind | None = None  # at the first look
        while True:
            with self._lock:
                self.beat()  # peers look at this rank too
                late = self._behind(peers)
                cause = self.find(is_dead) or self._certain(late, is_dead)
                if cause is not None:
                    return cause
                # Where neither this rank nor a peer is in a wait that is noted, notes say nothing.
                late = [one for one in late if one.reached < one.tick or one.tick & 1]
                cause = self._suspect(late, seen)
            if cause is not None:
                return cause
            furthest = furthest or min(late, key=lambda one: one.reached, default=None)
            if not late and furthest is not None and furthest.reached < furthest.tick:
                return Cause(furthest.rank, LATE, _TOO_LATE)  # it has come meanwhile
            if not late or time.monotonic_ns() > deadline:
                return None
            time.sleep(_PAUSE_SECONDS)

    def close(self) -> None:
        """Reads and writes no shared memory any more, which is about to be released."""
        with self._lock:
            self._notes = [_Note() for _ in self._notes]
            self._own = self._notes[self._rank]

    def _behind(self, peers: Sequence[int]) -> list[_Behind]:
        """Returns the ranks because of which a wait for `peers` may not end, the first ones first.

        These are the peers that have not done their part. Each is followed by the ranks because of
        which its own wait may not end.
        """
        found: list[_Behind] = []
        known = {self._rank}

        def follow(peers: Sequence[int], tick: int) -> None:
            notes = sorted((self._notes[peer].tick, peer) for peer in peers)
            for reached, peer in notes:
                if reached > tick:
                    return  # it has done its part, as all that follow
                if peer in known:
                    continue
                known.add(peer)
                found.append(_Behind(peer, reached, tick))
                if reached & 1:
                    mask = self._notes[peer].peers
                    follow([r for r in range(len(self._notes)) if mask >> r & 1], reached)

        follow(peers, self._tick)
        return found

    def _certain(self, ranks: Sequence[_Behind], is_dead: IsDead) -> Cause | None:
        """Returns the cause that one of these ranks has published or is, if one is certain."""
        for rank, _, _ in ranks:
            cause = self.said_by(rank)
            if cause is not None:
                return cause
            if is_dead(rank):
                return Cause(rank, DIED)
        return None

    def _suspect(
        self, ranks: Sequence[_Behind], seen: dict[int, tuple[tuple[int, int], int]]
    ) -> Cause | None:
        """Returns the one of these ranks that stands still; of several, the first that did.

        Args:
            ranks: the candidates.
            seen: what this function has seen of them in earlier looks.
        """
        now = time.monotonic_ns()
        oldest: tuple[int, _Behind] | None = None
        for one in ranks:
            note = self._notes[one.rank]
            state = int(note.tick), int(note.beat_ns)
            if one.rank not in seen or seen[one.rank][0] != state:
                seen[one.rank] = state, now
            stale = now - note.beat_ns > _STALE_NS and now - seen[one.rank][1] > _UNCHANGED_NS
            if stale and (oldest is None or state[1] < oldest[0]):
                oldest = state[1], one
        if oldest is None:
            return None
        _, one = oldest
        within = one.reached == one.tick
        return Cause(one.rank, LATE, _STANDS_STILL if within else _TOO_LATE)


class StoreNotes(Notes):
    """Notes that go through the store of the process group, between machines.

    Args:
        store: of the group; may block, or raise when its process has ended.
        prefix: of the keys, which no other communicator has.
        rank: this one.
    """

    def __init__(self, store: Any, prefix: str, rank: int) -> None:
        self._store, self._prefix, self._rank = store, prefix, rank
        self._posted = False
        self._answered: list[int] = []  # for whom this rank has last said that it waits
        self._looked = 0.0
        self._late: threading.Thread | None = None  # waits for a store that does not answer

    def post(self, cause: Cause) -> None:
        """Publishes why this rank has given up. The first cause of all ranks stays."""
        if not self._posted and cause.kind != LEFT:
            self._posted = True
            text = json.dumps(cause)
            self._bounded(lambda: self._store.compare_set(self._key("first"), "", text))

    def said_by(self, rank: int) -> Cause | None:
        """Returns the first cause that any rank has published."""
        return self._bounded(self.first)

    def first(self) -> Cause | None:
        """Returns the first cause that any rank has published; may block."""
        key = self._key("first")
        return Cause(*json.loads(self._store.get(key))) if self._store.check([key]) else None

    def find(self, is_dead: IsDead) -> Cause | None:
        """Returns the cause that keeps the current wait from ending, if one is certain."""
        for peer in self.peers:
            if peer != self._rank and is_dead(peer):
                return self.said_by(peer) or Cause(peer, DIED)
        return self._bounded(lambda: self.look(self.peers))

    def look(self, peers: Sequence[int]) -> Cause | None:
        """Returns the first cause that any rank has published; may block.

        Now and then it also looks whether a rank asks who waits for whom. Then it publishes `peers`
        as those for whom this rank waits.
        """
        cause = self.first()
        now = time.monotonic()
        if cause is None and now - self._looked > _ASKED_SECONDS:
            self._looked = now
            own = [peer for peer in peers if peer != self._rank]
            if own != self._answered and self._store.check([self._key("asked")]):
                self._publish(own)
        return cause

    def _publish(self, own: list[int]) -> None:
        self._answered = own
        self._store.set(self._key(self._rank), json.dumps(own))

    def settle(self, is_dead: IsDead, behind: int | None = None) -> Cause | None:
        """Returns the most likely cause after a wait has lasted its timeout.

        This rank publishes for whom it waited, and asks those that still wait to do so. Whoever
        waited for it follows it there, and so on, to a rank that publishes nothing: all that wait
        because of it name it.
        """
        certain = self.find(is_dead)
        if certain is not None:
            return certain
        deadline = time.monotonic() + _STORE_SECONDS
        peers = self.peers if behind is None else (behind,)
        own = [peer for peer in peers if peer != self._rank]

        def follow() -> Cause | None:
            self._store.set(self._key("asked"), "1")
            self._publish(own)
            peers, seen = own, {self._rank}
            while True:
                said = self._read(peers, deadline)
                first = self.first()
                if first is not None:
                    return first
                silent = [peer for peer in peers if peer not in said]
                if silent:
                    return Cause(silent[0], LATE, _TOO_LATE)
                following = [peer for peer in peers if peer not in seen]
                if not following:  # they wait for each other
                    return None
                peers = said[following[0]]
                seen.add(following[0])

        return self._bounded(follow, 2 * _STORE_SECONDS)

    def _read(self, peers: Sequence[int], deadline: float) -> dict[int, list[int]]:
        """Returns for whom peers waited, those that publish it before the deadline."""
        said: dict[int, list[int]] = {}
        while True:
            for peer in peers:
                if peer not in said and self._store.check([self._key(peer)]):
                    said[peer] = json.loads(self._store.get(self._key(peer)))
            done = len(said) >= len(set(peers)) or self._store.check([self._key("first")])
            if done or time.monotonic() > deadline:
                return said
            time.sleep(_PAUSE_SECONDS)

    def _key(self, name: int | str) -> str:
        return f"{self._prefix}/{name}"

    def _bounded(self, step: Callable[[], Any], seconds: float = _LOOK_SECONDS) -> Any:
        """Returns what `step` returns; None if it fails or takes too long.

        In a thread, because a store whose process is stopped answers to no deadline.
        """
        if self._late is not None and self._late.is_alive():
            return None
        found = []

        def run() -> None:
            with contextlib.suppress(Exception):
                found.append(step())

        thread = threading.Thread(target=run, name="allnorm-notes", daemon=True)
        thread.start()
        thread.join(seconds)
        self._late = thread
        return found[0] if found else None
