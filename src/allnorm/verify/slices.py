"""The check of rms_norm_sharded: RMSNorm of rows that are spread over the ranks."""

from __future__ import annotations

import itertools

import torch

import allnorm
from allnorm import reference
from allnorm.names import NUMERICS
from allnorm.testing import DTYPES
from allnorm.verify.calls import EPS
from allnorm.verify.context import Context, Recorder

_SIZES = ((2048, 256), (2880, 120), (8, 2944, 64, 5760))
_TOKENS = (0, 1, 3, 16, 131)
# Values that make a sum of squares zero, denormal, infinite or NaN.
_VALUES = (0.0, 1e-30, 3e38, float("inf"), float("nan"))


def sharded_norm(context: Context, recorder: Recorder) -> None:
    """Checks rms_norm_sharded by every algorithm, with ordinary and special values."""
    comm = context.comm
    for dtype, sizes, tokens in itertools.product(DTYPES.values(), _SIZES, _TOKENS):
        numerics = context.rng.choice(NUMERICS)
        bias = context.rng.choice((0.0, 1.0))
        tensors, weights = _inputs(context, dtype, sizes, tokens)
        mine, gains = tensors[comm.rank], weights[comm.rank]
        wanted = reference.rms_norm_sharded(tensors, weights, EPS, bias, numerics=numerics)
        for algorithm in ("auto", "one_shot", "unfused"):
            case = f"{tokens} rows of {sizes}, {dtype}, {numerics}, {algorithm}"
            try:
                got = comm.rms_norm_sharded(
                    mine, gains, EPS, bias, numerics=numerics, algorithm=algorithm
                )
            except allnorm.UnsupportedError:
                continue  # over islands, only the process group can exchange the sums
            names = [f"tensor {number}" for number in range(len(sizes))]
            recorder.compare(case, got, wanted[comm.rank], names, digest=False)


def _inputs(
    context: Context, dtype: torch.dtype, sizes: tuple[int, ...], tokens: int
) -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]]]:
    """Returns all ranks' tensors and weights, equal on every rank."""
    generator = torch.Generator().manual_seed(context.rng.randrange(1 << 31))
    ranks, device = range(context.comm.world_size), context.comm.device
    tensors = [[torch.randn(tokens, size, generator=generator) for size in sizes] for _ in ranks]
    special = context.rng.randrange(len(ranks))
    for x in tensors[special]:
        for row, value in zip(x[2:], _VALUES, strict=False):
            row[:] = value
    weights = [[torch.randn(size, generator=generator) for size in sizes] for _ in ranks]
    kind = context.rng.choice((dtype, torch.float32))
    return (
        [[x.to(dtype).to(device) for x in each] for each in tensors],
        [[w.to(kind).to(device) for w in each] for each in weights],
    )
