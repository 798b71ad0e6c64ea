"""Starts ranks and runs the checks on them."""

from __future__ import annotations

import random
from typing import Any

import allnorm
from allnorm import islands
from allnorm.core import hip
from allnorm.testing import OnMessage, report, run_ranks
from allnorm.testing.rank import device
from allnorm.verify import checks, soak, threads
from allnorm.verify.context import Check, Context, Job, Recorder

_SECONDS = 12 * 3600.0  # time limit of a run


def verify(job: Job, world_size: int, on_message: OnMessage | None = None) -> list[dict[str, Any]]:
    """Starts ranks and runs every check in them; returns the records of `run`.

    `on_message` takes a rank and its progress: `text`, `done` and `total`.

    Raises:
        RankError: a rank raised an error, died or timed out.
    """
    found: list[dict[str, Any]] = run_ranks(
        *(run, world_size),
        device=job.device,
        args=(job,),
        timeout=_SECONDS,
        on_message=on_message,
        share_gpus=job.shared_gpus,
    )[0]
    return found


def run(rank: int, world_size: int, job: Job) -> list[dict[str, Any]]:
    """Runs every check. Collective.

    Returns:
        One record per check, the same on every rank: `check`, `cases`, `failures`, `seconds`,
        `details` (the first failures) and `note`.
    """
    if job.proves:
        hip.prove()
    with allnorm.Communicator(
        device=device(), islands=islands.of_size(job.island_size, world_size)
    ) as comm:
        context = Context(comm, job, random.Random(job.seed))
        selected = checks_of(job)
        results = []
        for index, (name, check) in enumerate(selected.items()):
            report({"text": name, "done": index, "total": len(selected)})
            recorder = Recorder(name)
            check(context, recorder)
            comm.check()
            results.append(recorder.finish())
    return results


def checks_of(job: Job) -> dict[str, Check]:
    """Returns the checks of a job by name, in order."""
    if job.shapes:
        return {"repeated shapes": soak.repeat_shapes}
    listed = checks.CHECKS | (checks.GPU_CHECKS if job.device == "cuda" else {})
    if not hip.quantizes(job.device):
        listed = {n: check for n, check in listed.items() if "quanti" not in n}
    listed |= {"ordering soak": soak.soak} if job.stress else {}
    listed |= {"thread soak": threads.threads} if job.threads else {}
    words = job.only or ("",)
    return {n: check for n, check in listed.items() if any(word in n for word in words)}


def full_memory_bytes(world_size: int) -> int:
    """Estimates a rank's memory with --full: its largest call and the reference for it.

    Each rank computes the reference of a call in float32, from the inputs of all ranks.
    """
    largest = max(checks.HIDDEN_SIZES) * max(checks.TOKENS)
    return 4 * largest * (2 * world_size + 8) + _PROCESS_BYTES


# torch, the workspaces of the communicators, and the cache of the allocator.
_PROCESS_BYTES = 1 << 30
