"""A call that was checked, prepared for tensors of one geometry; then only addresses change."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch

from allnorm.core import _native, arguments, tensors
from allnorm.core.arguments import DTYPES, Like, rows_of
from allnorm.core.call import Call
from allnorm.core.shortcuts import current_raw_stream
from allnorm.core.tensors import LOW_ADDRESS
from allnorm.errors import AllnormError, UnsupportedError
from allnorm.policy import Plan
from allnorm.quant import DTYPE as FP8
from allnorm.quant import Fp8PerGroup, ScaleGeometry, scale_geometry

# Alignment of every row and of the weight that the CUDA kernels' 16-byte accesses need; quantised
# rows, which are narrower, are written 8 bytes at a time.
CUDA_ALIGN_BYTES = 16
_CUDA_QUANTIZED_ALIGN_BYTES = 8

_MEMORY_FIELDS = ("out", "residual_out", "quantized_out", "scale_out")
_OPS = {"all_reduce": _native.ALL_REDUCE, "all_gather_rows": _native.ALL_GATHER_ROWS}


def raise_status(library: _native.Library, status: int) -> None:
    """Raises what a failing native call reported, other than a fault of a peer."""
    if status == _native.OK:
        return
    text = library.last_error()
    if status == _native.INVALID_ARGUMENT:
        raise ValueError(text)
    if status == _native.UNSUPPORTED:
        raise UnsupportedError(text)
    raise AllnormError(text)


def describe(call: Call) -> _native.Call:
    """The C call without addresses and strides: what ranks agree on, which decides what fits."""
    native = _native.Call(
        struct_bytes=ctypes.sizeof(_native.Call),
        op=_OPS.get(call.op, _native.ADD_RMS_NORM),
        dtype=DTYPES[call.x.dtype],
        weight_dtype=DTYPES[call.x.dtype if call.weight is None else call.weight.dtype],
        num_tokens=call.rows,
        hidden_size=call.x.shape[-1],
    )
    if call.has_norm:
        native.numerics = _native.NUMERICS[call.numerics]
        native.eps, native.weight_bias = float(call.eps), float(call.weight_bias)
        native.flags = _native.RESIDUAL_SHARDED if call.residual_sharded else 0
    if call.quant is not None:
        native.quant = _native.QUANT[call.quant.kind]
    if isinstance(call.quant, Fp8PerGroup):
        native.group_size = call.quant.group_size
        native.scale_format = _native.SCALE_FORMAT[call.quant.scale_format]
    return native


class Result(NamedTuple):
    """One result of a call.

    Attributes:
        field: of Call that holds the caller's memory for it, if there is any.
        name: the caller's name for that argument.
        like: its shape, dtype and device.
        stride: of new memory for it.
        may_share: the input that may be passed as memory for it, by its field; "" for none.
        scale: geometry of the scales, if it holds scales.
    """

    field: str
    name: str
    like: Like
    stride: tuple[int, ...]
    may_share: str = ""
    scale: ScaleGeometry | None = None

    def make(self) -> torch.Tensor:
        """New memory for it."""
        shape, dtype, device, _ = self.like
        if self.scale is not None and self.scale.padded:
            return self.scale.empty(device)
        return torch.empty_strided(shape, self.stride, dtype=dtype, device=device)


Memory = dict[str, torch.Tensor]
"""What the kernels write, by the field of Call."""


class Launch:
    """A call prepared for tensors of one geometry.

    Args:
        call: one that `arguments.check_alike` takes.
        plan: how it runs.
        shard: this rank's rows, from and up to, where rows belong to ranks.

    Attributes:
        plan: how it runs.
        shard: as given.
        native: the C call; addresses and stream are those of the last call that was bound.
        scale: where the scales lie that it writes; None if it writes none.
        results: in the order in which they are returned; None for a field that is no result.
        repeated: what csrc/python repeats such calls from; None if it cannot, "" until it is asked.

    Raises:
        ValueError, TypeError: inputs or preallocated memory that this rank alone sees is wrong.
    """

    def __init__(self, call: Call, plan: Plan, shard: tuple[int, int] | None = None) -> None:
        arguments.check_own(call, shard)
        self.plan, self.shard, self.op = plan, shard, call.op
        self.num_tokens = call.rows
        self.scale: ScaleGeometry | None = None
        self.repeated: Any = ""
        self._is_cuda = call.x.device.type == "cuda"
        self.native = native = describe(call)
        native.algorithm = _native.ALGORITHM.get(plan.algorithm, 0)
        native.num_blocks, native.link_gbps = plan.num_blocks, plan.link_gbps
        native.cluster_size = plan.cluster_size
        native.num_sources = 1
        if call.op.endswith("_quant") and call.static_scale is None:
            self._prepare_scale(call)
        self.results = self._results(call)
        for result in self.results:
            if result is not None and getattr(call, result.field) is not None:
                _check_memory(result, getattr(call, result.field))
        self._copy_x, self._x_stride = self._row_stride(call.x)
        self._copy_residual, self._residual_stride = (
            (False, 0) if call.residual is None else self._row_stride(call.residual)
        )
        self.is_virtual = any(map(tensors.is_virtual, call.given))
        self._copies_inputs = self._copy_x or self._copy_residual or self.is_virtual
        self.address = ctypes.addressof(native)

    # ---- what is decided once -------------------------------------------------------------------

    def _prepare_scale(self, call: Call) -> None:
        geometry = scale_geometry(call.quant, self.num_tokens, call.x.shape[-1])
        assert geometry is not None
        native = self.native
        native.scale_row_stride, native.scale_group_stride = geometry.stride
        native.scale_padding_rows = geometry.padding_rows
        # Without padding rows a plain tensor has the same memory, and is allocated faster.
        self.scale = geometry if geometry.padding_rows else geometry._replace(padded=False)

    def _results(self, call: Call) -> list[Result | None]:
        x = call.x
        own = Like.rows(x, self.shard)
        whole = Like.rows(x, None)
        if call.op == "all_gather_rows":
            source = "num_tokens rows as wide as residual_shard"
            whole = Like((self.num_tokens, x.shape[-1]), x.dtype, x.device, source)
            return [Result("out", "out", whole, _contiguous(whole.shape))]
        may_share = "x" if call.op.startswith("all_reduce") else ""
        normed = Result("out", "out", whole, _contiguous(whole.shape), may_share)
        if not call.has_norm:
            return [normed]
        may_share = "residual" if may_share else ""
        residual = Result("residual_out", "residual_out", own, _contiguous(own.shape), may_share)
        if not call.op.endswith("_quant"):
            return [normed, residual]
        quantized = Like(whole.shape, FP8, x.device)
        scale = None
        if self.scale is not None:
            like = Like(self.scale.shape, self.scale.dtype, x.device)
            scale = Result("scale_out", "scale_out", like, self.scale.stride, "", self.scale)
        elif call.scale_out is not None:
            raise ValueError("scale_out with an Fp8PerTensor: its scale is given, none is written.")
        return [
            Result("quantized_out", "quantized_out", quantized, _contiguous(whole.shape)),
            scale,
            residual,
            normed._replace(name="normed_out") if call.return_normed else None,
        ]

    def _row_stride(self, x: torch.Tensor) -> tuple[bool, int]:
        """Whether `x` must be copied, and the elements between its rows otherwise."""
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
        """What the kernels write: the caller's memory where they can, new memory elsewhere.

        Raises:
            ValueError: the caller's memory is not there, or shared with another tensor of the call.
                This rank alone may see it.
        """
        memory: Memory = {}
        taken = dict(zip(("x", "residual", "weight", "quant.scale"), call.inputs, strict=True))
        if call.op == "all_gather_rows":
            taken = {"residual_shard": call.x}
        for result in reversed(self.results):
            if result is None:
                continue
            given = getattr(call, result.field)
            if given is not None:
                arguments.check_writable(result.name, given)
                whole = arguments.with_padding(given, result.scale)
                arguments.check_overlap(result.name, whole, taken, result.may_share)
                taken[result.name] = whole
            usable = given is not None and (result.scale is not None or self._can_write(given))
            memory[result.field] = given if usable else result.make()
        return memory

    def _can_write(self, result: torch.Tensor) -> bool:
        """Whether the kernels can write to `result` directly."""
        if result.is_neg():
            return False
        if result.dim() != 2 and not result.is_contiguous():
            return False  # it need not have rows at one distance
        size = result.element_size()
        if not self._is_cuda:
            return result.data_ptr() % size == 0
        row_align = _CUDA_QUANTIZED_ALIGN_BYTES if size == 1 else CUDA_ALIGN_BYTES
        row_bytes = (result.stride(0) if result.dim() == 2 else result.shape[-1]) * size
        return result.data_ptr() % CUDA_ALIGN_BYTES == 0 and (
            row_bytes % row_align == 0 or result.is_contiguous()
        )

    def returned(self, call: Call, memory: Memory) -> Any:
        """What the call returns; memory of the caller's that was not written is filled."""
        values = []
        for result in self.results:
            if result is None:
                continue
            given, written = getattr(call, result.field), memory[result.field]
            values.append(written if given is None or given is written else given.copy_(written))
        if len(self.results) == 1:
            return values[0]
        if call.static_scale is not None:
            values.insert(1, call.static_scale)
        if self.results[-1] is None:
            values.append(None)
        return tuple(values)

    # ---- each call ------------------------------------------------------------------------------

    def bind(self, call: Call, memory: Memory) -> tuple[torch.Tensor | None, ...]:
        """Puts the addresses and strides of tensors, and the current stream, into `native`.

        Returns:
            x, residual, weight and static_scale as they are read. Copies among them must live until
            the call has been made; on CUDA they may be freed then, because the allocator reuses
            memory in stream order.

        Raises:
            ValueError: a tensor has elements and no memory. This rank alone sees it.
        """
        native = self.native
        if self._is_cuda:
            native.stream = current_raw_stream(call.x.device.index)
        inputs = self._readable(call)
        x, residual, weight, static_scale = map(_address, inputs)
        out, residual_out = _address(memory.get("out")), _address(memory.get("residual_out"))
        # A tensor without rows has the address 0 here, and NULL would mean that it is absent. Any
        # other address will do, since nothing is read or written there.
        native.x = x or out or weight
        native.residual = 0 if call.residual is None else residual or weight
        native.weight, native.out = weight, out
        native.residual_out = residual_out or weight
        native.quantized = _address(memory.get("quantized_out"))
        native.scale = _address(memory.get("scale_out")) or static_scale
        copied = inputs[0] is not call.x
        native.x_stride = native.hidden_size if copied else self._x_stride
        native.residual_stride = native.hidden_size if copied else self._residual_stride
        self._set_result_strides(native, memory)
        return inputs

    def _set_result_strides(self, native: _native.Call, memory: Memory) -> None:
        width = native.hidden_size
        native.out_stride = _stride(memory.get("out"), width)
        native.residual_out_stride = _stride(memory.get("residual_out"), width)
        native.quantized_stride = _stride(memory.get("quantized_out"), width)

    def _readable(self, call: Call) -> tuple[torch.Tensor | None, ...]:
        """The inputs, or contiguous, aligned copies of x, residual and weight."""
        x, residual, weight, static_scale = call.inputs
        addresses = [_address(tensor) for tensor in call.inputs]
        if min(addresses) < LOW_ADDRESS:
            tensors.check_memory(x=x, residual=residual, weight=weight)
            if static_scale is not None:
                tensors.check_memory(scale=static_scale)
        if static_scale is not None and self.is_virtual:
            static_scale = tensors.in_memory(static_scale)
        align = CUDA_ALIGN_BYTES if self._is_cuda else call.x.element_size()
        weight_align = align if self._is_cuda or weight is None else weight.element_size()
        aligned = (addresses[0] | addresses[1]) % align == addresses[2] % weight_align == 0
        if aligned and not self._copies_inputs:
            return x, residual, weight, static_scale
        copies = (
            None
            if t is None
            else rows_of(tensors.in_memory(t)).clone(memory_format=torch.contiguous_format)
            for t in (x, residual, weight)
        )
        return (*copies, static_scale)

    def repeatable(self, call: Call, memory: Memory) -> _native.Call | None:
        """A copy of the C call for tensors that it takes as they are; None if there are none such.

        Rows must be there, since without any a shard has no address.
        """
        rows = self.num_tokens if self.shard is None else self.shard[1] - self.shard[0]
        as_given = all(
            given is None or memory.get(field) is given
            for field, given in zip(_MEMORY_FIELDS, call.memory, strict=True)
        )
        if self._copies_inputs or rows == 0 or not as_given:
            return None
        native = _native.Call.from_buffer_copy(self.native)
        native.x_stride, native.residual_stride = self._x_stride, self._residual_stride
        self._set_result_strides(native, memory)
        if "out" not in memory:
            native.out = None
        return native


def _check_memory(result: Result, given: torch.Tensor) -> None:
    if result.scale is not None:
        arguments.check_scale_result(given, result.scale, result.like.device)
    else:
        arguments.check_result(result.name, given, result.like)


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _stride(result: torch.Tensor | None, hidden_size: int) -> int:
    """Elements between the rows of a result."""
    return result.stride(0) if result is not None and result.dim() == 2 else hidden_size


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(torch.empty(shape, device="meta").stride())
