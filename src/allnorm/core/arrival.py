"""Arrival: the ranks of a group find each other in the group's store. This is called a meeting.

A meeting is identified by its processes, not by a counter. Counters would differ between ranks
after a process was replaced, or after other ranks created a group of the same name. The store has
one entry per rank:

- An arriving rank writes a new random nonce to its entry. This replaces anything that an earlier
  process, or an earlier group of the same name, left there.
- It reads all entries and adds a digest of their nonces to its own, whenever they change.
- The ranks have met when every entry holds the same digest. The digest includes this rank's new
  nonce, so entries of earlier processes and meetings cannot hold it. It becomes the name of the
  meeting, which is never used again.
- A rank that gives up records this in its entry, with the nonces that it had seen. The ranks with
  these nonces give up too, even if the first rank has arrived again since: its entry keeps the
  record. Ranks that arrive later ignore the record.
- After the meeting's first step, when all ranks have met, each rank empties its entry. It does not
  delete the entry, because reading a deleted key blocks.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import threading
import time
import uuid
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from allnorm.core.watch import Process, lives, this_process
from allnorm.errors import AllnormError, PeerDiedError, PeerTimeoutError

SHORTEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1e-4, 1e-2
# Interval at which this rank checks whether its peers' processes are alive.
_LOOK_SECONDS = 0.1
# Records kept per entry: a rank may give up more than once between two reads by a peer.
_REMEMBERED = 4


class GivenUp(NamedTuple):
    """The record of an arrival that ended without a meeting."""

    nonce: str  # nonce of the arrival
    reason: str  # why it ended
    seen: frozenset[str]  # nonces of the ranks that it had seen


class Entry(NamedTuple):
    """A rank's entry in the store."""

    nonce: str  # random number, new for each arrival
    process: Process  # process of the rank
    given_up: tuple[GivenUp, ...]  # records of its latest arrivals without a meeting
    seen: str = ""  # digest of all nonces that the rank saw; empty while a rank is missing

    @property
    def reason(self) -> str | None:
        """Why the rank gave up; None if it did not."""
        last = self.given_up[-1] if self.given_up else None
        return last.reason if last is not None and last.nonce == self.nonce else None


class Members:
    """The state of this process for one process group object.

    Attributes:
        lock: held by the thread that waits for the other ranks, because a rank has only one entry.
        processes: the ranks' processes as of their last meeting; empty before the first meeting. A
            process group object is connected to these processes only.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.processes: list[Process] = []


_members: weakref.WeakKeyDictionary[dist.ProcessGroup, Members] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def members_of(group: dist.ProcessGroup) -> Members:
    """Returns the state of this process for `group`."""
    with _lock:
        return _members.setdefault(group, Members())


class Arrival:
    """One rank's arrival at a meeting, for which it has `seconds`, that is, until `deadline`."""

    def __init__(
        self,
        store: Any,
        name: str,
        rank: int,
        world_size: int,
        members: Members,
        seconds: float,
        deadline: float,
    ) -> None:
        self._store, self._rank = store, rank
        self._keys = [f"{name}/entry/{other}" for other in range(world_size)]
        self._members, self._seconds, self._deadline = members, seconds, deadline
        self._own: Entry | None = None
        self._process = this_process()
        self._seen: frozenset[str] = frozenset()  # nonces of ranks that had not given up
        # Nonces of current arrivals: their process was alive, or they appeared during the wait.
        self._recent: set[str] = set()
        self._next_look = 0.0

    @contextlib.contextmanager
    def taking_turns(self, what: str) -> Iterator[None]:
        """Lets one thread at a time use this rank's entry, for the first step of a meeting.

        Raises:
            PeerTimeoutError: another thread's meeting of the same group did not end in time.
        """
        if not self._members.lock.acquire(timeout=max(0.0, self._seconds_left())):
            raise PeerTimeoutError(
                f"rank {self._rank} waited {self._seconds:g} s while {what}: another thread of "
                "this process is making a Communicator of the same group, and its peers have not "
                "come. Make the communicators of a group in the same order on every rank.",
                rank=self._rank,
                expected=what,
            )
        try:
            yield
        finally:
            self._members.lock.release()

    def find(self, what: str) -> tuple[str, list[Process]]:
        """Waits until all ranks see each other; returns the meeting's name and their processes.

        Raises:
            PeerDiedError: the process of a rank has exited.
            PeerTimeoutError: a rank did not come before the deadline.
            AllnormError: a rank gave up.
        """
        before = self._read([self._rank]).get(self._rank)
        given_up = before.given_up if before is not None else ()
        self._write(Entry(uuid.uuid4().hex[:16], self._process, given_up))
        pause = SHORTEST_PAUSE_SECONDS
        first: set[str] | None = None
        while True:
            entries = self._read(range(len(self._keys)))
            nonces = {entry.nonce for entry in entries.values()}
            first = nonces if first is None else first
            self._recent |= nonces - first
            self._raise_given_up(entries, what)
            came = {rank: entry for rank, entry in entries.items() if entry.reason is None}
            self._seen |= {entry.nonce for entry in came.values()}
            missing = [rank for rank in range(len(self._keys)) if rank not in came]
            if not missing:
                in_order = "".join(came[rank].nonce for rank in range(len(self._keys)))
                digest = hashlib.sha256(in_order.encode()).hexdigest()[:16]
                if self._entry().seen != digest:
                    self._write(self._entry()._replace(seen=digest))
                    pause = SHORTEST_PAUSE_SECONDS
                    continue
                missing = [rank for rank, entry in sorted(came.items()) if entry.seen != digest]
                if not missing:
                    processes = [came[rank].process for rank in range(len(self._keys))]
                    self._members.processes = processes
                    return digest, processes
            self._look_at_processes(came, missing, what)
            if time.monotonic() > self._deadline:
                raise self._late(entries, missing, what)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def leave(self) -> None:
        """Empties this rank's entry, after every rank has found the meeting."""
        self._store.set(self._keys[self._rank], b"")

    def give_up(self, reason: str) -> None:
        """Publishes the reason to the ranks that have seen this rank."""
        own = self._own
        if own is not None:
            ended = GivenUp(own.nonce, reason, self._seen)
            given_up = (*own.given_up, ended)[-_REMEMBERED:]
            self._write(own._replace(given_up=given_up, seen=""))

    def _entry(self) -> Entry:
        assert self._own is not None
        return self._own

    def _write(self, entry: Entry) -> None:
        self._own = entry
        self._store.set(self._keys[self._rank], pickle.dumps(entry))

    def _read(self, ranks: Iterable[int]) -> dict[int, Entry]:
        """Returns the existing entries, keyed by rank."""
        keys = {rank: self._keys[rank] for rank in ranks}
        if not self._store.check(list(keys.values())):
            keys = {rank: key for rank, key in keys.items() if self._store.check([key])}
        if not keys:
            return {}
        values = zip(keys, self._store.multi_get(list(keys.values())), strict=True)
        return {rank: pickle.loads(value) for rank, value in values if value}

    def _raise_given_up(self, entries: dict[int, Entry], what: str) -> None:
        for entry in entries.values():
            for ended in entry.given_up:
                if self._entry().nonce in ended.seen and ended.nonce != self._entry().nonce:
                    raise AllnormError(f"{what}: another rank has given up, {ended.reason}")

    def _look_at_processes(self, came: dict[int, Entry], missing: list[int], what: str) -> None:
        """Raises if a missing rank can no longer come, because its process has exited."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _LOOK_SECONDS
        for rank in set(came) | set(missing):
            entry, known = came.get(rank), self._known(rank)
            process = known if entry is None else entry.process
            if process is None or not process.is_visible_from(self._process):
                continue
            if lives(process):
                if entry is not None:
                    self._recent.add(entry.nonce)
            # An entry that an earlier group left behind does not count: a new process may come.
            elif entry is None or entry.nonce in self._recent or process == known:
                now = self._read([rank]).get(rank)
                if now is not None and now != entry:
                    continue  # the rank, or a new process of it, has arrived since the last read
                raise died_error(self._rank, rank, process, what)

    def _known(self, rank: int) -> Process | None:
        return self._members.processes[rank] if self._members.processes else None

    def _late(self, entries: dict[int, Entry], missing: list[int], what: str) -> PeerTimeoutError:
        notes = []
        for rank in missing:
            entry = entries.get(rank)
            if entry is None:
                continue
            if entry.reason is not None:
                notes.append(f"An earlier attempt was given up: {entry.reason}")
            elif entry.process.is_visible_from(self._process) and not lives(entry.process):
                notes.append(f"Process {entry.process.pid} came as rank {rank} and has ended.")
        return late_error(self._rank, missing, self._seconds, what, notes)

    def _seconds_left(self) -> float:
        return min(self._deadline - time.monotonic(), threading.TIMEOUT_MAX)


def died_error(
    rank: int, peer: int, process: Process, what: str, reason: str = ""
) -> PeerDiedError:
    """Returns the error for a rank that waited for a peer whose process has exited."""
    return PeerDiedError(
        f"rank {rank} waited for rank {peer} while {what}, but process {process.pid} has "
        f"ended{reason}. Make a Communicator over healthy ranks.",
        rank=rank,
        peer=peer,
        expected=what,
    )


def late_error(
    rank: int, missing: Sequence[int], seconds: float, what: str, notes: Sequence[str] = ()
) -> PeerTimeoutError:
    """Returns the error for a rank that waited for missing ranks until the deadline."""
    ranks = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
    text = (
        f"rank {rank} waited {seconds:g} s for {ranks} while {what}, without success. Every rank "
        "of the group must make the Communicator, in the same order. Find out what happened to "
        f"{ranks}, or give a longer timeout."
    )
    return PeerTimeoutError(" ".join([text, *notes]), rank=rank, peer=missing[0], expected=what)


def _become_fork() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held it
    _members.clear()


os.register_at_fork(after_in_child=_become_fork)
