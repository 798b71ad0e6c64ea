"""A layer's input from residual streams: checks the arguments, and calls the native library.

Nothing is exchanged, so ranks need not agree on anything here.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from allnorm.core import _native, arguments, backends, checks, tensors
from allnorm.core.arguments import DTYPES
from allnorm.core.prepared_streams import token_strides
from allnorm.core.shortcuts import current_raw_stream, is_intercepted, is_traced
from allnorm.errors import UnsupportedError
from allnorm.hyper_connection import HyperConnection, HyperConnectionProjection
from allnorm.names import NUMERICS, check_choice

_MOST_ITERATIONS = 1000


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
    if type(projection) is not HyperConnectionProjection:
        raise TypeError(
            f"projection={projection!r}: expected an allnorm.HyperConnectionProjection."
        )
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
    _check_tensors(streams, fn, scale, base, weight)
    check_choice("numerics", numerics, NUMERICS)
    arguments.check_count("projection.iterations", iterations, least=1)
    if iterations > _MOST_ITERATIONS:
        raise ValueError(
            f"projection.iterations={iterations}: expected at most {_MOST_ITERATIONS}."
        )
    arguments.check_numbers(
        {
            "eps": eps,
            "weight_bias": weight_bias,
            "projection.eps": stream_eps,
            "projection.hc_eps": hc_eps,
            "projection.post_scale": post_scale,
        }
    )
    count, width = streams.shape[-2:]
    readable, (token_stride, stream_stride) = _readable(streams)
    fn, scale, base, weight = (
        tensors.in_memory(each).contiguous() for each in (fn, scale, base, weight)
    )
    normed, post, mix = results = allocate(streams, weight)
    native = _native.StreamInput(
        struct_bytes=ctypes.sizeof(_native.StreamInput),
        dtype=DTYPES[normed.dtype],
        stream_dtype=DTYPES[streams.dtype],
        weight_dtype=DTYPES[weight.dtype],
        numerics=_native.NUMERICS[numerics],
        num_streams=count,
        iterations=iterations,
        eps=eps,
        weight_bias=weight_bias,
        stream_eps=stream_eps,
        hc_eps=hc_eps,
        post_scale=post_scale,
        num_tokens=normed.numel() // width,
        hidden_size=width,
        streams=readable.data_ptr(),
        token_stride=token_stride,
        stream_stride=stream_stride,
        fn=fn.data_ptr(),
        scale=scale.data_ptr(),
        base=base.data_ptr(),
        weight=weight.data_ptr(),
        out=normed.data_ptr(),
        out_stride=width,
        post=post.data_ptr(),
        mix=mix.data_ptr(),
        cuda_stream=current_raw_stream(streams.device.index) if streams.is_cuda else None,
    )
    library = backends.library(streams.device.type)
    status = library.stream_input(ctypes.addressof(native))
    if status:
        _native.raise_status(library, status)
    return results


def allocate(streams: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns memory for the results; for tracers their shapes and dtypes."""
    *leading, count, width = streams.shape
    dtype = weight.dtype if streams.dtype is torch.float32 else streams.dtype
    return (
        streams.new_empty((*leading, width), dtype=dtype),
        streams.new_empty((*leading, count), dtype=torch.float32),
        streams.new_empty((*leading, count, count), dtype=torch.float32),
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
