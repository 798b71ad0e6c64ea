"""Arithmetic that PyTorch lacks: fused multiply-add, exact square roots, and the tree sum.

Three problems of PyTorch are avoided everywhere. Dividing a CUDA tensor by a Python number
multiplies by its reciprocal, so every divisor is a tensor on the device. `torch.sqrt` on the CPU
may be wrong in the last bit (with MKL for a fifth of all float32 values), so `sqrt` uses float64.
PyTorch has no fused multiply-add, so `fma` computes it from exact float64 parts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from allnorm.names import DTYPES as DTYPE_NAMES

DTYPES = tuple(getattr(torch, name) for name in DTYPE_NAMES)
"""The dtypes of the inputs: float32, float16 and bfloat16."""

_PACKS_PER_CHUNK = 32


def square_sum(z: Tensor, elems_per_pack: int) -> Tensor:
    """Computes the sum of squares of each row (step 4), in an order independent of the launch.

    Args:
        z: `[..., hidden_size]`, float32.
        elems_per_pack: 8 if the rows come from 16-bit elements, 4 if from float32.

    Returns:
        `[...]`, float32.
    """
    elems_per_chunk = elems_per_pack * _PACKS_PER_CHUNK
    # Missing elements and packs are zeros; fma(0, 0, p) is p.
    z = torch.nn.functional.pad(z, (0, -z.shape[-1] % elems_per_chunk))
    packs = z.unflatten(-1, (-1, _PACKS_PER_CHUNK, elems_per_pack))  # [..., chunk, pack, element]
    p = packs[..., 0] * packs[..., 0]
    for i in range(1, elems_per_pack):
        p = fma(packs[..., i], packs[..., i], p)
    chunks = _butterfly(p)
    width = 1 << (chunks.shape[-1] - 1).bit_length()
    return _butterfly(torch.nn.functional.pad(chunks, (0, width - chunks.shape[-1])))


def _butterfly(c: Tensor) -> Tensor:
    """Sums `[..., n] -> [...]` as `for offset in n/2, ..., 2, 1: c_i = c_i + c_(i xor offset)`.

    After the first step, c_i and c_(i xor n/2) are bit-identical, because addition commutes. So
    only the first half is computed, and the same holds for each later step.
    """
    while c.shape[-1] > 1:
        half = c.shape[-1] // 2
        c = c[..., :half] + c[..., half:]
    return c.squeeze(-1)


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Computes `a * b + c` of float32 tensors, rounded once.

    The product is exact in float64. The float64 sum is rounded to odd: if it is inexact, to the
    neighbor with an odd last bit, which the exact error of the addition determines. Rounding 53
    bits that were rounded to odd to 24 or fewer bits gives the same result as rounding the exact
    value (Boldo and Melquiond, 2008).

    Args:
        a: float32; the three tensors are on one device, and their shapes broadcast.
        b: float32.
        c: float32.

    Returns:
        float32.
    """
    product = a.double() * b.double()
    addend = c.double()
    total = product + addend
    # Knuth's two-sum: product + addend == total + error exactly; NaN if an operand is not finite.
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(torch.int64)
    wrong = ((error > 0) | (error < 0)) & (bits & 1 == 0)
    away_from_zero = (error > 0) == (total > 0)
    step = torch.where(away_from_zero, 1, -1)
    return torch.where(wrong, bits + step, bits).view(torch.float64).float()


def sqrt(a: Tensor) -> Tensor:
    """Returns the correctly rounded square root of a float32 tensor.

    The root of a float32 is at least 4 float64 units in the last place away from the midpoint of
    two float32 values. So a float64 root with an error of one unit rounds to the right value.
    """
    return torch.sqrt(a.double()).float()


def float32(value: float, like: Tensor) -> Tensor:
    """Returns `value` rounded to float32, as a tensor of one element on the device of `like`."""
    return torch.tensor(value, dtype=torch.float32, device=like.device)


def new_tensor(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Copies values to a new contiguous tensor, which never aliases an argument."""
    return torch.empty(values.shape, dtype=dtype, device=values.device).copy_(values)
