"""How a call is made: find what is prepared for it, make its results, launch."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import os
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from allnorm import _native, arguments, channel, fast_call, faults, results, tensors, unfused
from allnorm.announcement import Announcement
from allnorm.arguments import Like
from allnorm.errors import AllnormError, CommunicatorClosedError, PeerDiedError, PeerTimeoutError
from allnorm.fast_call import FastCall
from allnorm.launch import Launch, raise_status
from allnorm.prepare import Preparer
from allnorm.quant import DTYPE as FP8
from allnorm.quant import Fp8PerTensor, QuantizedNorm
from allnorm.refusal import Refusal, is_refusal
from allnorm.results import Result
from allnorm.shortcuts import New
from allnorm.watch import Watch

_Tensor = torch.Tensor
# How long after its connections a process may live on.
_END_SECONDS = 0.5
# A wait of so long is for a rank that has ended, and not for what it sent before it did.
_ARRIVAL_SECONDS = 0.2
# What the library has a record of.
_RECORDED = (
    *(_native.TIMEOUT, _native.DIVERGED, _native.PEER_DIED, _native.PEER_LEFT),
    _native.INTERRUPTED,
)


class Calls:
    """How a Communicator makes its calls; it sets these attributes."""

    name: str
    rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup
    timeout: datetime.timedelta
    _library: _native.Library
    _handle: int
    _preparer: Preparer
    _new: Callable[[], New]
    _fast: FastCall
    _lock: threading.Lock
    _holder: int
    _closed: bool
    _refusal: Refusal | None = None
    # Why this rank has refused a call that its peers may have made, last.
    _refused: str = ""
    # What this rank and its peer have said of the calls in which they diverged.
    _accounts: tuple[faults.Account, faults.Account] | None = None
    _streams: set[int | None]  # handles of which the library knows whether they last
    _process: int
    # Makes the error of an unfused call that failed amid its exchange.
    _broken: Callable[[], PeerTimeoutError] | None = None
    _watch: Watch | None = None
    _channel: channel.Channel | None = None

    def _call(
        self,
        x: _Tensor,
        residual: _Tensor | None,
        weight: _Tensor | None,
        norm: tuple[Any, ...] | None,
        algorithm: str,
        out: _Tensor | None,
        residual_out: _Tensor | None,
    ) -> tuple[_Tensor, _Tensor | None]:
        """A call that quantises nothing; `norm`: eps, weight_bias, numerics, residual_sharded."""
        made = self._fast.make(x, residual, weight, norm, algorithm, out, residual_out)
        if made.__class__ is tuple:
            return made if norm is not None else (made[0], None)
        if made is not None:
            self._raise(made, x, residual, weight, norm, algorithm)
        if self._closed:
            self._refuse()
        launch = None
        try:
            launch = self._preparer.find(x, residual, weight, norm, algorithm)
            given = (x, residual, weight, out, residual_out)
            fresh = out is None and residual_out is None
            if fresh:
                self._keep(launch, given, norm, algorithm)
                new = self._new()
                result = new(*launch.out)
                summed = None if norm is None else new(*launch.residual_out)
            else:
                wanted = [Result("out", Like.rows(x, None), out, "x")]
                if launch.is_norm:
                    like = Like.rows(x, launch.shard)
                    wanted.append(Result("residual_out", like, residual_out, "residual"))
                results.check(wanted, {"x": x, "residual": residual, "weight": weight}, launch)
                written = results.writable(wanted, launch)
                if not any(map(Result.is_copied, wanted, written)):
                    self._keep(launch, given, norm, algorithm)
        except Exception as error:
            self._tell(error, launch)
            raise
        if fresh:
            self._launch(launch, x, residual, weight, result, summed)
            return result, summed
        sums = written[1] if launch.is_norm else None
        self._launch(launch, x, residual, weight, written[0], sums, None, None, False)
        stored = results.store(wanted, written)
        return stored[0], stored[1] if launch.is_norm else None

    def _call_quantized(
        self,
        x: _Tensor,
        residual: _Tensor | None,
        weight: _Tensor,
        norm: tuple[Any, ...],
        quant: Any,
        return_normed: bool,
        algorithm: str,
        memory: tuple[_Tensor | None, ...],
    ) -> QuantizedNorm:
        """A call that quantises; `norm` as of `_call`, `memory` () or one for each result."""
        if not memory:
            whole = (*norm, quant, return_normed)
            made = self._fast.make(x, residual, weight, whole, algorithm, None, None)
            if made.__class__ is tuple:
                return QuantizedNorm(*made)
            if made is not None:
                self._raise(made, x, residual, weight, whole, algorithm, quant)
        # A scale that is given is no part of what is prepared, only where it is.
        key = (Fp8PerTensor, quant.scale.device) if type(quant) is Fp8PerTensor else quant
        if self._closed:
            self._refuse()
        norm = (*norm, key, return_normed)
        launch = None
        try:
            launch = self._preparer.find(x, residual, weight, norm, algorithm, quant)
            if memory:
                wanted, written, scale = _quantized_memory(
                    launch, x, residual, weight, quant, return_normed, memory
                )
                quantized, summed, normed = (*written, None)[:3]
            else:
                self._keep(launch, (x, residual, weight, None, None), norm, algorithm)
                new = self._new()
                quantized, summed = new(*launch.quantized), new(*launch.residual_out)
                normed = new(*launch.out) if return_normed else None
                scale = _new_scale(launch, new, x.device)
            if scale is None:
                scale = tensors.in_memory(quant.scale) if launch.is_virtual else quant.scale
        except Exception as error:
            self._tell(error, launch)
            raise
        self._launch(
            launch, x, residual, weight, normed, summed, quantized, scale, fresh=not memory
        )
        if launch.scale is None:
            scale = quant.scale
        if not memory:
            assert quantized is not None
            assert summed is not None
            return QuantizedNorm(quantized, scale, summed, normed)
        stored = results.store(wanted, written)
        return QuantizedNorm(stored[0], scale, stored[1], stored[2] if return_normed else None)

    def _gather_rows(
        self, shard: _Tensor, num_tokens: int, algorithm: str, out: _Tensor | None
    ) -> _Tensor:
        if self._closed:
            self._refuse()
        launch = None
        try:
            launch = self._preparer.find_gather(shard, num_tokens, algorithm)
            wanted = []
            if out is None:
                result = self._new()(*launch.out)
            else:
                source = "num_tokens rows as wide as residual_shard"
                shape = (num_tokens, shard.shape[-1])
                like = Like(shape, shard.dtype, shard.device, source)
                wanted = [Result("out", like, out)]
                results.check(wanted, {"residual_shard": shard}, launch)
                (result,) = results.writable(wanted, launch)
        except Exception as error:
            self._tell(error, launch)
            raise
        self._launch(launch, shard, None, None, result, None, fresh=out is None)
        return results.store(wanted, [result])[0] if wanted else result

    def _keep(
        self,
        launch: Launch,
        tensors: fast_call.Tensors,
        norm: tuple[Any, ...] | None,
        algorithm: str,
    ) -> None:
        """From its third time on, lets this call be made without Python."""
        if launch.recent is not None:
            fast_call.keep(self._fast, launch, tensors, norm, algorithm, self.world_size == 1)

    # ---- launching ------------------------------------------------------------------------------

    def _launch(
        self,
        launch: Launch,
        x: _Tensor,
        residual: _Tensor | None,
        weight: _Tensor | None,
        out: _Tensor | None,
        residual_out: _Tensor | None,
        quantized: _Tensor | None = None,
        scale: _Tensor | None = None,
        fresh: bool = True,
    ) -> None:
        self._take_turn()
        refused: Exception | None = None
        try:
            try:
                # Copies of unaligned inputs live until the call has been made.
                temporaries = launch.bind(
                    x, residual, weight, out, residual_out, quantized, scale, fresh
                )
            except Exception as error:  # noqa: BLE001 - raised below, when the turn has ended
                refused = error
            else:
                if launch.is_unfused:
                    read = temporaries[0] if temporaries else x
                    status = self._run_unfused(launch, read, out, quantized, scale)
                else:
                    if launch.call.stream not in self._streams:
                        self._note_stream(launch.call.stream)
                    status = self._library.run(self._handle, launch.address)
                del temporaries
        finally:
            self._end_turn()
        if refused is not None:
            self._tell(refused, launch)
            raise refused
        if status:
            self._fail(status, launch)

    def _run_unfused(
        self,
        launch: Launch,
        x: _Tensor,
        out: _Tensor | None,
        quantized: _Tensor | None,
        scale: _Tensor | None,
    ) -> int:
        self.check()  # the library does it for the others
        try:
            return unfused.run(
                *(launch, self._library, self.group, self._channel, self),
                *(x, out, quantized, scale),
            )
        except AllnormError:
            raise  # what the ranks told each other first; the channel keeps what it must
        except BaseException as error:
            if self._has_failed():
                raise  # a wait for the others' announcements, which has told them
            # Amid the exchange: peers may have gone on, and a later call would meet them in this.
            self._broken = self._what_broke(error)
            self._fast.close()
            if isinstance(error, RuntimeError):
                raise self._broken() from error
            raise

    def _has_failed(self) -> bool:
        """Whether the library has recorded what every later call will raise."""
        try:
            self._check(None)
        except AllnormError:
            return True
        return False

    def _look_at_peers(self, seconds: float) -> None:
        """Ends a wait of so many seconds for the process group, by raising, if it is to end."""
        if self._closed:
            self._refuse()
        late = seconds > _ARRIVAL_SECONDS
        if late and self._watch is not None and self._watch.find_ended(0.0) is not None:
            raise RuntimeError("a process of the group has ended")
        if seconds > self.timeout.total_seconds():
            raise RuntimeError(f"no answer of the process group within {seconds:g} s")

    def _what_broke(self, error: BaseException) -> Callable[[], PeerTimeoutError]:
        """Makes the error of an unfused call that failed in the process group, now and later."""
        kind: type[PeerTimeoutError] = PeerTimeoutError
        peer = None if self._watch is None else self._watch.find_ended(_END_SECONDS)
        if self._watch is not None and peer is not None:
            kind, why = PeerDiedError, f"{self._watch.describe(peer)} has ended"
            text = f"waited for rank {peer} in an unfused call, but {why}"
        else:
            text = f"could not finish an unfused call ({type(error).__name__}: {error})"
        return lambda: kind(
            f"rank {self.rank} {text}. Results of this and later calls are not valid; make a new "
            "Communicator over healthy ranks.",
            rank=self.rank,
            peer=-1 if peer is None else peer,
            op=0,
            expected="an unfused call",
            seen="nothing",
        )

    def _take_turn(self) -> None:
        """Threads make their calls one after the other.

        The lock also keeps another one from changing the prepared call while it is being read.
        """
        if not self._lock.acquire(False):
            self._refuse_within_call("a call")
            self._lock.acquire()
        self._holder = threading.get_ident()
        if self._closed or self._broken is not None:
            self._end_turn()
            self._check(None)

    def _end_turn(self) -> None:
        self._holder = 0
        self._lock.release()

    def _refuse_within_call(self, what: str) -> None:
        """Raises if this very thread is in a call of this communicator."""
        if threading.get_ident() in (self._holder, self._fast.holder()):
            raise AllnormError(
                f"{what} of communicator {self.name} within a call of it, from a signal handler: "
                "the other ranks cannot know of it, and the outer call is not done. Leave a note "
                "for after the call, or raise an exception, which ends it."
            )

    def _note_stream(self, handle: int) -> None:
        """Tells the library whether calls follow on a stream that lasts: each costs less then.

        Streams of torch are never destroyed; those that others have made, of which the handle is
        all that torch knows, may be.
        """
        self._streams.add(handle)
        stream = torch.cuda.current_stream(self.device)
        if stream.cuda_stream == handle and stream.stream_id != handle:
            self._library.stream_lasts(handle)

    def _raise(
        self,
        status: int,
        x: _Tensor,
        residual: _Tensor | None,
        weight: _Tensor | None,
        norm: tuple[Any, ...] | None,
        algorithm: str,
        quant: Any = None,
    ) -> NoReturn:
        """Raises what a call that was made without Python has recorded."""
        launch = None
        if status == _native.DIVERGED:
            with contextlib.suppress(Exception):  # it is for the words of the error only
                launch = self._preparer.find(x, residual, weight, norm, algorithm, quant)
        self._fail(status, launch)

    def _fail(self, status: int, launch: Launch | None) -> NoReturn:
        """Raises what a call that ended with this status has recorded."""
        if status == _native.INTERRUPTED:
            fast_call.raise_interrupt()
        if status == _native.CLOSED:
            self._refuse()
        if status in _RECORDED:
            self._check(launch)
        try:
            raise_status(self._library, status)
        except ValueError as error:  # refused before anything was exchanged
            error.seen_alone = "fused"  # type: ignore[attr-defined]
            self._tell(error, launch)
            raise
        raise AllnormError(f"status {status}")

    def _tell(self, error: Exception, launch: Launch | None) -> None:
        """Lets the peers know that this rank makes no call where they may make one.

        For an error that this rank alone may raise, before the call has begun. Ranks that all
        refuse are in step afterwards; a rank that does not refuse raises too, and at once. What
        ranks refuse alike is told to nobody: `launch` is None, and the error is not marked.
        """
        algorithm = getattr(error, "seen_alone", None) if launch is None else launch.algorithm
        if algorithm is None or self.world_size == 1 or self._closed:
            return
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return  # the capture fails with this error, there is nothing to replay
        self._take_turn()
        try:
            if algorithm == "unfused":
                unfused.refuse(self._channel, self, self.rank)
                return
            self._refused = f"{type(error).__name__}: {error}"
            faults.publish_refusal(self.group, self.name, self.rank, self._refused)
            if self._refusal is None:
                self._refusal = Refusal(self.device)
            self._refusal.run(self._library, self._handle)
        finally:
            self._end_turn()

    # ---- state ----------------------------------------------------------------------------------

    def _refuse(self) -> NoReturn:
        if self._process != os.getpid():
            raise CommunicatorClosedError(
                f"communicator {self.name} belongs to process {self._process}, of which this one, "
                f"{os.getpid()}, is a fork: only that one may use, check or close it. Make another "
                "communicator here, in a process group of its own."
            )
        raise CommunicatorClosedError(f"communicator {self.name} is closed: make a new one.")

    def check(self) -> None:
        """Raises what a wait recorded, else returns None. Reads host memory; never synchronises.

        Raises:
            PeerTimeoutError: a peer did not come in time, came with another call
                (PeerDivergedError), has closed its communicator (PeerLeftError), or its process has
                ended (PeerDiedError) while this rank needed it; or a wait was interrupted.
            AllnormError: CUDA refused a call of this rank (its launch, or its place among calls on
                other streams), which its peers may have made.
            CommunicatorClosedError: after `close()`.
        """
        self._check(None)

    def _check(self, launch: Launch | None) -> None:
        """As `check`, after a call by `launch`, if one is known."""
        if self._closed:
            self._refuse()
        if self._broken is not None:
            raise self._broken()
        if self._handle:
            fault = _native.Fault()
            status = self._library.comm_check(self._handle, ctypes.addressof(fault))
            if status == _native.CLOSED:
                self._refuse()
            if status in _RECORDED:
                raise self._fault_error(fault, launch)
            raise_status(self._library, status)
        if self._channel is not None:
            self._channel.check(self)

    def _fault_error(self, fault: _native.Fault, launch: Launch | None) -> PeerTimeoutError:
        if self._accounts is None:
            own = self._account(fault, launch)
            seen: faults.Account = {}
            if fault.status == _native.DIVERGED:
                seen = faults.ask(self.group, self.name, fault, own)
            self._accounts = own, seen
        return faults.fault_error(fault, self.timeout, *self._accounts, watch=self._watch)

    def _account(self, fault: _native.Fault, launch: Launch | None) -> faults.Account:
        """What this rank says of the call in which it failed."""
        if is_refusal(fault.expected_shape, fault.expected_tokens):
            return {faults.REFUSED: self._refused}
        # On CUDA it is an earlier one than the call that has found out.
        launches = self._preparer.launches()
        if launch is not None and self.device.type == "cpu":
            launches = [launch]
        return faults.account_of(fault, [Announcement.of(other) for other in launches])


def _new_scale(launch: Launch, new: New, device: torch.device) -> _Tensor | None:
    """Memory for the scales; None if one is given."""
    geometry = launch.scale
    if geometry is None:
        return None
    if geometry.padded:
        return geometry.empty(device)
    return new(geometry.shape, geometry.stride, geometry.dtype)


def _quantized_memory(
    launch: Launch,
    x: _Tensor,
    residual: _Tensor | None,
    weight: _Tensor,
    quant: Any,
    return_normed: bool,
    memory: tuple[_Tensor | None, ...],
) -> tuple[list[Result], list[_Tensor], _Tensor | None]:
    """The results that are wanted, the memory to write them to, and that of the scales.

    Raises:
        ValueError, TypeError: preallocated memory does not fit. This rank alone may see it.
    """
    quantized_out, scale, residual_out, normed_out = memory
    taken = {"x": x, "residual": residual, "weight": weight}
    if scale is not None:
        arguments.check_scale_result(scale, launch.scale, x)
        whole = arguments.with_padding(scale, launch.scale)
        arguments.check_overlap("scale_out", whole, taken, "")
        taken["scale_out"] = whole
    elif launch.scale is not None:
        scale = launch.scale.empty(x.device)
    else:
        taken["quant.scale"] = quant.scale
    wanted = [
        Result("out", Like(x.shape, FP8, x.device), quantized_out),
        Result("residual_out", Like.rows(x, launch.shard), residual_out, "residual"),
    ]
    if return_normed:
        wanted.append(Result("normed_out", Like.rows(x, None), normed_out, "x"))
    results.check(wanted, taken, launch)
    return wanted, results.writable(wanted, launch), scale
