"""Checks that every kind of call is bit-exact."""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

import allnorm
from allnorm import reference
from allnorm.core import hip
from allnorm.names import ALGORITHMS, NUMERICS
from allnorm.quant import Quant
from allnorm.testing import DTYPES, Batch, capture, gather, report
from allnorm.verify.calls import CHANGES, EPS, outcomes, specs
from allnorm.verify.case import Case, Results, with_padding
from allnorm.verify.context import Check, Context, Recorder
from allnorm.verify.corners import CORNERS
from allnorm.verify.slices import sharded_norm
from allnorm.verify.streams import hyper_connection, stream_input

HIDDEN_SIZES = (2880, 2944, 5760, 120, 4096, 7168, 8192, 16384, 1001)
TOKENS = (0, 1, 2, 3, 16, 17, 64, 129, 257, 1024)
_SAMPLE_ELEMS_CPU = 1 << 20  # largest shape of a random sample on CPU: the reference is slow
_GRAPH_ROUNDS = 6

Normed = tuple[torch.Tensor, torch.Tensor]


def combinations(context: Context, recorder: Recorder) -> None:
    """Checks combinations of dtype, shape, rounding mode and algorithm: all, or a random sample."""
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
    """Returns (dtype, hidden_size, num_tokens) in random order; the first ones cover each value."""
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
    """Checks that the bits of a row do not depend on its batch."""
    for dtype, hidden_size in itertools.product(DTYPES.values(), (2880, 4096)):
        batch = context.batch(67, hidden_size, dtype)
        whole = _reference(context, batch)
        for low, high in ((0, 67), (0, 1), (13, 14), (66, 67), (3, 20), (30, 63)):
            part = batch.map(lambda tensor, lo=low, hi=high: tensor[lo:hi].clone())  # type: ignore[misc]
            expected = [tensor[low:high] for tensor in whole]
            case = f"rows {low}..{high} of 67x{hidden_size}"
            _by_each_algorithm(context, recorder, part, case, expected, whole_rows=67)


def two_communicators(context: Context, recorder: Recorder) -> None:
    """Checks calls that alternate between communicators, with different shapes and algorithms."""
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
    """Checks the fused norm of a batch with each algorithm that can run it.

    `expected` defaults to the reference's results for the batch. With `whole_rows`, the batch is a
    part of a larger one with that many rows, and the algorithms are those that can run the larger
    one.
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


# ---- the table of corners ------------------------------------------------------------------------


def corners(name: str, context: Context, recorder: Recorder) -> None:
    """Runs the corner cases of one check, on this run's islands."""
    for corner in CORNERS.values():
        tested = corner.cpu if context.job.device == "cpu" else corner.gpu
        if corner.check != name or corner.policy or not tested:
            continue
        with contextlib.ExitStack() as closing:
            comm = context.comm
            if corner.workspace_bytes is not None:
                small = allnorm.Communicator(
                    device=comm.device,
                    islands=comm.islands,
                    workspace_bytes=corner.workspace_bytes,
                )
                comm = closing.enter_context(small)
            quantizes = hip.quantizes(context.job.device)
            cases = [case for case in corner.cases if quantizes or case.quant is None]
            for outcome in outcomes(comm, cases):
                recorder.count(f"{outcome.case}: {outcome.wrong}" if outcome.wrong else "")
                recorder.digests.append((recorder.cases - 1, torch.tensor(outcome.digest)))


# ---- CUDA graphs ---------------------------------------------------------------------------------


def _compare(
    recorder: Recorder,
    case: str,
    spec: Quant | None,
    got: Results,
    expected: Results,
    digest: bool = True,
) -> None:
    """Compares results by name; scales include their padding rows."""
    parts, wanted = (
        [with_padding(part, spec) if name == "scale" else part for name, part in results.items()]
        for results in (got, {name: expected[name] for name in got})
    )
    recorder.compare(case, parts, wanted, list(got), digest=digest)


def graph_replay(context: Context, recorder: Recorder) -> None:
    """Checks CUDA graphs replayed with new inputs, in random order, with eager calls in between."""
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
    """Returns a graph with one call per algorithm, its inputs, and its results by algorithm."""
    static = context.batch(num_tokens, hidden_size, torch.bfloat16)
    algorithms = context.algorithms(num_tokens, hidden_size, torch.bfloat16)
    if context.job.shared_gpus:
        algorithms.remove("unfused")  # gloo copies to the host, which cannot be captured
    for algorithm in algorithms:
        context.run(static, algorithm=algorithm)
    with capture() as graph:
        results = {a: context.run(static, algorithm=a) for a in algorithms}
    return graph, static, results


def quantized_graph_replay(context: Context, recorder: Recorder) -> None:
    """Checks a graph of all calls except plain norms, with new inputs and a new static scale."""
    comm = context.comm
    static = context.batch(35, 2944, torch.bfloat16)
    cases = [Case((35, 2944), **change) for change in CHANGES]
    cases += [
        Case((35, 2944), quant=spec, sharded=sharded)
        for spec in specs(2944, comm.device)
        for sharded in (False, True)
    ]
    per_tensor = cases[-1].quant
    assert isinstance(per_tensor, allnorm.Fp8PerTensor)

    def calls() -> list[Results]:
        x = static.xs[comm.rank]
        return [case.issue(comm, x, static.residual, static.weight) for case in cases]

    calls()
    with capture() as graph:
        results = calls()
    for turn in range(_GRAPH_ROUNDS):
        batch = context.batch(35, 2944, torch.bfloat16)
        static.copy_(batch)
        per_tensor.scale.fill_(0.01 * (turn + 1))
        graph.replay()
        reduced = context.reduce(batch.xs)
        for case, got in zip(cases, results, strict=True):
            expected = case.expected_of(reduced, batch.residual, batch.weight)
            _compare(recorder, f"replay {turn}, {case}", case.quant, got, expected)


_OF_THE_TABLE = (
    *("special values", "sentinel patterns", "options", "in place", "strided rows", "chunks"),
    *("quantization", "quantized special values", "sharded residual", "post norms and experts"),
)
CHECKS: dict[str, Check] = {
    "every combination": combinations,
    "batch invariance": batch_invariance,
    **{name: functools.partial(corners, name) for name in _OF_THE_TABLE},
    "rows over ranks": sharded_norm,
    "residual streams": hyper_connection,
    "input from streams": stream_input,
    "two communicators": two_communicators,
}
GPU_CHECKS: dict[str, Check] = {
    "graph replay": graph_replay,
    "quantized graph replay": quantized_graph_replay,
}
