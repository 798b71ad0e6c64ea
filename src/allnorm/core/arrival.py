"""How the ranks of a group find each other: a meeting is the set of ranks that came, not a number.

A number that each process counts differs as soon as a process is replaced, or a group of the same
name is made again by other ranks. So nothing is counted. The store has one entry per rank:

- A rank that comes writes a new random nonce to its entry, over whatever an earlier process or an
  earlier group of this name has left there.
- It reads the entries of all ranks and adds to its own a digest of the nonces that it sees. It does
  so again whenever they change.
- The ranks meet when every entry holds the digest of the same nonces. This rank's nonce is new and
  part of the digest, so an entry of an earlier process or an earlier meeting never holds it. The
  digest is the name of the meeting: it is never used again.
- A rank that gives up writes that to its entry, with the nonces that it had seen. The ranks of
  these nonces give up too, even if the rank has come again in the meantime: the entry remembers.
  Ranks that come later ignore it.
- After the first step all ranks have left this stage, and each empties its entry. An entry is not
  deleted: reading a deleted key blocks.
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
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch.distributed as dist

from allnorm.core.watch import Process, lives, this_process
from allnorm.errors import AllnormError, PeerDiedError, PeerTimeoutError

SHORTEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1e-4, 1e-2
# How often this rank looks whether the processes of peers live.
_LOOK_SECONDS = 0.1
# A rank may give up several times between two looks of a peer.
_REMEMBERED = 4


class GivenUp(NamedTuple):
    """An arrival that ended without a meeting.

    Attributes:
        nonce: the arrival's.
        reason: why it ended.
        seen: the nonces of the ranks that it had seen.
    """

    nonce: str
    reason: str
    seen: frozenset[str]


class Entry(NamedTuple):
    """The entry of a rank in the store.

    Attributes:
        nonce: new for each arrival.
        process: the rank's process.
        given_up: the latest arrivals of this rank that ended without a meeting.
        seen: the digest of all nonces that the rank saw last; empty while a rank is missing.
    """

    nonce: str
    process: Process
    given_up: tuple[GivenUp, ...]
    seen: str = ""

    @property
    def reason(self) -> str | None:
        """Why the rank gave up; None if it did not."""
        last = self.given_up[-1] if self.given_up else None
        return last.reason if last is not None and last.nonce == self.nonce else None


class Members:
    """What this process knows of the ranks of one process group object.

    Attributes:
        lock: one thread at a time looks for the ranks, because a rank has one entry.
        processes: the ranks' processes at their last meeting, by rank; empty before. A process
            group object has connections to these processes and no others.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.processes: list[Process] = []


_members: weakref.WeakKeyDictionary[dist.ProcessGroup, Members] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def members_of(group: dist.ProcessGroup) -> Members:
    """Returns what this process knows of the ranks of `group`."""
    with _lock:
        return _members.setdefault(group, Members())


class Arrival:
    """One rank's arrival at a meeting.

    Args:
        store: the store of the process group.
        name: the prefix of the keys.
        rank: this rank.
        world_size: the number of ranks.
        members: what is known of the ranks.
        seconds: how long the ranks wait for each other.
        deadline: when that ends, by time.monotonic().
    """

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
        self._seen: frozenset[str] = frozenset()  # nonces of the ranks that had not given up
        # Nonces that are certainly not left over: the process lived, or the nonce came during the
        # wait.
        self._recent: set[str] = set()
        self._next_look = 0.0

    @contextlib.contextmanager
    def taking_turns(self, what: str) -> Iterator[None]:
        """Holds the entry of this rank, for the first step of a meeting.

        Raises:
            PeerTimeoutError: another thread's meeting of this group did not end in time.
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
        """Waits until all ranks see each other.

        Returns:
            The name of their meeting, and their processes.

        Raises:
            PeerDiedError: the process of a rank has ended.
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
        """Empties this rank's entry. Every rank has found the meeting by then."""
        self._store.set(self._keys[self._rank], b"")

    def give_up(self, reason: str) -> None:
        """Leaves word for the ranks that have seen this one."""
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
        """Returns the entries that are there, by rank."""
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
        """Raises if a rank that is missing can come no more."""
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
            # What a process of an earlier group has left does not count: another one may come.
            elif entry is None or entry.nonce in self._recent or process == known:
                now = self._read([rank]).get(rank)
                if now is not None and now != entry:
                    continue  # the rank came, or a new process of it did, since the last look
                raise PeerDiedError(
                    f"rank {self._rank} waited for rank {rank} while {what}, but process "
                    f"{process.pid} has ended. Make a Communicator over healthy ranks.",
                    rank=self._rank,
                    peer=rank,
                    expected=what,
                )

    def _known(self, rank: int) -> Process | None:
        return self._members.processes[rank] if self._members.processes else None

    def _late(self, entries: dict[int, Entry], missing: list[int], what: str) -> PeerTimeoutError:
        ranks = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        notes = []
        for rank in missing:
            entry = entries.get(rank)
            if entry is None:
                continue
            if entry.reason is not None:
                notes.append(f"An earlier attempt was given up: {entry.reason}")
            elif entry.process.is_visible_from(self._process) and not lives(entry.process):
                notes.append(f"Process {entry.process.pid} came as rank {rank} and has ended.")
        return PeerTimeoutError(
            f"rank {self._rank} waited {self._seconds:g} s for {ranks} while {what}, without "
            "success. Every rank of the group must make the Communicator, in the same order. Find "
            f"out what happened to {ranks}, or give a longer timeout." + " ".join(["", *notes]),
            rank=self._rank,
            peer=missing[0],
            expected=what,
        )

    def _seconds_left(self) -> float:
        return min(self._deadline - time.monotonic(), threading.TIMEOUT_MAX)


def _become_fork() -> None:
    global _lock
    _lock = threading.Lock()  # another thread may have held it, or one of a group
    _members.clear()


os.register_at_fork(after_in_child=_become_fork)
