"""The checks of hyper-connections: several residual streams, which the reduced sum enters.

One check is of all_reduce_hyper_connection, the other of the next layer's input.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

import allnorm
from allnorm import reference
from allnorm.names import NUMERICS
from allnorm.quant import Quant
from allnorm.testing import DTYPES
from allnorm.testing.inputs import random_projection
from allnorm.verify.calls import EPS, EXPERTS
from allnorm.verify.case import Case
from allnorm.verify.context import Context, Recorder

_SIZES = (4096, 2880, 120, 1001)
_TOKENS = (0, 1, 3, 17, 131)
_STREAMS = (2, 3, 4, 8)
_INPUT_SIZES = (120, 2880)
_INPUT_TOKENS = 17
_INPUT_ROWS = (slice(0, 0), slice(0, 1), slice(16, 17), slice(0, 17))  # of a call
_INPUT_ELEMS = 16_384  # elements of a token, above which not all dtypes are checked
_QUANTS: tuple[Quant, ...] = (
    *(allnorm.Fp8PerToken(), allnorm.Fp8PerGroup(64), allnorm.MxFp8()),
    allnorm.Fp8PerGroup(32, scale_format="ue8m0_packed"),
)
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


def stream_input(context: Context, recorder: Recorder) -> None:
    """Checks hyper_connection_input on every rank, with ordinary and special values.

    The normed rows are also quantized, in one of the formats.
    """
    for streams, size in itertools.product(_STREAMS, _INPUT_SIZES):
        kinds = [*((kind, kind) for kind in DTYPES.values()), (torch.float32, torch.bfloat16)]
        if streams * size > _INPUT_ELEMS:
            kinds = [context.rng.choice(kinds)]  # the reference is slow
        for kind, weight_kind in kinds:
            given, projection, weight = _input_arguments(context, streams, size, kind, weight_kind)
            options: dict[str, Any] = {
                "eps": EPS,
                "weight_bias": context.rng.choice((0.0, 1.0)),
                "numerics": context.rng.choice(NUMERICS),
            }
            wanted = _parts(reference.hyper_connection_input(given, projection, weight, **options))
            quant = context.rng.choice(_QUANTS if size % 64 == 0 else _QUANTS[:1])
            for rows in _INPUT_ROWS:
                got = allnorm.hyper_connection_input(given[rows], projection, weight, **options)
                text = f"tokens {rows.start}..{rows.stop} of {_INPUT_TOKENS}x{streams}x{size}, "
                text += f"{kind}, weight {weight_kind}, {options}"
                parts = [part[rows] for part in wanted]
                names = ("normed", "post", "mix")
                recorder.compare(text, _parts(got), parts, names, digest=False)
                narrow = allnorm.quantize(parts[0], quant), reference.quantize(parts[0], quant)
                recorder.compare(f"{quant} of {text}", *narrow, ("quantized", "scale"), False)


def _parts(result: tuple[torch.Tensor, allnorm.HyperConnection]) -> list[torch.Tensor]:
    """Returns the normed input and the coefficients in one list."""
    normed, connection = result
    return [normed, *connection]


def _input_arguments(
    context: Context, streams: int, size: int, kind: torch.dtype, weight_kind: torch.dtype
) -> tuple[torch.Tensor, allnorm.HyperConnectionProjection, torch.Tensor]:
    """Returns streams, a projection and a weight, equal on every rank.

    Each of the first tokens has a special value in all or some elements of every stream.
    """
    generator = torch.Generator().manual_seed(context.rng.randrange(1 << 31))
    given = torch.randn(_INPUT_TOKENS, streams, size, generator=generator)
    values = context.rng.sample(_VALUES, len(_VALUES))
    for token, value in zip(given, values, strict=False):
        token[:, :: context.rng.choice((1, 7, size))] = value
    device = context.comm.device
    projection = random_projection(generator, streams, size, device)
    weight = torch.randn(size, generator=generator).to(device)
    return given.to(kind).to(device), projection, (1 + weight / 8).to(weight_kind)
