"""Reproducible test inputs, distinct on every rank and in every call, and special values.

A test whose ranks hold equal values cannot detect data from a wrong peer. A test that repeats
values cannot detect data from an earlier call. Hence every seed contains the rank and the call
number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from allnorm import names
from allnorm.hyper_connection import HyperConnectionProjection

SENTINEL_WORDS = (
    *(0xFFFFFFFF, 0xFFFEFFFE, 0xFFFEFFFF, 0xFFFFFFFE, 0xFFFF0000, 0x0000FFFF),
    *(0x7FFFFFFF, 0x7FFF7FFF, 0x7FFE7FFE, 0x7FC00000, 0x7FC07FC0, 0x7F800001, 0x7F817F81),
    *(0x7C017C01, 0x80000000, 0x80008000, 0x00008000, 0x00000000, 0x00000001, 0x00010001),
    *(0xDEADBEEF, 0xCDCDCDCD, 0xAAAAAAAA, 0x55555555),
)
"""32-bit words that a transport might use as its "empty" word, and words that resemble them.

The library must treat all of them as ordinary data.
"""

SPECIAL_KINDS = (
    *("zeros", "negative_zeros", "mixed_zeros", "denormals", "huge", "nan", "infinity"),
    "opposite_infinities",
)
"""The kinds of `special_input`."""

_WORDS_PER_PACK = 4

DTYPES = {name: getattr(torch, name) for name in names.DTYPES}
"""The dtypes of calls by name: bfloat16, float16 and float32."""


@dataclass(frozen=True)
class Batch:
    """All ranks' inputs for one call, so that each rank can compute the reference alone.

    Attributes:
        xs: every rank's partial sums, each `[num_tokens, hidden_size]`.
        residual: `[num_tokens, hidden_size]`, equal on every rank.
        weight: `[hidden_size]`, the weight of the norm, equal on every rank.
    """

    xs: tuple[Tensor, ...]
    residual: Tensor
    weight: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Returns the batch with `change` applied to the partial sums and the residual."""
        return Batch(tuple(map(change, self.xs)), change(self.residual), self.weight)

    def copy_(self, other: Batch) -> None:
        """Copies the values of a batch with the same shapes."""
        copy_all((*self.xs, self.residual, self.weight), (*other.xs, other.residual, other.weight))


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies every source to its target, in place.

    Args:
        targets: tensors to write.
        sources: as many tensors, each with the shape of its target; dtypes and devices may differ.

    Raises:
        ValueError: there are more tensors on one side.
    """
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def make_batch(
    num_tokens: int,
    hidden_size: int,
    dtype: torch.dtype,
    device: torch.device,
    world_size: int,
    seed: int,
    weight_bias: float = 0.0,
) -> Batch:
    """Creates random inputs that differ on every rank and depend only on the arguments.

    Every rank can make the batch of all ranks. Not collective.

    Args:
        num_tokens: number of rows, from 0.
        hidden_size: number of columns.
        dtype: bfloat16, float16 or float32, of all tensors.
        device: device of the results. They are computed there, and different devices give
            different numbers.
        world_size: number of ranks; equals the length of `xs`.
        seed: distinguishes batches.
        weight_bias: what the call adds to the weight, whose mean is therefore `1 - weight_bias`.
    """
    normal = normal_maker(seed * 1009, device)
    return Batch(
        xs=tuple(normal(2 + r, num_tokens, hidden_size).to(dtype) for r in range(world_size)),
        residual=normal(0, num_tokens, hidden_size).to(dtype),
        weight=(1.0 - weight_bias + 0.1 * normal(1, hidden_size)).to(dtype),
    )


def normal_maker(seed: int, device: torch.device) -> Callable[..., Tensor]:
    """Returns a function that maps a number and a shape to normal float32 values on the device.

    Number n uses seed `seed + n`; choose `seed` so that ranges do not overlap.
    """
    generator = torch.Generator(device=device)

    def normal(part: int, *shape: int) -> Tensor:
        generator.manual_seed(seed + part)
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32)

    return normal


def random_projection(
    generator: torch.Generator, streams: int, hidden_size: int, device: torch.device
) -> HyperConnectionProjection:
    """Returns a random projection of residual streams; its raw coefficients are about 1.

    Args:
        generator: of the CPU; draws the tensors in the order of the fields.
        streams: number of residual streams.
        hidden_size: columns of a stream.
        device: device of the tensors.
    """
    count, width = streams * (streams + 2), streams * hidden_size
    fn, scale, base = (
        torch.randn(shape, generator=generator).to(device)
        for shape in ((count, width), (3,), (count,))
    )
    return HyperConnectionProjection(fn / width**0.5, scale, base)


def rank_input(
    shape: Sequence[int],
    dtype: torch.dtype,
    rank: int,
    *,
    call: int = 0,
    seed: int = 0,
    scale: float = 1.0,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Creates normal random numbers that depend only on rank, shape, dtype, call and seed.

    Args:
        shape: shape of the result, for example `[num_tokens, hidden_size]`.
        dtype: bfloat16, float16 or float32.
        rank: rank of the input; every process can make every rank's input.
        call: number of the call within a test.
        seed: distinguishes tests.
        scale: standard deviation.
        device: device of the result; it is computed on the CPU.
    """
    values = _normal(("rank", rank, tuple(shape), dtype, call, seed), shape)
    return (values * scale).to(dtype).to(device)


def all_inputs(
    world_size: int, shape: Sequence[int], dtype: torch.dtype, **options: Any
) -> list[Tensor]:
    """Returns `rank_input` of every rank, in rank order, for `allnorm.reference`.

    Args:
        world_size: number of ranks.
        shape: shape of each input.
        dtype: bfloat16, float16 or float32.
        options: `call`, `seed`, `scale` and `device` of `rank_input`.
    """
    return [rank_input(shape, dtype, rank, **options) for rank in range(world_size)]


def shared_input(
    shape: Sequence[int],
    dtype: torch.dtype,
    name: str,
    *,
    call: int = 0,
    seed: int = 0,
    scale: float = 1.0,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Creates normal random numbers that are equal on every rank, for a residual or a weight.

    Args:
        shape: shape of the result.
        dtype: bfloat16, float16 or float32.
        name: name of the tensor; different names give different numbers.
        call: number of the call within a test.
        seed: distinguishes tests.
        scale: standard deviation.
        device: device of the result; it is computed on the CPU.
    """
    values = _normal((name, tuple(shape), dtype, call, seed), shape)
    return (values * scale).to(dtype).to(device)


def special_input(
    kind: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    rank: int,
    *,
    call: int = 0,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Creates an input with special values, such as zeros of both signs, NaN or infinities.

    "nan" and "infinity" put one such element into every third row, on rank 0 only.
    "opposite_infinities" puts +inf on rank 0 and -inf on rank 1 at the same index. "huge" overflows
    the sum.

    Args:
        kind: one of SPECIAL_KINDS.
        shape: shape of the result, with at least one dimension.
        dtype: bfloat16, float16 or float32.
        rank: rank of the input; every process can make every rank's input.
        call: number of the call within a test.
        device: device of the result; it is computed on the CPU.

    Raises:
        ValueError: unknown kind.
    """
    x = rank_input(shape, dtype, rank, call=call)
    info = torch.finfo(dtype)
    if kind == "zeros":
        x = torch.zeros_like(x)
    elif kind == "negative_zeros":
        x = torch.full_like(x, -0.0)
    elif kind == "mixed_zeros":
        x = torch.zeros_like(x).copysign(x)
    elif kind == "denormals":
        x = (x.double() * info.smallest_normal / 8).to(dtype)
    elif kind == "huge":
        x = torch.full_like(x, info.max * 0.75).copysign(shared_input(shape, dtype, "sign"))
    elif kind in ("nan", "infinity", "opposite_infinities"):
        value = float("nan") if kind == "nan" else float("inf")
        if kind == "opposite_infinities" and rank == 1:
            value = -value
        if rank == 0 or (rank == 1 and kind == "opposite_infinities"):
            rows = x.view(-1, x.shape[-1])
            for row in range(0, rows.shape[0], 3):
                rows[row, (7 * row + call) % x.shape[-1]] = value
    else:
        raise ValueError(f"kind {kind!r}: expected one of {', '.join(SPECIAL_KINDS)}")
    return x.to(device)


def sentinel_input(
    shape: Sequence[int],
    dtype: torch.dtype,
    rank: int,
    *,
    finite: bool = False,
    call: int = 0,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Creates random data whose 16-byte packs contain every sentinel word in every position.

    Of the n words, pack `k`, counted over all rows, has word `k mod n` at position `k / n mod 5`;
    position 4 means all four words. The pattern is shifted by rank and call, so that these have
    different words at the same index.

    Args:
        shape: shape of the result; rows must consist of whole packs to reach every position.
        dtype: bfloat16, float16 or float32.
        rank: rank of the input; every process can make every rank's input.
        finite: omit words that hold a NaN or an infinity in this dtype, so that every bit of the
            outputs can be compared.
        call: number of the call within a test.
        device: device of the result; it is computed on the CPU.
    """
    words = torch.tensor(SENTINEL_WORDS, dtype=torch.int64)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    if finite:
        elements = words.view(dtype).float().reshape(words.numel(), -1)
        words = words[torch.isfinite(elements).all(-1)]
    x = rank_input(shape, dtype, rank, call=call)
    flat = x.reshape(-1).view(torch.uint8)
    count = flat.numel() // (4 * _WORDS_PER_PACK)
    packs = flat[: count * 4 * _WORDS_PER_PACK].view(torch.int32).view(count, _WORDS_PER_PACK)
    index = torch.arange(count) + 7 * rank + 3 * call
    word = words[index % words.numel()]
    position = index // words.numel() % (_WORDS_PER_PACK + 1)
    for i in range(_WORDS_PER_PACK):
        hit = (position == i) | (position == _WORDS_PER_PACK)
        packs[:, i] = torch.where(hit, word, packs[:, i])
    return x.to(device)


def _normal(seed: tuple[object, ...], shape: Sequence[int]) -> Tensor:
    digest = hashlib.blake2b(repr(seed).encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    return torch.randn(tuple(shape), generator=generator)
