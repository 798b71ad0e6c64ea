"""What every kernel of allnorm computes, in plain PyTorch: the numerics page, step by step.

The functions take the inputs of all ranks, communicate nothing, and run on CPU and CUDA tensors
with the same bits. Kernels are compared with them bit for bit; only the payload of a NaN is free.

Below, ``T`` is the dtype of `x`, ``f(.)`` the exact conversion to float32, and every arithmetic
operation is one float32 operation rounded to nearest even. Three traps of PyTorch are avoided
everywhere: dividing a CUDA tensor by a Python number multiplies with its reciprocal, so every
divisor is a tensor on the device; `torch.sqrt` on the CPU may be wrong in the last bit (with MKL it
is for a fifth of all float32), so `sqrt` goes through float64; and PyTorch has no fused
multiply-add, so `fma` computes it from exact float64 parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

NUMERICS = ("rounded", "unrounded", "transformers", "vllm")
ALGORITHMS = ("auto", "one_shot", "two_shot", "unfused")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_PACK_BYTES = 16
_PACKS_PER_CHUNK = 32


def all_reduce(inputs: Sequence[Tensor]) -> Tensor:
    """Sums the ranks' inputs in rank order in float32 and rounds once.

    Equivalent to ``sum(x.float() for x in inputs).to(inputs[0].dtype)``.

    Args:
        inputs: one `x` per rank, in rank order; equal shapes `[...]`, equal dtypes (float32,
            float16 or bfloat16), one device.

    Returns:
        The reduced sum: new, contiguous, shape and dtype of one input.

    Raises:
        ValueError: no inputs, or they differ in shape, dtype or device.
        TypeError: the dtype is not one of the three.
    """
    _check_inputs(inputs)
    total = inputs[0].float()
    for x in inputs[1:]:
        total = total + x.float()
    return _new(total, inputs[0].dtype)


def all_reduce_add_rms_norm(
    inputs: Sequence[Tensor],
    residual: Tensor | None,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    weight_bias: float = 0.0,
    numerics: str | None = "rounded",
    algorithm: str = "auto",
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Reduces over ranks, adds the residual, applies RMSNorm.

    Equivalent to ``residual_out = all_reduce(x) + residual`` and
    ``normed = rms_norm(residual_out, weight, eps)``.

    Args:
        inputs: one `x` per rank, in rank order, `[..., hidden_size]`; float32, float16 or bfloat16.
        residual: shape and dtype of `x`, or None: then nothing is added.
        weight: `[hidden_size]`, dtype of `x` or float32.
        eps: added to the mean square, rounded to float32.
        weight_bias: added to the weight in float32 (1.0 for Gemma).
        numerics: "rounded", "unrounded", "transformers" or "vllm"; None is "rounded".
        algorithm: accepted for equal signatures; every algorithm has the same bits.
        out: receives `normed`; may be one of the inputs.
        residual_out: receives the new residual; may be `residual`.

    Returns:
        `(normed, residual_out)`, both of the shape and dtype of `x`.

    Raises:
        ValueError: shapes, devices or names do not fit.
        TypeError: a dtype does not fit.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm {algorithm!r}: expected one of {', '.join(ALGORITHMS)}")
    normed, total = add_rms_norm(
        all_reduce(inputs), residual, weight, eps, weight_bias=weight_bias, numerics=numerics
    )
    return (
        normed if out is None else out.copy_(normed),
        total if residual_out is None else residual_out.copy_(total),
    )


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    weight_bias: float = 0.0,
    numerics: str | None = "rounded",
) -> tuple[Tensor, Tensor]:
    """Adds the residual to an already reduced `x` and applies RMSNorm: steps 2 to 5.

    Args:
        x: `[..., hidden_size]`, float32, float16 or bfloat16.
        residual: shape and dtype of `x`, or None.
        weight: `[hidden_size]`, dtype of `x` or float32.
        eps: added to the mean square, rounded to float32.
        weight_bias: added to the weight in float32.
        numerics: "rounded", "unrounded", "transformers" or "vllm"; None is "rounded".

    Returns:
        `(normed, residual_out)`, both of the shape and dtype of `x`.

    Raises:
        ValueError: shapes, devices or names do not fit.
        TypeError: a dtype does not fit.
    """
    numerics = "rounded" if numerics is None else numerics
    _check_norm(x, residual, weight, numerics)
    total = _add_residual(x, residual)
    residual_out = total.to(x.dtype)
    z = residual_out.float() if numerics in ("rounded", "transformers") else total
    normed = _scale(z, _reciprocal_rms(z, eps, x.dtype), _gain(weight, weight_bias), x, numerics)
    return _new(normed, x.dtype), _new(residual_out, x.dtype)


def _add_residual(x: Tensor, residual: Tensor | None) -> Tensor:
    """Step 2, before rounding: `s = f(A) + f(residual)`."""
    return x.float() if residual is None else x.float() + residual.float()


def _reciprocal_rms(z: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Step 4, the end: `1 / sqrt(sum / H + eps)`, `[..., 1]`."""
    hidden_size = _float32(z.shape[-1], z)
    mean = square_sum(z, _PACK_BYTES // dtype.itemsize).unsqueeze(-1) / hidden_size
    root = sqrt(mean + _float32(eps, z))
    return torch.ones_like(root) / root


def _gain(weight: Tensor, weight_bias: float) -> Tensor:
    """Step 5: `weight_bias + f(w)`."""
    return _float32(weight_bias, weight) + weight.float()


def _scale(z: Tensor, rstd: Tensor, gain: Tensor, x: Tensor, numerics: str) -> Tensor:
    """Step 5, before the last rounding."""
    y = z * rstd
    if numerics in ("transformers", "vllm"):
        y = y.to(x.dtype).float()
    return y * gain


def square_sum(z: Tensor, elems_per_pack: int) -> Tensor:
    """Step 4: the sum of squares of each row, by the tree that does not depend on launch geometry.

    Args:
        z: `[..., hidden_size]`, float32.
        elems_per_pack: 8 if the rows come from 16-bit elements, 4 if from float32.

    Returns:
        `[...]`, float32.
    """
    elems_per_chunk = elems_per_pack * _PACKS_PER_CHUNK
    # Elements and packs that do not exist count as zero; fma(0, 0, p) is p.
    z = torch.nn.functional.pad(z, (0, -z.shape[-1] % elems_per_chunk))
    packs = z.unflatten(-1, (-1, _PACKS_PER_CHUNK, elems_per_pack))  # [..., chunk, pack, element]
    p = packs[..., 0] * packs[..., 0]
    for i in range(1, elems_per_pack):
        p = fma(packs[..., i], packs[..., i], p)
    chunks = _butterfly(p)
    width = 1 << (chunks.shape[-1] - 1).bit_length()
    return _butterfly(torch.nn.functional.pad(chunks, (0, width - chunks.shape[-1])))


def _butterfly(c: Tensor) -> Tensor:
    """`for offset in n/2, ..., 2, 1: c_i = c_i + c_(i xor offset)`; `[..., n] -> [...]`.

    After the first step c_i and c_(i xor n/2) hold the same bits, because addition commutes, so the
    first half stands for all; and so on.
    """
    while c.shape[-1] > 1:
        half = c.shape[-1] // 2
        c = c[..., :half] + c[..., half:]
    return c.squeeze(-1)


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """`a * b + c` of float32 tensors, rounded once.

    The product is exact in float64. The float64 sum is rounded to odd (to whichever neighbour has
    an odd last bit, if inexact), found from the exact error of the addition; from 53 bits rounded
    to odd, rounding to 24 or fewer bits gives what rounding the exact value gives (Boldo and
    Melquiond, 2008).

    Args:
        a: float32; the three shapes broadcast, on one device.
        b: float32.
        c: float32.

    Returns:
        float32.
    """
    product = a.double() * b.double()
    addend = c.double()
    total = product + addend
    # Knuth's two-sum: product + addend == total + error, exactly. NaN if an operand is not finite.
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(torch.int64)
    wrong = ((error > 0) | (error < 0)) & (bits & 1 == 0)
    away_from_zero = (error > 0) == (total > 0)
    step = torch.where(away_from_zero, 1, -1)
    return torch.where(wrong, bits + step, bits).view(torch.float64).float()


def sqrt(a: Tensor) -> Tensor:
    """The correctly rounded square root of a float32 tensor.

    The root of a float32 is never closer than 4 units in the last place of float64 to the middle of
    two float32, so that a float64 root within one such unit rounds to the right neighbour.
    """
    return torch.sqrt(a.double()).float()


def _float32(value: float, like: Tensor) -> Tensor:
    """`value` rounded to float32, one element on the device of `like`."""
    return torch.tensor(value, dtype=torch.float32, device=like.device)


def _new(values: Tensor, dtype: torch.dtype) -> Tensor:
    """A fresh contiguous tensor, never an alias of an argument."""
    return torch.empty(values.shape, dtype=dtype, device=values.device).copy_(values)


def _check_inputs(inputs: Sequence[Tensor]) -> None:
    if not inputs:
        raise ValueError("inputs is empty: expected the input of every rank, in rank order")
    first = inputs[0]
    if first.dtype not in DTYPES:
        raise TypeError(f"x is {first.dtype}: expected float32, float16 or bfloat16")
    for rank, x in enumerate(inputs):
        if (x.shape, x.dtype, x.device) != (first.shape, first.dtype, first.device):
            raise ValueError(
                f"the inputs differ: rank 0 has {_describe(first)}, rank {rank} has {_describe(x)}"
            )


def _check_norm(x: Tensor, residual: Tensor | None, weight: Tensor, numerics: str) -> None:
    if numerics not in NUMERICS:
        raise ValueError(f"numerics {numerics!r}: expected one of {', '.join(NUMERICS)}")
    if x.dtype not in DTYPES:
        raise TypeError(f"x is {x.dtype}: expected float32, float16 or bfloat16")
    if x.ndim < 1 or x.shape[-1] < 1:
        raise ValueError(f"x has shape {list(x.shape)}: expected [..., hidden_size]")
    if residual is not None and residual.dtype != x.dtype:
        raise TypeError(f"residual is {residual.dtype}: expected the dtype of x, {x.dtype}")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual has shape {list(residual.shape)}: expected {list(x.shape)}")
    if weight.dtype not in (x.dtype, torch.float32):
        raise TypeError(f"weight is {weight.dtype}: expected {x.dtype} or float32")
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight has shape {list(weight.shape)}: expected {list(x.shape[-1:])}")


def _describe(x: Tensor) -> str:
    return f"{list(x.shape)} {x.dtype} on {x.device}"
