"""The checks and what runs them, in ranks."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import allnorm
from allnorm import reference
from allnorm.names import NUMERICS, REQUESTS
from allnorm.testing import (
    DTYPES,
    Batch,
    OnMessage,
    gather,
    make_batch,
    report,
    run_ranks,
    shared_input,
    special_input,
)
from allnorm.testing.rank import device
from allnorm.verify.record import Recorder

HIDDEN_SIZES = (2880, 2944, 5760, 120, 4096, 7168, 8192, 16384, 1001)
TOKENS = (0, 1, 2, 3, 16, 17, 64, 129, 257, 1024)
EPS = 1e-5
_SECONDS = 12 * 3600.0  # that a run may take
_SAMPLE_ELEMS_CPU = 1 << 20  # largest shape of a random sample there: the reference is slow


@dataclass(frozen=True)
class Job:
    """What to check; the same on every rank."""

    device: str  # "cuda" or "cpu"
    seed: int  # of the sample, its order and all inputs
    full: bool  # check every combination instead of a random sample
    seconds: float  # how long the sample of the combinations may take
    stress: int  # calls of the ordering soak; 0 for none
    # (num_tokens, hidden_size) to run `repeat` times each, and nothing else.
    shapes: tuple[tuple[int, int], ...] = ()
    repeat: int = 0  # how often
    # Words; of all checks only those run whose names hold one of them. Empty: all.
    only: tuple[str, ...] = ()
    shared_gpus: bool = False  # several ranks are on one GPU, where gloo stands for NCCL


@dataclass(frozen=True)
class Context:
    """What a check works with."""

    comm: allnorm.Communicator  # the communicator under test
    job: Job  # what was asked for
    rng: random.Random  # gives all ranks the same numbers

    def batch(self, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> Batch:
        """New inputs of that shape."""
        seed = self.rng.randrange(1 << 31)
        comm = self.comm
        return make_batch(num_tokens, hidden_size, dtype, comm.device, comm.world_size, seed)

    def special(self, kind: str, shape: tuple[int, int], dtype: torch.dtype) -> Batch:
        """Inputs of one of `testing.SPECIAL_KINDS`."""
        where, ranks = self.comm.device, range(self.comm.world_size)
        return Batch(
            tuple(special_input(kind, shape, dtype, rank, device=where) for rank in ranks),
            shared_input(shape, dtype, "residual", device=where),
            shared_input(shape[1:], dtype, "weight", device=where),
        )

    def algorithms(
        self,
        num_tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
        quant: Any = None,
        residual_sharded: bool = False,
    ) -> list[str]:
        """The algorithms that can run that shape."""
        shape = (num_tokens, hidden_size, dtype, quant, residual_sharded)
        plans = {a: self.comm.plan(*shape, algorithm=a) for a in REQUESTS}
        return [a for a, plan in plans.items() if a in ("auto", plan.algorithm)]

    def run(self, batch: Batch, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The fused call on this rank's part of a batch."""
        x = batch.xs[self.comm.rank]
        return self.comm.all_reduce_add_rms_norm(x, batch.residual, batch.weight, EPS, **options)


Check = Callable[[Context, Recorder], None]


def verify(job: Job, world_size: int, on_message: OnMessage | None = None) -> list[dict[str, Any]]:
    """Starts ranks and runs every check in them; returns the records of `run`.

    `on_message` takes a rank and what it says of its progress: `text`, `done` and `total`.

    Raises:
        RankError: a rank raised, died or was late.
    """
    found: list[dict[str, Any]] = run_ranks(
        run,
        world_size,
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
    with allnorm.Communicator(device=device()) as comm:
        context = Context(comm, job, random.Random(job.seed))
        listed = checks_of(job)
        results = []
        for index, (name, check) in enumerate(listed.items()):
            report({"text": name, "done": index, "total": len(listed)})
            recorder = Recorder(name)
            check(context, recorder)
            comm.check()
            results.append(recorder.finish())
    return results


def checks_of(job: Job) -> dict[str, Check]:
    """The checks of a job by their names, in order."""
    from allnorm.verify import checks, variants
    from allnorm.verify.stress import repeat, soak

    if job.shapes:
        return {"repeated shapes": repeat.repeat_shapes}
    listed = {"every combination": product}
    for module in (checks, variants):
        listed |= module.CHECKS | (module.GPU_CHECKS if job.device == "cuda" else {})
    listed |= {"ordering soak": soak.soak} if job.stress else {}
    words = job.only or ("",)
    return {n: check for n, check in listed.items() if any(word in n for word in words)}


def product(context: Context, recorder: Recorder) -> None:
    """Dtypes, shapes, rounding modes and algorithms against the reference: all or a sample."""
    shapes = _shapes(context)
    began, checked = time.monotonic(), 0
    for name, hidden_size, num_tokens in shapes:
        if not context.job.full and _slowest(began) > context.job.seconds:
            break
        report({"text": recorder.name, "done": checked, "total": len(shapes)})
        _one_shape(context, recorder, name, hidden_size, num_tokens)
        checked += 1
    total = len(DTYPES) * len(HIDDEN_SIZES) * len(TOKENS)
    recorder.note = f"{checked} of {total} shapes" + ("" if checked == total else "; --full: all")


def _one_shape(
    context: Context, recorder: Recorder, name: str, hidden_size: int, num_tokens: int
) -> None:
    dtype = DTYPES[name]
    batch = context.batch(num_tokens, hidden_size, dtype)
    reduced = reference.all_reduce(batch.xs)
    algorithms = context.algorithms(num_tokens, hidden_size, dtype)
    where = f"{num_tokens}x{hidden_size} {name}"
    for algorithm in algorithms:
        got = context.comm.all_reduce(batch.xs[context.comm.rank], algorithm=algorithm)
        recorder.compare(f"all_reduce {where} {algorithm}", [got], [reduced], ["reduced"])
    for numerics in NUMERICS:
        expected = reference.add_rms_norm(
            reduced, batch.residual, batch.weight, EPS, numerics=numerics
        )
        for algorithm in algorithms:
            result = context.run(batch, numerics=numerics, algorithm=algorithm)
            recorder.compare(f"{where} {numerics} {algorithm}", result, expected)


def _shapes(context: Context) -> list[tuple[str, int, int]]:
    """(dtype, hidden_size, num_tokens) in random order; the first ones reach every value once."""
    limit = None if context.job.full or context.job.device == "cuda" else _SAMPLE_ELEMS_CPU
    dtypes, hidden_sizes, tokens = list(DTYPES), list(HIDDEN_SIZES), list(TOKENS)
    for values in (dtypes, hidden_sizes, tokens):
        context.rng.shuffle(values)
    every = [(d, h, t) for d in dtypes for h in hidden_sizes for t in tokens]
    context.rng.shuffle(every)
    first = [
        (dtypes[i % 3], hidden_sizes[i % len(hidden_sizes)], tokens[i % len(tokens)])
        for i in range(max(len(hidden_sizes), len(tokens)))
    ]
    ordered = list(dict.fromkeys([*first, *every]))
    return [s for s in ordered if limit is None or s[1] * s[2] <= limit]


def _slowest(began: float) -> float:
    """The seconds that some rank has used up: the ranks must stop together."""
    return max(gather(time.monotonic() - began))
