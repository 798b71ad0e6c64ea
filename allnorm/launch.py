"""From checked tensors to one call of the native library."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch.distributed as dist

from allnorm import _native, policy
from allnorm.arguments import DTYPES, NormArguments, rows_of
from allnorm.errors import AllnormError, UnsupportedError

# Renamed in torch 2.13; the package accepts 2.11.
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# Alignment of every row and of the weight that the CUDA kernels' 16-byte accesses need.
_CUDA_ALIGN_BYTES = 16


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


class Launch:
    """A call prepared for tensors of one geometry; only pointers change from call to call.

    Args:
        x: the input, or one like it.
        residual: like `x`, or None.
        weight: [hidden_size], or None for a plain all-reduce.
        norm: what the norm needs beside tensors; None for a plain all-reduce.
        algorithm: "one_shot", "two_shot" or "unfused".
    """

    def __init__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        norm: NormArguments | None,
        algorithm: str,
    ) -> None:
        self.algorithm = algorithm
        self.is_norm = norm is not None
        # Contiguous, with the strides that a new tensor has.
        self.is_canonical = x.stride() == torch.empty(x.shape, device="meta").stride()
        self._device = x.device
        self._is_cuda = x.device.type == "cuda"
        self._num_tokens = x.numel() // x.shape[-1]
        call = _native.Call(
            struct_bytes=ctypes.sizeof(_native.Call),
            op=_native.ALL_REDUCE if norm is None else _native.ADD_RMS_NORM,
            algorithm=_native.ALGORITHM.get(algorithm, 0),
            dtype=DTYPES[x.dtype],
            weight_dtype=DTYPES[x.dtype if weight is None else weight.dtype],
            num_tokens=self._num_tokens,
            hidden_size=x.shape[-1],
            num_sources=1,
        )
        if norm is not None:
            call.numerics = _native.NUMERICS[norm.numerics]
            call.eps, call.weight_bias = norm.eps, norm.weight_bias
        self._copy_x, self._x_stride = self._row_stride(x)
        self._copy_residual, self._residual_stride = (
            (False, 0) if residual is None else self._row_stride(residual)
        )
        self._call = call
        self._address = ctypes.addressof(call)
        self._restore_strides()

    def bind(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        out: torch.Tensor,
        residual_out: torch.Tensor | None,
        *,
        fresh: bool = True,
    ) -> tuple[Any, ...]:
        """Puts the tensors' addresses into the call.

        Args:
            x: the input.
            residual: like `x`, or None.
            weight: [hidden_size], or None for a plain all-reduce.
            out: the result.
            residual_out: the new residual, or None for a plain all-reduce.
            fresh: the results are contiguous.

        Returns:
            Temporaries that must live until the call has been made; on CUDA they may be freed then,
            because the allocator reuses memory in stream order.
        """
        call = self._call
        if self._other_strides:
            self._restore_strides()
        if not fresh:
            self._set_result_strides(out, residual_out)
        address = x.data_ptr()
        residual_address = 0 if residual is None else residual.data_ptr()
        weight_address = 0 if weight is None else weight.data_ptr()
        temporaries: tuple[Any, ...] = ()
        if self._is_cuda:
            call.stream = torch._C._cuda_getCurrentRawStream(self._device.index)
            unaligned = (address | residual_address | weight_address) % _CUDA_ALIGN_BYTES
            if unaligned or self._copy_x or self._copy_residual:
                temporaries = self._copies(x, residual, weight)
        elif self._copy_x or self._copy_residual:
            temporaries = self._copies(x, residual, weight)
        if temporaries:
            address, residual_address, weight_address = (
                0 if tensor is None else tensor.data_ptr() for tensor in temporaries
            )
        call.x = address
        call.residual = residual_address
        call.weight = weight_address
        call.out = out.data_ptr()
        if residual_out is not None:
            call.residual_out = residual_out.data_ptr()
        return temporaries

    def _copies(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None
    ) -> tuple[Any, ...]:
        """Contiguous, aligned copies of x, residual and weight; their strides go into the call."""
        self._other_strides = True
        self._call.x_stride = self._call.residual_stride = x.shape[-1]
        return tuple(
            None if t is None else rows_of(t).clone(memory_format=torch.contiguous_format)
            for t in (x, residual, weight)
        )

    def _set_result_strides(self, out: torch.Tensor, residual_out: torch.Tensor | None) -> None:
        self._other_strides = True
        call = self._call
        if out.dim() == 2:
            call.out_stride = out.stride(0)
        if residual_out is not None and residual_out.dim() == 2:
            call.residual_out_stride = residual_out.stride(0)

    def _restore_strides(self) -> None:
        """The strides of the tensors that this call was prepared for, and of fresh results."""
        self._other_strides = False
        call = self._call
        call.x_stride, call.residual_stride = self._x_stride, self._residual_stride
        call.out_stride = call.residual_out_stride = call.hidden_size

    def writable(self, result: torch.Tensor) -> bool:
        """Whether the kernels can write to `result` directly."""
        if not self._is_cuda:
            return True
        row_bytes = (result.stride(0) if result.dim() == 2 else result.shape[-1]) * (
            result.element_size()
        )
        return result.data_ptr() % _CUDA_ALIGN_BYTES == 0 and (
            row_bytes % _CUDA_ALIGN_BYTES == 0 or result.is_contiguous()
        )

    def exchange(self, library: _native.Library, handle: int) -> int:
        """Runs the call on a communicator; returns the status."""
        return int(library.run(handle, self._address))

    def local(self, library: _native.Library) -> int:
        """Runs the op on `x` as the already reduced tensor; returns the status."""
        return int(library.local(self._address))

    def unfused(
        self, library: _native.Library, x: torch.Tensor, group: dist.ProcessGroup | None
    ) -> int:
        """Gathers all partial sums with the process group, then runs one local kernel over them."""
        world_size = 1 if group is None else dist.get_world_size(group)
        if world_size == 1 or group is None:
            return self.local(library)
        call = self._call
        saved = {name: getattr(call, name) for name in _ROW_FIELDS}
        rows = rows_of(x)
        hidden_size, width = rows.shape[-1], rows.element_size()
        step = max(1, policy.UNFUSED_GATHER_BYTES // (world_size * hidden_size * width))
        try:
            for begin in range(0, self._num_tokens, step):
                chunk = rows[begin : begin + step].contiguous()
                gathered = torch.empty(
                    (world_size, *chunk.shape), dtype=chunk.dtype, device=chunk.device
                )
                # As bytes: gloo does not gather bfloat16, and no bit may change on the way.
                _gather_into(
                    gathered.view(torch.uint8).view(world_size * chunk.shape[0], -1),
                    chunk.view(torch.uint8),
                    group=group,
                )
                call.x, call.x_stride = gathered.data_ptr(), hidden_size
                call.num_tokens = chunk.shape[0]
                call.num_sources, call.source_stride = world_size, chunk.numel()
                for name in ("residual", "out", "residual_out"):
                    if saved[name]:
                        offset = begin * saved[f"{name}_stride"] * width
                        setattr(call, name, saved[name] + offset)
                status = self.local(library)
                if status != _native.OK:
                    return status
        finally:
            for name, value in saved.items():
                setattr(call, name, value)
        return _native.OK

    def _row_stride(self, x: torch.Tensor) -> tuple[bool, int]:
        """Whether `x` must be copied, and the elements between its rows otherwise."""
        try:
            rows = x if x.dim() == 2 else x.view(-1, x.shape[-1])
        except RuntimeError:
            return True, 0
        stride = rows.stride(0) if rows.shape[0] > 1 else rows.shape[1]
        aligned = stride * x.element_size() % _CUDA_ALIGN_BYTES == 0 or rows.is_contiguous()
        return self._is_cuda and not aligned, stride


_ROW_FIELDS = (
    "x",
    "residual",
    "out",
    "residual_out",
    "x_stride",
    "residual_stride",
    "out_stride",
    "residual_out_stride",
    "num_tokens",
    "num_sources",
    "source_stride",
)
