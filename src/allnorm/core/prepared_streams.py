"""Prepared calls of `all_reduce_hyper_connection`, whose residual consists of streams."""

from __future__ import annotations

import ctypes
import math

import torch

from allnorm.core import _native, checks, tensors
from allnorm.core.arguments import DTYPES, Like
from allnorm.core.call import Call
from allnorm.core.prepared_call import (
    CUDA_ALIGN_BYTES,
    Memory,
    PreparedCall,
    Result,
    address_of,
    choice_stride,
)
from allnorm.core.shortcuts import current_raw_stream
from allnorm.policy import Plan


class PreparedStreams(PreparedCall):
    """A call of all_reduce_hyper_connection, prepared for tensors of one geometry."""

    def __init__(self, call: Call, plan: Plan, shard: tuple[int, int] | None = None) -> None:
        checks.check_own_streams(call)
        residual, post, mix = call.residual, call.post, call.mix
        assert residual is not None
        assert post is not None
        assert mix is not None
        self.plan, self.shard, self.op = plan, None, call.op
        self.num_tokens, self.gathers, self.scale = call.rows, True, None
        self.repeated = ""
        self._is_cuda = call.x.device.type == "cuda"
        self.native = native = self.describe(call)
        native.algorithm = _native.ALGORITHM.get(plan.algorithm, 0)
        native.num_blocks, native.link_gbps = plan.num_blocks, plan.link_gbps
        native.cluster_size, native.num_sources = plan.cluster_size, 1
        self.address = ctypes.addressof(native)
        like = Like(residual.shape, residual.dtype, residual.device, "that of residual")
        stride = tuple(torch.empty(residual.shape, device="meta").stride())
        self.results = [Result("residual_out", "residual_out", like, stride, "residual")]
        found = [(False, 0) if t is None else self._row_stride(t) for t in (call.x, call.shared)]
        streams = token_strides(residual, 2)
        factors = [token_strides(post, 1), token_strides(mix, 2)]
        self.is_virtual = any(map(tensors.is_virtual, call.given))
        self._copies_inputs = (
            self.is_virtual
            or any(copied for copied, _ in found)
            or streams is None
            or (self._is_cuda and not _has_aligned_rows(residual, streams))
            or factors[0] is None
            or factors[0][1:] != (1,)
            or factors[1] is None
            or factors[1][1:] != (native.num_streams, 1)
        )
        self._strides = self._contiguous_strides()
        if not self._copies_inputs:
            assert streams is not None
            choices = map(choice_stride, (call.expert_index, call.expert_weights))
            self._strides = (
                *(stride for _, stride in found),
                *choices,
                *streams[:2],
                *(each[0] for each in factors if each),
            )

    @staticmethod
    def describe(call: Call) -> _native.Call:
        """Returns the C call without addresses and strides."""
        assert call.residual is not None
        native = _native.Call(
            struct_bytes=ctypes.sizeof(_native.Call),
            op=_native.HYPER_CONNECTION,
            dtype=DTYPES[call.x.dtype],
            weight_dtype=DTYPES[call.x.dtype],
            num_tokens=call.rows,
            hidden_size=call.x.shape[-1],
            num_streams=call.residual.shape[-2] if call.residual.dim() > 1 else 0,
            flags=_native.FLOAT32_RESIDUAL if call.has_float32_residual else 0,
        )
        if call.experts:
            native.top_k, native.num_rows = call.top_k, math.prod(call.x.shape[:-1])
        return native

    def bind(self, call: Call, memory: Memory) -> tuple[torch.Tensor | None, ...]:
        """Writes addresses, strides and the current stream; returns the inputs to keep alive."""
        native = self.native
        if self._is_cuda:
            native.stream = current_raw_stream(call.x.device.index)
        inputs = self._readable(call)
        native.x, native.residual = address_of(inputs[0]), address_of(inputs[1])
        # An empty tensor has the address 0, but NULL means that it is absent: PreparedCall.bind.
        native.expert_index, native.expert_weights, native.shared = (
            0 if tensor is None else address_of(tensor) or self.address for tensor in inputs[5:8]
        )
        native.post, native.mix = address_of(inputs[-2]), address_of(inputs[-1])
        native.residual_out = address_of(memory["residual_out"])
        copied = inputs[0] is not call.x
        self._set_input_strides(native, self._contiguous_strides() if copied else self._strides)
        self._set_result_strides(native, memory)
        return inputs

    def _contiguous_strides(self) -> tuple[int, ...]:
        streams, width = self.native.num_streams, self.native.hidden_size
        experts = (width, *(self.native.top_k,) * 2)  # of shared, index and weights
        return width, *experts, streams * width, width, streams, streams * streams

    @staticmethod
    def _set_input_strides(native: _native.Call, strides: tuple[int, ...]) -> None:
        native.x_stride, native.shared_stride = strides[:2]
        native.expert_index_stride, native.expert_weights_stride = strides[2:4]
        native.residual_stride, native.stream_stride = strides[4:6]
        native.post_stride, native.mix_stride = strides[6:]

    def _set_result_strides(self, native: _native.Call, memory: Memory) -> None:
        # Only the result for a single token may have a stride that is not contiguous.
        native.stream_out_stride = memory["residual_out"].stride(-2)
        native.residual_out_stride = native.num_streams * native.stream_out_stride


def token_strides(tensor: torch.Tensor, inner: int) -> tuple[int, ...] | None:
    """Returns the strides of a tensor as [num_tokens, ...]; None if it has no such view.

    The last `inner` dimensions belong to a token.
    """
    shape = tensor.shape[tensor.dim() - inner :]
    usual = tuple(torch.empty((1, *shape), device="meta").stride())
    if not tensor.numel():
        return usual
    try:
        tokens = tensor.view(-1, *shape)
    except RuntimeError:
        return None
    return (tokens.stride(0) if tokens.shape[0] > 1 else usual[0], *tokens.stride()[1:])


def _has_aligned_rows(residual: torch.Tensor, strides: tuple[int, ...]) -> bool:
    return all(stride * residual.element_size() % CUDA_ALIGN_BYTES == 0 for stride in strides[:2])
