"""From checked tensors to one call of the native library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from allnorm import _native, shortcuts, tensors
from allnorm.arguments import DTYPES, NormArguments, rows_of
from allnorm.errors import AllnormError, UnsupportedError
from allnorm.quant import DTYPE as FP8
from allnorm.quant import Fp8PerGroup, Quant, ScaleGeometry, scale_geometry
from allnorm.shortcuts import current_raw_stream
from allnorm.tensors import LOW_ADDRESS

# Alignment of every row and of the weight that the CUDA kernels' 16-byte accesses need; quantised
# rows, which are narrower, are written 8 bytes at a time.
_CUDA_ALIGN_BYTES = 16
_CUDA_QUANTIZED_ALIGN_BYTES = 8

Geometry = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of a tensor."""


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


def describe_call(
    op: int, dtype: torch.dtype, hidden_size: int, norm: NormArguments | None = None
) -> _native.Call:
    """A call without rows and memory: what all ranks agree on, and decides how much fits."""
    call = _native.Call(
        struct_bytes=ctypes.sizeof(_native.Call),
        op=op,
        dtype=DTYPES[dtype],
        weight_dtype=DTYPES[dtype],
        hidden_size=hidden_size,
    )
    if norm is not None:
        call.numerics = _native.NUMERICS[norm.numerics]
        call.eps, call.weight_bias = float(norm.eps), float(norm.weight_bias)
        call.flags = _native.RESIDUAL_SHARDED if norm.residual_sharded else 0
        if norm.quant is not None:
            _describe_quant(call, norm.quant)
    return call


def _describe_quant(call: _native.Call, quant: Quant) -> None:
    call.quant = _native.QUANT[quant.kind]
    if isinstance(quant, Fp8PerGroup):
        call.group_size = quant.group_size
        call.scale_format = _native.SCALE_FORMAT[quant.scale_format]


class Guard:
    """Whether tensors are like those it was made of: then they are as plain, and of that geometry.

    Args:
        given: all that a call is given.
    """

    __slots__ = ("check", "needs_no_grad")

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        self.check = shortcuts.alike(given)
        # The same is taken with gradients disabled and refused with gradients enabled.
        self.needs_no_grad = any(tensor.requires_grad for tensor in given)

    def accepts(self, given: Sequence[torch.Tensor]) -> bool:
        """Whether they are; False is no answer."""
        if self.needs_no_grad and torch.is_grad_enabled():
            return False
        return self.check(*given)


class Launch:
    """A call prepared for tensors of one geometry; only pointers change from call to call.

    Args:
        x: the input, or one like it.
        residual: like `x`, or this rank's rows of it, or None.
        weight: [hidden_size], or None without a norm.
        norm: what the norm needs beside tensors; None without one.
        algorithm: "one_shot", "two_shot" or "unfused".
        shard: this rank's rows, from and up to, where rows belong to ranks.
        gathered_rows: if not None, `x` are this rank's of so many rows, which are to be gathered.
    """

    def __init__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        norm: NormArguments | None,
        algorithm: str,
        *,
        shard: tuple[int, int] | None = None,
        gathered_rows: int | None = None,
    ) -> None:
        self.algorithm = algorithm
        self.is_unfused = algorithm == "unfused"
        self.is_norm = norm is not None
        self.shard = shard
        self.scale: ScaleGeometry | None = None
        self.num_tokens = x.numel() // x.shape[-1] if gathered_rows is None else gathered_rows
        self.guard: Guard | None = None
        self.results: dict[tuple[str, ...], Guard] = {}  # by the names of those that are given
        # Where there are rows there is memory: an address that says otherwise is looked into.
        self._least_x = LOW_ADDRESS if x.numel() else 0
        self._least_residual = LOW_ADDRESS if residual is not None and residual.numel() else 0
        self._least_weight = 0 if weight is None else LOW_ADDRESS
        self.recent: Any = None  # prepare.py finds it again by this
        self.fast: dict[Any, Any] = {}  # fast_call.py recognises it by these; see there
        self._is_cuda = x.device.type == "cuda"
        self._align = self._weight_align = _CUDA_ALIGN_BYTES
        if not self._is_cuda:
            self._align = x.element_size()
            self._weight_align = 1 if weight is None else weight.element_size()
        self._device_index = x.device.index
        op = _native.ALL_REDUCE if norm is None else _native.ADD_RMS_NORM
        if gathered_rows is not None:
            op = _native.ALL_GATHER_ROWS
        self.call = call = describe_call(op, x.dtype, x.shape[-1], norm)
        call.algorithm = _native.ALGORITHM.get(algorithm, 0)
        call.num_tokens, call.num_sources = self.num_tokens, 1
        if weight is not None:
            call.weight_dtype = DTYPES[weight.dtype]
        if norm is not None and norm.quant is not None:
            self._prepare_scale(scale_geometry(norm.quant, self.num_tokens, x.shape[-1]))
        self._copy_x, self._x_stride = self._row_stride(x)
        self._copy_residual, self._residual_stride = (
            (False, 0) if residual is None else self._row_stride(residual)
        )
        inputs = (x, residual, weight, None if norm is None else norm.scale)
        self.is_virtual = any(t is not None and tensors.is_virtual(t) for t in inputs)
        self._copies_inputs = self._copy_x or self._copy_residual or self.is_virtual
        self.address = ctypes.addressof(call)
        self._other_strides = False
        self._restore_strides()
        self._describe_results(x)

    def _describe_results(self, x: torch.Tensor) -> None:
        """What the results are: shape, strides and dtype of each, as `shortcuts.New` takes them."""
        rows = tuple(x.shape)
        if self.call.op == _native.ALL_GATHER_ROWS:
            rows = (self.num_tokens, rows[-1])
        self.out = _contiguous(rows, x.dtype)
        self.quantized = _contiguous(rows, FP8)
        if self.shard is not None:
            rows = (self.shard[1] - self.shard[0], rows[-1])
        self.residual_out = _contiguous(rows, x.dtype)

    def _prepare_scale(self, geometry: ScaleGeometry | None) -> None:
        if geometry is None:
            return
        call = self.call
        call.scale_row_stride, call.scale_group_stride = geometry.stride
        call.scale_padding_rows = geometry.padding_rows
        # Without padding rows memory of the plain kind is the same, and sooner made.
        self.scale = geometry if geometry.padding_rows else geometry._replace(padded=False)

    def bind(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        out: torch.Tensor | None,
        residual_out: torch.Tensor | None,
        quantized: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
        fresh: bool = True,
    ) -> tuple[Any, ...]:
        """Puts the tensors' addresses into the call. Runs in every call: each line is host time.

        Args:
            x: the input.
            residual: like `x`, or None.
            weight: [hidden_size], or None without a norm.
            out: the result; None if a quantised call does not want it.
            residual_out: the new residual, or None without a norm.
            quantized: the quantised result, if there is one.
            scale: its scale.
            fresh: the results are contiguous.

        Returns:
            Temporaries that must live until the call has been made; on CUDA they may be freed then,
            because the allocator reuses memory in stream order. None, or x, residual and weight.

        Raises:
            ValueError: a tensor has elements and no memory. This rank alone sees it.
        """
        call = self.call
        if self._other_strides:
            self._restore_strides()
        if not fresh:
            self._other_strides = True
            _set_result_strides(call, out, residual_out, quantized)
        if quantized is not None and scale is not None:
            scale_address = scale.data_ptr()
            if scale_address < LOW_ADDRESS:
                tensors.check_memory(scale=scale)
            call.quantized, call.scale = quantized.data_ptr(), scale_address
        out_address = 0 if out is None else out.data_ptr()
        address = x.data_ptr()
        weight_address = 0 if weight is None else weight.data_ptr()
        residual_address = 0 if residual is None else residual.data_ptr()
        if (
            address < self._least_x
            or residual_address < self._least_residual
            or weight_address < self._least_weight
        ):
            tensors.check_memory(x=x, residual=residual, weight=weight)
        temporaries: tuple[Any, ...] = ()
        if self._is_cuda:
            call.stream = current_raw_stream(self._device_index)
        if (
            self._copies_inputs
            or (address | residual_address) % self._align
            or weight_address % self._weight_align
        ):
            temporaries = self._copies(x, residual, weight)
            address, residual_address, weight_address = (
                0 if tensor is None else tensor.data_ptr() for tensor in temporaries
            )
        # Only what has no rows still has an address of 0 here. NULL would say that there is none at
        # all: any other address does, nothing is read or written there.
        call.x = address or out_address
        call.residual = residual_address if residual is None else residual_address or weight_address
        call.weight = weight_address
        call.out = out_address
        if residual_out is not None:
            call.residual_out = residual_out.data_ptr() or weight_address
        return temporaries

    def repeatable(
        self, out: torch.Tensor | None, residual_out: torch.Tensor | None
    ) -> _native.Call | None:
        """A copy of the call for tensors that it takes as they are; None if there are none such.

        Rows must be there, since without any a shard has no address.

        Args:
            out: the memory that is given for that result, or None.
            residual_out: the same.
        """
        rows = self.num_tokens if self.shard is None else self.shard[1] - self.shard[0]
        if self._copies_inputs or rows == 0:
            return None
        call = _native.Call.from_buffer_copy(self.call)
        self._set_own_strides(call)
        _set_result_strides(call, out, residual_out)
        return call

    def _copies(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None
    ) -> tuple[Any, ...]:
        """Contiguous, aligned copies of x, residual and weight; their strides go into the call."""
        self._other_strides = True
        self.call.x_stride = self.call.residual_stride = x.shape[-1]
        return tuple(
            None
            if t is None
            else rows_of(tensors.in_memory(t)).clone(memory_format=torch.contiguous_format)
            for t in (x, residual, weight)
        )

    def _restore_strides(self) -> None:
        """The strides of the tensors that this call was prepared for, and of fresh results."""
        self._other_strides = False
        self._set_own_strides(self.call)

    def _set_own_strides(self, call: _native.Call) -> None:
        call.x_stride, call.residual_stride = self._x_stride, self._residual_stride
        call.out_stride = call.residual_out_stride = call.quantized_stride = call.hidden_size

    def writable(self, result: torch.Tensor) -> bool:
        """Whether the kernels can write to `result` directly."""
        if result.is_neg():
            return False
        if result.dim() != 2 and not result.is_contiguous():
            return False  # it need not have rows at one distance
        size = result.element_size()
        if not self._is_cuda:
            return result.data_ptr() % size == 0
        row_align = _CUDA_QUANTIZED_ALIGN_BYTES if size == 1 else _CUDA_ALIGN_BYTES
        row_bytes = (result.stride(0) if result.dim() == 2 else result.shape[-1]) * size
        return result.data_ptr() % _CUDA_ALIGN_BYTES == 0 and (
            row_bytes % row_align == 0 or result.is_contiguous()
        )

    def takes(self, given: Sequence[torch.Tensor]) -> bool:
        """Whether these tensors, of the geometry that it is prepared for, can be read as such.

        Args:
            given: all that the call is given.
        """
        if self.guard is not None and self.guard.accepts(given):
            return True
        if not all(map(tensors.is_plain, given)):
            return False
        if self.guard is None:  # only now: many a geometry is seen once
            self.guard = Guard(given)
        return True

    def local(self, library: _native.Library) -> int:
        """Runs the op on `x` as the already reduced tensor; returns the status."""
        return int(library.local(self.address))

    def _row_stride(self, x: torch.Tensor) -> tuple[bool, int]:
        """Whether `x` must be copied, and the elements between its rows otherwise."""
        if tensors.is_virtual(x):
            return True, 0
        try:
            rows = x if x.dim() == 2 else x.view(-1, x.shape[-1])
        except RuntimeError:
            return True, 0
        stride = rows.stride(0) if rows.shape[0] > 1 else rows.shape[1]
        aligned = stride * x.element_size() % _CUDA_ALIGN_BYTES == 0 or rows.is_contiguous()
        return self._is_cuda and not aligned, stride


def _set_result_strides(
    call: _native.Call,
    out: torch.Tensor | None,
    residual_out: torch.Tensor | None,
    quantized: torch.Tensor | None = None,
) -> None:
    if out is not None and out.dim() == 2:
        call.out_stride = out.stride(0)
    if residual_out is not None and residual_out.dim() == 2:
        call.residual_out_stride = residual_out.stride(0)
    if quantized is not None and quantized.dim() == 2:
        call.quantized_stride = quantized.stride(0)


def _contiguous(shape: tuple[int, ...], dtype: torch.dtype) -> Geometry:
    return shape, tuple(torch.empty(shape, device="meta").stride()), dtype
