"""What must hold beside the plain bits: invariance, special values, in-place, strides, graphs."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import allnorm
from allnorm import reference
from allnorm.names import NUMERICS, REQUESTS
from allnorm.testing import DTYPES, SPECIAL_KINDS, Batch, capture, sentinel_input
from allnorm.verify.record import Recorder
from allnorm.verify.run import EPS, Check, Context

Result = tuple[torch.Tensor, torch.Tensor]

_GRAPH_ROUNDS = 6


def batch_invariance(context: Context, recorder: Recorder) -> None:
    """A row's bits do not depend on the batch it is in."""
    for name, dtype in DTYPES.items():
        for hidden_size in (2880, 4096):
            batch = context.batch(67, hidden_size, dtype)
            whole = _reference(batch)
            for algorithm in context.algorithms(67, hidden_size, dtype):
                for low, high in ((0, 67), (0, 1), (13, 14), (66, 67), (3, 20), (30, 63)):
                    rows = slice(low, high)
                    part = batch.map(lambda tensor, rows=rows: tensor[rows].clone())  # type: ignore[misc]
                    recorder.compare(
                        f"rows {low}..{high} of 67x{hidden_size} {name} {algorithm}",
                        context.run(part, algorithm=algorithm),
                        [tensor[rows] for tensor in whole],
                    )


def special_values(context: Context, recorder: Recorder) -> None:
    """Zeros of both signs, denormals, overflow, NaN and infinities go through as IEEE says."""
    for name, dtype in DTYPES.items():
        for kind in SPECIAL_KINDS:
            batch = context.special(kind, (17, 2880), dtype)
            expected = _reference(batch)
            for algorithm in context.algorithms(17, 2880, dtype):
                got = context.run(batch, algorithm=algorithm)
                recorder.compare(f"{kind} {name} {algorithm}", got, expected, digest=False)


def sentinels(context: Context, recorder: Recorder) -> None:
    """Every pattern that some transport could use as its mark arrives as ordinary data."""
    device = context.comm.device
    for name, dtype in DTYPES.items():
        for num_tokens, finite in ((1, True), (16, True), (16, False), (129, True)):
            shape = (num_tokens, 4096)
            batch = Batch(
                tuple(
                    sentinel_input(shape, dtype, r, finite=finite, device=device)
                    for r in range(context.comm.world_size)
                ),
                torch.full(shape, -0.0, dtype=dtype, device=device),
                torch.ones(shape[1], dtype=dtype, device=device),
            )
            expected = _reference(batch)
            for algorithm in context.algorithms(*shape, dtype):
                case = f"{num_tokens}x4096 {name} {algorithm} {'finite' if finite else 'any'}"
                got = context.run(batch, algorithm=algorithm)
                recorder.compare(case, got, expected, digest=False)


def options(context: Context, recorder: Recorder) -> None:
    """No residual, a float32 weight, a weight bias, more dimensions; in every rounding mode."""
    for name, dtype in DTYPES.items():
        batch = context.batch(12, 5760, dtype)
        weights = (batch.weight, batch.weight.float())
        for variant in itertools.product((batch.residual, None), weights, (0.0, 1.0), NUMERICS):
            _one_option(context, recorder, batch, *variant)
        # More dimensions than two.
        folded = batch.map(lambda rows: rows.view(3, 2, 2, -1))
        expected = [part.view(3, 2, 2, -1) for part in _reference(batch)]
        recorder.compare(f"[3, 2, 2, 5760] {name}", context.run(folded), expected)


def _one_option(
    context: Context,
    recorder: Recorder,
    batch: Batch,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: float,
    numerics: str,
) -> None:
    comm, (num_tokens, hidden_size), dtype = context.comm, batch.residual.shape, weight.dtype
    call = (residual, weight, EPS)
    options: dict[str, Any] = {"weight_bias": bias, "numerics": numerics}
    expected = reference.all_reduce_add_rms_norm(batch.xs, *call, **options)
    for algorithm in context.algorithms(num_tokens, hidden_size, batch.residual.dtype):
        x = batch.xs[comm.rank]
        got = comm.all_reduce_add_rms_norm(x, *call, algorithm=algorithm, **options)
        case = (
            f"{batch.residual.dtype}, residual {residual is not None}, weight {dtype}, "
            f"weight_bias {bias}, {numerics} {algorithm}"
        )
        recorder.compare(case, got, expected)


def in_place(context: Context, recorder: Recorder) -> None:
    """Results written over `x` and `residual`, and results written to memory of the caller."""
    comm = context.comm
    for name, dtype in DTYPES.items():
        for num_tokens in (1, 16, 257):
            batch = context.batch(num_tokens, 4096, dtype)
            expected = _reference(batch)
            reduced = reference.all_reduce(batch.xs)
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
    for name, dtype in DTYPES.items():
        for num_tokens, hidden_size in ((5, 2880), (64, 4096), (129, 1001)):
            batch = context.batch(num_tokens, hidden_size, dtype)
            apart = replace(batch.map(partial(_apart, gap=24)), residual=_apart(batch.residual, 8))
            expected = _reference(batch)
            for algorithm in context.algorithms(num_tokens, hidden_size, dtype):
                got = context.run(apart, algorithm=algorithm)
                recorder.compare(f"{num_tokens}x{hidden_size} {name} {algorithm}", got, expected)


def two_communicators(context: Context, recorder: Recorder) -> None:
    """Calls on two communicators in turn, of other shapes and algorithms."""
    with allnorm.Communicator(device=context.comm.device, numerics="vllm") as other:
        for turn in range(24):
            name = context.rng.choice(list(DTYPES))
            shape = (context.rng.choice((1, 3, 16, 65)), context.rng.choice((2880, 4096)))
            batch = context.batch(*shape, DTYPES[name])
            algorithm = context.rng.choice(REQUESTS)
            if algorithm not in context.algorithms(*shape, DTYPES[name]):
                algorithm = "auto"
            got = [
                replace(context, comm=comm).run(batch, algorithm=algorithm)
                for comm in (context.comm, other)
            ]
            for result, numerics in zip(got, ("rounded", "vllm"), strict=True):
                case = f"turn {turn} {shape[0]}x{shape[1]} {name} {numerics} {algorithm}"
                recorder.compare(case, result, _reference(batch, numerics))
        other.check()


def graph_replay(context: Context, recorder: Recorder) -> None:
    """CUDA graphs replayed with new inputs, in random order, with eager calls between."""
    shapes = [(1, 4096), (16, 2880), (130, 8192)]
    recorder.note = "not unfused: gloo" if context.job.shared_gpus else ""
    graphs = [_capture(context, *shape) for shape in shapes]
    for turn in range(_GRAPH_ROUNDS):
        order = list(range(len(graphs)))
        context.rng.shuffle(order)
        for which in order:
            graph, static, results = graphs[which]
            batch = context.batch(*shapes[which], torch.bfloat16)
            static.copy_(batch)
            graph.replay()
            eager = context.batch(7, 4096, torch.bfloat16)
            recorder.compare(f"eager, turn {turn}", context.run(eager), _reference(eager))
            expected = _reference(batch)
            for algorithm, result in results.items():
                case = f"{shapes[which][0]}x{shapes[which][1]} {algorithm}, turn {turn}"
                recorder.compare(f"replay of {case}", result, expected)


def _capture(
    context: Context, num_tokens: int, hidden_size: int
) -> tuple[torch.cuda.CUDAGraph, Batch, dict[str, Result]]:
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


def _reference(batch: Batch, numerics: str = "rounded") -> Result:
    return reference.all_reduce_add_rms_norm(
        batch.xs, batch.residual, batch.weight, EPS, numerics=numerics
    )


def _apart(x: torch.Tensor, gap: int) -> torch.Tensor:
    """The same rows with `gap` other elements between them."""
    wide = torch.full((x.shape[0], x.shape[1] + gap), 7.0, dtype=x.dtype, device=x.device)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


CHECKS: dict[str, Check] = {
    "batch invariance": batch_invariance,
    "special values": special_values,
    "sentinel patterns": sentinels,
    "options": options,
    "in place": in_place,
    "strided rows": strided,
    "two communicators": two_communicators,
}
GPU_CHECKS: dict[str, Check] = {"graph replay": graph_replay}
