"""Notes: records that the ranks keep of which rank waits for which, and of why a rank failed.

Each rank has a note that its peers can read. While a rank waits on the host, its note contains the
ranks that it waits for, and the number of the wait. A rank that gives up adds the cause: the failed
rank, and what happened to it. A later cause does not replace the first.

After a failed wait, a rank follows the notes: from the ranks that it waited for to the ranks that
these wait for, and so on. It stops at a rank that has given up (and takes over its cause), has
exited, or is stuck. So all ranks that fail for the same reason name the same rank. `find` returns
only a certain cause, and ends a wait early. `settle` also suspects stuck ranks, which is justified
only after a wait has lasted its whole timeout.

A waiting thread stores the time in its rank's note repeatedly, in Python and in the library, and
once more at both ends of a wait. A rank is stuck if its note has not changed for a while. So a rank
that waits, or has just stopped waiting, is not suspected. `settle` keeps looking until it can
distinguish a rank that has just become stuck from such ranks. It always looks for a moment, because
all processes of the host may have been suspended. If it suspects more than one rank, it names the
one with the oldest note: a rank that only lacks CPU time stored the time later than a stuck one.

On one host, notes are in shared memory next to the workspaces (workspace.py). A note is written
only by its own rank, and stays readable after that rank, or the process group's store, is gone.
Between hosts, ranks publish causes in the store, and when they fail, also which ranks they waited
for.

Waits are counted: a note's tick is 2 k + 1 during wait k, and 2 k + 2 after it. All ranks make the
same calls, hence the same waits in the same order. So the ticks of different ranks can be compared:
a rank with a later tick has done its part of a wait.
"""

from __future__ import annotations

import ctypes
import json
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from allnorm.core import threads

# Bytes of shared memory per note.
NOTE_BYTES = 4096
# Kinds of causes.
DIED = "died"
LEFT = "left"
INTERRUPTED = "interrupted"
FAILED = "failed"
LATE = "late"
CROSSED = "crossed"  # two of the rank's threads made calls at the same time
# Descriptions of what a failed rank did.
_TOO_LATE, _STUCK = "did not come", "is stuck in this wait"
# A waiting rank refreshes its note about every 0.1 s. After this time without a change it is stuck.
_STALE_NS = 1_500_000_000
# A suspect's note must not change for this long while `settle` looks.
_UNCHANGED_NS = 300_000_000
# Time limit of `settle`. Other ranks with failed waits give up meanwhile, and publish why.
_SETTLE_NS = 2 * _STALE_NS
# The time that ranks on different hosts wait for peers to publish whom they waited for.
_STORE_SECONDS = 2.0
_LOOK_SECONDS = 0.5
# Interval at which a waiting rank checks whether a peer asks whom it waits for.
_ASKED_SECONDS = 0.1
_PAUSE_SECONDS = 0.01

IsDead = Callable[[int], bool]
"""Returns whether the process of a rank is known to have ended."""


class Cause(NamedTuple):
    """The cause of a failure: which rank failed, and how."""

    rank: int  # the failed rank; -1: unknown
    kind: str  # one of the constants above
    why: str = ""  # details; may be empty


class Notes:
    """The notes of a communicator's ranks. This base class is for a rank without peers.

    Attributes:
        peers: the ranks of the current or latest wait.
    """

    peers: Sequence[int] = ()
    beat_address = 0
    """Address at which waits in the library store the time; 0: nowhere."""

    def enter(self, peers: Sequence[int]) -> None:
        """Records that this rank starts to wait for `peers`, which may include itself."""
        self.peers = peers

    def leave(self) -> None:
        """Records that the wait has succeeded."""

    def beat(self) -> None:
        """Records that this rank still waits."""

    def close(self) -> None:
        """Stops using the shared memory, which is about to be released."""

    def post(self, cause: Cause) -> None:
        """Publishes why this rank has given up. Only the first cause is kept."""

    def said_by(self, rank: int) -> Cause | None:
        """Returns the cause that a rank has published; None if it has published none."""
        return None

    def first(self) -> Cause | None:
        """Returns a cause that any rank has published; the first one, if that is known."""
        return None

    def find(self, is_dead: IsDead) -> Cause | None:
        """Returns the cause that keeps the current wait from ending, if one is certain."""
        return None

    def settle(self, is_dead: IsDead, behind: int | None = None) -> Cause | None:
        """Returns the most likely cause after a wait has lasted its timeout. Bounded.

        Args:
            is_dead: as in `find`.
            behind: for a wait in the library, the rank that the library reported; None: for the
                current wait, the ranks are `peers`.
        """
        return None


class _Note(ctypes.Structure):
    """A rank's note in shared memory. Fields of 8 bytes are written atomically."""

    _fields_ = [
        ("tick", ctypes.c_uint64),
        ("peers", ctypes.c_uint64),  # bit mask
        ("beat_ns", ctypes.c_int64),  # monotonic clock of the machine
        ("cause_bytes", ctypes.c_uint32),  # 0: the rank has not given up
        ("cause_crc", ctypes.c_uint32),
        ("cause", ctypes.c_char * (NOTE_BYTES - 32)),
    ]


class _Behind(NamedTuple):
    """A rank that has not done its part of a wait."""

    rank: int  # number of the rank
    reached: int  # tick of the rank
    tick: int  # tick of the wait


class SharedNotes(Notes):
    """Notes in shared memory that is initially zero, at one address per rank."""

    def __init__(self, addresses: Sequence[int], rank: int) -> None:
        self._rank = rank
        self._notes = [_Note.from_address(address) for address in addresses]
        self._own = self._notes[rank]
        self.beat_address = addresses[rank] + _Note.beat_ns.offset
        self._tick = 0
        self._masks: dict[tuple[int, ...], int] = {}
        # close() must not release the memory while a thread reads it. Reentrant, because a signal
        # handler may interrupt the thread.
        self._lock = threading.RLock()

    def enter(self, peers: Sequence[int]) -> None:
        """Records that this rank starts to wait for `peers`."""
        self.peers = peers
        own, key = self._own, tuple(peers)
        mask = self._masks.get(key)
        if mask is None:
            mask = self._masks[key] = sum(1 << peer for peer in set(key))
        own.peers = mask
        own.beat_ns = time.monotonic_ns()
        # Odd, even if an exception ended the previous wait.
        self._tick = (self._tick + 1) | 1
        own.tick = self._tick

    def leave(self) -> None:
        """Records that the wait has succeeded."""
        self._tick += 1
        self._own.beat_ns = time.monotonic_ns()
        self._own.tick = self._tick

    def beat(self) -> None:
        """Records that this rank still waits."""
        self._own.beat_ns = time.monotonic_ns()

    def post(self, cause: Cause) -> None:
        """Publishes why this rank has given up. Only the first cause is kept."""
        why = cause.why
        while len(data := json.dumps(cause._replace(why=why)).encode()) >= NOTE_BYTES - 32:
            why = why[: len(why) // 2]
        with self._lock:
            if not self._own.cause_bytes:
                self._own.cause = data
                self._own.cause_crc = zlib.crc32(data)
                self._own.cause_bytes = len(data)  # last, because readers check it first

    def said_by(self, rank: int) -> Cause | None:
        """Returns the cause that a rank has published; None if it has published none."""
        with self._lock:
            note = self._notes[rank]
            size = note.cause_bytes
            if not 0 < size < NOTE_BYTES - 32:
                return None
            data = ctypes.string_at(ctypes.addressof(note) + _Note.cause.offset, size)
            # A wrong checksum: the writer was killed, or not all bytes are visible here yet.
            return Cause(*json.loads(data)) if zlib.crc32(data) == note.cause_crc else None

    def first(self) -> Cause | None:
        """Returns a cause that any rank has published."""
        causes = (self.said_by(rank) for rank in range(len(self._notes)))
        # A rank that closed its communicator has not failed.
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
        furthest: _Behind | None = None  # furthest behind at the first look
        while True:
            with self._lock:
                self.beat()  # peers read this rank's note too
                late = self._behind(peers)
                cause = self.find(is_dead) or self._certain(late, is_dead)
                if cause is not None:
                    return cause
                # If neither this rank nor a peer is in a recorded wait, notes contain no clue.
                late = [one for one in late if one.reached < one.tick or one.tick & 1]
                cause = self._suspect(late, seen)
            if cause is not None:
                return cause
            furthest = furthest or min(late, key=lambda one: one.reached, default=None)
            if not late and furthest is not None and furthest.reached < furthest.tick:
                return Cause(furthest.rank, LATE, _TOO_LATE)  # the rank has come since
            if not late or time.monotonic_ns() > deadline:
                return None
            time.sleep(_PAUSE_SECONDS)

    def close(self) -> None:
        """Stops using the shared memory, which is about to be released."""
        with self._lock:
            self._notes = [_Note() for _ in self._notes]
            self._own = self._notes[self._rank]

    def _behind(self, peers: Sequence[int]) -> list[_Behind]:
        """Returns the ranks that may keep a wait for `peers` from ending, furthest behind first.

        These are the peers that have not done their part. Each is followed by the ranks that may
        keep its own wait from ending.
        """
        found: list[_Behind] = []
        known = {self._rank}

        def follow(peers: Sequence[int], tick: int) -> None:
            notes = sorted((self._notes[peer].tick, peer) for peer in peers)
            for reached, peer in notes:
                if reached > tick:
                    return  # this rank and those after it have done their part
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
        """Returns a cause that one of `ranks` has published, or its exit if known; else None."""
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
        """Returns the cause for the stuck rank among `ranks`, or for the first that got stuck.

        `seen` keeps the states of notes from earlier calls of this function.
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
        return Cause(one.rank, LATE, _STUCK if within else _TOO_LATE)


class StoreNotes(Notes):
    """Notes in the store of the process group, between hosts.

    The store may block, or raise after its process has exited. No other communicator uses keys with
    this prefix.
    """

    def __init__(self, store: Any, prefix: str, rank: int) -> None:
        self._store, self._prefix, self._rank = store, prefix, rank
        self._posted = False
        self._answered: list[int] = []  # the ranks in this rank's latest published wait
        self._looked = 0.0
        self._late: threading.Thread | None = None  # waits for a store that does not answer

    def post(self, cause: Cause) -> None:
        """Publishes why this rank has given up. Only the first cause of all ranks is kept."""
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

        From time to time it also checks whether a rank has asked which ranks its peers wait for.
        If so, it publishes `peers` as the ranks that this rank waits for.
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

        This rank publishes which ranks it waited for, and asks waiting ranks to do the same. Each
        rank follows these links to a rank that publishes nothing, so all ranks name the same one.
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
        """Returns the ranks that `peers` waited for, if they publish them before the deadline."""
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
        """Returns the result of `step`; None if it fails or takes too long.

        It runs in a thread, because a store ignores deadlines while its process is stopped.
        """
        if self._late is not None and self._late.is_alive():
            return None
        thread, found, _ = threads.start(step)
        thread.join(seconds)
        self._late = thread
        return found[0] if found else None
