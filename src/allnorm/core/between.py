"""allnorm's own process groups, for exchanges between islands and for unfused calls.

A process group's collectives must have the same order on every rank. Multiple threads, or the
user's own collectives, would break this order. So a communicator uses only the given process
group's store, and creates its own groups on top of it. It cannot use torch.distributed.new_group,
because ranks outside the group would have to call that too.
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
from allnorm.core.notes import Notes
from allnorm.core.rendezvous import Rendezvous
from allnorm.islands import Islands

# Waiting for gloo: spin briefly, then poll at intervals; check peers even less often.
_SPIN_SECONDS, _PAUSE_SECONDS, LOOK_SECONDS = 5e-4, 1e-4, 0.1
BACKENDS = ("gloo", "nccl")
# Gloo stores a timeout in nanoseconds, in 63 bits.
_LONGEST_TIMEOUT = datetime.timedelta(days=100 * 365)

Look = Callable[[float], None]

# Groups with captured exchanges, which must stay until the process exits.
_in_graphs: list[Any] = []
# Groups that a thread is aborting.
_ending: list[list[Any]] = []
# Exchanges that may still hold a process group.
_exchanges: weakref.WeakSet[GroupExchange] = weakref.WeakSet()


class GroupError(RuntimeError):
    """An exchange through a process group failed."""


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Returns the name of a group's backend for a device's tensors; empty if it has none."""
    try:
        return str(group._get_backend(torch.device(device.type)).name())
    except RuntimeError:
        return ""


class GroupExchange:
    """One rank's end of a process group that only allnorm uses. Collective.

    With NCCL, a watchdog thread waits for an exchange instead of the host: NCCL itself would wait
    forever for a lost rank, and torch's own watchdog aborts the process.

    `rank` and `size` refer to the participating ranks. `purpose` names the exchange in errors.

    Attributes:
        ranks: participating ranks, as numbered in the communicator.
        failure: why the exchange was aborted; empty if it was not.
        notes: record of this rank's waits.
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
        self.notes = Notes()
        self._captured = False
        self._on_host = device.type == "cpu"
        self._backend, self._purpose = backend, purpose
        if backend == "gloo":
            made: Any = dist.ProcessGroupGloo(store, rank, size, min(timeout, _LONGEST_TIMEOUT))
        else:
            made = _new_nccl(store, rank, size)
        # In a list, which is also emptied when the interpreter exits: gloo's threads must have
        # ended by then, or they abort the process.
        self._groups: list[Any] = [made]
        self._end = weakref.finalize(self, self._groups.clear)
        _exchanges.add(self)
        self._late = _Late(weakref.ref(self), timeout.total_seconds())
        # The first exchange connects the ranks. It must not count towards the deadline of a call,
        # and cannot be captured.
        self._connect(torch.zeros(size, dtype=torch.float32, device=device))
        if not self._on_host:
            torch.cuda.current_stream(device).synchronize()

    def _connect(self, first: torch.Tensor) -> None:
        """Runs each kind of exchange once."""
        self.gather(first, lambda seconds: None)

    def gather(self, rows: torch.Tensor, look: Look) -> torch.Tensor:
        """Gathers contiguous tensors of equal shape as `[size, *shape]`. Collective.

        While the host waits, it calls `look` with the seconds so far; `look` raises to end the
        wait.

        Raises:
            RuntimeError: the backend failed.
        """
        return self.start_gather(rows)(look)

    def start_gather(self, rows: torch.Tensor) -> Callable[[Look], torch.Tensor]:
        """Starts a gather; returns a function that completes it. More than one may be in flight."""
        gathered = rows.new_empty((self.size, *rows.shape))
        if not rows.numel():
            return lambda look: gathered
        sent, received = (t.view(torch.uint8).view(-1) for t in (rows, gathered))
        if self._backend == "nccl":
            # NaN in every dtype: if NCCL is aborted, the memory does not look like a result.
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
        work.wait()  # makes the current stream wait, not the host
        if torch.cuda.is_current_stream_capturing():
            self._captured = True
        else:
            self._late.watch(work)

    def abort(self, why: str) -> None:
        """Aborts the exchange, so that waiting peers get an error. Idempotent; any thread."""
        self.failure = self.failure or why
        # Destroying a group waits for pending work, perhaps with a rank that never comes. So only
        # the aborting thread may hold a reference.
        groups, self._groups[:] = self._groups[:], []
        if groups:
            _ending.append(groups)
            threading.Thread(target=_abort, args=(groups,), daemon=True).start()
        self.close()

    def close(self) -> None:
        """Releases the process group, unless a CUDA graph may use it. Idempotent."""
        if self._captured and not self.failure:
            _in_graphs.extend(self._groups)
        elif self._backend == "nccl" and not self.failure:
            # NCCL's shutdown may wait for the other ranks, and they may close much later.
            for group in list(self._groups):
                threading.Thread(target=_shut_down, args=(group,), daemon=True).start()
        self._end()


class Between(GroupExchange):
    """The exchange between a rank and the ranks with its index in other islands. Collective.

    Attributes:
        num_islands: number of islands, each with one participating rank.
        ranks: participating ranks in island order, as numbered in the whole group.
    """

    def __init__(
        self,
        meeting: Rendezvous,
        islands: Islands,
        device: torch.device,
        backend: str,
        timeout: datetime.timedelta,
    ) -> None:
        own, index = places(islands, meeting.rank)
        self.num_islands = len(islands)
        store = own_store(meeting.store, meeting.prefix(f"between{index}"), timeout)
        purpose = "the exchange between islands"
        super().__init__(store, own, self.num_islands, device, backend, timeout, purpose)
        self.ranks = [island[index] for island in islands]

    def _connect(self, first: torch.Tensor) -> None:
        super()._connect(first)
        if self.can_exchange_parts:
            self.start_parts(first)(lambda seconds: None)

    def start_parts(self, rows: torch.Tensor) -> Callable[[Look], torch.Tensor]:
        """Starts to send part i of `rows`, split equally into parts, to island i. Collective.

        Returns a function that completes the exchange, and returns the parts that this rank has
        received, one per island: `[num_islands, rows of a part, ...]`.
        """
        received = torch.empty_like(rows)
        parts = received.view(self.num_islands, rows.shape[0] // self.num_islands, *rows.shape[1:])
        if not rows.numel():  # on all ranks of the exchange or none: they have equal shapes
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
        """Returns whether `start_parts` is usable (it needs CPU tensors or NCCL) and saves time."""
        return self.num_islands > 2 and (self._on_host or self._backend == "nccl")


class _Late:
    """Watchdog: aborts an exchange that misses its deadline while only the GPU waits for it.

    Exchanges end in the order in which they start. So the watchdog watches one exchange at a time,
    and goes on with the newest after that one's deadline. It does not query the GPU before the
    deadline, because a query may break a capture.
    """

    def __init__(self, exchange: weakref.ref[GroupExchange], seconds: float) -> None:
        self._exchange, self._seconds = exchange, seconds
        self._newest: tuple[float, Any] | None = None
        self._thread: threading.Thread | None = None

    def watch(self, work: Any) -> None:
        """Watches an exchange that the host has enqueued."""
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
    groups.clear()  # destroys the group in this thread
    _ending[:] = [others for others in _ending if others is not groups]


def _shut_down(group: Any) -> None:
    with contextlib.suppress(RuntimeError):
        group.shutdown()


def own_store(store: Any, prefix: str, timeout: datetime.timedelta) -> Any:
    """Returns a store for the keys of one process group, with its own connection.

    A thread that waits for a key blocks its connection, even for the thread that would set the key.
    """
    with contextlib.suppress(RuntimeError, NotImplementedError):  # a store written in Python
        store = store.clone()
        store.set_timeout(timeout)
    return PrefixStore(prefix, store)


def _new_nccl(store: Any, rank: int, size: int) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    # Otherwise an error would abort the process.
    with config.variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"):
        return dist.ProcessGroupNCCL(store, rank, size, options)


def wait(work: Any, look: Look) -> None:
    """Waits for gloo and calls `look` periodically: gloo notices only the exit of neighbors."""
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
    """Returns the number of a rank's island and the rank's index in it."""
    number = next(i for i, island in enumerate(islands) if rank in island)
    return number, islands[number].index(rank)


def segments(islands: Islands, bounds: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Converts the ranks' row ranges to those of islands, which consist of consecutive ranks."""
    return [(bounds[island[0]][0], bounds[island[-1]][1]) for island in islands]


def _leave_to_parent() -> None:
    """Keeps groups forever in a forked child: destroying one waits for the parent's threads."""
    for groups in [_in_graphs, *_ending, *(exchange._groups for exchange in _exchanges)]:
        for group in groups:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        groups.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
