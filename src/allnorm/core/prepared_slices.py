"""Prepared calls of `rms_norm_sharded`, which have several tensors and no sum."""

from __future__ import annotations

import ctypes

import torch

from allnorm.core import _native, arguments, checks, tensors
from allnorm.core.arguments import DTYPES, Like
from allnorm.core.call import Call
from allnorm.core.prepared_call import CUDA_ALIGN_BYTES, Memory, PreparedCall, Result, address_of
from allnorm.core.shortcuts import current_raw_stream
from allnorm.core.slices import slot
from allnorm.core.tensors import LOW_ADDRESS, rows_of
from allnorm.policy import Plan


class PreparedSlices(PreparedCall):
    """A call of rms_norm_sharded, prepared for tensors of one geometry: see PreparedCall."""

    def __init__(self, call: Call, plan: Plan, shard: tuple[int, int] | None = None) -> None:
        checks.check_own_slices(call)
        slices = call.slices
        assert slices is not None
        self.plan, self.shard, self.op = plan, None, call.op
        self.num_tokens, self.scale, self.repeated = call.rows, None, ""
        self.gathers = True
        self._is_cuda = call.x.device.type == "cuda"
        self.native = native = self.describe(call)
        native.num_blocks, native.num_sources = plan.num_blocks, 1
        self.address = ctypes.addressof(native)
        self.results = [
            Result(
                slot("out", number),
                f"out[{number}]",
                Like(x.shape, x.dtype, x.device),
                tuple(torch.empty(x.shape, device="meta").stride()),
                f"tensors[{number}]",
            )
            for number, x in enumerate(slices.tensors)
        ]
        found = [
            (False, 0) if tensors.is_virtual(x) else self._row_stride(x) for x in slices.tensors
        ]
        self._strides = tuple(stride for _, stride in found)
        self._copied = tuple(
            copied or tensors.is_virtual(x)
            for (copied, _), x in zip(found, slices.tensors, strict=True)
        )
        self.is_virtual = any(map(tensors.is_virtual, call.given))

    @staticmethod
    def describe(call: Call) -> _native.Call:
        """Returns the C call without addresses and strides."""
        slices = call.slices
        assert slices is not None
        native = _native.Call(
            struct_bytes=ctypes.sizeof(_native.Call),
            op=_native.RMS_NORM_SHARDED,
            dtype=DTYPES[call.x.dtype],
            weight_dtype=DTYPES[call.x.dtype],
            numerics=_native.NUMERICS[call.numerics],
            eps=float(call.eps),
            weight_bias=float(call.weight_bias),
            num_tokens=call.rows,
            hidden_size=sum(x.shape[-1] for x in slices.tensors),
            num_slices=len(slices.tensors),
        )
        for number, (x, weight) in enumerate(zip(slices.tensors, slices.weights, strict=True)):
            native.set_slice(number, local_size=x.shape[-1], weight_dtype=DTYPES[weight.dtype])
        return native

    def allocate(self, call: Call) -> Memory:
        """Returns the tensors that the kernels write, as PreparedCall.allocate does."""
        memory: Memory = {}
        slices = call.slices
        assert slices is not None
        taken: dict[str, torch.Tensor | None] = {}
        for number, (x, weight) in enumerate(zip(slices.tensors, slices.weights, strict=True)):
            taken |= {f"tensors[{number}]": x, f"weights[{number}]": weight}
        for number, result in enumerate(self.results):
            assert result is not None
            given = None if slices.outs is None else slices.outs[number]
            if given is not None:
                arguments.check_writable(result.name, given)
                arguments.check_overlap(result.name, given, taken, result.may_share)
                taken[result.name] = given
            # A copied input is read after its copy, so the result need not be apart from it.
            usable = given is not None and self._can_write(given)
            memory[result.field] = given if given is not None and usable else result.make()
        return memory

    def returned(self, call: Call, memory: Memory) -> list[torch.Tensor]:
        """Returns the results; copies those that were not written to the caller's memory."""
        values = []
        for number, result in enumerate(self.results):
            assert result is not None
            assert call.slices is not None
            given = None if call.slices.outs is None else call.slices.outs[number]
            written = memory[result.field]
            values.append(written if given is None or given is written else given.copy_(written))
        return values

    def bind(self, call: Call, memory: Memory) -> tuple[torch.Tensor | None, ...]:
        """Writes addresses, strides and the current stream; returns the inputs to keep alive."""
        native, slices = self.native, call.slices
        assert slices is not None
        if self._is_cuda:
            native.stream = current_raw_stream(call.x.device.index)
        kept: list[torch.Tensor | None] = []
        for number, (x, weight) in enumerate(zip(slices.tensors, slices.weights, strict=True)):
            given = {f"tensors[{number}]": x, f"weights[{number}]": weight}
            if min(map(address_of, given.values())) < LOW_ADDRESS:
                tensors.check_memory(**given)
            read, stride = x, self._strides[number]
            if self._copied[number] or address_of(x) % self._align(x):
                read = rows_of(tensors.in_memory(x)).clone(memory_format=torch.contiguous_format)
                stride = read.shape[1]
            if tensors.is_virtual(weight) or address_of(weight) % self._align(weight):
                weight = tensors.in_memory(weight).clone(memory_format=torch.contiguous_format)
            out = memory[slot("out", number)]
            some = address_of(weight)  # any address, for tensors without rows
            native.set_slice(
                number,
                x=address_of(read) or some,
                weight=some,
                out=address_of(out) or some,
                x_stride=stride,
                out_stride=_stride(out),
            )
            kept += [read, weight]
        return tuple(kept)

    def _align(self, tensor: torch.Tensor) -> int:  # type: ignore[override]
        return CUDA_ALIGN_BYTES if self._is_cuda else tensor.element_size()

    def repeatable(self, call: Call, memory: Memory) -> _native.Call | None:
        """Returns a copy of the C call for tensors like these.

        Returns None if any tensor is copied, or if there are no rows.
        """
        given = call.named
        as_given = all(given.get(name, out) is out for name, out in memory.items())
        if any(self._copied) or self.is_virtual or self.num_tokens == 0 or not as_given:
            return None
        native = _native.Call.from_buffer_copy(self.native)
        for number, stride in enumerate(self._strides):
            out = memory[slot("out", number)]
            native.set_slice(number, x_stride=stride, out_stride=_stride(out))
        return native


def _stride(out: torch.Tensor) -> int:
    """Returns the row stride of a result, in elements."""
    return out.stride(0) if out.dim() == 2 else out.shape[-1]
