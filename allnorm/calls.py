"""From the arguments of a call to its launch: check, choose, prepare, allocate, launch.

Everything that the tensors' geometry decides is decided once and kept as a `Launch`. A call that
comes again makes its results and puts addresses into place.
"""

from __future__ import annotations

import ctypes
import datetime
import math
import threading
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from allnorm import _native, arguments, policy, unfused
from allnorm.arguments import Like, NormArguments, row_shard
from allnorm.errors import CommunicatorClosedError, UnsupportedError
from allnorm.faults import fault_error
from allnorm.launch import Launch, describe_call, raise_status
from allnorm.policy import Plan
from allnorm.quant import DTYPE as FP8
from allnorm.quant import Fp8PerTensor, QuantizedNorm
from allnorm.workspace import Workspace

# Prepared calls kept per communicator; a server sees a few thousand geometries at most.
_MAX_PREPARED = 4096

_Tensor = torch.Tensor


class _Result(NamedTuple):
    """A result: its name, what it is like, preallocated memory, and the input that it may be."""

    name: str
    like: Like
    given: _Tensor | None
    may_be: str = ""


class Calls:
    """How a Communicator makes its calls; it sets these attributes."""

    rank: int
    world_size: int
    name: str
    device: torch.device
    group: dist.ProcessGroup
    timeout: datetime.timedelta
    traits: policy.Traits
    _library: _native.Library
    _workspace: Workspace
    _handle: int
    _closed: bool
    _lock: threading.Lock
    _prepared: dict[Any, Launch]

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
        launch = self._find(x, residual, weight, norm, algorithm)
        if out is None and residual_out is None:
            if launch.is_canonical:
                result = torch.empty_like(x)  # the faster one, but it keeps unusual strides
            else:
                result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            summed = _new_residual(launch, result) if launch.is_norm else None
            self._launch(launch, x, residual, weight, result, summed)
            return result, summed
        results = [_Result("out", Like.rows(x, None), out, "x")]
        if launch.is_norm:
            like = Like.rows(x, launch.shard)
            results.append(_Result("residual_out", like, residual_out, "residual"))
        made = self._call_into(launch, x, residual, weight, results)
        return made[0], made[1] if launch.is_norm else None

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
        # A scale that is given is no part of what is prepared, only where it is.
        key = (Fp8PerTensor, quant.scale.device) if type(quant) is Fp8PerTensor else quant
        launch = self._find(x, residual, weight, (*norm, key, return_normed), algorithm, quant)
        if not memory:
            like = x
            if not launch.is_canonical:
                like = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            quantized = torch.empty_like(like, dtype=FP8)
            scale = quant.scale if launch.scale is None else launch.scale.empty(x.device)
            summed = _new_residual(launch, like)
            normed = torch.empty_like(like) if return_normed else None
            self._launch(launch, x, residual, weight, normed, summed, quantized, scale)
            return QuantizedNorm(quantized, scale, summed, normed)
        quantized_out, scale_out, residual_out, normed_out = memory
        results = [
            _Result("out", Like(x.shape, FP8), quantized_out),
            _Result("residual_out", Like.rows(x, launch.shard), residual_out, "residual"),
        ]
        if return_normed:
            results.append(_Result("normed_out", Like.rows(x, None), normed_out, "x"))
        if scale_out is not None:
            arguments.check_scale_result(scale_out, launch.scale, x)
            taken = {"x": x, "residual": residual, "weight": weight}
            arguments.check_overlap(
                "scale_out", arguments.with_padding(scale_out, launch.scale), taken, ""
            )
            scale = scale_out
        else:
            scale = quant.scale if launch.scale is None else launch.scale.empty(x.device)
        made = self._call_into(launch, x, residual, weight, results, scale)
        return QuantizedNorm(made[0], scale, made[1], made[2] if return_normed else None)

    def _gather_rows(
        self, shard: _Tensor, num_tokens: int, algorithm: str, out: _Tensor | None
    ) -> _Tensor:
        self._check_open()
        arguments.check_algorithm(algorithm)
        arguments.check_count("num_tokens", num_tokens)
        arguments.check_input("residual_shard", shard, self.device)
        hidden_size = shard.shape[-1]
        lo, hi = row_shard(num_tokens, self.world_size, self.rank)
        if shard.shape != (hi - lo, hidden_size):
            raise ValueError(
                f"residual_shard has shape {tuple(shard.shape)}: expected {(hi - lo, hidden_size)},"
                f" this rank's rows, {lo} up to {hi} of num_tokens={num_tokens}, as row_shard() "
                "gives them."
            )
        if out is not None:
            source = "num_tokens rows of residual_shard's width"
            like = Like((num_tokens, hidden_size), shard.dtype, source)
            arguments.check_result("out", out, like, self.device)
            arguments.check_overlap("out", out, {"residual_shard": shard}, "")
        call = describe_call(_native.ALL_GATHER_ROWS, shard.dtype, hidden_size)
        plan = self._plan(call, num_tokens, shard.dtype, algorithm)
        launch = Launch(shard, None, None, None, plan.algorithm, gathered_rows=num_tokens)
        result = out
        if result is None or not launch.writable(result):
            result = torch.empty((num_tokens, hidden_size), dtype=shard.dtype, device=shard.device)
        self._launch(launch, shard, None, None, result, None, fresh=result is not out)
        if out is not None and result is not out:
            out.copy_(result)
        return result if out is None else out

    # ---- preparing ------------------------------------------------------------------------------

    def _find(
        self,
        x: _Tensor,
        residual: _Tensor | None,
        weight: _Tensor | None,
        norm: tuple[Any, ...] | None,
        algorithm: str,
        quant: Any = None,
    ) -> Launch:
        """The prepared call for tensors of this geometry; `norm` tells specs of `quant` apart."""
        if self._closed:
            self._check_open()
        try:
            key = (
                *(x.shape, x.stride(), x.dtype, x.device),
                None if residual is None else (residual.shape, residual.stride(), residual.dtype),
                None if residual is None else residual.device,
                None if weight is None else (weight.shape, weight.stride(), weight.dtype),
                None if weight is None else weight.device,
                # 0.0 and -0.0 are equal keys, but not equal biases.
                *(norm, None if norm is None else math.copysign(1.0, norm[1]), algorithm),
            )
            launch = self._prepared.get(key)
        except (AttributeError, TypeError):  # not tensors, or not hashable: the checks say which
            key, launch = None, None
        if launch is None:
            launch = self._prepare(x, residual, weight, norm, algorithm, quant)
            if key is not None:
                if len(self._prepared) >= _MAX_PREPARED:
                    self._prepared.clear()
                self._prepared[key] = launch
        return launch

    def _prepare(
        self,
        x: _Tensor,
        residual: _Tensor | None,
        weight: _Tensor | None,
        norm: tuple[Any, ...] | None,
        algorithm: str,
        quant: Any,
    ) -> Launch:
        """Checks everything that the tensors' geometry decides, and chooses the algorithm."""
        arguments.check_algorithm(algorithm)
        arguments.check_input("x", x, self.device)
        num_tokens, hidden_size = x.numel() // x.shape[-1], x.shape[-1]
        checked = shard = None
        if norm is not None:
            eps, weight_bias, numerics, sharded = norm[:4]
            wants_normed = norm[5] if quant is not None else False
            checked = NormArguments(eps, weight_bias, numerics, sharded, quant, wants_normed)
            arguments.check_norm_arguments(checked)
            arguments.check_weight(weight, x)
            if len(norm) > 4:
                arguments.check_quantization(quant, x)
            if checked.residual_sharded:
                shard = row_shard(num_tokens, self.world_size, self.rank)
            if residual is not None:
                arguments.check_like("residual", residual, Like.rows(x, shard), self.device)
        op = _native.ALL_REDUCE if norm is None else _native.ADD_RMS_NORM
        plan = self._plan(
            describe_call(op, x.dtype, hidden_size, checked), num_tokens, x.dtype, algorithm
        )
        return Launch(x, residual, weight, checked, plan.algorithm, shard=shard)

    def _plan(
        self, call: _native.Call, num_tokens: int, dtype: torch.dtype, algorithm: str
    ) -> Plan:
        """Chooses the algorithm of such a call; refuses one that was asked for and cannot run."""
        plan = self._choose(call, num_tokens, dtype, algorithm)
        if algorithm not in ("auto", plan.algorithm):
            raise UnsupportedError(
                f"algorithm={algorithm!r} cannot run here: {plan.reason}. Pass algorithm='auto' or "
                "'unfused'; the results are the same bits."
            )
        return plan

    def _choose(
        self, call: _native.Call, num_tokens: int, dtype: torch.dtype, algorithm: str
    ) -> Plan:
        rows = {}
        for name, call.algorithm in _native.ALGORITHM.items():
            rows[name] = self._library.rows_per_chunk(
                self.world_size, self._workspace.num_bytes, ctypes.addressof(call)
            )
        owned_rows = bool(call.flags & _native.RESIDUAL_SHARDED)
        return policy.choose(
            self.traits,
            num_tokens,
            call.hidden_size,
            dtype.itemsize,
            rows,
            algorithm,
            owned_rows or call.op == _native.ALL_GATHER_ROWS,
        )

    # ---- launching ------------------------------------------------------------------------------

    def _call_into(
        self,
        launch: Launch,
        x: _Tensor,
        residual: _Tensor | None,
        weight: _Tensor | None,
        results: list[_Result],
        scale: _Tensor | None = None,
    ) -> list[_Tensor]:
        """A call with preallocated results: checks them, and returns all.

        `results` are out, residual_out if there is a norm; of a quantised call quantized,
        residual_out, normed if it is wanted.
        """
        taken = {"x": x, "residual": residual, "weight": weight}
        if scale is not None:
            name = "quant.scale" if launch.scale is None else "scale_out"
            taken[name] = arguments.with_padding(scale, launch.scale)
        for name, like, given, may_be in reversed(results):
            if given is not None:
                arguments.check_result(name, given, like, x.device)
                arguments.check_overlap(name, given, taken, may_be)
                taken[name] = given
        made = [
            torch.empty(like.shape, dtype=like.dtype, device=x.device)
            if given is None or not launch.writable(given)
            else given
            for _, like, given, _ in results
        ]
        ordered: list[_Tensor | None] = [*made, None, None]
        if scale is not None:
            quantized, summed, normed = ordered[:3]
            self._launch(
                *(launch, x, residual, weight, normed, summed, quantized, scale), fresh=False
            )
        else:
            self._launch(launch, x, residual, weight, ordered[0], ordered[1], fresh=False)
        for index, (result, wanted) in enumerate(zip(made, results, strict=True)):
            if wanted.given is not None and wanted.given is not result:
                made[index] = wanted.given.copy_(result)
        return made

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
        *,
        fresh: bool = True,
    ) -> None:
        # The lock keeps another thread from changing the prepared call while it is being read.
        with self._lock:
            temporaries = launch.bind(
                x, residual, weight, out, residual_out, quantized, scale, fresh=fresh
            )
            if launch.algorithm == "unfused":
                status = unfused.run(launch, self._library, self.group, x, out, quantized, scale)
            else:
                status = launch.exchange(self._library, self._handle)
            del temporaries
        if status != _native.OK:
            if status in (_native.TIMEOUT, _native.DIVERGED):
                self.check()
            raise_status(self._library, status)

    # ---- state ----------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise CommunicatorClosedError(f"communicator {self.name} is closed: make a new one.")

    def check(self) -> None:
        """Raises what a wait recorded, else returns None. Reads host memory; never synchronises.

        Raises:
            PeerTimeoutError: a peer did not come in time, or (PeerDivergedError) came with another
                call.
            CommunicatorClosedError: after `close()`.
        """
        self._check_open()
        if self._handle:
            fault = _native.Fault()
            if self._library.comm_check(self._handle, ctypes.addressof(fault)) != _native.OK:
                raise fault_error(fault, self.timeout)


def _new_residual(launch: Launch, like: _Tensor) -> _Tensor:
    if launch.residual_shape is None:
        return torch.empty_like(like)
    return torch.empty(launch.residual_shape, dtype=like.dtype, device=like.device)
