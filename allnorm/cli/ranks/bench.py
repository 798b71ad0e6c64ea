"""Times the arms of `allnorm bench` inside one rank."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import allnorm
from allnorm import reference
from allnorm.cli.options import Shape
from allnorm.cli.ranks import baselines
from allnorm.cli.ranks.data import DTYPES, Batch, make_batch
from allnorm.testing import calls_per_graph, report, same_bits
from allnorm.testing.timing import percentile

Arm = Callable[[int], baselines.Result]
"""Runs one call on the inputs of that buffer set."""

NUM_SETS = 2  # rotating buffer sets
_GPU_ROUNDS = 10
_REPLAYS_PER_ROUND = 3
_CPU_ROUNDS = 10
_CPU_CALLS = (5, 1000)  # least and most timed calls of an arm
_CPU_WARM_UP = 2  # beside the checked calls
_EAGER_CALLS = 200


@dataclass(frozen=True)
class Job:
    """What to measure; the same on every rank.

    Attributes:
        shapes: in the order they are measured.
        dtype: name of the dtype of all tensors.
        numerics: rounding mode of the allnorm arms.
        arms: their names.
        device: "cuda" or "cpu".
        seconds: on CPU, roughly how long one arm of one shape is timed.
    """

    shapes: tuple[Shape, ...]
    dtype: str
    numerics: str
    arms: tuple[str, ...]
    device: str
    seconds: float = 0.7


@dataclass
class _Bench:
    """One shape's inputs, references and arms."""

    batches: list[Batch]
    expected: list[baselines.Result]
    scratch: list[torch.Tensor]
    arms: dict[str, Arm]

    def refill(self) -> None:
        """Undoes what the in-place all-reduces of the baselines did to their inputs."""
        rank = dist.get_rank()
        for scratch, batch in zip(self.scratch, self.batches, strict=True):
            scratch.copy_(batch.xs[rank])


def run(rank: int, world_size: int, job: Job) -> list[dict[str, Any]]:
    """Checks, then times every arm at every shape. Collective.

    Returns:
        One record per shape and arm: `shape` (its index), `arm`, `supported` (whether the arm can
        run the shape), `error` ("" if its result was right), `p50_us`, `p90_us`, `p99_us` of this
        rank, and on GPUs `host_us`, what an eager call costs the host.
        An arm that is wrong is not timed: its times are NaN.
    """
    results = []
    with allnorm.Communicator(device=job.device, numerics=job.numerics) as communicator:
        for index, shape in enumerate(job.shapes):
            report({"text": str(shape), "done": index, "total": len(job.shapes)})
            bench = _prepare(communicator, job, shape, seed=index)
            errors = {name: _check(name, bench, shape) for name in bench.arms}
            right = {name: arm for name, arm in bench.arms.items() if not errors[name]}
            measure = _time_cuda if job.device == "cuda" else _time_cpu
            times = measure(bench, right, shape, job)
            for name in job.arms:
                record: dict[str, Any] = {"shape": index, "arm": name, "supported": name in errors}
                record |= {"error": errors.get(name, ""), **_summary(times.get(name, []))}
                if name == "allnorm" and job.device == "cuda" and name in right:
                    record["host_us"] = _eager_host_us(right[name])
                results.append(record)
            del bench, right
        communicator.check()
    return results


def _prepare(comm: allnorm.Communicator, job: Job, shape: Shape, seed: int) -> _Bench:
    dtype, rank = DTYPES[job.dtype], dist.get_rank()
    size = (shape.num_tokens, shape.hidden_size)
    options: dict[str, Any] = {"weight_bias": shape.weight_bias, "numerics": job.numerics}
    batches = [
        make_batch(
            *size, dtype, comm.device, comm.world_size, seed * NUM_SETS + i, shape.weight_bias
        )
        for i in range(NUM_SETS)
    ]
    bench = _Bench(
        batches=batches,
        expected=[
            reference.all_reduce_add_rms_norm(b.xs, b.residual, b.weight, shape.eps, **options)
            for b in batches
        ],
        scratch=[batch.xs[rank].clone() for batch in batches],
        arms={},
    )
    for name in job.arms:
        library, _, variant = name.partition(":" if name.startswith("allnorm") else "+")
        if library == "allnorm":
            algorithm = variant or "auto"
            plan = comm.plan(*size, dtype, algorithm=algorithm)
            if algorithm not in ("auto", plan.algorithm):
                continue
            bench.arms[name] = _fused_arm(comm, batches, shape, algorithm, options)
        else:
            bench.arms[name] = _baseline_arm(bench, shape, variant, job.numerics)
    return bench


def _fused_arm(
    comm: allnorm.Communicator,
    batches: list[Batch],
    shape: Shape,
    algorithm: str,
    options: dict[str, Any],
) -> Arm:
    calls = [(b.xs[comm.rank], b.residual, b.weight, shape.eps) for b in batches]
    fused = comm.all_reduce_add_rms_norm

    def run_set(index: int) -> baselines.Result:
        return fused(*calls[index], algorithm=algorithm, **options)

    return run_set


def _baseline_arm(bench: _Bench, shape: Shape, variant: str, numerics: str) -> Arm:
    norms = [
        baselines.torch_norm(batch, shape.eps, shape.weight_bias)
        if variant == "torch"
        else baselines.local_norm(batch, shape.eps, shape.weight_bias, numerics)
        for batch in bench.batches
    ]

    def run_set(index: int) -> baselines.Result:
        return norms[index](bench.scratch[index])

    return run_set


def _check(name: str, bench: _Bench, shape: Shape) -> str:
    """Runs an arm once on every buffer set; all ranks get the same answer.

    Returns:
        "" if the results were right on every rank, else the first rank's complaint.
    """
    bench.refill()
    error = ""
    for index, (batch, expected) in enumerate(zip(bench.batches, bench.expected, strict=True)):
        got = bench.arms[name](index)
        if name.startswith("allnorm"):
            error = error or bit_error(got, expected)
        else:
            error = error or baselines.describe_error(
                got, expected, batch, shape.eps, shape.weight_bias
            )
    return agree(error)


def bit_error(got: baselines.Result, expected: baselines.Result) -> str:
    """Says which tensor has other bits than the reference's; empty if none."""
    for name, value, wanted in zip(("normed", "residual_out"), got, expected, strict=True):
        if not same_bits(value, wanted):
            return f"{name} differs from the reference"
    return ""


def agree(error: str) -> str:
    """The first complaint of any rank, the same on all. Collective."""
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    return next((f"rank {rank}: {text}" for rank, text in enumerate(errors) if text), "")


def _time_cpu(
    bench: _Bench, arms: dict[str, Arm], shape: Shape, job: Job
) -> dict[str, list[float]]:
    """Wall time of every call, arms interleaved in rounds."""
    samples: dict[str, list[float]] = {name: [] for name in arms}
    calls = {name: _calls_that_fit(arm, job.seconds) for name, arm in arms.items()}
    for turn in range(_CPU_ROUNDS):
        for name, arm in arms.items():
            bench.refill()
            dist.all_reduce(torch.zeros(1))  # the ranks start together
            for call, _ in enumerate(range(turn, calls[name], _CPU_ROUNDS)):
                begin = time.perf_counter_ns()
                arm(call % NUM_SETS)
                samples[name].append((time.perf_counter_ns() - begin) / 1e3)
    return samples


def _calls_that_fit(arm: Arm, seconds: float) -> int:
    """Calls that take roughly `seconds`, the same on all ranks."""
    begin = time.perf_counter()
    for call in range(_CPU_WARM_UP):
        arm(call % NUM_SETS)
    slowest = torch.tensor((time.perf_counter() - begin) / _CPU_WARM_UP)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return max(_CPU_CALLS[0], min(_CPU_CALLS[1], int(seconds / max(float(slowest), 1e-6))))


def _time_cuda(
    bench: _Bench, arms: dict[str, Arm], shape: Shape, job: Job
) -> dict[str, list[float]]:
    """Time per call of CUDA graph replays, arms interleaved."""
    calls = calls_per_graph(shape.num_tokens)
    graphs = {name: _capture(arm, calls) for name, arm in arms.items()}
    samples: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(_GPU_ROUNDS):
        for name, graph in graphs.items():
            bench.refill()
            # Untimed: aligns the ranks and keeps the GPU busy while the host launches the next.
            graph.replay()
            events = [torch.cuda.Event(enable_timing=True) for _ in range(_REPLAYS_PER_ROUND + 1)]
            events[0].record()
            for event in events[1:]:
                graph.replay()
                event.record()
            events[-1].synchronize()
            samples[name] += [
                begin.elapsed_time(end) * 1e3 / calls for begin, end in itertools.pairwise(events)
            ]
    return samples


def _capture(arm: Arm, calls: int) -> torch.cuda.CUDAGraph:
    """A graph of `calls` calls over rotating buffer sets; warm afterwards."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    # thread_local: NCCL's watchdog thread queries events, which must not end the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for call in range(calls):
            arm(call % NUM_SETS)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    return graph


def _eager_host_us(arm: Arm) -> float:
    """What an eager call costs the host: median time to enqueue one."""
    torch.cuda.synchronize()
    dist.all_reduce(torch.zeros(1))  # the ranks start together
    samples = []
    for call in range(_EAGER_CALLS):
        begin = time.perf_counter_ns()
        arm(call % NUM_SETS)
        samples.append((time.perf_counter_ns() - begin) / 1e3)
    torch.cuda.synchronize()
    return percentile(sorted(samples), 0.5)


def _summary(samples: list[float]) -> dict[str, float]:
    ordered = sorted(samples) or [math.nan]
    return {f"p{percent}_us": percentile(ordered, percent / 100) for percent in (50, 90, 99)}
