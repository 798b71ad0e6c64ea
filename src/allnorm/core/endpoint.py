"""One rank's end of an exchange: the native communicator, whose turn it is, and what has failed."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

import torch
import torch.distributed as dist

from allnorm import names
from allnorm.core import _native, between, channel, fast_call, faults, hierarchical, unfused
from allnorm.core.announcement import Announcement, is_announcement
from allnorm.core.between import GroupError
from allnorm.core.call import Call
from allnorm.core.channel import WaitEndedError
from allnorm.core.dispatch import Chooser, Dispatcher
from allnorm.core.notes import CROSSED, DIED, FAILED, INTERRUPTED, LATE, LEFT, Cause, NoNotes, Notes
from allnorm.core.prepared_call import Memory, PreparedCall, make_nan, raise_status
from allnorm.core.refusal import Refusal, is_refusal
from allnorm.core.turn import Turn
from allnorm.core.watch import Watch
from allnorm.core.workspace import Workspace
from allnorm.errors import (
    AllnormError,
    CommunicatorClosedError,
    PeerDiedError,
    PeerDivergedError,
    PeerLeftError,
    PeerTimeoutError,
)

# A process may outlive its connections by so long.
_END_SECONDS = 0.5
_PAUSE_SECONDS = 0.01
# After so long, what a rank sent before it ended has arrived: a longer wait is for the rank itself.
_ARRIVAL_SECONDS = 0.2
_CROSSED = (
    " called the communicator at the same time: their order differs from rank to rank, and rows of "
    "both would be summed. Give each thread a Communicator of its own, made in the same order on "
    "every rank (for functions: a process group of its own), or let the threads take turns, alike "
    "on every rank"
)
_GIVEN_UP = "this rank has given up"
# Statuses behind which the library has a fault record.
_RECORDED = (
    *(_native.TIMEOUT, _native.DIVERGED, _native.PEER_DIED, _native.PEER_LEFT),
    _native.INTERRUPTED,
)
_KIND_OF_STATUS = {
    _native.TIMEOUT: LATE,
    _native.PEER_DIED: DIED,
    _native.PEER_LEFT: LEFT,
}
_ERRORS = {
    DIED: PeerDiedError,
    LEFT: PeerLeftError,
    INTERRUPTED: PeerLeftError,
    CROSSED: PeerLeftError,
}


class _FaultError(RuntimeError):
    """A wait in the library has ended with this fault, whose ranks are those of the group."""

    def __init__(self, fault: _native.Fault) -> None:
        super().__init__(f"status {fault.status}, rank {fault.peer}")
        self.fault = fault


class _TooLateError(RuntimeError):
    """A wait for the process group has lasted the whole timeout."""


@dataclass(frozen=True)
class Stats:
    """What a communicator has done on this rank since it was made.

    Attributes:
        calls: by algorithm: how often "one_shot" and "two_shot" were launched, replays of CUDA
            graphs included (a call whose rows do not fit the workspace at once has several
            launches; on CUDA those that have run are counted), and how many calls ran "unfused"
            (of those that a CUDA graph captured, the capture). One rank alone launches neither.
        unfused: the same calls by the reason, as plans say it.
        fault: what `check()` raises, in words; None if it raises nothing.
    """

    calls: dict[str, int]
    unfused: dict[str, int]
    fault: str | None


class Endpoint:
    """One rank's end of a communicator.

    Args:
        name: of the communicator, the same on every rank.
        number: the same on every rank; higher than that of every earlier communicator that a rank
            has made of a group of this name, for such a device.
        key: the same on every rank; no other communicator ever has it.
        group: its ranks.
        device: of the tensors.
        timeout: of every wait.
        library: of the backend.
        workspace: of all ranks of an island.
        handle: of the native communicator; 0 if ranks cannot exchange directly.
        channel: over which ranks announce unfused calls; None for one rank.
        chooser: of the algorithms.
        hierarchy: this rank's place among several islands: then workspace and handle are of its
            own; None if there is one island, or nothing hierarchical.
        connection: what unfused calls go through; None for one rank.

    Attributes:
        dispatcher: of its calls.
        watch: of the peers' processes; None for one rank.
        notes: where ranks read who waits for whom.
        closed: whether calls are refused.
    """

    def __init__(
        self,
        name: str,
        number: int,
        key: str,
        group: dist.ProcessGroup,
        device: torch.device,
        timeout: datetime.timedelta,
        library: _native.Library,
        workspace: Workspace,
        handle: int,
        channel: channel.Channel | None,
        chooser: Chooser,
        hierarchy: hierarchical.Hierarchy | None = None,
        connection: unfused.Connection | None = None,
    ) -> None:
        self.name, self.number = name, number
        self.device, self.timeout = device, timeout
        self._key = key
        # Weak: torch holds the group until it is destroyed. Held any longer, it would keep gloo
        # from ending, which then aborts the interpreter at its exit.
        self._group: Callable[[], dist.ProcessGroup | None] = weakref.ref(group)
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.chooser = chooser
        self.watch: Watch | None = None
        self.closed = False
        self._library, self._workspace, self._handle = library, workspace, handle
        self._channel = channel
        self._hierarchy, self._connection = hierarchy, connection
        self.notes: Notes = NoNotes() if channel is None else channel.notes
        if hierarchy is not None:
            hierarchy.between.notes = self.notes
            if handle and device.type == "cpu":
                library.set_beat(handle, self.notes.beat_address)
        self._process = os.getpid()
        self._turn = Turn()
        self._ended = False  # close() has released everything
        self._streams: set[int | None] = {None}  # that were reported by _note_stream()
        self._refusal: Refusal | None = None
        # Why this rank last refused a call that its peers may have made.
        self._refused = ""
        # What this rank and its peer have said of the calls in which they diverged.
        self._accounts: tuple[faults.Account, faults.Account] | None = None
        # Makes the error of every call after this rank has given up.
        self._broken: Callable[[], PeerTimeoutError] | None = None
        self._counts: _native.Stats | None = None  # of a native communicator that was closed
        self._unfused: Counter[str] = Counter()  # calls, by why they ran so
        self._hierarchical = 0  # calls
        self.choose = chooser.choose  # as Dispatcher asks for it
        if handle:
            self.dispatcher = Dispatcher(self, library.run, handle, self._turn.lock)
        else:  # one rank needs no exchange; more go through the process group
            self.dispatcher = Dispatcher(self, library.local if self.world_size == 1 else None)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks; None after `close()` and when the group was destroyed."""
        return self._group()

    def living_group(self) -> dist.ProcessGroup:
        """The ranks; raises if the group was destroyed."""
        group = self._group()
        if group is None:
            raise CommunicatorClosedError(
                f"the process group of communicator {self.name} was destroyed: make a new "
                "communicator, in a new group."
            )
        return group

    def is_of(self, group: dist.ProcessGroup) -> bool:
        """Whether it is open, and `group` are its ranks."""
        return not self.closed and self._group() is group

    # ---- a call, as Dispatcher asks for it ------------------------------------------------------

    def check_open(self) -> None:
        """Raises CommunicatorClosedError after `close()`, and in a fork."""
        if not self.closed:
            return
        if self._process != os.getpid():
            raise CommunicatorClosedError(
                f"communicator {self.name} belongs to process {self._process}, of which this one, "
                f"{os.getpid()}, is a fork: only that one may use, check or close it. Make another "
                "communicator here, in a process group of its own."
            )
        raise CommunicatorClosedError(f"communicator {self.name} is closed: make a new one.")

    def can_repeat(self, prepared: PreparedCall) -> bool:
        """Whether the library makes such a call by itself."""
        if self._handle:
            return prepared.plan.algorithm in names.FUSED
        return self.world_size == 1 and prepared.op != "all_gather_rows"

    def run(self, prepared: PreparedCall, call: Call, memory: Memory) -> None:
        """Makes a call, when it is this thread's turn. Collective."""
        try:
            status, refused = self._run_in_turn(prepared, call, memory)
        except AllnormError:
            raise
        except BaseException as error:
            self.interrupted(error)
            raise
        if refused is not None:
            self.refuse(refused, prepared.plan.algorithm)
            raise refused
        if status:
            self.fail(status, prepared)

    def _run_in_turn(
        self, prepared: PreparedCall, call: Call, memory: Memory
    ) -> tuple[int, Exception | None]:
        """Returns the status of a call, and why this rank alone refuses to make it."""
        try:
            self._take_turn(sys._getframe())
            try:
                # Copies of unaligned inputs live until the call has been made.
                inputs = prepared.bind(call, memory)
            except Exception as error:  # noqa: BLE001 - raised when the turn has ended
                return _native.OK, error
            if prepared.plan.algorithm in names.BETWEEN_ISLANDS:
                return self._run_through_group(prepared, inputs, memory), None
            if prepared.native.stream not in self._streams:
                self._note_stream(prepared.native.stream)
            status = int(self._library.run(self._handle, prepared.address))
            del inputs
            return status, None
        finally:
            self._turn.end(sys._getframe())

    def interrupted(self, error: BaseException) -> None:
        """Ends the communicator after an exception of a signal handler in the middle of a call.

        The peers may be in this call or in the next one: they learn it at once.
        """
        if self.closed or self._broken is not None or self.world_size == 1:
            return
        self._end_with(Cause(self.rank, INTERRUPTED, _text(error)))
        self._refuse_next()

    def _refuse_next(self) -> None:
        """Lets peers on CUDA, where nothing else ends their waits, see that no call follows."""
        if self.device.type == "cuda" and self._handle:
            # To close the native communicator would be to wait for the device.
            with contextlib.suppress(Exception):
                if not torch.cuda.is_current_stream_capturing():
                    Refusal(self.device).run(self._library, self._handle)

    def refuse(self, error: Exception, algorithm: str) -> None:
        """Lets the peers know that this rank makes no call where they may make one.

        For an error that this rank alone may raise, before the call has begun. Ranks that all
        refuse are in step afterwards; a rank that does not refuse raises too, and at once. What
        ranks refuse alike is told to nobody.

        Args:
            error: that this rank will raise.
            algorithm: of the call.
        """
        if self.world_size == 1 or self.closed:
            return
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return  # the capture fails with this error, there is nothing to replay
        try:
            self._take_turn(sys._getframe())
            if algorithm in names.BETWEEN_ISLANDS:
                try:
                    unfused.refuse(self._channel, self)
                except (RuntimeError, AllnormError) as failure:
                    if self._broken is None:
                        self._give_up(failure)
                return
            self._refused = f"{type(error).__name__}: {error}"
            faults.publish_refusal(self.living_group(), self._key, self.rank, self._refused)
            if self._refusal is None:
                self._refusal = Refusal(self.device)
            self._refusal.run(self._library, self._handle)
        finally:
            self._turn.end(sys._getframe())

    def fail(self, status: int, prepared: PreparedCall | None) -> NoReturn:
        """Raises what a call that ended with this status has recorded."""
        if status == _native.INTERRUPTED:
            self.notes.post(Cause(self.rank, INTERRUPTED))
            fast_call.raise_interrupt()
        if status == _native.CLOSED:
            self._check_usable()
        if status in _RECORDED:
            self.check(prepared)
        try:
            raise_status(self._library, status)
        except ValueError as error:  # refused before anything was exchanged
            self.refuse(error, "fused" if prepared is None else prepared.plan.algorithm)
            raise
        raise AllnormError(f"status {status}")

    def _take_turn(self, call: FrameType) -> None:
        """Waits for the calls of other threads.

        The lock also keeps another thread from changing the bound call while it is being read.

        Args:
            call: the frame that ends the turn.
        """
        if not self._turn.try_take(call):
            self._refuse_within_call("a call")
            crosses = self._end_beside_call()
            self._turn.wait(call)
            if crosses:
                self._refuse_next()
        self._check_usable()

    def _check_usable(self) -> None:
        """Raises after close(), and after this rank has given up."""
        self.check_open()
        if self._broken is not None:
            raise self._broken()

    def _refuse_within_call(self, what: str) -> None:
        """Raises if this very thread is in a call of this communicator."""
        if self._turn.is_here() or threading.get_ident() == self.dispatcher.fast.holder():
            raise AllnormError(
                f"{what} of communicator {self.name} within a call of it, from a signal handler: "
                "the other ranks cannot know of it, and the outer call is not done. Leave a note "
                "for after the call, or raise an exception, which ends it."
            )

    def _end_beside_call(self) -> bool:
        """Ends the communicator, since another thread is in a call of it; returns whether it did.

        Which of the two comes first differs from rank to rank, so each rank would sum the rows of
        one with those of the other. This is seen only where two calls meet: nothing is added to
        calls that have their turn.
        """
        if self.world_size == 1 or self.closed or self._broken is not None:
            return False
        self._end_with(Cause(self.rank, CROSSED))
        return True

    def _note_stream(self, handle: int) -> None:
        """Tells the library that a stream lasts as long as the process: calls on it cost less.

        Streams of torch are never destroyed; those that others have made, of which the handle is
        all that torch knows, may be.
        """
        self._streams.add(handle)
        stream = torch.cuda.current_stream(self.device)
        if stream.cuda_stream == handle and stream.stream_id != handle:
            self._library.stream_lasts(handle)

    # ---- calls through the process group --------------------------------------------------------

    def _run_through_group(
        self, prepared: PreparedCall, inputs: tuple[torch.Tensor | None, ...], memory: Memory
    ) -> int:
        self.check()  # the library does it for the others
        self.living_group()  # raises before the ranks tell each other anything
        try:
            if prepared.plan.algorithm == "hierarchical":
                status = self._run_hierarchical(prepared, inputs, memory)
            else:
                status = self._run_unfused(prepared, inputs, memory)
            if status in _RECORDED or status == _native.CLOSED:
                self.end_wait(status)
            return status
        except PeerDivergedError:
            raise  # then all are in step, and go on, or the library has written NaN
        except (PeerTimeoutError, CommunicatorClosedError, *unfused.IN_STEP):
            make_nan(memory)
            raise
        except BaseException as error:
            # In the middle of the exchange: peers may be in their next call, or still in this one.
            raised = self._give_up(error)
            with contextlib.suppress(Exception):
                make_nan(memory)
            if raised is None:
                raise
            raise raised from error

    def end_wait(self, status: int, fault: _native.Fault | None = None) -> NoReturn:
        """Raises what a wait in the library ended with.

        Args:
            status: of the call.
            fault: what the library has recorded, with numbers of ranks of the group; None: it is in
                the communicator's own record.
        """
        if status == _native.INTERRUPTED:
            fast_call.raise_interrupt()
        if status == _native.CLOSED:
            self._check_usable()
        if fault is None and self._hierarchy is None:
            self.check()
        if fault is None:
            fault = _native.Fault()
            self._library.comm_check(self._handle, ctypes.addressof(fault))
            fault = self._in_group(fault)
        if status in _KIND_OF_STATUS:
            raise _FaultError(fault)
        if status == _native.DIVERGED:
            diverged = fault
            self._broken = lambda: faults.fault_error(diverged, self.timeout, {}, {}, self.watch)
            raise self._broken()
        raise_status(self._library, status)
        raise AllnormError(f"status {status}")

    def _run_unfused(
        self, prepared: PreparedCall, inputs: tuple[torch.Tensor | None, ...], memory: Memory
    ) -> int:
        x = inputs[0]
        assert x is not None
        if self.world_size > 1:
            self._unfused[prepared.plan.reason] += 1
        islands = self.chooser.traits.islands
        way = prepared, self._library, self._channel, self._connection, self
        return unfused.run(*way, x, memory, islands)

    def _run_hierarchical(
        self, prepared: PreparedCall, inputs: tuple[torch.Tensor | None, ...], memory: Memory
    ) -> int:
        assert self._hierarchy is not None
        assert self._channel is not None
        self._hierarchical += 1
        if self._handle and prepared.native.stream not in self._streams:
            self._note_stream(prepared.native.stream)
        return hierarchical.run(
            *(prepared, self._library, self._handle, self._hierarchy, self._channel, self),
            *(inputs, memory),
        )

    def parts(self, call: Call) -> dict[str, Callable[[], object]]:
        """As `Communicator._parts`."""
        assert self._hierarchy is not None
        prepared = PreparedCall(call, self.choose(call))
        memory = prepared.allocate(call)
        given = (prepared, self._library, self._handle, self._hierarchy, self.look_at_peers)
        return hierarchical.parts(*given, lambda: prepared.bind(call, memory))

    def _exchanges(self) -> list[unfused.Connection | between.Between]:
        """Returns what goes through process groups of the communicator's own."""
        own = None if self._hierarchy is None else self._hierarchy.between
        return [one for one in (own, self._connection) if one is not None]

    def _abandon(self) -> None:
        """Ends this rank's part of a call that cannot be finished, and the waits for it."""
        self.dispatcher.fast.close()
        for exchange in self._exchanges():
            exchange.abort(_GIVEN_UP)
        if self._channel is not None:
            self._channel.end_waits()
        if self._handle and self.device.type == "cpu":  # on CUDA that would wait for the device
            counts = _native.Stats()
            if self._library.comm_stats(self._handle, ctypes.addressof(counts)) == _native.OK:
                self._counts = counts
            self._library.comm_close(self._handle)

    def _failure(self) -> AllnormError | None:
        """What `check` raises, if anything."""
        try:
            self.check()
        except AllnormError as error:
            return error
        return None

    def look_at_peers(self, seconds: float) -> None:
        """Ends a wait of so many seconds for the process group, by raising, if it is to end."""
        self._check_usable()
        self.notes.beat()
        if seconds > _ARRIVAL_SECONDS:
            cause = self.notes.find(self._is_dead)
            if cause is not None:
                raise WaitEndedError(cause)
        if seconds > self.timeout.total_seconds():
            raise _TooLateError(f"no answer of the process group within {seconds:g} s")

    def _is_dead(self, rank: int) -> bool:
        return self.watch is not None and self.watch.has_ended(rank)

    def _give_up(self, error: BaseException) -> PeerTimeoutError | None:
        """Ends the communicator after an error in the middle of a call through the process group.

        Returns:
            The error to raise; None: the given one, which is of this rank alone.
        """
        cause = self._cause_of(error)
        if cause is None:
            self._end_with(Cause(self.rank, INTERRUPTED, _text(error)))
            return None
        self._end_with(cause)
        assert self._broken is not None
        return self._broken()

    def _end_with(self, cause: Cause) -> None:
        """Makes every later call raise the error for a cause, and lets the peers know."""
        self._broken = self._error_of(cause)
        self.notes.post(cause)
        self._abandon()

    def _cause_of(self, error: BaseException) -> Cause | None:
        """Returns why a wait has ended; None if `error` is of this rank alone."""
        if isinstance(error, WaitEndedError):
            return error.cause
        if isinstance(error, _FaultError):
            return self._cause_of_fault(error.fault)
        if not isinstance(error, RuntimeError | AllnormError):
            return None
        cause = None
        if not isinstance(error, _TooLateError):
            # The process group, or the store, has failed. Notes say why, perhaps a little later.
            deadline = time.monotonic() + _END_SECONDS
            while (cause := self.notes.find(self._is_dead) or self.notes.first()) is None:
                self.notes.beat()
                if time.monotonic() > deadline:
                    break
                time.sleep(_PAUSE_SECONDS)
        if cause is None and isinstance(error, _TooLateError | GroupError):
            cause = self.notes.settle(self._is_dead) or Cause(-1, FAILED, _text(error))
        return cause

    def _cause_of_fault(self, fault: _native.Fault) -> Cause:
        """Returns why a wait in the library has ended with a fault."""
        peer, kind = int(fault.peer), _KIND_OF_STATUS[fault.status]
        if kind == LATE:
            return self.notes.settle(self._is_dead, peer) or Cause(peer, LATE, "did not come")
        # It may have ended because of another rank.
        return self.notes.said_by(peer) or Cause(peer, kind)

    def _error_of(self, cause: Cause) -> Callable[[], PeerTimeoutError]:
        """Makes the error for a cause, now and later."""
        what = "a call"
        if self._hierarchy is not None:
            what = "a call between islands"
        elif not self._handle:
            what = "an unfused call"
        own, peer = f"rank {self.rank}", f"rank {cause.rank}"
        waited = f"{own} waited for {peer} in {what}"
        process = "its process" if self.watch is None else self.watch.describe(cause.rank)
        details = f" ({cause.why})" if cause.why else ""
        texts = {
            DIED: f"{waited}, but {process} has ended",
            LEFT: f"{waited}, but it has closed its communicator",
            INTERRUPTED: f"{waited}, but it was interrupted in a call{details}",
            CROSSED: f"{waited}, but two of its threads{_CROSSED}",
            LATE: f"{waited} for {self.timeout.total_seconds():g} s: it {cause.why}",
            FAILED: f"{own} waited for the process group in {what}, which failed{details}",
        }
        text = texts[cause.kind]
        if cause.rank == self.rank:
            text = f"{own} was late in {what}: its peers waited for it, and have given up"
            if cause.kind == INTERRUPTED:
                text = f"{own} was interrupted, by an exception, in {what}{details}"
            if cause.kind == CROSSED:
                text = f"two threads of {own}{_CROSSED}"
        kind = _ERRORS.get(cause.kind, PeerTimeoutError)
        if cause.rank == self.rank:
            kind = PeerTimeoutError
        return lambda: kind(
            f"{text}. Results of this and later calls are not valid; find out what {peer} did, and "
            "make a new Communicator over healthy ranks.",
            rank=self.rank,
            peer=cause.rank,
            expected=what,
        )

    # ---- state ----------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """As `Communicator.stats`."""
        self.check_open()
        counts = self._counts or _native.Stats()
        if self._handle and self._counts is None:
            status = self._library.comm_stats(self._handle, ctypes.addressof(counts))
            if status == _native.CLOSED:
                self.check_open()
            raise_status(self._library, status)
        fused = {name: int(getattr(counts, name)) for name in names.FUSED}
        if self._hierarchy is not None:
            fused = {**dict.fromkeys(names.FUSED, 0), "hierarchical": self._hierarchical}
        elif self._handle and self._channel is not None and self.device.type == "cpu":
            fused["two_shot"] -= self._channel.launches  # made with the same handle
        reasons = dict(self._unfused)
        failure = self._failure()
        fault = None if failure is None else f"{type(failure).__name__}: {failure}"
        return Stats({**fused, "unfused": sum(reasons.values())}, reasons, fault)

    def check(self, prepared: PreparedCall | None = None) -> None:
        """As `Communicator.check`; after a call by `prepared`, if one is known."""
        self.check_open()
        if self._broken is not None:
            raise self._broken()
        failure = next((one.failure for one in self._exchanges() if one.failure), "")
        if failure:  # of an exchange that only the GPU waits for
            failed = self._give_up(GroupError(failure))
            assert failed is not None
            raise failed
        if self._handle:
            fault = _native.Fault()
            status = self._library.comm_check(self._handle, ctypes.addressof(fault))
            if status == _native.CLOSED:
                self._check_usable()
            if status in _RECORDED:
                raise self._fault_error(fault, prepared)
            raise_status(self._library, status)

    def _in_group(self, fault: _native.Fault) -> _native.Fault:
        """A fault of the native communicator with numbers of ranks of the group."""
        if self._hierarchy is not None:
            ranks = self._hierarchy.ranks
            fault = _native.Fault.from_buffer_copy(fault)
            fault.rank, fault.peer = ranks[fault.rank], ranks[fault.peer]
        return fault

    def _fault_error(self, fault: _native.Fault, prepared: PreparedCall | None) -> PeerTimeoutError:
        fault = self._in_group(fault)
        if self._accounts is None:
            own = self._account(fault, prepared)
            seen: faults.Account = {}
            if fault.status == _native.DIVERGED:
                seen = faults.ask(self.living_group(), self._key, fault, own)
            elif fault.status in _KIND_OF_STATUS:
                cause = self._cause_of_fault(fault)
                if cause.rank not in (fault.peer, self.rank) or cause.kind == CROSSED:
                    # The peer has ended, or is late, because of this one.
                    self._end_with(cause)
                    assert self._broken is not None
                    return self._broken()
                self.notes.post(cause)
            self._accounts = own, seen
        return faults.fault_error(fault, self.timeout, *self._accounts, watch=self.watch)

    def _account(self, fault: _native.Fault, prepared: PreparedCall | None) -> faults.Account:
        """What this rank says of the call in which it failed."""
        if is_refusal(fault.expected_shape, fault.expected_tokens):
            return {faults.REFUSED: self._refused}
        if is_announcement(fault.expected_shape) and self._channel is not None:
            announced = self._channel.announced
            return {} if announced is None else announced.described()
        # On CUDA the fault is of an earlier call than the one that reports it.
        prepared_calls = self.dispatcher.prepared_calls()
        if prepared is not None and self.device.type == "cpu":
            prepared_calls = [prepared]
        return faults.account_of(fault, [Announcement.of(other) for other in prepared_calls])

    # ---- end ------------------------------------------------------------------------------------

    def close(self) -> None:
        """As `Communicator.close`."""
        if self._process != os.getpid():
            self.check_open()
        if self._ended or (self.closed and self._turn.is_here()):
            return
        self._refuse_within_call("close()")
        self.closed = True
        if self.watch is not None:
            self.watch.stop()
        self.dispatcher.fast.close()
        if self._channel is not None:
            self._channel.end_waits()
        for exchange in self._exchanges():
            exchange.close()
        # Ends calls that wait, and returns when no thread is in one any more. The handle stays
        # valid for threads that are about to use it.
        busy = bool(self._handle) and self._library.comm_close(self._handle) == _native.BUSY
        try:
            self._turn.wait(sys._getframe())
            self.notes.post(Cause(self.rank, LEFT))
            self.notes.close()
            if self._channel is not None:
                self._channel.close()
            self.dispatcher.forget()
            if not busy:  # else a CUDA graph may use the workspaces, which then stay for good
                self._workspace.release()
            self._group = lambda: None
            self._ended = True
        finally:
            self._turn.end(sys._getframe())

    def destroy(self) -> None:
        """Frees what close() leaves for threads that are about to use it. None may be left."""
        if self._handle:
            self._library.comm_destroy(self._handle)
        if self._channel is not None:
            self._channel.destroy()

    def peer_ended(self, rank: int, settled: bool) -> None:
        """The process of a peer has ended; `settled`: what it had sent has arrived."""
        place: int | None = rank
        if self._hierarchy is not None:
            place = self._hierarchy.place_of(rank)
        if self._handle and place is not None:
            self._library.comm_peers_died(self._handle, 1 << place, int(settled))
        if self._channel is not None:
            self._channel.peer_ended(rank)
        if self.device.type == "cuda":  # nothing else ends what NCCL waits for on the GPU
            why = f"the process of rank {rank} has ended"
            if self._hierarchy is not None and place is None:
                self._hierarchy.between.abort(why)
            if self._connection is not None:
                self._connection.abort(why)

    def become_fork(self) -> None:
        """In a child of fork(): nothing here may touch what the parent uses."""
        self.closed = True
        self._turn = Turn()  # another thread may have had it
        self.dispatcher.fast.close()


def _text(error: BaseException) -> str:
    """An exception in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:500].rstrip(": ")
