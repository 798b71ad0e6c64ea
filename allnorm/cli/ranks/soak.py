"""The ordering soak: would a byte of a wrong peer, an older call or a later one ever be seen?

Payloads are small integers that depend on rank, call and position, so every sum is exact and the
right answer is computed on the device. Calls come in bursts without host synchronisation; shapes,
dtypes, ops and algorithms change from call to call; every rank waits at its own random times, on
the host and, on GPUs, inside the stream.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import torch

import allnorm
from allnorm.cli.ranks.data import DTYPES
from allnorm.cli.ranks.record import Recorder
from allnorm.cli.ranks.verify import ALGORITHMS, EPS, NUMERICS, Context
from allnorm.testing import report

BURST = 64  # calls between two looks at the results
_TOKENS = {"cuda": (1, 2, 3, 8, 17, 64, 130, 257), "cpu": (1, 2, 3, 8, 17, 40)}
_HIDDEN_SIZES = (120, 2880, 4096, 7168)
_MODULUS = 29  # the sum of 8 ranks' values stays below 256, exact in bfloat16


@dataclass
class _Call:
    """One call of a burst, prepared before the burst starts.

    Attributes:
        x: this rank's payload.
        total: the sum over all ranks, exact.
        residual: small integers; None for a plain all_reduce.
        numerics: rounding mode.
        algorithm: how it runs.
        result: normed and residual_out, or the reduced sum.
    """

    x: torch.Tensor
    total: torch.Tensor
    residual: torch.Tensor | None
    numerics: str
    algorithm: str
    result: tuple[torch.Tensor, ...] = ()


def soak(context: Context, recorder: Recorder) -> None:
    """Runs `job.stress` calls in bursts and counts wrong elements on the device."""
    comm = context.comm
    delays = random.Random(context.job.seed * 1000 + comm.rank)
    weights = {
        (h, d): torch.ones(h, dtype=d, device=comm.device)
        for h in _HIDDEN_SIZES
        for d in DTYPES.values()
    }
    bursts = -(-context.job.stress // BURST)
    for burst in range(bursts):
        report({"text": recorder.name, "done": burst * BURST, "total": bursts * BURST})
        calls = [_prepare(context, burst * BURST + i) for i in range(BURST)]
        for call in calls:
            _delay(delays, comm.device)
            _issue(comm, call, weights)
        wrong = torch.stack([_count_wrong(call, weights) for call in calls])
        for index, count in enumerate(wrong.tolist()):
            call = calls[index]
            recorder.count(
                f"call {burst * BURST + index}, {tuple(call.x.shape)} {call.x.dtype} "
                f"{call.algorithm}: {count} elements wrong"
                if count
                else ""
            )
    recorder.note = f"bursts of {BURST} calls without host synchronisation"


def _prepare(context: Context, number: int) -> _Call:
    comm, rng = context.comm, context.rng
    dtype = DTYPES[rng.choice(list(DTYPES))]
    shape = (rng.choice(_TOKENS[context.job.device]), rng.choice(_HIDDEN_SIZES))
    algorithm = rng.choice(ALGORITHMS)
    if algorithm not in context.algorithms(*shape, dtype):
        algorithm = "auto"
    numerics, plain = rng.choice(NUMERICS), rng.random() < 0.2
    index = torch.arange(shape[0] * shape[1], device=comm.device).view(shape)

    def payload(rank: int) -> torch.Tensor:
        return (index * (3 + 2 * rank) + number * 11 + rank * 5) % _MODULUS - _MODULUS // 2

    total = sum((payload(rank) for rank in range(comm.world_size)), torch.zeros_like(index))
    residual = None if plain else ((index + number) % 7).to(dtype)
    return _Call(payload(comm.rank).to(dtype), total.to(dtype), residual, numerics, algorithm)


def _issue(
    comm: allnorm.Communicator,
    call: _Call,
    weights: dict[tuple[int, torch.dtype], torch.Tensor],
) -> None:
    if call.residual is None:
        call.result = (comm.all_reduce(call.x, algorithm=call.algorithm),)
        return
    call.result = comm.all_reduce_add_rms_norm(
        call.x,
        call.residual,
        weights[call.x.shape[-1], call.x.dtype],
        EPS,
        numerics=call.numerics,
        algorithm=call.algorithm,
    )


def _count_wrong(call: _Call, weights: dict[tuple[int, torch.dtype], torch.Tensor]) -> torch.Tensor:
    """How many elements are wrong, on the device; the local kernel says what the norm must be."""
    expected: tuple[torch.Tensor, ...] = (call.total,)
    if call.residual is not None:
        weight = weights[call.x.shape[-1], call.x.dtype]
        expected = allnorm.add_rms_norm(
            call.total, call.residual, weight, EPS, numerics=call.numerics
        )
    pairs = zip(call.result, expected, strict=True)
    return torch.stack([(got != wanted).sum() for got, wanted in pairs]).sum()


def _delay(delays: random.Random, device: torch.device) -> None:
    """Waits now and then: this rank's host, or its stream."""
    chance = delays.random()
    if chance < 0.03:
        time.sleep(delays.random() * 2e-3)
    elif chance < 0.10 and device.type == "cuda":
        torch.cuda._sleep(delays.randrange(200_000))
