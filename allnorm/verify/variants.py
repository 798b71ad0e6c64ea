"""What must hold of quantised calls and of sharded residuals: every byte, in every form."""

from __future__ import annotations

import itertools
from typing import Any

import torch

import allnorm
from allnorm import reference
from allnorm.names import GROUP_SIZES, NUMERICS, SCALE_LAYOUTS
from allnorm.quant import Quant
from allnorm.testing import DTYPES, SPECIAL_KINDS, Batch, capture
from allnorm.verify.record import Recorder
from allnorm.verify.run import EPS, Check, Context

_LAYOUTS = (
    *itertools.product(SCALE_LAYOUTS, ("float32", "ue8m0")),
    ("column_major_tma", "ue8m0_packed"),
)
_HIDDEN_SIZES = (512, 2944, 2880, 120)
_TOKENS = (0, 1, 2, 3, 5, 7, 33)
_NAMES = ("quantized", "scale", "residual_out", "normed")
_GRAPH_ROUNDS = 6


def listed(device: str) -> list[tuple[str, Check]]:
    """The checks of this file that run on "cuda" or "cpu", with their names."""
    everywhere: list[tuple[str, Check]] = [
        ("quantisation", quantization),
        ("quantised special values", quantized_special_values),
        ("sharded residual", sharded_residual),
    ]
    replay: list[tuple[str, Check]] = [("quantised graph replay", quantized_graph_replay)]
    return everywhere + replay if device == "cuda" else everywhere


def specs(hidden_size: int, device: torch.device) -> list[Quant]:
    """Every way to quantise rows of that many columns."""
    fitting = [size for size in GROUP_SIZES if hidden_size % size == 0]
    groups = [allnorm.Fp8PerGroup(size, *names) for size in fitting for names in _LAYOUTS]
    static = allnorm.Fp8PerTensor(torch.full((1,), 0.03, device=device))
    return [*groups, allnorm.Fp8PerToken(), static]


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
            _check(context, recorder, batch, spec, 0, kind=kind)


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
    every = specs(2944, comm.device)
    given = every[-1]
    assert isinstance(given, allnorm.Fp8PerTensor)
    lo, hi = comm.row_shard(35)
    x, shard = static.xs[comm.rank], static.residual[lo:hi]

    def calls() -> list[allnorm.QuantizedNorm]:
        results = []
        for spec in every:
            whole = comm.all_reduce_add_rms_norm_quant(x, static.residual, static.weight, EPS, spec)
            own = comm.all_reduce_add_rms_norm_quant(
                x, shard, static.weight, EPS, spec, residual_sharded=True
            )
            residual = comm.all_gather_rows(own.residual, 35)
            results += [whole, own._replace(residual=residual)]
        return results

    calls()
    with capture() as graph:
        results = calls()
    for turn in range(_GRAPH_ROUNDS):
        batch = context.batch(35, 2944, torch.bfloat16)
        static.copy_(batch)
        given.scale.fill_(0.01 * (turn + 1))
        graph.replay()
        for index, result in enumerate(results):
            spec = every[index // 2]
            expected = reference.all_reduce_add_rms_norm_quant(
                batch.xs, batch.residual, batch.weight, EPS, spec
            )
            recorder.compare(
                f"replay {turn}, {spec}{', sharded' if index % 2 else ''}",
                list(_parts(result, spec).values()),
                list(_parts(expected, spec).values()),
                _NAMES,
            )


def _check(
    context: Context,
    recorder: Recorder,
    batch: Batch,
    spec: Quant | None,
    turn: int,
    *,
    sharded: bool = False,
    kind: str = "",
) -> None:
    """A call by each algorithm that can run it; what is left open takes turns."""
    comm, (num_tokens, hidden_size) = context.comm, batch.residual.shape
    dtype, whole = batch.residual.dtype, batch.residual if turn % 3 or kind else None
    options: dict[str, Any] = {
        "numerics": NUMERICS[turn % len(NUMERICS)],
        "weight_bias": float(turn % 5 == 0),
    }
    call, refer = comm.all_reduce_add_rms_norm, reference.all_reduce_add_rms_norm
    if spec is not None:
        options |= {"quant": spec, "return_normed": turn % 2 == 0}
        call = comm.all_reduce_add_rms_norm_quant  # type: ignore[assignment]
        refer = reference.all_reduce_add_rms_norm_quant  # type: ignore[assignment]
    expected = _parts(refer(batch.xs, whole, batch.weight, EPS, **options), spec)
    own = whole
    if sharded:
        lo, hi = comm.row_shard(num_tokens)
        own = None if whole is None else whole[lo:hi].clone()
        expected["residual_out"] = expected["residual_out"][lo:hi]
    x = batch.xs[comm.rank]
    for algorithm in context.algorithms(num_tokens, hidden_size, dtype, spec, sharded):
        result = call(
            *(x, own, batch.weight, EPS),
            algorithm=algorithm,
            residual_sharded=sharded,
            **options,
        )
        got = _parts(result, spec)
        case = f"{kind} {num_tokens}x{hidden_size} {dtype} {spec} {options['numerics']} {algorithm}"
        for shared in (True, False):  # held by every rank alike, or this rank's own
            names = [name for name in got if (name != "residual_out" or not sharded) == shared]
            if names:
                recorder.compare(
                    case,
                    [got[name] for name in names],
                    [expected[name] for name in names],
                    names,
                    digest=shared and not kind,
                )


def _parts(result: tuple[torch.Tensor | None, ...], spec: Quant | None) -> dict[str, torch.Tensor]:
    """A call's results by their names; scales with the padding rows behind them."""
    names = ("normed", "residual_out") if spec is None else _NAMES
    parts = {n: part for n, part in zip(names, result, strict=True) if part is not None}
    if isinstance(spec, allnorm.Fp8PerGroup) and spec.scale_layout == "column_major_tma":
        scale = parts["scale"]
        column = scale.stride(1)
        if scale.numel():
            parts["scale"] = scale.as_strided((column, scale.shape[1]), (1, column))
    return parts


def _check_gathered(context: Context, recorder: Recorder, batch: Batch) -> None:
    comm, (num_tokens, hidden_size) = context.comm, batch.residual.shape
    lo, hi = comm.row_shard(num_tokens)
    for algorithm in ("auto", "unfused"):
        got = comm.all_gather_rows(batch.residual[lo:hi], num_tokens, algorithm=algorithm)
        case = f"all_gather_rows {num_tokens}x{hidden_size} {batch.residual.dtype} {algorithm}"
        recorder.compare(case, [got], [batch.residual], ["rows"])
