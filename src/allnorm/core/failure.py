"""The failure of a communicator: why a wait ended, and the error of all later calls."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import NoReturn

from allnorm.core import _native, fast_call, faults
from allnorm.core.announcement import Announcement, is_announcement
from allnorm.core.between import GroupError
from allnorm.core.channel import WaitEndedError
from allnorm.core.notes import CROSSED, DIED, FAILED, INTERRUPTED, LATE, LEFT, Cause, Notes
from allnorm.core.opened import Opened
from allnorm.core.prepared_call import PreparedCall
from allnorm.core.refusal import is_refusal
from allnorm.core.watch import Watch
from allnorm.errors import AllnormError, PeerDiedError, PeerLeftError, PeerTimeoutError

# Grace period between a lost connection and the exit of the peer's process.
_END_SECONDS = 0.5
_PAUSE_SECONDS = 0.01
# After this time, all that an exited rank sent has arrived, so a wait must be for the rank itself.
_ARRIVAL_SECONDS = 0.2
_CROSSED = (
    " called the communicator at the same time: their order differs between ranks, which would add "
    "rows of different calls. Give each thread a Communicator of its own, created in the same "
    "order on every rank (for functions: a process group of its own), or let the threads take "
    "turns in the same order on every rank"
)
# Statuses for which the library records a fault.
RECORDED = (
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
    """A wait in the library ended with a fault; the ranks in it are numbered as in the group."""

    def __init__(self, fault: _native.Fault) -> None:
        super().__init__(f"status {fault.status}, rank {fault.peer}")
        self.fault = fault


class _TooLateError(RuntimeError):
    """A wait for the process group lasted the whole timeout."""


class Failure:
    """The failure state of a communicator; decides when its waits end.

    Args:
        opened: parts of the communicator.
        prepared_calls: returns the prepared calls; the failed call may be one of them.
        abandon: aborts this rank's part of a call that cannot be finished.

    Attributes:
        watch: watches the peers' processes; None for one rank.
        refused: error for which this rank last refused a call.
    """

    def __init__(
        self,
        opened: Opened,
        prepared_calls: Callable[[], list[PreparedCall]],
        abandon: Callable[[], None],
    ) -> None:
        self.rank, self.world_size, self.timeout = opened.rank, opened.world_size, opened.timeout
        self.notes = Notes() if opened.channel is None else opened.channel.notes
        self.watch: Watch | None = None
        self.refused = ""
        self._opened = opened
        self._prepared_calls, self._abandon = prepared_calls, abandon
        # Accounts, by this rank and its peer, of the calls in which they diverged.
        self._accounts: tuple[faults.Account, faults.Account] | None = None
        # The call through the process group in which this rank has given up.
        self._given_up: Announcement | None = None
        # Creates the error of every call after this rank has given up.
        self._error: Callable[[], PeerTimeoutError] | None = None

    @property
    def is_final(self) -> bool:
        """Returns whether this rank has given up; every later call then raises the error."""
        return self._error is not None

    def check_usable(self) -> None:
        """Raises after close(), and after this rank has given up."""
        self._opened.check_open()
        if self._error is not None:
            raise self._error()

    def check(self, prepared: PreparedCall | None = None) -> None:
        """Raises the failure, if there is one; see `Communicator.check`.

        `prepared` is the call that has just ended, if it is known.
        """
        self.check_usable()
        failure = next((one.failure for one in self._opened.exchanges() if one.failure), "")
        if failure:  # only the GPU waited for that exchange
            failed = self.give_up(GroupError(failure))
            assert failed is not None
            raise failed
        if self._opened.handle:
            fault = _native.Fault()
            status = self._opened.library.comm_check(self._opened.handle, ctypes.addressof(fault))
            if status == _native.CLOSED:
                self.check_usable()
            if status in RECORDED:
                raise self._fault_error(fault, prepared)
            _native.raise_status(self._opened.library, status)

    def found(self) -> AllnormError | None:
        """Returns the error that `check` raises, or None."""
        try:
            self.check()
        except AllnormError as error:
            return error
        return None

    # ---- waits -------------------------------------------------------------------------------

    def look_at_peers(self, seconds: float) -> None:
        """Raises if a wait for the process group that has lasted `seconds` must end."""
        self.check_usable()
        self.notes.beat()
        if seconds > _ARRIVAL_SECONDS:
            cause = self.notes.find(self._is_dead)
            if cause is not None:
                raise WaitEndedError(cause)
        if seconds > self.timeout.total_seconds():
            raise _TooLateError(f"no answer of the process group within {seconds:g} s")

    def end_wait(self, status: int, fault: _native.Fault | None = None) -> NoReturn:
        """Raises the error of a failed wait in the library; see `Waits.end_wait`."""
        if status == _native.INTERRUPTED:
            fast_call.raise_interrupt()
        if status == _native.CLOSED:
            self.check_usable()
        if fault is None and self._opened.hierarchy is None:
            self.check()
        if fault is None:
            fault = _native.Fault()
            self._opened.library.comm_check(self._opened.handle, ctypes.addressof(fault))
            fault = self._opened.in_group(fault)
        if fault.status == _native.OK:
            # Another thread has failed or closed the communicator since this wait ended. A closed
            # handle no longer returns its record.
            self.check_usable()
        if status in _KIND_OF_STATUS:
            raise _FaultError(fault)
        if status == _native.DIVERGED:
            diverged = fault
            self._error = lambda: faults.fault_error(diverged, self.timeout, {}, {}, self.watch)
            raise self._error()
        _native.raise_status(self._opened.library, status)
        raise AllnormError(f"status {status}")

    def _is_dead(self, rank: int) -> bool:
        return self.watch is not None and self.watch.has_ended(rank)

    # ---- the end of a communicator that cannot go on ----------------------------------------

    def give_up(self, error: BaseException) -> PeerTimeoutError | None:
        """Fails the communicator after an error during a call through the process group.

        Returns:
            The error to raise; None: `error` itself, which concerns only this rank.
        """
        cause = self._cause_of(error)
        if self._opened.channel is not None:
            self._given_up = self._opened.channel.announced
        if cause is None:
            self.end_with(Cause(self.rank, INTERRUPTED, text_of(error)))
            return None
        self.end_with(cause)
        assert self._error is not None
        return self._error()

    def end_with(self, cause: Cause) -> None:
        """Makes every later call raise the error for a cause, and tells the peers."""
        self._error = self._error_of(cause)
        self.notes.post(cause)
        self._abandon()

    def _cause_of(self, error: BaseException) -> Cause | None:
        """Returns why a wait ended; None if `error` concerns only this rank."""
        if isinstance(error, WaitEndedError):
            return error.cause
        if isinstance(error, _FaultError):
            return self._cause_of_fault(error.fault)
        if not isinstance(error, RuntimeError | AllnormError):
            return None
        cause = None
        if not isinstance(error, _TooLateError):
            # The process group or the store failed. Notes will show why, perhaps a little later.
            deadline = time.monotonic() + _END_SECONDS
            while (cause := self.notes.find(self._is_dead) or self.notes.first()) is None:
                self.notes.beat()
                if time.monotonic() > deadline:
                    break
                time.sleep(_PAUSE_SECONDS)
        if cause is None and isinstance(error, _TooLateError | GroupError):
            cause = self.notes.settle(self._is_dead) or Cause(-1, FAILED, text_of(error))
        return cause

    def _cause_of_fault(self, fault: _native.Fault) -> Cause:
        """Returns why a wait in the library ended with a fault."""
        peer, kind = int(fault.peer), _KIND_OF_STATUS[fault.status]
        if kind == LATE:
            return self.notes.settle(self._is_dead, peer) or Cause(peer, LATE, "did not come")
        # The peer may have failed because of another rank.
        return self.notes.said_by(peer) or Cause(peer, kind)

    def _error_of(self, cause: Cause) -> Callable[[], PeerTimeoutError]:
        """Returns a function that creates the error for a cause."""
        what = "a call"
        if self._opened.hierarchy is not None:
            what = "a call between islands"
        elif not self._opened.handle:
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
            text = f"{own} was late in {what}: its peers timed out waiting for it"
            if cause.kind == INTERRUPTED:
                text = f"{own} was interrupted by an exception in {what}{details}"
            if cause.kind == CROSSED:
                text = f"two threads of {own}{_CROSSED}"
        call = what
        if self._given_up is not None:
            call = str(self._given_up)
            text += f". Expected {call}"
        kind = _ERRORS.get(cause.kind, PeerTimeoutError)
        if cause.rank == self.rank:
            kind = PeerTimeoutError
        return lambda: kind(
            f"{text}. Results of this and later calls are not valid; find out what {peer} did, and "
            "make a new Communicator over healthy ranks.",
            rank=self.rank,
            peer=cause.rank,
            expected=call,
        )

    # ---- faults that the library has recorded -----------------------------------------------

    def _fault_error(self, fault: _native.Fault, prepared: PreparedCall | None) -> PeerTimeoutError:
        fault = self._opened.in_group(fault)
        if self._accounts is None:
            own = self._account(fault, prepared)
            seen: faults.Account = {}
            if fault.status == _native.DIVERGED:
                seen = faults.ask(self._opened.living_group(), self._opened.key, fault, own)
            elif fault.status in _KIND_OF_STATUS:
                cause = self._cause_of_fault(fault)
                if cause.rank not in (fault.peer, self.rank) or cause.kind == CROSSED:
                    # The peer has exited, or is late, because of the rank in `cause`.
                    self.end_with(cause)
                    assert self._error is not None
                    return self._error()
                self.notes.post(cause)
            self._accounts = own, seen
        return faults.fault_error(fault, self.timeout, *self._accounts, watch=self.watch)

    def _account(self, fault: _native.Fault, prepared: PreparedCall | None) -> faults.Account:
        """Returns this rank's account of the call in which it failed."""
        if is_refusal(fault.expected_shape, fault.expected_tokens):
            return {faults.REFUSED: self.refused}
        if is_announcement(fault.expected_shape) and self._opened.channel is not None:
            announced = self._opened.channel.announced
            return {} if announced is None else announced.described()
        # On CUDA, the fault occurred in an earlier call than the one that reports it.
        prepared_calls = self._prepared_calls()
        if prepared is not None and self._opened.device.type == "cpu":
            prepared_calls = [prepared]
        return faults.account_of(fault, [Announcement.of(other) for other in prepared_calls])


def text_of(error: BaseException) -> str:
    """Formats an exception in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:500].rstrip(": ")
