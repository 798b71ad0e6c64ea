"""A layer's input from residual streams: checks the arguments, and calls the native library.

Nothing is exchanged, so ranks need not agree on anything here.
"""

from __future__ import annotations

import ctypes
from math import copysign
from typing import Any, NamedTuple

import torch
from torch import Tensor

from allnorm.core import _native, arguments, backends, checks, tensors
from allnorm.core.arguments import DTYPES
from allnorm.core.prepared_streams import token_strides
from allnorm.core.shortcuts import (
    Check,
    New,
    alike,
    current_device,
    current_raw_stream,
    fast_empty,
    is_intercepted,
    is_traced,
)
from allnorm.errors import UnsupportedError
from allnorm.hyper_connection import HyperConnection, HyperConnectionProjection
from allnorm.names import NUMERICS, check_choice

_MOST_ITERATIONS = 1000
_MOST_GEOMETRIES = 4096  # a server has a few thousand
_KINDS = frozenset({float, int, str})  # of constants; a bool is none of them
_ADDRESSES = ("streams", "fn", "scale", "base", "weight", "out", "post", "mix")
# Streams, fn, scale, base and weight.
_Given = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
_Geometry = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides, dtype


def hyper_connection_input(
    streams: Tensor,
    projection: HyperConnectionProjection,
    weight: Tensor,
    eps: float,
    *,
    weight_bias: float = 0.0,
    numerics: str = "rounded",
) -> tuple[Tensor, HyperConnection]:
    """Makes a layer's normed input and its coefficients from the residual streams, in one launch.

    PyTorch equivalent, up to the order of sums, for a projection of n streams:

        flat = streams.flatten(-2).float()
        flat = F.rms_norm(flat, flat.shape[-1:], eps=projection.eps)
        pre, post, mix = F.linear(flat, projection.fn).split([n, n, n * n], -1)
        pre = sigmoid(pre * scale[0] + base[:n]) + hc_eps
        post = post_scale * sigmoid(post * scale[1] + base[n : 2 * n])
        mix = sinkhorn(softmax((mix * scale[2] + base[2 * n :]).unflatten(-1, (n, n)), -1) + hc_eps)
        x = (pre.unsqueeze(-1) * streams).sum(-2).to(dtype)
        normed = F.rms_norm(x, x.shape[-1:], weight_bias + weight, eps)
        connection = HyperConnection(post, mix.mT)

    Sinkhorn's steps normalize the columns, then `iterations - 1` times the rows and the columns.

    Args:
        streams: `[..., streams, hidden_size]` with any hidden_size and 2 to 8 streams; float32,
            float16 or bfloat16.
        projection: the layer's parameters.
        weight: `[hidden_size]`, of the norm: dtype of `streams` or float32. If the streams are
            float32, any of the three dtypes, which is that of the result.
        eps: added to the mean square of the input.
        weight_bias: added to the weight in float32.
        numerics: "transformers" and "vllm" round to the result's dtype before the weight, the other
            modes do not. The norm's input is rounded in every mode.

    Returns:
        `(normed, connection)`. `normed` is `[..., hidden_size]`, contiguous, in the dtype of
        `streams`, or in that of `weight` if the streams are float32. `connection` has the
        coefficients with which the layer's output enters the streams:
        `Communicator.all_reduce_hyper_connection`.

    Raises:
        ValueError, TypeError, UnsupportedError: wrong arguments.
        NativeLibraryError: the backend's library is missing.

    Not collective. Safe in CUDA graphs and under torch.compile. Source: Xie et al., "mHC:
    Manifold-Constrained Hyper-Connections", 2025; bits: the numerics page.
    """
    _check_projection(projection)
    fn, scale, base, *constants = projection
    given: tuple[Any, ...] = (streams, fn, scale, base, weight, eps, weight_bias, numerics)
    run_it: Any = run
    if is_traced(streams) or is_intercepted():
        tensors.check_all_fake(streams=streams, fn=fn, scale=scale, base=base, weight=weight)
        run_it = torch.ops.allnorm.hyper_connection_input
    normed, post, mix = run_it(*given, *constants)
    return normed, HyperConnection(post, mix)


def run(
    streams: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    weight: Tensor,
    eps: float,
    weight_bias: float,
    numerics: str,
    stream_eps: float,
    hc_eps: float,
    iterations: int,
    post_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the normed input, and `post` and `mix` of its connection."""
    constants = Constants(eps, weight_bias, numerics, stream_eps, hc_eps, iterations, post_scale)
    prepared = _repeatable_calls.prepare((streams, fn, scale, base, weight), constants)
    library = backends.library(streams.device.type)
    status = library.stream_input(prepared.address)
    if status:
        _native.raise_status(library, status)
    return prepared.results


class Constants(NamedTuple):
    """The numbers of an input, and its rounding mode."""

    eps: float
    weight_bias: float
    numerics: str
    stream_eps: float
    hc_eps: float
    iterations: int
    post_scale: float

    def check(self) -> None:
        """Raises ValueError or TypeError for wrong values."""
        check_choice("numerics", self.numerics, NUMERICS)
        arguments.check_count("projection.iterations", self.iterations, least=1)
        if self.iterations > _MOST_ITERATIONS:
            raise ValueError(
                f"projection.iterations={self.iterations}: expected at most {_MOST_ITERATIONS}."
            )
        arguments.check_numbers(
            {
                "eps": self.eps,
                "weight_bias": self.weight_bias,
                "projection.eps": self.stream_eps,
                "projection.hc_eps": self.hc_eps,
                "projection.post_scale": self.post_scale,
            }
        )


class Prepared:
    """The C struct of an input, with memory for its results.

    Args:
        native: the C struct without addresses.
        given: the tensors, as the kernels read them: streams, fn, scale, base and weight.
        results: memory for the normed input, and for `post` and `mix` of its connection.

    Attributes:
        native: a copy of the C struct with addresses.
        address: address of `native`.
        given: as above.
        results: as above.
    """

    def __init__(
        self, native: _native.StreamInput, given: _Given, results: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        self.given = given  # alive until the call has been launched
        self.results = results
        self.native = native = _native.StreamInput.from_buffer_copy(native)
        self.address = ctypes.addressof(native)
        for name, tensor in zip(_ADDRESSES, (*given, *results), strict=True):
            setattr(native, name, tensor.data_ptr())
        if given[0].is_cuda:
            native.cuda_stream = current_raw_stream(given[0].device.index)


def prepare(given: _Given, constants: Constants) -> Prepared:
    """Checks the arguments of an input and allocates its results.

    Raises:
        ValueError, TypeError, UnsupportedError: wrong arguments.
    """
    _check_tensors(*given)
    constants.check()
    streams, *others = given
    readable, (token_stride, stream_stride) = _readable(streams)
    fn, scale, base, weight = (tensors.in_memory(each).contiguous() for each in others)
    results = allocate(streams, weight)
    *_, count, width = streams.shape
    native = _native.StreamInput(
        struct_bytes=ctypes.sizeof(_native.StreamInput),
        dtype=DTYPES[results[0].dtype],
        stream_dtype=DTYPES[streams.dtype],
        weight_dtype=DTYPES[weight.dtype],
        numerics=_native.NUMERICS[constants.numerics],
        num_streams=count,
        iterations=constants.iterations,
        eps=constants.eps,
        weight_bias=constants.weight_bias,
        stream_eps=constants.stream_eps,
        hc_eps=constants.hc_eps,
        post_scale=constants.post_scale,
        num_tokens=results[0].numel() // width,
        hidden_size=width,
        token_stride=token_stride,
        stream_stride=stream_stride,
        out_stride=width,
    )
    return Prepared(native, (readable, fn, scale, base, weight), results)


class _Repeatable(NamedTuple):
    """Recognizes repetitions of a call, and has what they need."""

    is_like: Check  # takes the tensors
    new: New  # allocates on the current device
    native: _native.StreamInput
    geometries: tuple[_Geometry, _Geometry, _Geometry]  # of the results


class _RepeatableCalls:
    """Calls that were made before, which are not checked again.

    It is safe for threads, because it reads and replaces entries that do not change.
    """

    def __init__(self) -> None:
        self._calls: dict[Any, _Repeatable] = {}

    def prepare(self, given: _Given, constants: Constants) -> Prepared:
        """Does the same as the function `prepare`, faster for calls like an earlier one."""
        key = self._key(given, constants)
        known = self._calls.get(key)
        if known is not None and all(map(tensors.is_plain, given)) and known.is_like(*given):
            device = given[0].device
            is_here = device.type == "cpu" or current_device() == device.index
            if not is_here or not all(map(tensors.has_memory, given)):
                return prepare(given, constants)
            new, (a, b, c) = known.new, known.geometries
            return Prepared(known.native, given, (new(*a), new(*b), new(*c)))
        prepared = prepare(given, constants)
        if key is not None:
            self._keep(key, given, prepared)
        return prepared

    def _keep(self, key: Any, given: _Given, prepared: Prepared) -> None:
        """Keeps a call, unless its tensors had to be copied."""
        if any(a is not b for a, b in zip(prepared.given, given, strict=True)):
            return
        new = fast_empty(given[0].device)
        if new is None:
            return
        if len(self._calls) >= _MOST_GEOMETRIES:
            self._calls.clear()
        a, b, c = ((tuple(r.shape), r.stride(), r.dtype) for r in prepared.results)
        self._calls[key] = _Repeatable(alike(given), new, prepared.native, (a, b, c))

    @staticmethod
    def _key(given: _Given, constants: Constants) -> Any:
        """Returns a key for tensors and constants; None for arguments that are refused by type."""
        kinds = tuple(map(type, constants))
        if not _KINDS.issuperset(kinds):
            return None
        try:
            streams, weight = given[0], given[-1]
            of_tensors = streams.shape, streams.dtype, streams.device, weight.dtype
            # Equality ignores the sign of a zero; results do not.
            signs = [copysign(1, value) for value in constants if type(value) is float]
        except (AttributeError, RuntimeError):
            return None
        return (*of_tensors, constants, kinds, *signs)


_repeatable_calls = _RepeatableCalls()


class NextInput:
    """The input that follows a call of all_reduce_hyper_connection, made from its streams.

    `prepare` checks the arguments and allocates the results; the call then makes the input in its
    launch, or `results` makes it afterwards.
    """

    def __init__(
        self,
        projection: HyperConnectionProjection,
        weight: Tensor,
        eps: float,
        weight_bias: float,
        numerics: str,
    ) -> None:
        _check_projection(projection)
        self._arguments = projection, weight, eps
        self._rounding = weight_bias, numerics
        self._prepared: Prepared | None = None
        self._is_made = False

    @staticmethod
    def joins(known: set[Any], residual: Tensor) -> bool:
        """Returns whether a call should make its input too, and not leave it to a call of its own.

        It should in a capture, and once per geometry before, which loads the kernel of both:
        captures do not load kernels. Other calls are limited by the CPU. There two calls take half
        the time, because csrc/python repeats the first one.

        Args:
            known: geometries of earlier calls of the same communicator; updated.
            residual: the call's residual.
        """
        try:
            if residual.is_cuda and torch.cuda.is_current_stream_capturing():
                return True
            key = residual.shape, residual.dtype
            is_new = key not in known
            if is_new:
                if len(known) >= _MOST_GEOMETRIES:
                    known.clear()
                known.add(key)
        except (AttributeError, TypeError, RuntimeError):
            return True  # a wrong argument, which the call reports
        return is_new

    @property
    def operands(self) -> dict[str, Any]:
        """The operator's arguments for the input, keyed by name."""
        (fn, scale, base, *constants), weight, eps = self._arguments
        stream_eps, hc_eps, iterations, post_scale = constants
        weight_bias, numerics = self._rounding
        return {
            "fn": fn,
            "scale": scale,
            "base": base,
            "weight": weight,
            "eps": eps,
            "weight_bias": weight_bias,
            "numerics": numerics,
            "stream_eps": stream_eps,
            "hc_eps": hc_eps,
            "iterations": iterations,
            "post_scale": post_scale,
        }

    def prepare(self, streams: Tensor) -> None:
        """Prepares the input of streams that the call will make in this memory."""
        (fn, scale, base, *constants), weight, eps = self._arguments
        self._prepared = prepare(
            (streams, fn, scale, base, weight),
            Constants(eps, *self._rounding, *constants),  # type: ignore[arg-type]
        )

    def run_with(self, library: _native.Library, handle: int, call: _native.Call) -> int:
        """Makes a bound call and the input on a communicator; returns the status."""
        assert self._prepared is not None
        native = self._prepared.native
        if not call.num_tokens or native.streams != call.residual_out:
            return int(library.run(handle, ctypes.addressof(call)))
        native.token_stride, native.stream_stride = call.residual_out_stride, call.stream_out_stride
        address = ctypes.addressof(call)
        status = int(library.run_with_input(handle, address, self._prepared.address))
        self._is_made = status == _native.OK
        return status

    def results(self, streams: Tensor) -> tuple[Tensor, HyperConnection]:
        """Returns the normed input and its connection."""
        if self._is_made:
            assert self._prepared is not None
            normed, post, mix = self._prepared.results
            return normed, HyperConnection(post, mix)
        weight_bias, numerics = self._rounding
        return hyper_connection_input(
            *(streams, *self._arguments), weight_bias=weight_bias, numerics=numerics
        )


def allocate(streams: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns memory for the results; for tracers their shapes and dtypes."""
    *leading, count, width = streams.shape
    dtype = weight.dtype if streams.dtype is torch.float32 else streams.dtype
    return (
        streams.new_empty((*leading, width), dtype=dtype),
        streams.new_empty((*leading, count), dtype=torch.float32),
        streams.new_empty((*leading, count, count), dtype=torch.float32),
    )


def _check_projection(projection: object) -> None:
    if type(projection) is not HyperConnectionProjection:
        raise TypeError(
            f"projection={projection!r}: expected an allnorm.HyperConnectionProjection."
        )


def _readable(streams: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """Returns streams that the kernels can read, and the strides of tokens and of streams."""
    streams = tensors.in_memory(streams)
    strides = token_strides(streams, 2)
    apart = strides is not None and min(strides[:2]) >= 0
    if strides is None or not apart or (strides[2] != 1 and streams.shape[-1] > 1):
        streams = streams.contiguous()
        strides = token_strides(streams, 2)
    assert strides is not None
    return streams, (strides[0], strides[1])


def _check_tensors(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, weight: Tensor
) -> None:
    tensors.check_kind("streams", streams)
    if streams.device.type not in ("cpu", "cuda"):
        raise UnsupportedError(
            f"streams are on {streams.device}: expected a CUDA device or the CPU."
        )
    arguments.check_input("streams", streams, streams.device)
    count, width = streams.shape[-2] if streams.dim() > 1 else 0, streams.shape[-1]
    if count not in checks.STREAMS:
        raise ValueError(
            f"streams has shape {tuple(streams.shape)}: expected [..., streams, hidden_size] with "
            f"{checks.STREAMS[0]} to {checks.STREAMS[-1]} streams."
        )
    rows = count * (count + 2)
    given = {"streams": streams}
    for name, tensor, shape in (
        ("projection.fn", fn, (rows, count * width)),
        ("projection.scale", scale, (3,)),
        ("projection.base", base, (rows,)),
    ):
        tensors.check_kind(name, tensor)
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}: expected {shape}.")
        if tensor.dtype is not torch.float32:
            raise TypeError(f"{name} has dtype {tensor.dtype}: expected torch.float32.")
        arguments.check_device(name, tensor, streams.device)
        given[name] = tensor
    tensors.check_kind("weight", weight)
    if streams.dtype is torch.float32:
        arguments.check_dtype("weight.dtype", weight.dtype)
        if weight.shape != (width,):
            raise ValueError(f"weight has shape {tuple(weight.shape)}: expected ({width},).")
    else:
        arguments.check_weight("weight", weight, streams)
    arguments.check_device("weight", weight, streams.device)
    tensors.check_memory(weight=weight, **given)
