"""Channels: ranks announce unfused and hierarchical calls to each other on the host.

Collectives of a process group have their own timeout, do not report which rank is missing, and
abort the process if ranks send different numbers of bytes. So ranks first announce which call they
make, and every wait for an announcement has a deadline. On one host, ranks announce calls with the
CPU library's all_gather_rows over shared memory, even for tensors on GPUs; its waits name the
missing rank. Between hosts they send messages through the group's store, which is slower.
"""

from __future__ import annotations

import abc
import ctypes
import time
from collections.abc import Sequence
from typing import NoReturn, Protocol

from allnorm.core import _native, workspace
from allnorm.core.announcement import FIELDS, Announcement
from allnorm.core.notes import DIED, LATE, Cause, Notes, SharedNotes, StoreNotes
from allnorm.core.rendezvous import Mailbox, Rendezvous
from allnorm.core.threads import run_bounded
from allnorm.core.watch import Watch
from allnorm.errors import AllnormError

# The time in excess of the timeout that a wait for the store may take.
_STORE_SECONDS = 1.0
# Number of 64-bit integers in an announcement.
WORDS = len(FIELDS)


class Waits(Protocol):
    """Decides when a communicator's waits end, and which error they raise. See Failure."""

    rank: int
    world_size: int
    watch: Watch | None
    notes: Notes

    def end_wait(self, status: int, fault: _native.Fault | None = None) -> NoReturn:
        """Raises the error of a failed wait in the library.

        Args:
            status: status of the call.
            fault: the recorded fault, with group ranks; None: the communicator's own record.
        """

    def look_at_peers(self, seconds: float) -> None:
        """Raises if a wait that has lasted `seconds` must end."""


class WaitEndedError(AllnormError):
    """The error of a wait that ended for a known cause."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(f"rank {cause.rank}: {cause.kind} {cause.why}")
        self.cause = cause


class Channel(abc.ABC):
    """One rank's end of a channel. Its methods are called under the communicator's lock.

    Attributes:
        notes: record of which rank waits for which.
        launches: number of CPU library calls that the channel has made.
        announced: the latest call that was announced; None if there was none.
        is_slow: whether the channel uses the store, as it does between hosts.
    """

    notes: Notes
    launches = 0
    is_slow = False
    announced: Announcement | None = None

    @abc.abstractmethod
    def gather(self, words: Sequence[int], waits: Waits) -> list[list[int]]:
        """Exchanges `WORDS` integers; returns those of every rank, in rank order. Collective.

        Raises:
            PeerDivergedError: a rank made a fused call.
            WaitEndedError, RuntimeError: a rank did not come; `Waits.end_wait` raises the latter.
        """

    def peer_ended(self, rank: int) -> None:  # noqa: B027
        """Reports that the process of a rank has exited."""

    def end_waits(self) -> None:  # noqa: B027
        """Ends a wait in another thread."""

    def close(self) -> None:  # noqa: B027
        """Releases the resources of the channel."""

    def destroy(self) -> None:  # noqa: B027
        """Frees the channel; call after close(), once no thread uses it."""


def create(
    meeting: Rendezvous, own_handle: int, memory: workspace.Workspace, timeout_ns: int
) -> Channel:
    """Creates the channel of a communicator. Collective.

    `own_handle` is the handle of the communicator if it uses the CPU library, else 0.
    """
    if own_handle:
        return _LibraryChannel(meeting, own_handle, memory)
    fits = meeting.world_size <= _native.MAX_WORLD_SIZE
    built = meeting.agree(lambda: "cpu" in _native.available_backends(), "looking for libraries")
    if not fits or not all(built) or not workspace.on_one_host(meeting):
        return _Messages(meeting, timeout_ns * 1e-9)
    memory, handles = workspace.create_shared_memory(meeting, workspace.MIN_BYTES), []
    try:
        meeting.agree(
            lambda: handles.append(start(_native.library("cpu"), meeting, memory, timeout_ns)),
            "starting the channel of unfused calls",
        )
    except BaseException:
        memory.release()
        raise
    return _SeparateChannel(meeting, handles[0], memory)


def start(
    library: _native.Library,
    meeting: Rendezvous,
    memory: workspace.Workspace,
    timeout_ns: int,
    **settings: int,
) -> int:
    """Creates this rank's native communicator and returns its handle.

    `settings` are other fields of CommConfig: device, first_op, flags.
    """
    config = _native.CommConfig(
        struct_bytes=ctypes.sizeof(_native.CommConfig),
        rank=meeting.rank,
        world_size=meeting.world_size,
        workspace_bytes=memory.num_bytes,
        timeout_ns=timeout_ns,
        **{"device": -1, **settings},
    )
    config.workspaces[: meeting.world_size] = memory.addresses
    handle = ctypes.c_void_p()
    _native.raise_status(
        library, library.comm_create(ctypes.addressof(config), ctypes.addressof(handle))
    )
    return int(handle.value or 0)


class _LibraryChannel(Channel):
    """A channel that uses the communicator's own handle of the CPU library.

    So a rank also notices if another makes a fused call instead, and the communicator records
    failed waits.
    """

    def __init__(self, meeting: Rendezvous, handle: int, memory: workspace.Workspace) -> None:
        world_size = meeting.world_size
        self._library, self._handle, self._memory = _native.library("cpu"), handle, memory
        self._everyone = tuple(range(world_size))
        self.notes = SharedNotes(memory.notes, meeting.rank)
        self._library.set_beat(handle, self.notes.beat_address)
        self._own = (ctypes.c_int64 * WORDS)()
        self._all = (ctypes.c_int64 * (WORDS * world_size))()
        # The library copies rows as bytes, so the integers can be declared as float32.
        width = ctypes.sizeof(self._own) // 4
        self._call = _native.Call(
            struct_bytes=ctypes.sizeof(_native.Call),
            op=_native.ALL_GATHER_ROWS,
            dtype=_native.DTYPE["float32"],
            weight_dtype=_native.DTYPE["float32"],
            flags=_native.ANNOUNCEMENT,
            num_tokens=world_size,
            hidden_size=width,
            x=ctypes.addressof(self._own),
            out=ctypes.addressof(self._all),
            x_stride=width,
            out_stride=width,
        )

    def gather(self, words: Sequence[int], waits: Waits) -> list[list[int]]:
        self._own[:] = list(words)
        self.launches += 1
        self.notes.enter(self._everyone)
        status = self._library.run(self._handle, ctypes.addressof(self._call))
        if status:
            waits.end_wait(status, self._fault())
        self.notes.leave()
        return [self._all[q * WORDS : (q + 1) * WORDS] for q in self._everyone]

    def _fault(self) -> _native.Fault | None:
        """Returns the fault of the channel's own communicator; None if it has none."""
        return None


class _SeparateChannel(_LibraryChannel):
    """A channel with its own handle and memory, for a communicator without a CPU handle."""

    def _fault(self) -> _native.Fault | None:
        fault = _native.Fault()
        self._library.comm_check(self._handle, ctypes.addressof(fault))
        return fault

    def peer_ended(self, rank: int) -> None:
        self._library.comm_peers_died(self._handle, 1 << rank, 0)

    def end_waits(self) -> None:
        self._library.comm_close(self._handle)

    def close(self) -> None:
        self._memory.release()

    def destroy(self) -> None:
        self._library.comm_destroy(self._handle)


class _MissingError(Exception):
    """Some ranks did not come before the deadline."""

    def __init__(self, missing: set[int]) -> None:
        super().__init__(missing)
        self.missing = sorted(missing)


class _Messages(Channel):
    """A channel that uses the store of the process group: one key per rank and call."""

    is_slow = True

    def __init__(self, meeting: Rendezvous, seconds: float) -> None:
        self._mailbox = Mailbox(meeting, seconds)
        self._notes = self.notes = StoreNotes(meeting.store, meeting.prefix("notes"), meeting.rank)
        self._everyone = tuple(range(meeting.world_size))
        self._dead: set[int] = set()
        self._closed = False

    def gather(self, words: Sequence[int], waits: Waits) -> list[list[int]]:
        def look(missing: set[int], dead: list[int]) -> None:
            if self._closed:
                waits.end_wait(_native.CLOSED)
            cause = self._notes.look(sorted(missing))
            if cause is not None and cause.rank != waits.rank:
                raise WaitEndedError(cause)
            for rank in dead:
                raise WaitEndedError(Cause(rank, DIED))
            if time.monotonic() > deadline:
                raise _MissingError(missing)

        seconds = self._mailbox.seconds
        deadline = time.monotonic() + seconds
        self.notes.enter(self._everyone)
        try:
            found = run_bounded(
                lambda: self._mailbox.exchange(list(words), self._dead, look),
                seconds + _STORE_SECONDS,
            )
        except _MissingError as error:
            # The missing ranks may still be in an earlier wait, for a different rank.
            self.notes.enter(error.missing)
            cause = self.notes.settle(self._dead.__contains__)
            raise WaitEndedError(cause or Cause(error.missing[0], LATE, "did not come")) from None
        if found is None:
            far = [] if waits.watch is None else sorted(waits.watch.blind)
            why = "did not come (the store of the process group does not answer)"
            raise WaitEndedError(Cause(far[0] if far else -1, LATE, why))
        self.notes.leave()
        return found

    def peer_ended(self, rank: int) -> None:
        self._dead.add(rank)

    def end_waits(self) -> None:
        self._closed = True
