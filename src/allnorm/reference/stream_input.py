"""A layer's input from residual streams: projection, Sinkhorn's steps, weighted sum, RMSNorm."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from allnorm.hyper_connection import HyperConnection, HyperConnectionProjection
from allnorm.reference.arithmetic import float32, fma, new_tensor, sqrt
from allnorm.reference.norm import add_rms_norm

_PACK_ELEMS, _CHUNK_PACKS, _SEGMENTS = 8, 32, 8
_LN2_HIGH = 355 / 512  # times an integer below 2^14 it is exact
_LN2_LOW = math.log(2) - _LN2_HIGH


def hyper_connection_input(
    streams: Tensor,
    projection: HyperConnectionProjection,
    weight: Tensor,
    eps: float,
    *,
    weight_bias: float = 0.0,
    numerics: str | None = "rounded",
) -> tuple[Tensor, HyperConnection]:
    """Computes a layer's normed input and its coefficients from the residual streams.

    Args:
        streams: `[..., streams, hidden_size]`; float32, float16 or bfloat16; 2 to 8 streams.
        projection: the layer's parameters.
        weight: `[hidden_size]`, of the norm; dtype of `streams` or float32, or any of the three
            dtypes if `streams` are float32.
        eps: added to the mean square of the input.
        weight_bias: added to the weight in float32.
        numerics: "transformers" and "vllm" round before the weight, other modes do not.

    Returns:
        `(normed, connection)`: `[..., hidden_size]` in the dtype of `streams`, or, if these are
        float32, of `weight`; and the coefficients for the layer's output.

    Raises:
        ValueError: a shape or name does not match.
        TypeError: a dtype does not match.
    """
    count, width = streams.shape[-2:]
    fn, scale, base = projection.fn, projection.scale, projection.base
    for name, tensor, shape in (
        ("fn", fn, (count * (count + 2), count * width)),
        ("scale", scale, (3,)),
        ("base", base, (count * (count + 2),)),
    ):
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}: expected {shape}.")
        if tensor.dtype != torch.float32:
            raise TypeError(f"{name} has dtype {tensor.dtype}: expected float32.")
    if not 2 <= count <= 8:
        raise ValueError(f"{count} streams: expected 2 to 8.")
    z = streams.float()
    square = _project(z, None)
    mean = square / float32(count * width, z)
    root = sqrt(mean + float32(projection.eps, z))
    rstd = torch.ones_like(root) / root
    groups = torch.tensor([0] * count + [1] * count + [2] * count * count, device=z.device)
    rows = fn.view(-1, count, width)
    dots = torch.stack([_project(z, row) for row in rows], -1)
    raw = (dots * rstd.unsqueeze(-1)) * scale[groups] + base
    pre = _sigmoid(raw[..., :count]) + float32(projection.hc_eps, z)
    post = _sigmoid(raw[..., count : 2 * count]) * float32(projection.post_scale, z)
    comb = _sinkhorn(raw[..., 2 * count :].unflatten(-1, (count, count)), projection)
    total = pre[..., :1] * z[..., 0, :]
    for j in range(1, count):
        total = total + pre[..., j : j + 1] * z[..., j, :]
    dtype = weight.dtype if streams.dtype == torch.float32 else streams.dtype
    normed, _ = add_rms_norm(
        total.to(dtype), None, weight, eps, weight_bias=weight_bias, numerics=numerics
    )
    connection = HyperConnection(
        new_tensor(post, torch.float32), new_tensor(comb.transpose(-1, -2), torch.float32)
    )
    return normed, connection


def _project(z: Tensor, row: Tensor | None) -> Tensor:
    """Computes the product `[...]` of the streams and a row `[streams, hidden_size]` of `fn`.

    Without a row, computes the sum of the streams' squares. A pack has 8 elements in every dtype.
    """
    elems = _PACK_ELEMS * _CHUNK_PACKS
    pad = (0, -z.shape[-1] % elems)
    packs = torch.nn.functional.pad(z, pad).unflatten(-1, (-1, _CHUNK_PACKS, _PACK_ELEMS))
    factors = packs
    if row is not None:
        factors = torch.nn.functional.pad(row, pad).unflatten(-1, packs.shape[-3:])
    p = packs[..., 0] * factors[..., 0]
    for i in range(1, _PACK_ELEMS):
        p = fma(packs[..., i], factors[..., i], p)
    while p.shape[-1] > 1:  # the butterfly over a chunk
        half = p.shape[-1] // 2
        p = p[..., :half] + p[..., half:]
    chunks = p.squeeze(-1)  # [..., streams, chunks]
    count = chunks.shape[-1]
    total = None
    for segment in range(_SEGMENTS):
        part = torch.zeros_like(chunks[..., 0, 0])
        for j in range(chunks.shape[-2]):
            for chunk in range(segment * count // _SEGMENTS, (segment + 1) * count // _SEGMENTS):
                part = part + chunks[..., j, chunk]
        total = part if total is None else total + part
    assert total is not None
    return total


def _exp(t: Tensor) -> Tensor:
    """Computes e^t with products and sums that are each rounded to float32: see numerics."""
    t = torch.where(t > 89, float32(89, t), t)
    t = torch.where(t < -105, float32(-105, t), t)
    k = torch.round(t * float32(1 / math.log(2), t))
    r = (t - k * float32(_LN2_HIGH, t)) - k * float32(_LN2_LOW, t)
    p = float32(1 / 5040, t) * r + float32(1 / 720, t)
    for divisor in (120, 24, 6, 2, 1, 1):
        p = p * r + float32(1 / divisor, t)
    exponent = torch.nan_to_num(k).to(torch.int32)
    half = exponent >> 1
    for part in (half, exponent - half):
        p = p * ((part + 127) << 23).view(torch.float32)
    return p


def _sigmoid(t: Tensor) -> Tensor:
    one = torch.ones_like(t)
    return one / (one + _exp(-t))


def _sinkhorn(raw: Tensor, projection: HyperConnectionProjection) -> Tensor:
    """Makes the matrices `[..., streams, streams]` of nearly doubly stochastic coefficients."""
    eps = float32(projection.hc_eps, raw)
    greatest = raw[..., 0]
    for j in range(1, raw.shape[-1]):
        greatest = torch.where(raw[..., j] > greatest, raw[..., j], greatest)
    powers = _exp(raw - greatest.unsqueeze(-1))
    comb = powers / _in_order(powers, -1) + eps
    comb = _normalized(comb, -2, eps)
    for _ in range(projection.iterations - 1):
        comb = _normalized(_normalized(comb, -1, eps), -2, eps)
    return comb


def _normalized(comb: Tensor, dim: int, eps: Tensor) -> Tensor:
    total = _in_order(comb, dim) + eps
    return comb * (torch.ones_like(total) / total)


def _in_order(terms: Tensor, dim: int) -> Tensor:
    """Sums along a dimension, which remains with size 1, in order."""
    first, *others = terms.split(1, dim)
    for term in others:
        first = first + term
    return first
