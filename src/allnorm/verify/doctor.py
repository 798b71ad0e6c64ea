"""A quick check of one call's results, and of how long calls take."""

from __future__ import annotations

import time
from typing import Any

import torch

import allnorm
from allnorm import reference
from allnorm.core import hip
from allnorm.testing import (
    Timing,
    agree,
    gather,
    make_batch,
    max_over_ranks,
    report,
    same_bits,
    start_together,
    time_cpu,
    time_cuda_graph,
)

PLAN_SHAPES = ((1, 4096), (16, 4096), (128, 2880), (1024, 8192), (8192, 8192), (16, 1001))
BANDWIDTH_BYTES = 64 << 20
_ROW_BYTES_OF_CLUSTERS = 64 << 10  # max_row_bytes() in csrc/gpu/launch.h
_DTYPE = torch.bfloat16
_EPS = 1e-5


def run(rank: int, world_size: int, device_type: str) -> dict[str, Any]:
    """Creates a communicator, checks one call and times three others. Collective.

    Returns:
        A dict, equal on every rank: `create_s`, `error` ("" if the call was right), `old_code` (the
        GPU has clusters of blocks, but the loaded kernels do not support them), `islands` (the
        ranks of each), `plans` (shape, algorithm, reason, source, launches), and the medians
        `fused_us` (1x4096), `flag_us` (the smallest all_reduce) and `large_us` (an all_reduce of
        BANDWIDTH_BYTES).
    """
    report({"text": "creating a communicator", "done": 0, "total": 4})
    start_together()
    began = time.perf_counter()
    with allnorm.Communicator(device=device_type) as comm:
        took = time.perf_counter() - began
        found: dict[str, Any] = {
            "create_s": max(gather(took)),
            "error": agree(_check(comm)),
            "islands": [list(island) for island in comm.islands],
            "old_code": any(gather(has_old_code(comm))),
            "plans": [_plan(comm, *shape) for shape in PLAN_SHAPES],
        }
        batch = make_batch(1, 4096, _DTYPE, comm.device, world_size, seed=0)
        x = batch.xs[rank]
        smallest = x[:, :8].contiguous()
        large = torch.ones(BANDWIDTH_BYTES // 8192, 4096, dtype=_DTYPE, device=comm.device)
        calls = {
            "fused_us": lambda: comm.all_reduce_add_rms_norm(x, batch.residual, batch.weight, _EPS),
            "flag_us": lambda: comm.all_reduce(smallest),
            "large_us": lambda: comm.all_reduce(large),
        }
        for index, (name, call) in enumerate(calls.items()):
            report({"text": "timing", "done": index + 1, "total": 4})
            tokens = large.shape[0] if name == "large_us" else 1
            found[name] = max_over_ranks(_time(call, device_type, tokens)).p50_us
        comm.check()
    return found


def _time(call: Any, device_type: str, num_tokens: int) -> Timing:
    if device_type == "cuda":
        return time_cuda_graph([call], num_tokens)
    return time_cpu(call, min_calls=5, max_calls=2000)


def _check(comm: allnorm.Communicator) -> str:
    """Compares one call with the reference; returns "" if they are bit-identical."""
    batch = make_batch(3, 4096, _DTYPE, comm.device, comm.world_size, seed=1)
    got = comm.all_reduce_add_rms_norm(batch.xs[comm.rank], batch.residual, batch.weight, _EPS)
    expected = reference.all_reduce_add_rms_norm(
        batch.xs, batch.residual, batch.weight, _EPS, islands=comm.islands
    )
    right = all(same_bits(a, b) for a, b in zip(got, expected, strict=True))
    return "" if right else "a 3x4096 call differs from the reference"


def has_old_code(comm: allnorm.Communicator) -> bool:
    """Returns whether a GPU with block clusters runs kernels compiled for an older GPU.

    The driver translates these kernels, but they launch without clusters, which limits the row
    width.
    """
    if comm.device.type != "cuda" or hip.is_used():
        return False
    if torch.cuda.get_device_capability(comm.device) < (9, 0):
        return False
    return (comm.traits.max_row_bytes or 0) < _ROW_BYTES_OF_CLUSTERS


def _plan(comm: allnorm.Communicator, num_tokens: int, hidden_size: int) -> dict[str, Any]:
    plan = comm.plan(num_tokens, hidden_size, _DTYPE)
    return {
        "shape": f"{num_tokens}x{hidden_size}",
        "algorithm": plan.algorithm,
        "reason": plan.reason,
        "source": plan.source,
        "launches": plan.num_chunks,
    }
