"""What must hold of every kind of call, bit for bit."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import allnorm
from allnorm import reference
from allnorm.names import ALGORITHMS, NUMERICS
from allnorm.quant import Quant
from allnorm.testing import (
    DTYPES,
    SPECIAL_KINDS,
    Batch,
    capture,
    gather,
    report,
    sentinel_input,
)
from allnorm.verify.calls import CHANGES, EPS, Kind, Results, issue, specs
from allnorm.verify.context import Check, Context, Recorder

HIDDEN_SIZES = (2880, 2944, 5760, 120, 4096, 7168, 8192, 16384, 1001)
TOKENS = (0, 1, 2, 3, 16, 17, 64, 129, 257, 1024)
_SAMPLE_ELEMS_CPU = 1 << 20  # largest shape of a random sample there: the reference is slow
_QUANT_HIDDEN_SIZES = (512, 2944, 2880, 120)
_QUANT_TOKENS = (0, 1, 2, 3, 5, 7, 33)
_GRAPH_ROUNDS = 6

Normed = tuple[torch.Tensor, torch.Tensor]


def product(context: Context, recorder: Recorder) -> None:
    """Dtypes, shapes, rounding modes and algorithms against the reference: all or a sample."""
    shapes = _shapes(context)
    began, checked = time.monotonic(), 0
    for dtype, hidden_size, num_tokens in shapes:
        # The ranks must stop together.
        used = max(gather(time.monotonic() - began))
        if not context.job.full and used > context.job.seconds:
            break
        report({"text": recorder.name, "done": checked, "total": len(shapes)})
        _one_shape(context, recorder, dtype, hidden_size, num_tokens)
        checked += 1
    total = len(DTYPES) * len(HIDDEN_SIZES) * len(TOKENS)
    recorder.note = f"{checked} of {total} shapes" + ("" if checked == total else "; --full: all")


def _shapes(context: Context) -> list[tuple[str, int, int]]:
    """(dtype, hidden_size, num_tokens) in random order; the first ones reach every value once."""
    limit = None if context.job.full or context.job.device == "cuda" else _SAMPLE_ELEMS_CPU
    dtypes, hidden_sizes, tokens = list(DTYPES), list(HIDDEN_SIZES), list(TOKENS)
    for values in (dtypes, hidden_sizes, tokens):
        context.rng.shuffle(values)
    every = list(itertools.product(dtypes, hidden_sizes, tokens))
    context.rng.shuffle(every)
    first = [
        (dtypes[i % 3], hidden_sizes[i % len(hidden_sizes)], tokens[i % len(tokens)])
        for i in range(max(len(hidden_sizes), len(tokens)))
    ]
    ordered = list(dict.fromkeys([*first, *every]))
    return [s for s in ordered if limit is None or s[1] * s[2] <= limit]


def _one_shape(
    context: Context, recorder: Recorder, name: str, hidden_size: int, num_tokens: int
) -> None:
    dtype = DTYPES[name]
    batch = context.batch(num_tokens, hidden_size, dtype)
    reduced = context.reduce(batch.xs)
    algorithms = context.algorithms(num_tokens, hidden_size, dtype)
    shape = f"{num_tokens}x{hidden_size} {name}"
    for algorithm in algorithms:
        got = context.comm.all_reduce(batch.xs[context.comm.rank], algorithm=algorithm)
        recorder.compare(f"all_reduce {shape} {algorithm}", [got], [reduced], ["reduced"])
    for numerics in NUMERICS:
        expected = reference.add_rms_norm(
            reduced, batch.residual, batch.weight, EPS, numerics=numerics
        )
        for algorithm in algorithms:
            result = context.run(batch, numerics=numerics, algorithm=algorithm)
            recorder.compare(f"{shape} {numerics} {algorithm}", result, expected)


# ---- the fused norm ------------------------------------------------------------------------------


def batch_invariance(context: Context, recorder: Recorder) -> None:
    """A row's bits do not depend on the batch it is in."""
    for dtype, hidden_size in itertools.product(DTYPES.values(), (2880, 4096)):
        batch = context.batch(67, hidden_size, dtype)
        whole = _reference(context, batch)
        for low, high in ((0, 67), (0, 1), (13, 14), (66, 67), (3, 20), (30, 63)):
            part = batch.map(lambda tensor, lo=low, hi=high: tensor[lo:hi].clone())  # type: ignore[misc]
            expected = [tensor[low:high] for tensor in whole]
            case = f"rows {low}..{high} of 67x{hidden_size}"
            _by_each_algorithm(context, recorder, part, case, expected, whole_rows=67)


def special_values(context: Context, recorder: Recorder) -> None:
    """Zeros of both signs, denormals, overflow, NaN and infinities go through as IEEE says."""
    for dtype, kind in itertools.product(DTYPES.values(), SPECIAL_KINDS):
        batch = context.special(kind, (17, 2880), dtype)
        _by_each_algorithm(context, recorder, batch, kind, digest=False)


def sentinels(context: Context, recorder: Recorder) -> None:
    """Every pattern that some transport could use as its mark arrives as ordinary data."""
    comm = context.comm
    for dtype in DTYPES.values():
        for num_tokens, finite in ((1, True), (16, True), (16, False), (129, True)):
            shape = (num_tokens, 4096)
            make = partial(sentinel_input, shape, dtype, finite=finite, device=comm.device)
            batch = Batch(
                tuple(make(rank) for rank in range(comm.world_size)),
                torch.full(shape, -0.0, dtype=dtype, device=comm.device),
                torch.ones(shape[1], dtype=dtype, device=comm.device),
            )
            words = "finite words" if finite else "all words"
            _by_each_algorithm(context, recorder, batch, words, digest=False)


def options(context: Context, recorder: Recorder) -> None:
    """No residual, a float32 weight, a weight bias, more dimensions; in every rounding mode."""
    comm = context.comm
    for name, dtype in DTYPES.items():
        batch = context.batch(12, 5760, dtype)
        residuals, weights = (batch.residual, None), (batch.weight, batch.weight.float())
        variants = itertools.product(residuals, weights, (0.0, 1.0), NUMERICS)
        for residual, weight, bias, numerics in variants:
            call: Any = (residual, weight, EPS)
            chosen: dict[str, Any] = {"weight_bias": bias, "numerics": numerics}
            expected = reference.all_reduce_add_rms_norm(
                batch.xs, *call, islands=comm.islands, **chosen
            )
            for algorithm in context.algorithms(12, 5760, dtype):
                x = batch.xs[comm.rank]
                got = comm.all_reduce_add_rms_norm(x, *call, algorithm=algorithm, **chosen)
                case = (
                    f"{dtype}, residual {residual is not None}, weight {weight.dtype}, "
                    f"weight_bias {bias}, {numerics} {algorithm}"
                )
                recorder.compare(case, got, expected)
        # More dimensions than two.
        folded = batch.map(lambda rows: rows.view(3, 2, 2, -1))
        whole = [part.view(3, 2, 2, -1) for part in _reference(context, batch)]
        recorder.compare(f"[3, 2, 2, 5760] {name}", context.run(folded), whole)


def in_place(context: Context, recorder: Recorder) -> None:
    """Results written over `x` and `residual`, and results written to memory of the caller."""
    comm = context.comm
    for (name, dtype), num_tokens in itertools.product(DTYPES.items(), (1, 16, 257)):
        batch = context.batch(num_tokens, 4096, dtype)
        expected = _reference(context, batch)
        reduced = context.reduce(batch.xs)
        for algorithm in context.algorithms(num_tokens, 4096, dtype):
            case = f"{num_tokens}x4096 {name} {algorithm}"
            x, residual = batch.xs[comm.rank].clone(), batch.residual.clone()
            comm.all_reduce_add_rms_norm(
                *(x, residual, batch.weight, EPS),
                algorithm=algorithm,
                out=x,
                residual_out=residual,
            )
            recorder.compare(f"{case} in place", (x, residual), expected)
            x = batch.xs[comm.rank].clone()
            comm.all_reduce(x, algorithm=algorithm, out=x)
            recorder.compare(f"{case} all_reduce in place", [x], [reduced], ["reduced"])


def strided(context: Context, recorder: Recorder) -> None:
    """Rows that lie apart, such as a slice of a wider tensor."""
    for dtype in DTYPES.values():
        for num_tokens, hidden_size in ((5, 2880), (64, 4096), (129, 1001)):
            batch = context.batch(num_tokens, hidden_size, dtype)
            apart = replace(batch.map(partial(_apart, gap=24)), residual=_apart(batch.residual, 8))
            _by_each_algorithm(context, recorder, apart, "strided", _reference(context, batch))


def _apart(x: torch.Tensor, gap: int) -> torch.Tensor:
    """The same rows with `gap` other elements between them."""
    wide = torch.full((x.shape[0], x.shape[1] + gap), 7.0, dtype=x.dtype, device=x.device)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


def two_communicators(context: Context, recorder: Recorder) -> None:
    """Calls on two communicators in turn, of other shapes and algorithms."""
    islands = context.comm.islands
    with allnorm.Communicator(
        device=context.comm.device, numerics="vllm", islands=islands
    ) as other:
        for turn in range(24):
            name = context.rng.choice(list(DTYPES))
            shape = (context.rng.choice((1, 3, 16, 65)), context.rng.choice((2880, 4096)))
            batch = context.batch(*shape, DTYPES[name])
            algorithm = context.rng.choice(("auto", *ALGORITHMS))
            if algorithm not in context.algorithms(*shape, DTYPES[name]):
                algorithm = "auto"
            got = [
                replace(context, comm=comm).run(batch, algorithm=algorithm)
                for comm in (context.comm, other)
            ]
            for result, numerics in zip(got, ("rounded", "vllm"), strict=True):
                case = f"turn {turn} {shape[0]}x{shape[1]} {name} {numerics} {algorithm}"
                recorder.compare(case, result, _reference(context, batch, numerics))
        other.check()


def _by_each_algorithm(
    context: Context,
    recorder: Recorder,
    batch: Batch,
    case: str,
    expected: Sequence[torch.Tensor] | None = None,
    digest: bool = True,
    whole_rows: int | None = None,
) -> None:
    """Compares the fused norm of a batch, by each algorithm that can run it.

    `expected` is by default the reference of the batch. With `whole_rows` the algorithms are those
    that can run a batch of so many rows, of which this one is a part.
    """
    num_tokens, hidden_size = batch.residual.shape
    dtype = batch.residual.dtype
    wanted = _reference(context, batch) if expected is None else expected
    for algorithm in context.algorithms(whole_rows or num_tokens, hidden_size, dtype):
        got = context.run(batch, algorithm=algorithm)
        text = f"{case}, {num_tokens}x{hidden_size} {str(dtype)[6:]} {algorithm}"
        recorder.compare(text, got, wanted, digest=digest)


def _reference(context: Context, batch: Batch, numerics: str = "rounded") -> Normed:
    return reference.all_reduce_add_rms_norm(
        *(batch.xs, batch.residual, batch.weight, EPS),
        numerics=numerics,
        islands=context.comm.islands,
    )


# ---- quantised results and sharded residuals -----------------------------------------------------


def quantization(context: Context, recorder: Recorder) -> None:
    """Group sizes, scale layouts and formats, per token, per tensor, by every algorithm."""
    turn = itertools.count()
    for dtype, hidden_size in itertools.product(DTYPES.values(), _QUANT_HIDDEN_SIZES):
        for spec in specs(hidden_size, context.comm.device):
            batch = context.batch(context.rng.choice(_QUANT_TOKENS), hidden_size, dtype)
            _variants(context, recorder, batch, spec, next(turn))


def quantized_special_values(context: Context, recorder: Recorder) -> None:
    """Zeros, denormals, overflow, NaN and infinities: their groups say so, no others do."""
    for dtype, kind in itertools.product(DTYPES.values(), SPECIAL_KINDS):
        batch = context.special(kind, (17, 2880), dtype)
        for spec in specs(2880, context.comm.device)[-4:]:
            _variants(context, recorder, batch, spec, 0, special=kind)


def sharded_residual(context: Context, recorder: Recorder) -> None:
    """Each rank holds its rows of the residual, of fewer rows than ranks too; all are gathered."""
    turn, tokens = itertools.count(), (*_QUANT_TOKENS, 130)
    for dtype, num_tokens, hidden_size in itertools.product(
        DTYPES.values(), tokens, _QUANT_HIDDEN_SIZES
    ):
        batch = context.batch(num_tokens, hidden_size, dtype)
        every = specs(hidden_size, context.comm.device)
        for spec in (None, *context.rng.sample(every, min(3, len(every)))):
            _variants(context, recorder, batch, spec, next(turn), sharded=True)
        lo, hi = context.comm.row_shard(num_tokens)
        for algorithm in ("auto", "unfused"):
            shard = batch.residual[lo:hi]
            got = context.comm.all_gather_rows(shard, num_tokens, algorithm=algorithm)
            case = f"all_gather_rows {num_tokens}x{hidden_size} {dtype} {algorithm}"
            recorder.compare(case, [got], [batch.residual], ["rows"])


def _variants(
    context: Context,
    recorder: Recorder,
    batch: Batch,
    spec: Quant | None,
    turn: int,
    *,
    sharded: bool = False,
    special: str = "",
    change: dict[str, Any] | None = None,
) -> None:
    """A call by each algorithm that can run it; `turn` decides all options that are not given.

    `change`: further fields of the Kind.
    """
    comm, (num_tokens, hidden_size) = context.comm, batch.residual.shape
    dtype = batch.residual.dtype
    kind = Kind(
        *("norm", num_tokens, hidden_size, dtype, NUMERICS[turn % len(NUMERICS)]),
        weight_bias=float(turn % 5 == 0),
        has_residual=bool(turn % 3 or special),
        quant=spec,
        return_normed=spec is not None and turn % 2 == 0,
        sharded=sharded,
        **(change or {}),
    )
    expected = kind.expected(context.reduce(batch.xs), batch.residual, batch.weight)
    for algorithm in context.algorithms(num_tokens, hidden_size, dtype, spec, sharded):
        kind = replace(kind, algorithm=algorithm)
        got = issue(comm, kind, batch.xs[comm.rank], batch.residual, batch.weight)
        _compare(recorder, f"{special} {kind}", spec, got, expected, digest=not special)


def boundaries(context: Context, recorder: Recorder) -> None:
    """Post norms, scaled sums, calls without a second norm, sums of experts; in every mode."""
    turns = itertools.count()
    for dtype, hidden_size, num_tokens in itertools.product(
        DTYPES.values(), (2304, 120, 1001), (0, 1, 5, 33)
    ):
        batch = context.batch(num_tokens, hidden_size, dtype)
        for change, sharded in itertools.product(CHANGES, (False, True)):
            turn = next(turns)
            quantised = change.get("second_norm", True) and turn % 3 == 0
            spec = allnorm.Fp8PerToken() if quantised else None
            _variants(context, recorder, batch, spec, turn, sharded=sharded, change=change)


def _compare(
    recorder: Recorder,
    case: str,
    spec: Quant | None,
    got: Results,
    expected: Results,
    digest: bool = True,
) -> None:
    """Compares results by name, scales with the padding rows behind them."""
    parts, wanted = (
        [_with_padding(name, results[name], spec) for name in got] for results in (got, expected)
    )
    recorder.compare(case, parts, wanted, list(got), digest=digest)


def _with_padding(name: str, part: torch.Tensor, spec: Quant | None) -> torch.Tensor:
    if name != "scale" or not part.numel() or not isinstance(spec, allnorm.Fp8PerGroup):
        return part
    if spec.scale_layout != "column_major_tma":
        return part
    return part.as_strided((part.stride(1), part.shape[1]), (1, part.stride(1)))


# ---- CUDA graphs ---------------------------------------------------------------------------------


def graph_replay(context: Context, recorder: Recorder) -> None:
    """CUDA graphs replayed with new inputs, in random order, with eager calls between."""
    shapes = [(1, 4096), (16, 2880), (130, 8192)]
    recorder.note = "not unfused: gloo" if context.job.shared_gpus else ""
    graphs = [_capture(context, *shape) for shape in shapes]
    for turn in range(_GRAPH_ROUNDS):
        order = list(range(len(graphs)))
        context.rng.shuffle(order)
        for index in order:
            graph, static, results = graphs[index]
            batch = context.batch(*shapes[index], torch.bfloat16)
            static.copy_(batch)
            graph.replay()
            eager = context.batch(7, 4096, torch.bfloat16)
            recorder.compare(f"eager, turn {turn}", context.run(eager), _reference(context, eager))
            expected = _reference(context, batch)
            for algorithm, result in results.items():
                case = f"{shapes[index][0]}x{shapes[index][1]} {algorithm}, turn {turn}"
                recorder.compare(f"replay of {case}", result, expected)


def _capture(
    context: Context, num_tokens: int, hidden_size: int
) -> tuple[torch.cuda.CUDAGraph, Batch, dict[str, Normed]]:
    """A graph of one call by each algorithm, its inputs, and its results by algorithm."""
    static = context.batch(num_tokens, hidden_size, torch.bfloat16)
    algorithms = context.algorithms(num_tokens, hidden_size, torch.bfloat16)
    if context.job.shared_gpus:
        algorithms.remove("unfused")  # gloo copies to the host, which no graph can capture
    for algorithm in algorithms:
        context.run(static, algorithm=algorithm)
    with capture() as graph:
        results = {a: context.run(static, algorithm=a) for a in algorithms}
    return graph, static, results


def quantized_graph_replay(context: Context, recorder: Recorder) -> None:
    """A graph of all other kinds of calls, replayed with new inputs and a new static scale."""
    comm = context.comm
    static = context.batch(35, 2944, torch.bfloat16)
    kinds = [Kind("norm", 35, 2944, torch.bfloat16, **change) for change in CHANGES]
    kinds += [
        Kind("norm", 35, 2944, torch.bfloat16, quant=spec, sharded=sharded)
        for spec in specs(2944, comm.device)
        for sharded in (False, True)
    ]
    per_tensor = kinds[-1].quant
    assert isinstance(per_tensor, allnorm.Fp8PerTensor)

    def calls() -> list[Results]:
        x = static.xs[comm.rank]
        return [issue(comm, kind, x, static.residual, static.weight) for kind in kinds]

    calls()
    with capture() as graph:
        results = calls()
    for turn in range(_GRAPH_ROUNDS):
        batch = context.batch(35, 2944, torch.bfloat16)
        static.copy_(batch)
        per_tensor.scale.fill_(0.01 * (turn + 1))
        graph.replay()
        reduced = context.reduce(batch.xs)
        for kind, got in zip(kinds, results, strict=True):
            expected = kind.expected(reduced, batch.residual, batch.weight)
            _compare(recorder, f"replay {turn}, {kind}", kind.quant, got, expected)


CHECKS: dict[str, Check] = {
    "every combination": product,
    "batch invariance": batch_invariance,
    "special values": special_values,
    "sentinel patterns": sentinels,
    "options": options,
    "in place": in_place,
    "strided rows": strided,
    "two communicators": two_communicators,
    "quantisation": quantization,
    "quantised special values": quantized_special_values,
    "sharded residual": sharded_residual,
    "post norms and experts": boundaries,
}
GPU_CHECKS: dict[str, Check] = {
    "graph replay": graph_replay,
    "quantised graph replay": quantized_graph_replay,
}
