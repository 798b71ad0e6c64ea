"""The arithmetic that PyTorch does not have: fused multiply-add, exact roots, the sum's tree.

Three traps of PyTorch are avoided everywhere: dividing a CUDA tensor by a Python number multiplies
with its reciprocal, so every divisor is a tensor on the device; `torch.sqrt` on the CPU may be
wrong in the last bit (with MKL it is for a fifth of all float32), so `sqrt` goes through float64;
and PyTorch has no fused multiply-add, so `fma` computes it from exact float64 parts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from allnorm.names import DTYPES as DTYPE_NAMES

DTYPES = tuple(getattr(torch, name) for name in DTYPE_NAMES)

_PACKS_PER_CHUNK = 32


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


def float32(value: float, like: Tensor) -> Tensor:
    """`value` rounded to float32, one element on the device of `like`."""
    return torch.tensor(value, dtype=torch.float32, device=like.device)


def new_tensor(values: Tensor, dtype: torch.dtype) -> Tensor:
    """A fresh contiguous tensor, never an alias of an argument."""
    return torch.empty(values.shape, dtype=dtype, device=values.device).copy_(values)
