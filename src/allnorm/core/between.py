"""Process groups of allnorm's own: for exchanges between islands, and for unfused calls.

The collectives of a process group have one order, which neither several threads nor the user's own
collectives keep. So a communicator uses the process group that it was given for nothing but its
store, over which it makes others: not by torch.distributed.new_group, which ranks outside of the
group would have to call too.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from allnorm import config
from allnorm.core.notes import NoNotes, Notes
from allnorm.core.rendezvous import Rendezvous
from allnorm.islands import Islands

# How a wait for gloo looks: at once for a while, then now and then, and at processes rarely.
_SPIN_SECONDS, _PAUSE_SECONDS, LOOK_SECONDS = 5e-4, 1e-4, 0.1
BACKENDS = ("gloo", "nccl")
# Gloo counts nanoseconds in 63 bits.
_LONGEST_TIMEOUT = datetime.timedelta(days=100 * 365)

Look = Callable[[float], None]

# Groups of which graphs have captured exchanges: they stay until the process ends.
_in_graphs: list[Any] = []
# Groups that threads are ending.
_ending: list[list[Any]] = []
# All that may still have a group.
_living: weakref.WeakSet[GroupExchange] = weakref.WeakSet()


class GroupError(RuntimeError):
    """A process group has given up an exchange."""


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of what a group sends tensors of a device with; empty if it has none for them."""
    try:
        return str(group._get_backend(torch.device(device.type)).name())
    except RuntimeError:
        return ""


class GroupExchange:
    """One rank's end of a process group that nobody else uses. Collective.

    With NCCL an exchange is work of the GPU, which the host does not wait for. A thread does: NCCL
    itself would wait for ever for a rank that is lost, and torch's own watchdog ends the process.

    Args:
        store: over which the ranks meet, as `own_store` makes it.
        rank: of this one, among those that exchange.
        size: how many exchange.
        device: of the tensors.
        backend: one of BACKENDS.
        timeout: of the communicator.
        purpose: what it is, for errors.

    Attributes:
        size: as given.
        ranks: the numbers of those that exchange, in the communicator.
        failure: why it was given up; empty if it was not.
        notes: where waits are noted.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        device: torch.device,
        backend: str,
        timeout: datetime.timedelta,
        purpose: str,
    ) -> None:
        self.size = size
        self.ranks: Sequence[int] = range(size)
        self.failure = ""
        self.notes: Notes = NoNotes()
        self._captured = False
        self._on_host = device.type == "cpu"
        self._backend, self._purpose = backend, purpose
        if backend == "gloo":
            made: Any = dist.ProcessGroupGloo(store, rank, size, min(timeout, _LONGEST_TIMEOUT))
        else:
            made = _new_nccl(store, rank, size)
        # In a list of its own that is emptied at the interpreter's exit too: gloo's threads must
        # have ended by then, or they abort it.
        self._groups: list[Any] = [made]
        self._end = weakref.finalize(self, self._groups.clear)
        _living.add(self)
        self._late = _Late(weakref.ref(self), timeout.total_seconds())
        # Connections are made by the first exchange, which no deadline of a call should see, and
        # which no graph may capture.
        self._connect(torch.zeros(size, dtype=torch.float32, device=device))
        if not self._on_host:
            torch.cuda.current_stream(device).synchronize()

    def _connect(self, first: torch.Tensor) -> None:
        """Makes each kind of exchange that will be made."""
        self.gather(first, lambda seconds: None)

    def gather(self, rows: torch.Tensor, look: Look) -> torch.Tensor:
        """Every rank's contiguous tensor of equal shape, `[size, *shape]`. Collective.

        Args:
            rows: this rank's.
            look: called now and then while the host waits, with the seconds so far; raises to end
                the wait.

        Raises:
            RuntimeError: the backend gives up.
        """
        return self.start_gather(rows)(look)

    def start_gather(self, rows: torch.Tensor) -> Callable[[Look], torch.Tensor]:
        """`gather` in two parts: what is returned waits for it. Meanwhile others may be started."""
        gathered = rows.new_empty((self.size, *rows.shape))
        if not rows.numel():
            return lambda look: gathered
        sent, received = (t.view(torch.uint8).view(-1) for t in (rows, gathered))
        if self._backend == "nccl":
            # NaN, whatever it is read as: should NCCL be ended, what follows is none of a result.
            received.fill_(0xFF)
        work = self._group._allgather_base(received, sent)

        def finish(look: Look) -> torch.Tensor:
            self._finish(work, look)
            return gathered

        return finish

    @property
    def _group(self) -> Any:
        if not self._groups:
            raise RuntimeError(self.failure or f"{self._purpose} is closed")
        return self._groups[0]

    def _finish(self, work: Any, look: Look) -> None:
        if self._backend != "nccl":
            self.notes.enter(self.ranks)
            wait(work, look)
            self.notes.leave()
            return
        work.wait()  # of the current stream, not of the host
        if torch.cuda.is_current_stream_capturing():
            self._captured = True
        else:
            self._late.watch(work)

    def abort(self, why: str) -> None:
        """Ends it at once: those who wait for this rank get an error. Idempotent; any thread."""
        self.failure = self.failure or why
        # The end of a group waits for what is on its way, perhaps from a rank that never comes: so
        # the last reference to it must be the thread's, and no variable here holds one.
        groups, self._groups[:] = self._groups[:], []
        if groups:
            _ending.append(groups)
            threading.Thread(target=_abort, args=(groups,), daemon=True).start()
        self.close()

    def close(self) -> None:
        """Releases the process group, unless a CUDA graph may use it again. Idempotent."""
        if self._captured and not self.failure:
            _in_graphs.extend(self._groups)
        elif self._backend == "nccl" and not self.failure:
            # NCCL's own end may wait for the other ranks, which close when they like.
            for group in list(self._groups):
                threading.Thread(target=_shut_down, args=(group,), daemon=True).start()
        self._end()


class Between(GroupExchange):
    """The exchange of one rank with those of the same place in other islands. Collective.

    Args:
        meeting: of all ranks.
        islands: of equal size.
        device: of the tensors.
        backend: one of BACKENDS.
        timeout: of the communicator.

    Attributes:
        num_islands: how many ranks exchange.
        ranks: their numbers in the whole group, by island.
    """

    def __init__(
        self,
        meeting: Rendezvous,
        islands: Islands,
        device: torch.device,
        backend: str,
        timeout: datetime.timedelta,
    ) -> None:
        own, place = places(islands, meeting.rank)
        self.num_islands = len(islands)
        store = own_store(meeting.store, meeting.prefix(f"between{place}"), timeout)
        purpose = "the exchange between islands"
        super().__init__(store, own, self.num_islands, device, backend, timeout, purpose)
        self.ranks = [island[place] for island in islands]

    def _connect(self, first: torch.Tensor) -> None:
        super()._connect(first)
        if self.can_exchange_parts:
            self.start_parts(first)(lambda seconds: None)

    def start_parts(self, rows: torch.Tensor) -> Callable[[Look], torch.Tensor]:
        """Part i of `rows`, equal parts of the first dimension, goes to island i. Collective.

        In two parts like `start_gather`; what is returned waits for this island's part of every
        island, `[num_islands, rows of a part, ...]`.
        """
        received = torch.empty_like(rows)
        parts = received.view(self.num_islands, rows.shape[0] // self.num_islands, *rows.shape[1:])
        if not rows.numel():  # alike on all ranks of this place, which have the same rows
            return lambda look: parts
        if self._backend == "nccl":
            received.fill_(torch.nan)
        work = self._group.alltoall_base(received, rows, [], [])

        def finish(look: Look) -> torch.Tensor:
            self._finish(work, look)
            return parts

        return finish

    @property
    def can_exchange_parts(self) -> bool:
        """Whether `start_parts` is of use, and works: gloo does it on the host only."""
        return self.num_islands > 2 and (self._on_host or self._backend == "nccl")


class _Late:
    """Gives an exchange up that is not done in time, where only the GPU waits for it.

    Exchanges end in the order of their beginnings, so one is looked after at a time: when its time
    is over, the newest one is next. And nothing asks the GPU before: a question while a graph is
    captured may end the capture.

    Args:
        exchange: whose these are.
        seconds: how long one may take.
    """

    def __init__(self, exchange: weakref.ref[GroupExchange], seconds: float) -> None:
        self._exchange, self._seconds = exchange, seconds
        self._newest: tuple[float, Any] | None = None
        self._thread: threading.Thread | None = None

    def watch(self, work: Any) -> None:
        """Looks after an exchange that the host has enqueued."""
        self._newest = time.monotonic() + self._seconds, work
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="allnorm-exchange", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        watched: tuple[float, Any] | None = None
        while True:
            time.sleep(LOOK_SECONDS)
            exchange = self._exchange()
            if exchange is None or not exchange._groups:
                self._newest = None
                return
            if watched is None:
                watched, self._newest = self._newest, None
            if watched is not None and watched[0] < time.monotonic():
                if not watched[1].is_completed():
                    exchange.abort(f"no answer of NCCL within {self._seconds:g} s")
                watched = None
            del exchange


def _abort(groups: list[Any]) -> None:
    with contextlib.suppress(RuntimeError):
        groups[0].abort()
    groups.clear()  # so that the group ends here
    _ending[:] = [others for others in _ending if others is not groups]


def _shut_down(group: Any) -> None:
    with contextlib.suppress(RuntimeError):
        group.shutdown()


def own_store(store: Any, prefix: str, timeout: datetime.timedelta) -> Any:
    """A store for the keys of one process group, over another.

    A connection of its own: who waits for a key keeps others from using the connection, the thread
    that would set that key among them.
    """
    with contextlib.suppress(RuntimeError, NotImplementedError):  # one that is written in Python
        store = store.clone()
        store.set_timeout(timeout)
    return PrefixStore(prefix, store)


def _new_nccl(store: Any, rank: int, size: int) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    # After an error its groups would end the process.
    with config.variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"):
        return dist.ProcessGroupNCCL(store, rank, size, options)


def wait(work: Any, look: Look) -> None:
    """Waits for gloo, which notices a death only next to it, and looks at what else ends waits."""
    start = time.monotonic()
    looked = start
    while not work.is_completed():
        now = time.monotonic()
        if now - looked > LOOK_SECONDS:
            look(now - start)
            looked = now
        time.sleep(0 if now - start < _SPIN_SECONDS else _PAUSE_SECONDS)
    try:
        work.wait()
    except RuntimeError as error:
        raise GroupError(str(error)) from error


def places(islands: Islands, rank: int) -> tuple[int, int]:
    """The number of a rank's island, and its place there."""
    number = next(i for i, island in enumerate(islands) if rank in island)
    return number, islands[number].index(rank)


def segments(islands: Islands, bounds: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The rows of each island, whose ranks follow each other, from those of each rank."""
    return [(bounds[island[0]][0], bounds[island[-1]][1]) for island in islands]


def _leave_to_parent() -> None:
    """In a child of fork(): keeps groups for ever.

    Their end would wait for threads that only the parent has.
    """
    for groups in [_in_graphs, *_ending, *(exchange._groups for exchange in _living)]:
        for group in groups:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        groups.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
