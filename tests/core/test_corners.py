"""Calls that few programs make, and all of them may."""

from __future__ import annotations

import datetime

import numpy as np
import pytest
import torch
from rank_helpers import ALGORITHMS, comm, device, on

import allnorm
from allnorm import reference
from allnorm.testing import RankPool, assert_same_bits

HIDDEN = 72


def strided(kind: str) -> torch.Tensor:
    """Memory of shape [2, 3, 72] with gaps between its rows."""
    if kind == "columns of a wider tensor":
        return torch.zeros(2, 3, 80, dtype=torch.bfloat16, device=device())[..., :HIDDEN]
    return torch.zeros(3, 2, HIDDEN, dtype=torch.bfloat16, device=device()).transpose(0, 1)


def in_place(rank: int, world_size: int, kind: str, algorithm: str) -> None:
    """`out` is x and `residual_out` is the residual, of any strides that rows can have."""
    c = comm()
    torch.manual_seed(5)
    batch = [torch.randn(2, 3, HIDDEN).bfloat16() for _ in range(world_size + 1)]
    weight = torch.ones(HIDDEN, dtype=torch.bfloat16)
    normed, residual_out = reference.all_reduce_add_rms_norm(batch[:-1], batch[-1], weight, 1e-6)
    for _ in range(3):  # repeated calls are made by other code
        x, residual = strided(kind).copy_(batch[rank]), strided(kind).copy_(batch[-1])
        results = c.all_reduce_add_rms_norm(
            *(x, residual, weight.to(device()), 1e-6),
            algorithm=algorithm,
            out=x,
            residual_out=residual,
        )
        assert results[0] is x
        assert results[1] is residual
        assert_same_bits(x.cpu(), normed, "normed")
        assert_same_bits(residual.cpu(), residual_out, "residual_out")
    summed = strided(kind).copy_(batch[rank])
    c.all_reduce(summed, algorithm=algorithm, out=summed)
    assert_same_bits(summed.cpu(), reference.all_reduce(batch[:-1]), "reduced")


@on(cpu=(1, 2, 3), gpu=(1, 2))
@pytest.mark.parametrize("kind", ["columns of a wider tensor", "transposed"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_in_place_with_strided_rows_of_several_dimensions(
    pool: RankPool, kind: str, algorithm: str
) -> None:
    pool.run(in_place, kind, algorithm)


def overlapping(rank: int, world_size: int) -> None:
    x = torch.zeros(2, 3, HIDDEN, dtype=torch.bfloat16, device=device())
    memory = torch.zeros(4, HIDDEN, dtype=x.dtype, device=device())
    out = memory.as_strided((2, 3, HIDDEN), (HIDDEN, HIDDEN, 1))  # row (0, 1) is row (1, 0)
    with pytest.raises(ValueError, match="distinct, contiguous rows"):
        comm().all_reduce(x, out=out)
    with pytest.raises(ValueError, match="distinct, contiguous rows"):
        comm().all_reduce(x, out=memory[:1].expand(6, HIDDEN).view(2, 3, HIDDEN))


@on(cpu=(2,), gpu=(2,))
def test_rows_that_overlap_are_refused(pool: RankPool) -> None:
    pool.run(overlapping)


def closed(rank: int, world_size: int) -> None:
    c = allnorm.Communicator(device=device())
    c.close()
    for call in (
        lambda: c.plan(1, 64),
        lambda: c.row_shard(4),
        lambda: c.__enter__(),
        lambda: c.check(),
        lambda: c.all_reduce(torch.zeros(1, 64, device=device())),
    ):
        with pytest.raises(allnorm.CommunicatorClosedError):
            call()


def numbers(rank: int, world_size: int) -> None:
    c = comm()
    with pytest.raises(allnorm.UnsupportedError, match="hidden_size 1048576"):
        c.plan(1, 1 << 20)
    x = torch.ones(2, HIDDEN, dtype=torch.bfloat16, device=device())
    weight = torch.ones(HIDDEN, dtype=torch.bfloat16, device=device())
    expected = c.all_reduce_add_rms_norm(x, None, weight, 1e-6)
    for eps in (np.float32(1e-6), np.float64(1e-6)):
        found = c.all_reduce_add_rms_norm(x, None, weight, eps)  # type: ignore[arg-type]
        assert_same_bits(found[0], expected[0], "normed")
    with pytest.raises(ValueError, match="device='nowhere'"):
        allnorm.Communicator(device="nowhere")
    with allnorm.Communicator(device=device(), timeout=datetime.timedelta.max) as patient:
        assert_same_bits(patient.all_reduce(x), x * world_size, "reduced")


@on(cpu=(2,), gpu=(2,))
@pytest.mark.parametrize("what", [closed, numbers], ids=lambda what: what.__name__)
def test_arguments_and_ends(pool: RankPool, what: object) -> None:
    pool.run(what)  # type: ignore[arg-type]


def test_the_reference_takes_what_calls_take() -> None:
    xs = [torch.randn(4, 8) for _ in range(2)]
    out = torch.zeros(4, 8)
    assert reference.all_reduce(xs, algorithm="one_shot", out=out) is out
    assert_same_bits(out, reference.all_reduce(xs), "reduced")
    shards = [out[:2], out[2:]]
    whole = torch.zeros(4, 8)
    assert reference.all_gather_rows(shards, 4, algorithm="two_shot", out=whole) is whole
    assert_same_bits(whole, out, "rows")
    for call in (
        lambda: reference.all_reduce(xs, algorithm="ring"),
        lambda: reference.all_gather_rows(shards, 4, algorithm="ring"),
    ):
        with pytest.raises(ValueError, match="ring"):
            call()
