"""The check of all_reduce_hyper_connection: the reduced sum enters several residual streams."""

from __future__ import annotations

import itertools
from typing import Any

import torch

import allnorm
from allnorm import reference
from allnorm.testing import DTYPES
from allnorm.verify.calls import EXPERTS
from allnorm.verify.case import Case
from allnorm.verify.context import Context, Recorder

_SIZES = (4096, 2880, 120, 1001)
_TOKENS = (0, 1, 3, 17, 131)
_STREAMS = (2, 3, 4, 8)
# Values that make products and sums zero, denormal, infinite or NaN.
_VALUES = (-0.0, 1e-40, 3e38, float("inf"), float("nan"))


def hyper_connection(context: Context, recorder: Recorder) -> None:
    """Checks all_reduce_hyper_connection by every algorithm, with ordinary and special values.

    In every third call the ranks sum experts' rows, in many different ways.
    """
    comm = context.comm
    islands = None if len(comm.islands) == 1 else comm.islands
    for dtype, size, tokens in itertools.product(DTYPES.values(), _SIZES, _TOKENS):
        streams = context.rng.choice(_STREAMS)
        kind = context.rng.choice((dtype, torch.float32))
        xs, residual, connection = _inputs(context, dtype, kind, (tokens, streams, size))
        wanted = reference.all_reduce_hyper_connection(xs, residual, connection, islands=islands)
        for algorithm in context.algorithms(tokens, size, dtype):
            x = xs[comm.rank]
            text = f"{tokens}x{streams}x{size}, {dtype}, residual {kind}, {algorithm}"
            text += ", experts" if isinstance(x, allnorm.ExpertSum) else ""
            try:
                got = comm.all_reduce_hyper_connection(x, residual, connection, algorithm=algorithm)
            except allnorm.UnsupportedError:
                continue  # a row that only other calls have kernels for
            recorder.compare(text, [got], [wanted], ["streams"], digest=False)


def _inputs(
    context: Context, dtype: torch.dtype, kind: torch.dtype, shape: tuple[int, int, int]
) -> tuple[list[Any], torch.Tensor, allnorm.HyperConnection]:
    """Returns all ranks' inputs, the residual and the coefficients, equal on every rank."""
    generator = torch.Generator().manual_seed(context.rng.randrange(1 << 31))
    ranks, device = range(context.comm.world_size), context.comm.device
    tokens, streams, size = shape
    xs: list[Any] = [torch.randn(tokens, size, generator=generator) for _ in ranks]
    residual = torch.randn(shape, generator=generator)
    for rows in (xs[context.rng.randrange(len(xs))], residual[:, -1]):
        for row, value in zip(rows[2:], _VALUES, strict=False):
            row[::7] = value
    connection = allnorm.HyperConnection(
        torch.randn(tokens, streams, generator=generator).to(device),
        torch.randn(tokens, streams, streams, generator=generator).to(device),
    )
    xs = [x.to(dtype).to(device) for x in xs]
    if context.rng.random() < 1 / 3:
        case = Case((tokens, size), dtype, call=context.rng.randrange(1000))
        drawn = [context.rng.choice([*EXPERTS, None]) for _ in ranks]
        xs = [
            x if e is None else e(case, r) for r, (e, x) in enumerate(zip(drawn, xs, strict=True))
        ]
    return xs, residual.to(kind).to(device), connection
