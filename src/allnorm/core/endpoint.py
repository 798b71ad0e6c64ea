"""One rank's end of a communicator: runs its calls, one at a time, and closes it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from allnorm import names
from allnorm.core import _native, agreement, fast_call, faults, hierarchical, unfused
from allnorm.core.call import Call, CallWithInput
from allnorm.core.dispatch import Chooser, Dispatcher, Target
from allnorm.core.failure import RECORDED, Failure, text_of
from allnorm.core.notes import CROSSED, INTERRUPTED, LEFT, Cause
from allnorm.core.opened import Opened
from allnorm.core.prepared_call import Memory, PreparedCall, make_nan
from allnorm.core.refusal import Refusal
from allnorm.core.turn import Turn
from allnorm.errors import (
    AllnormError,
    CommunicatorClosedError,
    PeerDivergedError,
    PeerTimeoutError,
)
from allnorm.policy import Plan

_GIVEN_UP = "this rank has given up"


@dataclass(frozen=True)
class Stats:
    """Counts of a communicator's calls on this rank.

    Attributes:
        calls: counts, keyed by algorithm. "one_shot" and "two_shot" count launches, including those
            in replays of CUDA graphs: a call that does not fit into the workspace takes more than
            one launch, and on CUDA only completed launches count. "unfused" counts calls; a
            captured call counts once. One rank alone makes no launches.
        unfused: counts of the unfused calls, keyed by `Plan.reason`.
        fault: message of the error that `check()` raises; None if it raises nothing.
    """

    calls: dict[str, int]
    unfused: dict[str, int]
    fault: str | None


class Endpoint(Target):
    """One rank's end of a communicator: runs its calls, one thread at a time."""

    def __init__(self, opened: Opened, chooser: Chooser) -> None:
        self.name, self.number = opened.name, opened.number
        self.rank, self.world_size = opened.rank, opened.world_size
        self.device, self.timeout = opened.device, opened.timeout
        self.chooser = chooser
        self.failure = Failure(opened, lambda: self.dispatcher.prepared_calls(), self._abandon)
        self.check = self.failure.check
        self._opened, self._library, self._handle = opened, opened.library, opened.handle
        self._channel, self._hierarchy = opened.channel, opened.hierarchy
        if opened.hierarchy is not None:
            opened.hierarchy.between.notes = self.failure.notes
        self._turn = Turn()
        self._ended = False  # close() has released everything
        self._streams: set[int | None] = {None}  # streams that _note_stream() has reported
        self._refusal: Refusal | None = None
        self._counts: _native.Stats | None = None  # counts of a closed native communicator
        self._unfused: Counter[str] = Counter()  # unfused calls, by reason
        self._hierarchical = 0  # hierarchical calls
        if opened.handle:
            run, handle = opened.library.run, opened.handle
            self.dispatcher = Dispatcher(self, run, handle, self._turn.lock)
        else:  # one rank needs no exchange; multiple ranks use the process group
            self.dispatcher = Dispatcher(
                self, opened.library.local if self.world_size == 1 else None
            )

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group; None after `close()` and after the group was destroyed."""
        return self._opened.group()

    @property
    def closed(self) -> bool:
        """Returns whether calls are refused."""
        return self._opened.closed

    def is_of(self, group: dist.ProcessGroup) -> bool:
        """Returns whether the communicator is open and belongs to `group`."""
        return not self.closed and self._opened.group() is group

    # ---- running a call, for the Dispatcher -----------------------------------------------------

    def check_open(self) -> None:
        """Raises CommunicatorClosedError after close(), and in a forked child."""
        self._opened.check_open()

    def choose(self, call: Call) -> Plan:
        """Returns the plan of a call; see Chooser."""
        return self.chooser.choose(call)

    def can_repeat(self, prepared: PreparedCall) -> bool:
        """Returns whether csrc/python may repeat this prepared call."""
        if self._handle:
            return prepared.plan.algorithm in names.FUSED
        return self.world_size == 1 and prepared.op != "all_gather_rows"

    def run(self, prepared: PreparedCall, call: Call, memory: Memory) -> None:
        """Runs a call when it is this thread's turn. Collective."""
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
        """Returns the status of a call, and an error if only this rank refuses the call."""
        try:
            self._take_turn(sys._getframe())
            try:
                # Copies of unaligned inputs must live until the call has been launched.
                inputs = prepared.bind(call, memory)
            except Exception as error:  # noqa: BLE001 - run() raises it after the turn has ended
                return _native.OK, error
            if prepared.plan.algorithm in names.BETWEEN_ISLANDS:
                return self._run_through_group(prepared, inputs, memory), None
            if prepared.native.stream not in self._streams:
                self._note_stream(prepared.native.stream)
            if isinstance(call, CallWithInput):
                status = call.next_input.run_with(self._library, self._handle, prepared.native)
            else:
                status = int(self._library.run(self._handle, prepared.address))
            del inputs
            return status, None
        finally:
            self._turn.end(sys._getframe())

    def interrupted(self, error: BaseException) -> None:
        """Fails the communicator after a signal handler raised an exception during a call.

        Peers may be in this call or in the next one. This rank tells them at once.
        """
        if self.closed or self.failure.is_final or self.world_size == 1:
            return
        self.failure.end_with(Cause(self.rank, INTERRUPTED, text_of(error)))
        self._refuse_next()

    def _refuse_next(self) -> None:
        """Tells peers on CUDA, where nothing else ends their waits, that no call follows."""
        if self.device.type == "cuda" and self._handle:
            # Closing the native communicator would wait for the device.
            with contextlib.suppress(Exception):
                if not torch.cuda.is_current_stream_capturing():
                    Refusal(self.device).run(self._library, self._handle)

    def refuse(self, error: Exception, algorithm: str) -> None:
        """Tells the peers, which may be making a call, that this rank refuses it with `error`.

        This is for errors that may occur on one rank only, before the call starts. If all ranks
        refuse, they stay in step; a rank that does not refuse raises at once. If every rank raises
        the error anyway, the peers need not be told.
        """
        if self.world_size == 1 or self.closed:
            return
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return  # the capture fails with this error, so nothing will be replayed
        try:
            self._take_turn(sys._getframe())
            if algorithm in names.BETWEEN_ISLANDS:
                try:
                    agreement.refuse(self._channel, self.failure)
                except (RuntimeError, AllnormError) as failure:
                    if not self.failure.is_final:
                        self.failure.give_up(failure)
                return
            self.failure.refused = f"{type(error).__name__}: {error}"
            faults.publish_refusal(
                self._opened.living_group(), self._opened.key, self.rank, self.failure.refused
            )
            if self._refusal is None:
                self._refusal = Refusal(self.device)
            self._refusal.run(self._library, self._handle)
        finally:
            self._turn.end(sys._getframe())

    def fail(self, status: int, prepared: PreparedCall | None) -> NoReturn:
        """Raises the recorded error of a call that ended with `status`."""
        if status == _native.INTERRUPTED:
            self.failure.notes.post(Cause(self.rank, INTERRUPTED))
            fast_call.raise_interrupt()
        if status == _native.CLOSED:
            self.failure.check_usable()
        if status in RECORDED:
            self.check(prepared)
        try:
            super().fail(status, prepared)
        except ValueError as error:  # refused before any exchange
            self.refuse(error, "fused" if prepared is None else prepared.plan.algorithm)
            raise

    def _take_turn(self, call: FrameType) -> None:
        """Takes the turn for the call whose frame is `call`, after the calls of other threads.

        The turn also keeps other threads from changing a bound call while it is read.
        """
        if not self._turn.try_take(call):
            self._refuse_within_call("a call")
            crosses = self._end_beside_call()
            self._turn.wait(call)
            if crosses:
                self._refuse_next()
        self.failure.check_usable()

    def _refuse_within_call(self, what: str) -> None:
        """Raises if this thread is already in a call of this communicator."""
        if self._turn.is_here() or threading.get_ident() == self.dispatcher.fast.holder():
            raise AllnormError(
                f"{what} of communicator {self.name} within a call of it, from a signal handler: "
                "the other ranks do not expect it, and the outer call has not finished. Set a flag "
                "and make the call later, or raise an exception, which ends the outer call."
            )

    def _end_beside_call(self) -> bool:
        """Fails the communicator because another thread is in a call; returns whether it did.

        The order of the two calls may differ between ranks. Rows of different calls would then be
        added. Only calls that overlap in time are detected, so that other calls pay nothing.
        """
        if self.world_size == 1 or self.closed or self.failure.is_final:
            return False
        self.failure.end_with(Cause(self.rank, CROSSED))
        return True

    def _note_stream(self, handle: int) -> None:
        """Tells the library if a stream is never destroyed, because calls on it then cost less.

        torch never destroys its own streams. Of a stream that other code created, torch knows only
        the handle, and that stream may be destroyed.
        """
        self._streams.add(handle)
        stream = torch.cuda.current_stream(self.device)
        if stream.cuda_stream == handle and stream.stream_id != handle:
            self._library.stream_lasts(handle)

    # ---- calls through the process group --------------------------------------------------------

    def _run_through_group(
        self, prepared: PreparedCall, inputs: tuple[torch.Tensor | None, ...], memory: Memory
    ) -> int:
        self.check()  # the library checks fused calls
        self._opened.living_group()  # raises before the ranks exchange anything
        try:
            if prepared.plan.algorithm == "hierarchical":
                status = self._run_hierarchical(prepared, inputs, memory)
            else:
                status = self._run_unfused(prepared, inputs, memory)
            if status in RECORDED or status == _native.CLOSED:
                self.failure.end_wait(status)
            return status
        except PeerDivergedError:
            raise  # the ranks are in step and go on, or the library has written NaN
        except (PeerTimeoutError, CommunicatorClosedError, *unfused.IN_STEP):
            make_nan(memory)
            raise
        except BaseException as error:
            # This is in the middle of an exchange, so peers may be in this call or in their next.
            raised = self.failure.give_up(error)
            with contextlib.suppress(Exception):
                make_nan(memory)
            if raised is None:
                raise
            raise raised from error

    def _run_unfused(
        self, prepared: PreparedCall, inputs: tuple[torch.Tensor | None, ...], memory: Memory
    ) -> int:
        x = inputs[0]
        assert x is not None
        if self.world_size > 1:
            self._unfused[prepared.plan.reason] += 1
        return unfused.run(
            prepared=prepared,
            library=self._library,
            channel=self._channel,
            connection=self._opened.connection,
            waits=self.failure,
            x=x,
            memory=memory,
            islands=self.chooser.traits.islands,
        )

    def _run_hierarchical(
        self, prepared: PreparedCall, inputs: tuple[torch.Tensor | None, ...], memory: Memory
    ) -> int:
        assert self._hierarchy is not None
        assert self._channel is not None
        self._hierarchical += 1
        if self._handle and prepared.native.stream not in self._streams:
            self._note_stream(prepared.native.stream)
        return hierarchical.run(
            prepared=prepared,
            library=self._library,
            handle=self._handle,
            hierarchy=self._hierarchy,
            channel=self._channel,
            waits=self.failure,
            inputs=inputs,
            memory=memory,
        )

    def parts(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, **more: Any
    ) -> dict[str, Callable[[], object]]:
        """Returns the steps "sums", "exchange" and "rest" of a hierarchical call, for benchmarks.

        All ranks may call each step repeatedly; its result must not be used.
        """
        call = Call(
            op="all_reduce_add_rms_norm",
            source=x,
            residual=residual,
            weight=weight,
            eps=eps,
            algorithm="hierarchical",
            **more,
        )
        assert self._hierarchy is not None
        prepared = PreparedCall(call, self.choose(call))
        memory = prepared.allocate(call)
        return hierarchical.parts(
            prepared,
            self._library,
            self._handle,
            self._hierarchy,
            self.failure.look_at_peers,
            lambda: prepared.bind(call, memory),
        )

    def _abandon(self) -> None:
        """Aborts this rank's part of a call that cannot finish, and the waits for that part."""
        self.dispatcher.fast.close()
        for exchange in self._opened.exchanges():
            exchange.abort(_GIVEN_UP)
        if self._channel is not None:
            self._channel.end_waits()
        if self._handle and self.device.type == "cpu":  # on CUDA this would wait for the device
            counts = _native.Stats()
            if self._library.comm_stats(self._handle, ctypes.addressof(counts)) == _native.OK:
                self._counts = counts
            self._library.comm_close(self._handle)

    # ---- state ----------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Returns the counts of calls; see `Communicator.stats`."""
        self.check_open()
        counts = self._counts or _native.Stats()
        if self._handle and self._counts is None:
            status = self._library.comm_stats(self._handle, ctypes.addressof(counts))
            if status == _native.CLOSED:
                self.check_open()
            _native.raise_status(self._library, status)
        fused = {name: int(getattr(counts, name)) for name in names.FUSED}
        if self._hierarchy is not None:
            fused = {**dict.fromkeys(names.FUSED, 0), "hierarchical": self._hierarchical}
        elif self._handle and self._channel is not None and self.device.type == "cpu":
            fused["two_shot"] -= self._channel.launches  # the channel uses the same handle
        reasons = dict(self._unfused)
        failure = self.failure.found()
        fault = None if failure is None else f"{type(failure).__name__}: {failure}"
        return Stats({**fused, "unfused": sum(reasons.values())}, reasons, fault)

    # ---- end ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Closes the communicator; see `Communicator.close`."""
        if self._opened.process != os.getpid():
            self.check_open()
        if self._ended or (self.closed and self._turn.is_here()):
            return
        self._refuse_within_call("close()")
        self._opened.closed = True
        if self.failure.watch is not None:
            self.failure.watch.stop()
        self.dispatcher.fast.close()
        if self._channel is not None:
            self._channel.end_waits()
        for exchange in self._opened.exchanges():
            exchange.close()
        # Ends waiting calls, and returns once no thread is in a call. The handle stays valid for
        # threads that are about to use it.
        busy = bool(self._handle) and self._library.comm_close(self._handle) == _native.BUSY
        try:
            self._turn.wait(sys._getframe())
            self.failure.notes.post(Cause(self.rank, LEFT))
            self.failure.notes.close()
            if self._channel is not None:
                self._channel.close()
            self.dispatcher.forget()
            if not busy:  # otherwise a CUDA graph may use the workspaces, which then stay
                self._opened.workspace.release()
            self._opened.group = lambda: None
            self._ended = True
        finally:
            self._turn.end(sys._getframe())

    def destroy(self) -> None:
        """Frees what close() keeps for threads about to use it. No such thread may remain."""
        if self._handle:
            self._library.comm_destroy(self._handle)
        if self._channel is not None:
            self._channel.destroy()

    def peer_ended(self, rank: int, settled: bool) -> None:
        """Ends the waits for a peer whose process has exited.

        `settled` means that everything the peer had sent has arrived.
        """
        index: int | None = rank
        if self._hierarchy is not None:
            index = self._hierarchy.place_of(rank)
        if self._handle and index is not None:
            self._library.comm_peers_died(self._handle, 1 << index, int(settled))
        if self._channel is not None:
            self._channel.peer_ended(rank)
        if self.device.type == "cuda":  # nothing else ends NCCL's waits on the GPU
            why = f"the process of rank {rank} has ended"
            if self._hierarchy is not None and index is None:
                self._hierarchy.between.abort(why)
            if self._opened.connection is not None:
                self._opened.connection.abort(why)

    def become_fork(self) -> None:
        """Closes the communicator in a forked child, without touching the parent's resources."""
        self._opened.closed = True
        self._turn = Turn()  # another thread of the parent may have held it
        self.dispatcher.fast.close()
