"""How a call is made: find what is prepared for it, make its results, launch."""

from __future__ import annotations

import ctypes
import datetime
import os
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from allnorm import _native, arguments, channel, fast_call, results, unfused
from allnorm.arguments import Like
from allnorm.errors import AllnormError, CommunicatorClosedError, PeerDiedError
from allnorm.fast_call import FastCall
from allnorm.faults import fault_error
from allnorm.launch import Launch, raise_status
from allnorm.prepare import Preparer
from allnorm.quant import DTYPE as FP8
from allnorm.quant import Fp8PerTensor, QuantizedNorm
from allnorm.results import Result
from allnorm.shortcuts import New
from allnorm.watch import Watch

_Tensor = torch.Tensor
# How long after its connections a process may live on.
_END_SECONDS = 0.5
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
    _process: int
    _watch: Watch | None
    _channel: channel.Channel | None

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
            self._raise(made)
        if self._closed:
            self._refuse()
        launch = self._preparer.find(x, residual, weight, norm, algorithm)
        tensors = (x, residual, weight, out, residual_out)
        if out is None and residual_out is None:
            self._keep(launch, tensors, norm, algorithm)
            new = self._new()
            result = new(*launch.out)
            summed = None if norm is None else new(*launch.residual_out)
            self._launch(launch, x, residual, weight, result, summed)
            return result, summed
        wanted = [Result("out", Like.rows(x, None), out, "x")]
        if launch.is_norm:
            like = Like.rows(x, launch.shard)
            wanted.append(Result("residual_out", like, residual_out, "residual"))
        results.check(wanted, {"x": x, "residual": residual, "weight": weight})
        written = results.writable(wanted, launch)
        if not any(wish.is_copied(memory) for wish, memory in zip(wanted, written, strict=True)):
            self._keep(launch, tensors, norm, algorithm)
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
            made = self._fast.make(
                x, residual, weight, (*norm, quant, return_normed), algorithm, None, None
            )
            if made.__class__ is tuple:
                return QuantizedNorm(*made)
            if made is not None:
                self._raise(made)
        # A scale that is given is no part of what is prepared, only where it is.
        key = (Fp8PerTensor, quant.scale.device) if type(quant) is Fp8PerTensor else quant
        if self._closed:
            self._refuse()
        norm = (*norm, key, return_normed)
        launch = self._preparer.find(x, residual, weight, norm, algorithm, quant)
        if memory:
            return self._quantize_into(launch, x, residual, weight, quant, return_normed, memory)
        self._keep(launch, (x, residual, weight, None, None), norm, algorithm)
        new = self._new()
        quantized, summed = new(*launch.quantized), new(*launch.residual_out)
        geometry = launch.scale
        if geometry is None:
            scale = quant.scale
        elif geometry.padded:
            scale = geometry.empty(x.device)
        else:
            scale = new(geometry.shape, geometry.stride, geometry.dtype)
        normed = new(*launch.out) if return_normed else None
        self._launch(launch, x, residual, weight, normed, summed, quantized, scale)
        return QuantizedNorm(quantized, scale, summed, normed)

    def _quantize_into(
        self,
        launch: Launch,
        x: _Tensor,
        residual: _Tensor | None,
        weight: _Tensor,
        quant: Any,
        return_normed: bool,
        memory: tuple[_Tensor | None, ...],
    ) -> QuantizedNorm:
        """A quantising call with preallocated results."""
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
            taken["quant.scale"] = scale = quant.scale
        wanted = [
            Result("out", Like(x.shape, FP8, x.device), quantized_out),
            Result("residual_out", Like.rows(x, launch.shard), residual_out, "residual"),
        ]
        if return_normed:
            wanted.append(Result("normed_out", Like.rows(x, None), normed_out, "x"))
        results.check(wanted, taken)
        written = results.writable(wanted, launch)
        quantized, summed, normed = (*written, None)[:3]
        assert quantized is not None
        self._launch(launch, x, residual, weight, normed, summed, quantized, scale, False)
        stored = results.store(wanted, written)
        return QuantizedNorm(stored[0], scale, stored[1], stored[2] if return_normed else None)

    def _gather_rows(
        self, shard: _Tensor, num_tokens: int, algorithm: str, out: _Tensor | None
    ) -> _Tensor:
        if self._closed:
            self._refuse()
        launch = self._preparer.find_gather(shard, num_tokens, algorithm)
        shape = (num_tokens, shard.shape[-1])
        if out is None:
            result = self._new()(*launch.out)
            self._launch(launch, shard, None, None, result, None)
            return result
        source = "num_tokens rows as wide as residual_shard"
        wanted = [Result("out", Like(shape, shard.dtype, shard.device, source), out)]
        results.check(wanted, {"residual_shard": shard})
        written = results.writable(wanted, launch)
        self._launch(launch, shard, None, None, written[0], None, None, None, False)
        return results.store(wanted, written)[0]

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
        # The lock orders threads, and keeps another one from changing the prepared call while it is
        # being read.
        if not self._lock.acquire(False):
            self._wait_for_turn()
        try:
            self._holder = threading.get_ident()
            if self._closed:
                self._refuse()
            # Copies of unaligned inputs live until the call has been made.
            temporaries = launch.bind(
                x, residual, weight, out, residual_out, quantized, scale, fresh
            )
            if launch.is_unfused:
                self.check()  # the library does it for the others
                try:
                    status = unfused.run(
                        *(launch, self._library, self.group, self._channel, self),
                        *(x, out, quantized, scale),
                    )
                except RuntimeError as error:
                    self._blame_the_dead(error)
                    raise
            else:
                status = self._library.run(self._handle, launch.address)
            del temporaries
        finally:
            self._holder = 0
            self._lock.release()
        if status:
            self._raise(status)

    def _look_at_peers(self, seconds: float) -> None:
        """Ends a wait of so many seconds for the process group, by raising, if it is to end."""
        if self._closed:
            self._refuse()
        if self._watch is not None and self._watch.find_ended(0.0) is not None and seconds > 0.2:
            raise RuntimeError("a process of the group has ended")
        if seconds > self.timeout.total_seconds():
            raise RuntimeError(f"no answer of the process group within {seconds:g} s")

    def _blame_the_dead(self, error: RuntimeError) -> None:
        """Says who it was if the process group fails because a peer's process has ended."""
        peer = None if self._watch is None else self._watch.find_ended(_END_SECONDS)
        if self._watch is None or peer is None:
            return
        raise PeerDiedError(
            f"rank {self.rank} waited for rank {peer} in an unfused call, but "
            f"{self._watch.describe(peer)} has ended. Results of this and later calls are not "
            "valid; make a new Communicator over healthy ranks.",
            rank=self.rank,
            peer=peer,
            op=0,
            expected="an unfused call",
            seen="nothing",
        ) from error

    def _wait_for_turn(self) -> None:
        """Takes the lock when the call of another thread is done."""
        self._refuse_within_call("a call")
        self._lock.acquire()

    def _refuse_within_call(self, what: str) -> None:
        """Raises if this very thread is in a call of this communicator."""
        if threading.get_ident() in (self._holder, self._fast.holder()):
            raise AllnormError(
                f"{what} of communicator {self.name} within a call of it, from a signal handler: "
                "the other ranks cannot know of it, and the outer call is not done. Leave a note "
                "for after the call, or raise an exception, which ends it."
            )

    def _raise(self, status: int) -> None:
        """Raises what a call that ended with this status has recorded."""
        if status == _native.INTERRUPTED:
            fast_call.raise_interrupt()
        if status == _native.CLOSED:
            self._refuse()
        if status in _RECORDED:
            self.check()
        raise_status(self._library, status)

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
            CommunicatorClosedError: after `close()`.
        """
        if self._closed:
            self._refuse()
        if self._handle:
            fault = _native.Fault()
            status = self._library.comm_check(self._handle, ctypes.addressof(fault))
            if status == _native.CLOSED:
                self._refuse()
            if status != _native.OK:
                raise fault_error(fault, self.timeout, self._watch)
        if self._channel is not None:
            self._channel.check(self)
