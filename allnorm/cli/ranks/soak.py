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
from typing import Any

import torch

import allnorm
from allnorm.cli.ranks.data import DTYPES
from allnorm.cli.ranks.record import Recorder
from allnorm.cli.ranks.variants import specs
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
        quant: how the normed rows are quantised, if they are.
        sharded: whether this rank holds its rows of the residual only, and gathers all afterwards.
        result: what the call returned, a sharded residual gathered.
    """

    x: torch.Tensor
    total: torch.Tensor
    residual: torch.Tensor | None
    numerics: str
    algorithm: str
    quant: Any = None
    sharded: bool = False
    result: tuple[torch.Tensor | None, ...] = ()


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
                f"{call.algorithm} {call.quant or ''}{' sharded' if call.sharded else ''}: {count} "
                "elements wrong"
                if count
                else ""
            )
    recorder.note = f"bursts of {BURST} calls without host synchronisation"


def _prepare(context: Context, number: int) -> _Call:
    comm, rng = context.comm, context.rng
    dtype = DTYPES[rng.choice(list(DTYPES))]
    shape = (rng.choice(_TOKENS[context.job.device]), rng.choice(_HIDDEN_SIZES))
    numerics, plain = rng.choice(NUMERICS), rng.random() < 0.2
    quant = None if rng.random() < 0.5 else rng.choice(specs(shape[1], comm.device))
    sharded = rng.random() < 0.4
    algorithm = rng.choice(ALGORITHMS)
    if algorithm not in context.algorithms(*shape, dtype, quant, sharded):
        algorithm = "auto"
    index = torch.arange(shape[0] * shape[1], device=comm.device).view(shape)

    def payload(rank: int) -> torch.Tensor:
        return (index * (3 + 2 * rank) + number * 11 + rank * 5) % _MODULUS - _MODULUS // 2

    total = sum((payload(rank) for rank in range(comm.world_size)), torch.zeros_like(index))
    total = total.to(dtype)
    x = payload(comm.rank).to(dtype)
    if plain:
        return _Call(x, total, None, numerics, "auto" if sharded else algorithm)
    residual = ((index + number) % 7).to(dtype)
    return _Call(x, total, residual, numerics, algorithm, quant, sharded)


def _issue(
    comm: allnorm.Communicator,
    call: _Call,
    weights: dict[tuple[int, torch.dtype], torch.Tensor],
) -> None:
    if call.residual is None:
        call.result = (comm.all_reduce(call.x, algorithm=call.algorithm),)
        return
    num_tokens, hidden_size = call.x.shape
    lo, hi = comm.row_shard(num_tokens) if call.sharded else (0, num_tokens)
    arguments = (call.x, call.residual[lo:hi], weights[hidden_size, call.x.dtype], EPS)
    options: dict[str, Any] = {
        "numerics": call.numerics,
        "algorithm": call.algorithm,
        "residual_sharded": call.sharded,
    }
    if call.quant is None:
        call.result = comm.all_reduce_add_rms_norm(*arguments, **options)
    else:
        call.result = comm.all_reduce_add_rms_norm_quant(
            *arguments, call.quant, hidden_size % 5 == 0, **options
        )
    if call.sharded:
        position = 1 if call.quant is None else 2
        shard = call.result[position]
        assert shard is not None
        gathered = comm.all_gather_rows(shard, num_tokens)
        call.result = (*call.result[:position], gathered, *call.result[position + 1 :])


def _count_wrong(call: _Call, weights: dict[tuple[int, torch.dtype], torch.Tensor]) -> torch.Tensor:
    """How many elements are wrong, on the device; the local kernel says what the norm must be."""
    expected: tuple[torch.Tensor | None, ...] = (call.total,)
    if call.residual is not None:
        arguments = (call.total, call.residual, weights[call.x.shape[-1], call.x.dtype], EPS)
        if call.quant is None:
            expected = allnorm.add_rms_norm(*arguments, numerics=call.numerics)
        else:
            normed = call.result[3] is not None
            expected = allnorm.add_rms_norm_quant(
                *arguments, call.quant, normed, numerics=call.numerics
            )
    counts = [
        (_comparable(got) != _comparable(wanted)).sum()
        for got, wanted in zip(call.result, expected, strict=True)
        if got is not None and wanted is not None
    ]
    return torch.stack(counts).sum()


def _comparable(part: torch.Tensor) -> torch.Tensor:
    return part.view(torch.uint8) if part.element_size() == 1 else part


def _delay(delays: random.Random, device: torch.device) -> None:
    """Waits now and then: this rank's host, or its stream."""
    chance = delays.random()
    if chance < 0.03:
        time.sleep(delays.random() * 2e-3)
    elif chance < 0.10 and device.type == "cuda":
        torch.cuda._sleep(delays.randrange(200_000))
