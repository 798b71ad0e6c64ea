"""One rank's end of an exchange: the native communicator, whose turn it is, and what has failed."""

from __future__ import annotations

import ctypes
import datetime
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist

from allnorm import names
from allnorm.core import _native, channel, fast_call, faults, hierarchical, unfused
from allnorm.core.announcement import Announcement
from allnorm.core.call import Call
from allnorm.core.dispatch import Chooser, Dispatcher
from allnorm.core.launch import Launch, Memory, make_nan, raise_status
from allnorm.core.refusal import Refusal, is_refusal
from allnorm.core.watch import Watch
from allnorm.core.workspace import Workspace
from allnorm.errors import (
    AllnormError,
    CommunicatorClosedError,
    PeerDiedError,
    PeerDivergedError,
    PeerTimeoutError,
)

# A process may outlive its connections by so long.
_END_SECONDS = 0.5
# After so long, what a rank sent before it ended has arrived: a longer wait is for the rank itself.
_ARRIVAL_SECONDS = 0.2
_GIVEN_UP = "this rank has given up"
# Statuses behind which the library has a fault record.
_RECORDED = (
    *(_native.TIMEOUT, _native.DIVERGED, _native.PEER_DIED, _native.PEER_LEFT),
    _native.INTERRUPTED,
)


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
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._holder = 0  # the thread that has the lock; 0 also while csrc/python has it
        self._streams: set[int | None] = {None}  # that were reported by _note_stream()
        self._refusal: Refusal | None = None
        # Why this rank last refused a call that its peers may have made.
        self._refused = ""
        # What this rank and its peer have said of the calls in which they diverged.
        self._accounts: tuple[faults.Account, faults.Account] | None = None
        # Makes the error of an unfused call that failed amid its exchange.
        self._broken: Callable[[], PeerTimeoutError] | None = None
        self._unfused: Counter[str] = Counter()  # calls, by why they ran so
        self._hierarchical = 0  # calls
        self.choose = chooser.choose  # as Dispatcher asks for it
        if handle:
            self.dispatcher = Dispatcher(self, library.run, handle, self._lock)
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

    def can_repeat(self, launch: Launch) -> bool:
        """Whether the library makes such a call by itself."""
        if self._handle:
            return launch.plan.algorithm in names.FUSED
        return self.world_size == 1 and launch.op != "all_gather_rows"

    def run(self, launch: Launch, call: Call, memory: Memory) -> None:
        """Makes a call, when it is this thread's turn. Collective."""
        self._take_turn()
        refused: Exception | None = None
        try:
            try:
                # Copies of unaligned inputs live until the call has been made.
                inputs = launch.bind(call, memory)
            except Exception as error:  # noqa: BLE001 - raised below, when the turn has ended
                refused = error
            else:
                if launch.plan.algorithm in names.BETWEEN_ISLANDS:
                    status = self._run_through_group(launch, inputs, memory)
                else:
                    if launch.native.stream not in self._streams:
                        self._note_stream(launch.native.stream)
                    status = self._library.run(self._handle, launch.address)
                del inputs
        finally:
            self._end_turn()
        if refused is not None:
            self.refuse(refused, launch.plan.algorithm)
            raise refused
        if status:
            self.fail(status, launch)

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
        self._take_turn()
        try:
            if algorithm in names.BETWEEN_ISLANDS:
                unfused.refuse(self._channel, self)
                return
            self._refused = f"{type(error).__name__}: {error}"
            faults.publish_refusal(self.living_group(), self._key, self.rank, self._refused)
            if self._refusal is None:
                self._refusal = Refusal(self.device)
            self._refusal.run(self._library, self._handle)
        finally:
            self._end_turn()

    def fail(self, status: int, launch: Launch | None) -> NoReturn:
        """Raises what a call that ended with this status has recorded."""
        if status == _native.INTERRUPTED:
            fast_call.raise_interrupt()
        if status == _native.CLOSED:
            self.check_open()
        if status in _RECORDED:
            self.check(launch)
        try:
            raise_status(self._library, status)
        except ValueError as error:  # refused before anything was exchanged
            self.refuse(error, "fused" if launch is None else launch.plan.algorithm)
            raise
        raise AllnormError(f"status {status}")

    def _take_turn(self) -> None:
        """Threads make their calls one after the other.

        The lock also keeps another thread from changing the bound call while it is being read.
        """
        if not self._lock.acquire(False):
            self._refuse_within_call("a call")
            self._lock.acquire()
        self._holder = threading.get_ident()
        if self.closed or self._broken is not None:
            self._end_turn()
            self.check()

    def _end_turn(self) -> None:
        self._holder = 0
        self._lock.release()

    def _refuse_within_call(self, what: str) -> None:
        """Raises if this very thread is in a call of this communicator."""
        if threading.get_ident() in (self._holder, self.dispatcher.fast.holder()):
            raise AllnormError(
                f"{what} of communicator {self.name} within a call of it, from a signal handler: "
                "the other ranks cannot know of it, and the outer call is not done. Leave a note "
                "for after the call, or raise an exception, which ends it."
            )

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
        self, launch: Launch, inputs: tuple[torch.Tensor | None, ...], memory: Memory
    ) -> int:
        self.check()  # the library does it for the others
        self.living_group()  # raises before the ranks tell each other anything
        status = _native.OK
        try:
            if launch.plan.algorithm == "hierarchical":
                status = self._run_hierarchical(launch, inputs, memory)
            else:
                status = self._run_unfused(launch, inputs, memory)
        except AllnormError as error:
            # What the ranks told each other first; the channel keeps what it must.
            if not isinstance(error, PeerDivergedError):  # then all are in step, and go on
                make_nan(memory)
            raise
        except BaseException as error:
            make_nan(memory)
            failure = self._failure()
            if failure is not None:
                if isinstance(error, RuntimeError):
                    raise failure from error
                raise  # a wait for the others' announcements, which has told them
            # In the middle of the exchange: peers may be in their next call, or still in this one.
            self._abandon()
            self._broken = self._what_broke(error)
            if isinstance(error, RuntimeError):
                raise self._broken() from error
            raise
        if status in _RECORDED:
            make_nan(memory)
            self._broken = self._what_failed_inside(launch)
            if status == _native.INTERRUPTED:
                fast_call.raise_interrupt()
            raise self._broken()
        return status

    def _run_unfused(
        self, launch: Launch, inputs: tuple[torch.Tensor | None, ...], memory: Memory
    ) -> int:
        x = inputs[0]
        assert x is not None
        if self.world_size > 1:
            self._unfused[launch.plan.reason] += 1
        islands = self.chooser.traits.islands
        way = launch, self._library, self._channel, self._connection, self
        return unfused.run(*way, x, memory, islands)

    def _run_hierarchical(
        self, launch: Launch, inputs: tuple[torch.Tensor | None, ...], memory: Memory
    ) -> int:
        assert self._hierarchy is not None
        assert self._channel is not None
        self._hierarchical += 1
        if self._handle and launch.native.stream not in self._streams:
            self._note_stream(launch.native.stream)
        return hierarchical.run(
            *(launch, self._library, self._handle, self._hierarchy, self._channel, self),
            *(inputs, memory),
        )

    def parts(self, call: Call) -> dict[str, Callable[[], object]]:
        """As `Communicator._parts`."""
        assert self._hierarchy is not None
        launch = Launch(call, self.choose(call))
        memory = launch.allocate(call)
        given = (launch, self._library, self._handle, self._hierarchy, self.look_at_peers)
        return hierarchical.parts(*given, lambda: launch.bind(call, memory))

    def _abandon(self) -> None:
        """Ends this rank's part of a call that cannot be finished, and the waits for it."""
        self.dispatcher.fast.close()
        if self._connection is not None:
            self._connection.abort(_GIVEN_UP)
        if self._hierarchy is None:
            return
        self._hierarchy.between.abort(_GIVEN_UP)
        if self._handle and self.device.type == "cpu":  # on CUDA that would wait for the device
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
        self.check_open()
        late = seconds > _ARRIVAL_SECONDS
        if late and self.watch is not None and self.watch.find_ended(0.0) is not None:
            raise RuntimeError("a process of the group has ended")
        if seconds > self.timeout.total_seconds():
            raise RuntimeError(f"no answer of the process group within {seconds:g} s")

    def _what_broke(self, error: BaseException) -> Callable[[], PeerTimeoutError]:
        """Makes the error of an unfused call that failed in the process group, now and later."""
        if self._hierarchy is not None and not isinstance(error, RuntimeError):
            return self._was_interrupted()
        peer = None if self.watch is None else self.watch.find_ended(_END_SECONDS)
        if self.watch is not None and peer is not None:
            why = f"but {self.watch.describe(peer)} has ended"
            return self._because_of(faults.Wait([peer], why, True))
        text = f"which failed ({type(error).__name__}: {error})"
        if self._hierarchy is None:
            return self._because_of(faults.Wait([-1], text))
        others = [rank for rank in self._hierarchy.between.ranks if rank != self.rank]
        return self._because_of(faults.Wait(others, text))

    def _what_failed_inside(self, launch: Launch) -> Callable[[], PeerTimeoutError]:
        """The same for a hierarchical call that failed within the island."""
        fault = _native.Fault()
        self._library.comm_check(self._handle, ctypes.addressof(fault))
        error = self._fault_error(fault, launch)
        self._abandon()
        if fault.status == _native.INTERRUPTED:
            return self._was_interrupted()
        if fault.status == _native.DIVERGED:
            return lambda: error
        # A rank of the island may have been late, or given up, because of one of another island.
        died = isinstance(error, PeerDiedError)
        why = "whose process has ended" if died else "which did not come"
        return self._because_of(faults.Wait([error.peer], why, died))

    def _was_interrupted(self) -> Callable[[], PeerTimeoutError]:
        """Tells the others, whom nobody else tells, and waits for nobody."""
        wait = faults.Wait([self.rank], "which was interrupted")
        faults.publish_wait(self.living_group(), self._key, self.rank, wait)
        return lambda: PeerTimeoutError(
            f"rank {self.rank} was interrupted, by an exception, in a call between islands. "
            "Results of this and later calls are not valid; make a new Communicator on every rank.",
            rank=self.rank,
            expected="a call between islands",
        )

    def _because_of(self, wait: faults.Wait) -> Callable[[], PeerTimeoutError]:
        """Makes the error of a call that failed in a wait, now and later."""
        what = "an unfused call"
        if self._hierarchy is not None:
            wait = faults.find_cause(self.living_group(), self._key, self.rank, wait)
            what = "a call between islands"
        kind = PeerDiedError if wait.died else PeerTimeoutError
        names_ = ", ".join(map(str, wait.peers))
        whom = f"rank{'s' if len(wait.peers) > 1 else ''} {names_}"
        if wait.peers == [-1]:
            whom = "the process group"
        return lambda: kind(
            f"rank {self.rank} waited for {whom} in {what}, {wait.why}. Results of this and later "
            "calls are not valid; make a new Communicator over healthy ranks.",
            rank=self.rank,
            peer=wait.peers[0],
            expected=what,
        )

    # ---- state ----------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """As `Communicator.stats`."""
        self.check_open()
        counts = _native.Stats()
        if self._handle:
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

    def check(self, launch: Launch | None = None) -> None:
        """As `Communicator.check`; after a call by `launch`, if one is known."""
        self.check_open()
        if self._broken is not None:
            raise self._broken()
        failure = "" if self._hierarchy is None else self._hierarchy.between.failure
        if not failure and self._connection is not None:
            failure = self._connection.failure
        if failure:  # of an exchange that only the GPU waits for
            self._broken = self._what_broke(RuntimeError(failure))
            raise self._broken()
        if self._handle:
            fault = _native.Fault()
            status = self._library.comm_check(self._handle, ctypes.addressof(fault))
            if status == _native.CLOSED:
                self.check_open()
            if status in _RECORDED:
                raise self._fault_error(fault, launch)
            raise_status(self._library, status)
        if self._channel is not None:
            self._channel.check(self)

    def _fault_error(self, fault: _native.Fault, launch: Launch | None) -> PeerTimeoutError:
        if self._hierarchy is not None:
            ranks = self._hierarchy.ranks
            fault = _native.Fault.from_buffer_copy(fault)
            fault.rank, fault.peer = ranks[fault.rank], ranks[fault.peer]
        if self._accounts is None:
            own = self._account(fault, launch)
            seen: faults.Account = {}
            if fault.status == _native.DIVERGED:
                seen = faults.ask(self.living_group(), self._key, fault, own)
            self._accounts = own, seen
        return faults.fault_error(fault, self.timeout, *self._accounts, watch=self.watch)

    def _account(self, fault: _native.Fault, launch: Launch | None) -> faults.Account:
        """What this rank says of the call in which it failed."""
        if is_refusal(fault.expected_shape, fault.expected_tokens):
            return {faults.REFUSED: self._refused}
        # On CUDA the fault is of an earlier call than the one that reports it.
        launches = self.dispatcher.launches()
        if launch is not None and self.device.type == "cpu":
            launches = [launch]
        return faults.account_of(fault, [Announcement.of(other) for other in launches])

    # ---- end ------------------------------------------------------------------------------------

    def close(self) -> None:
        """As `Communicator.close`."""
        if self._process != os.getpid():
            self.check_open()
        if self.closed:
            return
        self._refuse_within_call("close()")
        self.closed = True
        if self.watch is not None:
            self.watch.stop()
        self.dispatcher.fast.close()
        if self._channel is not None:
            self._channel.end_waits()
        if self._hierarchy is not None:
            self._hierarchy.between.close()
        if self._connection is not None:
            self._connection.close()
        # Ends calls that wait, and returns when no thread is in one any more. The handle stays
        # valid for threads that are about to use it.
        busy = bool(self._handle) and self._library.comm_close(self._handle) == _native.BUSY
        with self._lock:
            if self._channel is not None:
                self._channel.close()
            self.dispatcher.forget()
            if not busy:  # else a CUDA graph may use the workspaces, which then stay for good
                self._workspace.release()
            self._group = lambda: None

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
        self._lock = threading.Lock()  # another thread may have held it
        self.dispatcher.fast.close()
