"""A call, checked and prepared for tensors of one geometry; later only addresses change."""

from __future__ import annotations

import ctypes
import math
from typing import Any, NamedTuple

import torch

from allnorm.core import _native, arguments, tensors
from allnorm.core.arguments import DTYPES, Like
from allnorm.core.call import MEMORY, Call
from allnorm.core.shortcuts import current_raw_stream
from allnorm.core.tensors import LOW_ADDRESS, rows_of
from allnorm.policy import Plan
from allnorm.quant import (
    Fp8PerGroup,
    Fp8PerTensor,
    ScaleGeometry,
    is_swizzled,
    quantized_dtype,
    quantized_shape,
    scale_geometry,
)

# Alignment of rows and weights that the 16-byte accesses of the CUDA kernels require. Quantized
# rows are narrower, and are written in units of 8 bytes.
CUDA_ALIGN_BYTES = 16
_CUDA_QUANTIZED_ALIGN_BYTES = 8

# Names of the inputs in error messages.
_INPUT_NAMES = (
    *("x", "residual", "weight", "quant.scale"),
    *("post_norm.weight", "index", "weights", "shared", "post", "mix"),
)
# inputs whose width is not hidden_size
_NARROW_INPUTS = ("quant.scale", "index", "weights", "post", "mix")
_NVFP4 = _native.QUANT["nvfp4"]
_OPS = {
    "all_reduce": _native.ALL_REDUCE,
    "all_gather_rows": _native.ALL_GATHER_ROWS,
    "quantize": _native.QUANTIZE,
}


def _flags(call: Call) -> int:
    flags: int = _native.RESIDUAL_SHARDED if call.residual_sharded else 0
    flags |= 0 if call.gather else _native.NO_GATHER
    flags |= _native.SCALED if call.scale != 1 else 0
    flags |= _native.FLOAT32_RESIDUAL if call.has_float32_residual else 0
    return flags | (_native.NO_NORM if call.weight is None else 0)


def as_launch_a(call: _native.Call) -> _native.Call:
    """Returns launch A of a hierarchical call: a copy that computes an island's sums."""
    sums = _native.Call.from_buffer_copy(call)
    for name in ("residual", "weight", "post_weight", "residual_out", "quantized", "scale"):
        setattr(sums, name, None)
    sums.prefetch, sums.prefetch_bytes = None, 0
    sums.algorithm = _native.ALGORITHM["two_shot"]
    sums.op, sums.quant, sums.flags, sums.scale_padding_rows = _native.SUM_ROWS, 0, 0, 0
    return sums


def as_launch_b(call: _native.Call) -> _native.Call:
    """Returns launch B of a hierarchical call: a copy that finishes the sums of all islands."""
    rest = _native.Call.from_buffer_copy(call)
    rest.algorithm = _native.ALGORITHM["two_shot"]
    # Rows that are not gathered are finished by the local kernel, in launches as large as these.
    rest.flags = rest.flags & ~_native.NO_GATHER | _native.ISLAND_SUMS
    rest.top_k = rest.num_rows = 0
    rest.expert_index = rest.expert_weights = rest.shared = None
    return rest


def only_reduce(launch_b: _native.Call) -> None:
    """Turns launch B of a hyper-connection into that of an all_reduce; a local call mixes then."""
    launch_b.op, launch_b.flags = _native.ALL_REDUCE, _native.ISLAND_SUMS
    launch_b.residual = launch_b.residual_out = None


class Result(NamedTuple):
    """One result of a call."""

    field: str  # the Call field for its preallocated memory
    name: str  # name of that argument in error messages
    like: Like  # shape, dtype and device
    stride: tuple[int, ...]  # strides of new memory
    may_share: str = ""  # input whose memory may be passed for it; "" for none
    scale: ScaleGeometry | None = None  # layout of the scales, if the result holds scales

    def make(self) -> torch.Tensor:
        """Allocates memory for the result."""
        shape, dtype, device, _ = self.like
        if self.scale is not None and self.scale.padded:
            return self.scale.empty(device)
        return torch.empty_strided(shape, self.stride, dtype=dtype, device=device)


# The tensors that the kernels write, keyed by the Call field for the preallocated memory.
Memory = dict[str, torch.Tensor]


def make_nan(memory: Memory) -> None:
    """Overwrites all results with NaN, as the kernels do after a fault."""
    for name, tensor in memory.items():
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return  # the capture fails with the call's error
        if tensor.dtype.is_floating_point and tensor.element_size() > 1:
            tensor.fill_(torch.nan)
        elif tensor.dtype == torch.int32:
            tensor.fill_(-1)  # exponents of 255
        elif tensor.dtype == torch.uint8:
            tensor.fill_(0xFF if name == "scale_out" else 0)  # an exponent; e2m1 has no NaN
        else:
            tensor.view(torch.uint8).fill_(0x7F)


class PreparedCall:
    """A call prepared for tensors of one geometry.

    Args:
        call: a call that passed `checks.check_alike`.
        plan: plan of the call.
        shard: this rank's rows (lo, hi), if rows have owners.

    Attributes:
        native: the C call, with the addresses and stream of the latest bound call.
        gathers: whether the results other than a sharded residual have all rows.
        scale: layout of the scales that the call writes; None if it writes none.
        results: the results in the order of return; None for a field that is not a result.
        repeated: data with which csrc/python repeats the call; None if it cannot, "" if not
            prepared yet.

    Raises:
        ValueError, TypeError: inputs or preallocated memory are wrong, on this rank only.
    """

    def __init__(self, call: Call, plan: Plan, shard: tuple[int, int] | None = None) -> None:
        arguments.check_own(call, shard)
        self.plan, self.shard, self.op = plan, shard, call.op
        self.num_tokens, self.gathers = call.rows, call.gather
        self.scale: ScaleGeometry | None = None
        self.repeated: Any = ""
        self._is_cuda = call.x.device.type == "cuda"
        self.native = native = self.describe(call)
        native.algorithm = _native.ALGORITHM.get(plan.algorithm, 0)
        native.num_blocks, native.link_gbps = plan.num_blocks, plan.link_gbps
        native.cluster_size = plan.cluster_size
        native.num_sources = 1
        self._prefetch_bytes = 0
        if call.prefetch is not None and call.prefetch.numel():
            self._prefetch_bytes = min(plan.prefetch_bytes, tensors.span_bytes(call.prefetch))
        if call.writes_scale:
            self._prepare_scale(call)
        self.results = self._results(call)
        for result in self.results:
            if result is not None and getattr(call, result.field) is not None:
                _check_memory(result, getattr(call, result.field))
        strided = (call.x, call.residual, call.shared)
        found = [(False, 0) if t is None else self._row_stride(t) for t in strided]
        choices = map(choice_stride, (call.expert_index, call.expert_weights))
        self._strides = (*(stride for _, stride in found), *choices)
        self.is_virtual = any(map(tensors.is_virtual, call.given))
        self._copies_inputs = self.is_virtual or any(copied for copied, _ in found)
        self.address = ctypes.addressof(native)

    @staticmethod
    def describe(call: Call) -> _native.Call:
        """Returns the C call without addresses and strides: the part that is equal on all ranks."""
        native = _native.Call(
            struct_bytes=ctypes.sizeof(_native.Call),
            op=_OPS.get(call.op, _native.ADD_RMS_NORM),
            dtype=DTYPES[call.x.dtype],
            weight_dtype=DTYPES[(call.x if call.weight is None else call.weight).dtype],
            num_tokens=call.rows,
            hidden_size=call.x.shape[-1],
        )
        if call.has_norm:
            native.numerics = _native.NUMERICS[call.numerics]
            native.eps, native.weight_bias = float(call.eps), float(call.weight_bias)
            native.flags = _flags(call)
            native.sum_scale = float(call.scale)
        if call.post_weight is not None:
            native.post_weight_dtype = DTYPES[call.post_weight.dtype]
            native.post_eps = float(call.post_eps)
            native.post_weight_bias = float(call.post_weight_bias)
        if call.experts:
            native.top_k, native.num_rows = call.top_k, math.prod(call.x.shape[:-1])
        if call.quant is not None:
            native.quant = _native.QUANT[call.quant.kind]
        if isinstance(call.quant, Fp8PerGroup):
            native.group_size = call.quant.group_size
            native.scale_format = _native.SCALE_FORMAT[call.quant.scale_format]
        if is_swizzled(call.quant):
            native.flags |= _native.SWIZZLED_SCALES
        return native

    # ---- what is decided once -------------------------------------------------------------------

    def _prepare_scale(self, call: Call) -> None:
        assert call.quant is not None
        num_rows = self.num_tokens
        if not self.gathers:
            assert self.shard is not None
            num_rows = self.shard[1] - self.shard[0]
        geometry = scale_geometry(call.quant, num_rows, call.x.shape[-1])
        assert geometry is not None
        native = self.native
        if not geometry.tiles:
            native.scale_row_stride, native.scale_group_stride = geometry.stride
        native.scale_padding_rows = geometry.padding_rows
        # Without padding rows, a plain tensor has the same memory and is allocated faster.
        self.scale = geometry if geometry.padding_rows else geometry._replace(padded=False)

    def _results(self, call: Call) -> list[Result | None]:
        x = call.x
        own = Like.of(call, self.shard)._replace(dtype=call.residual_dtype)
        whole = Like.of(call, None if self.gathers else self.shard)
        if call.op == "all_gather_rows":
            source = "num_tokens rows as wide as residual_shard"
            whole = Like((self.num_tokens, x.shape[-1]), x.dtype, x.device, source)
            return [Result("out", "out", whole, _contiguous(whole.shape))]
        in_place = call.op.startswith("all_reduce")
        may_share = "x" if in_place and self.gathers and not call.experts else ""
        normed = Result("out", "out", whole, _contiguous(whole.shape), may_share)
        if not call.has_norm:
            return self._narrow_results(call, whole) if call.is_quantized else [normed]
        may_share = "residual" if in_place else ""
        residual = Result("residual_out", "residual_out", own, _contiguous(own.shape), may_share)
        if not call.is_quantized:
            return [normed if call.weight is not None else None, residual]
        normed = normed._replace(name="normed_out")
        narrow = self._narrow_results(call, whole)
        return [*narrow, residual, normed if call.return_normed else None]

    def _narrow_results(self, call: Call, whole: Like) -> list[Result | None]:
        """Returns the results of a quantized call for rows `whole`: quantized rows and scales."""
        assert call.quant is not None
        narrow = quantized_shape(call.quant, whole.shape)
        source = whole.source if narrow == whole.shape else "two columns of x in each of its own"
        quantized = Like(tuple(narrow), quantized_dtype(call.quant), whole.device, source)
        scale = None
        if self.scale is not None:
            like = Like(self.scale.shape, self.scale.dtype, whole.device)
            scale = Result("scale_out", "scale_out", like, self.scale.stride, "", self.scale)
        elif call.scale_out is not None:
            raise ValueError("scale_out with an Fp8PerTensor: its scale is given, none is written.")
        stride = _contiguous(quantized.shape)
        return [Result("quantized_out", "quantized_out", quantized, stride), scale]

    def _row_stride(self, x: torch.Tensor) -> tuple[bool, int]:
        """Returns whether `x` must be copied; if not, also its row stride in elements."""
        if tensors.is_virtual(x):
            return True, 0
        try:
            rows = x if x.dim() == 2 else x.view(-1, x.shape[-1])
        except RuntimeError:
            return True, 0
        stride = rows.stride(0) if rows.shape[0] > 1 else rows.shape[1]
        aligned = stride * x.element_size() % CUDA_ALIGN_BYTES == 0 or rows.is_contiguous()
        return self._is_cuda and not aligned, stride

    # ---- memory for results ---------------------------------------------------------------------

    def allocate(self, call: Call) -> Memory:
        """Returns the tensors that the kernels write: the caller's if possible, else new ones.

        Raises:
            ValueError: the caller's memory does not exist, or overlaps another of the call's
                tensors. May be raised on this rank only.
        """
        memory: Memory = {}
        taken = _named_inputs(call)
        if call.op == "all_gather_rows":
            taken = {"residual_shard": call.x}
        for result in reversed(self.results):
            if result is None:
                continue
            given = getattr(call, result.field)
            if given is not None:
                arguments.check_writable(result.name, given)
                whole = given if result.scale is None else result.scale.with_padding(given)
                arguments.check_overlap(result.name, whole, taken, result.may_share)
                taken[result.name] = whole
            usable = given is not None and (result.scale is not None or self._can_write(given))
            memory[result.field] = given if usable else result.make()
        return memory

    def _can_write(self, result: torch.Tensor) -> bool:
        """Returns whether the kernels can write to `result` directly."""
        if result.is_neg():
            return False
        if result.dim() != 2 and not result.is_contiguous():
            return False  # its rows may not be evenly spaced
        size = result.element_size()
        if not self._is_cuda:
            return result.data_ptr() % size == 0
        row_align = _CUDA_QUANTIZED_ALIGN_BYTES if size == 1 else CUDA_ALIGN_BYTES
        row_bytes = (result.stride(0) if result.dim() == 2 else result.shape[-1]) * size
        return result.data_ptr() % CUDA_ALIGN_BYTES == 0 and (
            row_bytes % row_align == 0 or result.is_contiguous()
        )

    def returned(self, call: Call, memory: Memory) -> Any:
        """Returns the results; copies those that were not written to the caller's memory."""
        values: list[torch.Tensor | None] = []
        for result in self.results:
            if result is None:
                values.append(None)
                continue
            given, written = getattr(call, result.field), memory[result.field]
            values.append(written if given is None or given is written else given.copy_(written))
        if len(self.results) == 1:
            return values[0]
        if isinstance(call.quant, Fp8PerTensor):
            values[1] = call.static_scale
        return tuple(values)

    # ---- each call ------------------------------------------------------------------------------

    def bind(self, call: Call, memory: Memory) -> tuple[torch.Tensor | None, ...]:
        """Writes the addresses and strides of tensors, and the current stream, into `native`.

        Returns:
            The inputs that the kernels read. Copies among them must live until the launch; on CUDA
            they may be freed then, because the allocator reuses memory in stream order.

        Raises:
            ValueError: a tensor has elements but no memory. May be raised on this rank only.
        """
        native = self.native
        if self._is_cuda:
            native.stream = current_raw_stream(call.x.device.index)
        inputs = self._readable(call)
        x, residual, weight, static_scale, post_weight, index, weights, shared = map(
            address_of, inputs[:8]
        )
        out, residual_out = address_of(memory.get("out")), address_of(memory.get("residual_out"))
        # A tensor without rows has the address 0, but NULL means that a tensor is absent. Any other
        # address works, because nothing is read or written there.
        some = weight or post_weight
        native.x = x or out or some
        native.residual = 0 if call.residual is None else residual or some
        native.weight, native.post_weight = weight, post_weight
        native.out = (out or some) if "out" in memory else 0
        native.residual_out = residual_out or some
        native.expert_index = 0 if call.expert_index is None else index or some
        native.expert_weights = 0 if call.expert_weights is None else weights or some
        native.shared = 0 if call.shared is None else shared or some
        quantized = memory.get("quantized_out")
        native.quantized = 0 if quantized is None else address_of(quantized) or some
        if self.scale is None:
            native.scale = static_scale
        else:
            native.scale = address_of(memory["scale_out"]) or some
            native.global_scale = static_scale
        ahead = address_of(call.prefetch)
        has_memory = ahead >= LOW_ADDRESS  # no error without: this tensor is only a hint
        native.prefetch = ahead if has_memory else 0
        native.prefetch_bytes = self._prefetch_bytes if has_memory else 0
        copied = inputs[0] is not call.x
        self._set_input_strides(native, self._contiguous_strides() if copied else self._strides)
        self._set_result_strides(native, memory)
        return inputs

    def _contiguous_strides(self) -> tuple[int, ...]:
        """Returns the strides of copies, in the order of `_strides`."""
        return (self.native.hidden_size,) * 3 + (self.native.top_k,) * 2

    @staticmethod
    def _set_input_strides(native: _native.Call, strides: tuple[int, ...]) -> None:
        native.x_stride, native.residual_stride, native.shared_stride, *choices = strides
        native.expert_index_stride, native.expert_weights_stride = choices

    def _set_result_strides(self, native: _native.Call, memory: Memory) -> None:
        width = native.hidden_size
        native.out_stride = _stride(memory.get("out"), width)
        native.residual_out_stride = _stride(memory.get("residual_out"), width)
        narrow = width // 2 if native.quant == _NVFP4 else width
        native.quantized_stride = _stride(memory.get("quantized_out"), narrow)

    def _readable(self, call: Call) -> tuple[torch.Tensor | None, ...]:
        """Returns the inputs, or contiguous, aligned copies of them."""
        given = _named_inputs(call)
        addresses = {name: address_of(tensor) for name, tensor in given.items()}
        if min(addresses.values()) < LOW_ADDRESS:
            tensors.check_memory(**given)
        if not self._copies_inputs and all(
            tensor is None or addresses[name] % self._align(name, tensor) == 0
            for name, tensor in given.items()
        ):
            return call.inputs
        return tuple(
            None if tensor is None else self._copy(name, tensor) for name, tensor in given.items()
        )

    def _align(self, name: str, tensor: torch.Tensor) -> int:
        wide = self._is_cuda and name not in _NARROW_INPUTS
        return CUDA_ALIGN_BYTES if wide else tensor.element_size()

    def _copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        resolved = tensors.in_memory(tensor)
        if name in _NARROW_INPUTS:
            return resolved.contiguous()
        return rows_of(resolved).clone(memory_format=torch.contiguous_format)

    def repeatable(self, call: Call, memory: Memory) -> _native.Call | None:
        """Returns a copy of the C call for tensors like these; None if any of them is copied.

        Also None without rows, because a shard without rows has no address.
        """
        rows = self.num_tokens if self.shard is None else self.shard[1] - self.shard[0]
        as_given = all(
            given is None or memory.get(field) is given
            for field, given in zip(MEMORY, call.memory, strict=True)
        )
        if self._copies_inputs or rows == 0 or not as_given:
            return None
        native = _native.Call.from_buffer_copy(self.native)
        self._set_input_strides(native, self._strides)
        self._set_result_strides(native, memory)
        if "out" not in memory:
            native.out = None
        return native


def _named_inputs(call: Call) -> dict[str, torch.Tensor | None]:
    """Returns the inputs, keyed by their names in error messages."""
    names = ("rows", *_INPUT_NAMES[1:]) if call.experts else _INPUT_NAMES
    return dict(zip(names, call.inputs, strict=True))


def _check_memory(result: Result, given: torch.Tensor) -> None:
    if result.scale is not None:
        arguments.check_scale_result(given, result.scale, result.like.device)
    else:
        arguments.check_result(result.name, given, result.like)


def address_of(tensor: torch.Tensor | None) -> int:
    """Returns the address of a tensor's first element; 0 without a tensor."""
    return 0 if tensor is None else tensor.data_ptr()


def choice_stride(choices: torch.Tensor | None) -> int:
    """Returns the row stride of a [num_tokens, top_k] tensor, in elements."""
    if choices is None:
        return 0
    return choices.stride(0) if choices.shape[0] > 1 else choices.shape[1]


def _stride(result: torch.Tensor | None, hidden_size: int) -> int:
    """Returns the row stride of a result, in elements."""
    return result.stride(0) if result is not None and result.dim() == 2 else hidden_size


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(torch.empty(shape, device="meta").stride())
