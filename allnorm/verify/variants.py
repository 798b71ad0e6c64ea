"""What must hold of quantised calls and of sharded residuals: every byte, in every form."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

import allnorm
from allnorm import reference
from allnorm.names import NUMERICS
from allnorm.quant import Quant
from allnorm.testing import DTYPES, SPECIAL_KINDS, Batch, capture
from allnorm.verify.record import Recorder
from allnorm.verify.run import Check, Context
from allnorm.verify.stress.calls import Results, issue
from allnorm.verify.stress.kinds import Kind, specs

_HIDDEN_SIZES = (512, 2944, 2880, 120)
_TOKENS = (0, 1, 2, 3, 5, 7, 33)
_GRAPH_ROUNDS = 6


def quantization(context: Context, recorder: Recorder) -> None:
    """Group sizes, scale layouts and formats, per token, per tensor, by every algorithm."""
    turn = itertools.count()
    for name, hidden_size in itertools.product(DTYPES, _HIDDEN_SIZES):
        for spec in specs(hidden_size, context.comm.device):
            batch = context.batch(context.rng.choice(_TOKENS), hidden_size, DTYPES[name])
            _check(context, recorder, batch, spec, next(turn))


def quantized_special_values(context: Context, recorder: Recorder) -> None:
    """Zeros, denormals, overflow, NaN and infinities: their groups say so, no others do."""
    for dtype, kind in itertools.product(DTYPES.values(), SPECIAL_KINDS):
        batch = context.special(kind, (17, 2880), dtype)
        for spec in specs(2880, context.comm.device)[-4:]:
            _check(context, recorder, batch, spec, 0, special=kind)


def sharded_residual(context: Context, recorder: Recorder) -> None:
    """Each rank holds its rows of the residual, of fewer rows than ranks too; all are gathered."""
    turn = itertools.count()
    for name, num_tokens in itertools.product(DTYPES, (*_TOKENS, 130)):
        for hidden_size in _HIDDEN_SIZES:
            batch = context.batch(num_tokens, hidden_size, DTYPES[name])
            every = specs(hidden_size, context.comm.device)
            for spec in (None, *context.rng.sample(every, min(3, len(every)))):
                _check(context, recorder, batch, spec, next(turn), sharded=True)
            _check_gathered(context, recorder, batch)


def quantized_graph_replay(context: Context, recorder: Recorder) -> None:
    """A graph of quantised and sharded calls, replayed with new inputs and another given scale."""
    comm = context.comm
    static = context.batch(35, 2944, torch.bfloat16)
    kinds = [
        Kind("norm", 35, 2944, torch.bfloat16, quant=spec, sharded=sharded)
        for spec in specs(2944, comm.device)
        for sharded in (False, True)
    ]

    given = kinds[-1].quant
    assert isinstance(given, allnorm.Fp8PerTensor)

    def calls() -> list[Results]:
        x = static.xs[comm.rank]
        return [issue(comm, kind, x, static.residual, static.weight) for kind in kinds]

    calls()
    with capture() as graph:
        results = calls()
    for turn in range(_GRAPH_ROUNDS):
        batch = context.batch(35, 2944, torch.bfloat16)
        static.copy_(batch)
        given.scale.fill_(0.01 * (turn + 1))
        graph.replay()
        reduced = reference.all_reduce(batch.xs)
        for kind, got in zip(kinds, results, strict=True):
            expected = kind.expected(reduced, batch.residual, batch.weight)
            recorder.compare(
                f"replay {turn}, {kind}",
                [_whole(name, part, kind.quant) for name, part in got.items()],
                [_whole(name, expected[name], kind.quant) for name in got],
                list(got),
            )


def _check(
    context: Context,
    recorder: Recorder,
    batch: Batch,
    spec: Quant | None,
    turn: int,
    *,
    sharded: bool = False,
    special: str = "",
) -> None:
    """A call by each algorithm that can run it; what is left open takes turns."""
    comm, (num_tokens, hidden_size) = context.comm, batch.residual.shape
    dtype = batch.residual.dtype
    kind = Kind(
        *("norm", num_tokens, hidden_size, dtype, NUMERICS[turn % len(NUMERICS)]),
        weight_bias=float(turn % 5 == 0),
        has_residual=bool(turn % 3 or special),
        quant=spec,
        return_normed=spec is not None and turn % 2 == 0,
        sharded=sharded,
    )
    expected = kind.expected(reference.all_reduce(batch.xs), batch.residual, batch.weight)
    for algorithm in context.algorithms(num_tokens, hidden_size, dtype, spec, sharded):
        kind = replace(kind, algorithm=algorithm)
        got = issue(comm, kind, batch.xs[comm.rank], batch.residual, batch.weight)
        recorder.compare(
            f"{special} {kind}",
            [_whole(name, part, spec) for name, part in got.items()],
            [_whole(name, expected[name], spec) for name in got],
            list(got),
            digest=not special,
        )


def _whole(name: str, part: torch.Tensor, spec: Quant | None) -> torch.Tensor:
    """A result; of scales the padding rows behind them, too."""
    if name != "scale" or not part.numel() or not isinstance(spec, allnorm.Fp8PerGroup):
        return part
    if spec.scale_layout != "column_major_tma":
        return part
    return part.as_strided((part.stride(1), part.shape[1]), (1, part.stride(1)))


def _check_gathered(context: Context, recorder: Recorder, batch: Batch) -> None:
    comm, (num_tokens, hidden_size) = context.comm, batch.residual.shape
    lo, hi = comm.row_shard(num_tokens)
    for algorithm in ("auto", "unfused"):
        got = comm.all_gather_rows(batch.residual[lo:hi], num_tokens, algorithm=algorithm)
        case = f"all_gather_rows {num_tokens}x{hidden_size} {batch.residual.dtype} {algorithm}"
        recorder.compare(case, [got], [batch.residual], ["rows"])


CHECKS: dict[str, Check] = {
    "quantisation": quantization,
    "quantised special values": quantized_special_values,
    "sharded residual": sharded_residual,
}
GPU_CHECKS: dict[str, Check] = {"quantised graph replay": quantized_graph_replay}
