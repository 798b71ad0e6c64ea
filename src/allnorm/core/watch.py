"""Watches the processes of peers: one thread waits for their exits, for all communicators.

The start time distinguishes a process from a later one with the same pid. A pidfd reports the exit;
where pidfds are not allowed, /proc is polled. A peer on a different host, or in a different pid
namespace (such as a container), cannot be watched: a wait for it lasts until the deadline.
"""

from __future__ import annotations

import collections
import contextlib
import os
import platform
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

# Interval at which /proc is polled without a pidfd.
_POLL_SECONDS = 0.2
# How long after a process exits everything it sent is certain to have arrived, on any link.
SETTLED_SECONDS = 0.3


class Process(NamedTuple):
    """A process on any host."""

    pid: int  # process id in its own namespace
    started: str  # start time in the kernel's clock ticks; empty if it cannot be read
    namespace: str  # host and pid namespace; empty if they cannot be read

    def is_visible_from(self, other: Process) -> bool:
        """Returns whether `other` can find out if this process is alive."""
        return bool(self.started and self.namespace) and self.namespace == other.namespace


def machine_id() -> str:
    """Returns an identifier that all processes of this host share until it reboots."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return platform.node()


def this_process() -> Process:
    """Returns the description of this process that peers need to watch it."""
    try:
        # Namespace numbers are unique on one host only. The initial namespace, outside of
        # containers, has the same number on all hosts.
        namespace = f"{machine_id()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        namespace = ""
    return Process(os.getpid(), _state(os.getpid())[1], namespace)


def _state(pid: int) -> tuple[str, str]:
    """Returns the state letter of a process and its start time; empty if it does not exist."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name, in parentheses, may contain any characters.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return "", ""
    return fields[0].decode(), fields[19].decode()


def lives(process: Process) -> bool:
    """Returns whether a process that is visible from here has not exited."""
    state, started = _state(process.pid)
    return state not in ("", "Z", "X") and started == process.started


class Watch:
    """The peers that one communicator watches.

    Args:
        peers: processes in rank order; this process itself is not watched.
        ended: called from another thread with the rank of a peer that has exited, and False. Called
            again with True when everything that the peer sent has arrived.

    Attributes:
        blind: ranks that cannot be watched: their processes are not visible from here, or this
            process cannot start a thread.
        watched: the processes of the other ranks, keyed by rank.
        stopped: whether the watch was stopped.
    """

    def __init__(self, peers: Sequence[Process], ended: Callable[[int, bool], None]) -> None:
        self.peers = list(peers)
        self.ended = ended
        self.stopped = False
        own = this_process()
        self.blind = {rank for rank, peer in enumerate(peers) if not peer.is_visible_from(own)}
        self.watched = {
            rank: peer for rank, peer in enumerate(peers) if rank not in self.blind and peer != own
        }
        if self.watched and not _watcher.add(self):
            self.blind |= set(self.watched)
            self.watched = {}

    def stop(self) -> None:
        """Prevents further calls of `ended`, other than one in progress. Idempotent."""
        self.stopped = True
        if self.watched:
            _watcher.remove(self)

    def find_ended(self, seconds: float) -> int | None:
        """Returns a rank whose process exits within `seconds`, or has; None if there is none."""
        deadline = time.monotonic() + seconds
        while True:
            for rank in self.watched:
                if self.has_ended(rank):
                    return rank
            if time.monotonic() > deadline:
                return None
            time.sleep(0.01)

    def has_ended(self, rank: int) -> bool:
        """Returns whether the process of a rank is known to have ended."""
        process = self.watched.get(rank)
        return process is not None and not lives(process)

    def describe(self, rank: int) -> str:
        """Returns a name for the process of a rank."""
        return f"process {self.peers[rank].pid}"


class _Watcher:
    """The watching thread, and the processes that it waits for.

    Only the thread itself removes watches: stop() may run in a finalizer at any point, even while
    this thread or another one holds the lock.
    """

    def __init__(self) -> None:
        # Reentrant: a signal handler may make a communicator.
        self._lock = threading.RLock()
        self._watches: list[Watch] = []
        self._stopped: collections.deque[Watch] = collections.deque()  # to be removed
        self._descriptors: dict[Process, int | None] = {}  # None: /proc is polled
        self._known: set[tuple[int, int]] = set()  # id of a watch and rank: already reported
        self._thread: threading.Thread | None = None
        self._wake: tuple[int, int] | None = None

    def add(self, watch: Watch) -> bool:
        """Adds a watch; returns False if no thread can be started."""
        with self._lock:
            if self._thread is None and not self._start():
                return False
            self._watches.append(watch)
            for process in watch.watched.values():
                if process not in self._descriptors:
                    self._descriptors[process] = _open(process)
            self._notify()
            return True

    def _start(self) -> bool:
        try:
            self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            thread = threading.Thread(
                target=self._run, args=self._wake[:1], name="allnorm-watch", daemon=True
            )
            thread.start()
        except (OSError, RuntimeError):
            return False
        self._thread = thread
        return True

    def remove(self, watch: Watch) -> None:
        """Removes a watch soon, without taking a lock."""
        if self._wake is not None:  # otherwise this is a forked child, and the watch its parent's
            self._stopped.append(watch)
            self._notify()

    def _take_off_stopped(self) -> None:
        stopped = set()
        while self._stopped:
            stopped.add(self._stopped.popleft())
        self._watches = [watch for watch in self._watches if watch not in stopped]
        gone = set(map(id, stopped))
        self._known = {known for known in self._known if known[0] not in gone}
        wanted = {process for left in self._watches for process in left.watched.values()}
        for process in self._descriptors.keys() - wanted:
            descriptor = self._descriptors.pop(process)
            if descriptor is not None:
                os.close(descriptor)

    def forget(self) -> None:
        """Releases everything in a forked child, which does not have the thread."""
        descriptors = [fd for fd in self._descriptors.values() if fd is not None]
        for descriptor in (*descriptors, *(self._wake or ())):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self.__init__()  # type: ignore[misc]

    def _notify(self) -> None:
        assert self._wake is not None
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake[1], b"x")

    def _run(self, wake: int) -> None:
        settling: list[tuple[float, Watch, int]] = []
        while True:
            with self._lock:
                self._take_off_stopped()
                descriptors = dict(self._descriptors)
            poll = select.poll()
            poll.register(wake, select.POLLIN)
            for descriptor in descriptors.values():
                if descriptor is not None:
                    poll.register(descriptor, select.POLLIN)
            due = [settling[0][0] - time.monotonic()] if settling else []
            if None in descriptors.values():
                due.append(_POLL_SECONDS)
            ready = {fd for fd, _ in poll.poll(max(0, int(1e3 * min(due)) + 1) if due else None)}
            if wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake, 4096)
            for watch, rank in self._take_ended(descriptors, ready):
                _call(watch, rank, False)
                settling.append((time.monotonic() + SETTLED_SECONDS, watch, rank))
            while settling and settling[0][0] <= time.monotonic():
                _, watch, rank = settling.pop(0)
                _call(watch, rank, True)
                del watch

    def _take_ended(
        self, polled: dict[Process, int | None], ready: set[int]
    ) -> list[tuple[Watch, int]]:
        """Returns the watches and ranks of processes that have exited since the last call."""
        with self._lock:
            ended = set()
            for process, descriptor in self._descriptors.items():
                seen = process in polled and (descriptor is None or descriptor in ready)
                if seen and not lives(process):
                    ended.add(process)
            reports = [
                (watch, rank)
                for watch in self._watches
                for rank, process in watch.watched.items()
                if process in ended and (id(watch), rank) not in self._known
            ]
            self._known |= {(id(watch), rank) for watch, rank in reports}
            for process in ended:
                # A pidfd would stay ready forever. Later watches of this process notice its exit at
                # once, or by polling /proc.
                descriptor = self._descriptors[process]
                if descriptor is not None:
                    os.close(descriptor)
                del self._descriptors[process]
            return reports


def _call(watch: Watch, rank: int, settled: bool) -> None:
    # After any error the thread continues for the other watches.
    with contextlib.suppress(Exception):
        if not watch.stopped:
            watch.ended(rank, settled)


def _open(process: Process) -> int | None:
    """Returns a pidfd of a process; None if /proc must be polled instead."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except (OSError, AttributeError):
        return None  # pidfds are not allowed, or the process has exited: /proc tells which
    if lives(process):
        return descriptor
    os.close(descriptor)  # it belongs to a later process with this pid
    return None


_watcher = _Watcher()
os.register_at_fork(after_in_child=lambda: _watcher.forget())
