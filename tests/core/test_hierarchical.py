"""Tests hierarchical calls over islands on one machine: pieces, hops, plans, refusals, graphs."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_helpers import (
    DTYPES,
    Case,
    Experts,
    comm,
    device,
    dtype_ids,
    message_of,
    on,
    same_on_every_rank,
)

import allnorm
from allnorm.testing import RankPool, assert_same_bits, capture

PAIRS = ((0, 1), (2, 3))


def islands_of(pool: RankPool, size: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(lo, lo + size)) for lo in range(0, pool.world_size, size))


def check_parts(
    rank: int, world_size: int, cases: list[Case], islands: Any, sum_bytes: int
) -> tuple[int, int]:
    """Runs calls in pieces of `sum_bytes`, with two hops between islands where the policy allows.

    Returns:
        The number of pieces in the first case, and how often sums crossed in two hops.
    """
    from allnorm import policy
    from allnorm.core.between import Between

    with mock.patch.multiple(
        policy,
        HIERARCHICAL_SUM_BYTES=sum_bytes,
        HIERARCHICAL_HOP_BYTES=1,
        _OVERLAPPED_SUM_BYTES=sum_bytes,
    ):
        c = comm(islands=islands)
        start = Between.start_parts
        with mock.patch.object(Between, "start_parts", autospec=True, side_effect=start) as starts:
            for case in cases:
                case.check(c)
        pieces = c.plan(*cases[0].shape, cases[0].dtype).num_chunks
    return pieces, starts.call_count


@pytest.mark.sampled(3)
@on(cpu=(4, 6), gpu=(4,))
@pytest.mark.parametrize("dtype", **dtype_ids)
@pytest.mark.parametrize("sum_bytes", [64 << 20, 64 << 10], ids=["whole", "pieces"])
def test_sums_that_cross_in_two_hops(pool: RankPool, dtype: torch.dtype, sum_bytes: int) -> None:
    """Sums cross in two hops between three islands, but not between two. 199 is prime."""
    cases = [
        Case((199, 256), dtype, sharded=sharded, quant=quant, experts=experts, call=call)
        for call, (sharded, quant, experts) in enumerate(
            itertools.product((False, True), (None, allnorm.Fp8PerGroup()), (None, Experts()))
        )
    ]
    cases += [Case((1, 256), dtype), Case((0, 256), dtype)]
    islands = islands_of(pool, 2)
    found = pool.run(check_parts, cases, islands, sum_bytes)
    pieces = 4 if sum_bytes < 1 << 20 else 1
    for number, started in found:
        assert number == pieces
        assert started >= 4 * pieces + 12 if len(islands) > 2 else started == 0


@on(cpu=(2, 3), gpu=(2, 4))
@pytest.mark.parametrize("dtype", **dtype_ids)
def test_rows_of_islands_of_one_rank_in_two_hops(pool: RankPool, dtype: torch.dtype) -> None:
    """Checks that rows cross in two hops if there are three or more islands."""
    cases = [Case((rows, 256), dtype, quant=allnorm.Fp8PerGroup()) for rows in (1, 50)]
    found = pool.run(check_parts, cases, islands_of(pool, 1), 64 << 20)
    assert [started for _, started in found] == [2 * (pool.world_size > 2)] * pool.world_size


@on(cpu=(4,), gpu=(4,))
@pytest.mark.parametrize(
    ("islands", "reason", "owned"),
    [
        (((0, 1, 2), (3,)), "3, 1 ranks", "3, 1 ranks"),
        (((0,), (1,), (2,), (3,)), "", "4 islands of one rank"),
        (((0, 2), (1, 3)), "", "do not follow each other"),
        (((0, 3), (1, 2)), "", "do not follow each other"),
    ],
    ids=str,
)
def test_plans_say_why_islands_run_unfused(
    rank: int, world_size: int, islands: Any, reason: str, owned: str
) -> None:
    """Some groupings run all calls unfused, others only calls with owned rows."""
    c = comm(islands=islands)
    plan = c.plan(5, 256)
    assert plan.algorithm == ("unfused" if reason else "hierarchical"), plan
    assert reason in plan.reason
    assert owned in c.plan(5, 256, residual_sharded=True).reason
    if reason:
        with pytest.raises(allnorm.UnsupportedError, match=f"hierarchical.*{reason}"):
            Case((5, 256), algorithm="hierarchical").run(c)
    for algorithm in ("one_shot", "two_shot"):
        with pytest.raises(allnorm.UnsupportedError, match=f"{algorithm}.*2, 3, 4|islands"):
            Case((5, 256), algorithm=algorithm).run(c)


@on(cpu=(4,))
def test_one_island(rank: int, world_size: int) -> None:
    for islands in ("auto", [[1, 0, 3, 2]]):
        c = comm(islands=islands) if islands == "auto" else allnorm.Communicator(islands=islands)
        assert c.islands == ((0, 1, 2, 3),)
        with pytest.raises(allnorm.UnsupportedError, match=r"hierarchical.*one island"):
            Case(algorithm="hierarchical").run(c)
        Case((5, 256), torch.float32).check(c)


@on(cpu=(4,))
def test_all_ranks_refuse_wrong_islands(rank: int, world_size: int) -> None:
    texts = []
    other = [[0, 1], [2, 3]] if rank else [[0, 2], [1, 3]]
    for islands in ([[0, 1], [2]], [[0, 1], [2, 4]], "pairs", other):
        kinds = (ValueError, TypeError, allnorm.AllnormError)
        texts.append(message_of(kinds, lambda i=islands: allnorm.Communicator(islands=i)))
    missing, absent, word, different = same_on_every_rank(texts)
    assert missing.startswith("ValueError: islands=[[0, 1], [2]]: expected")
    assert absent.startswith("ValueError")
    assert word.startswith("TypeError")
    assert "islands is ((0, 2), (1, 3)) on rank 0, ((0, 1), (2, 3)) on rank 1" in different


@on(cpu=(4,), gpu=(4,))
def test_islands_are_found_from_hosts(rank: int, world_size: int) -> None:
    """Gives the ranks the boot IDs of two machines."""
    name = f"host {rank // 2}"
    with mock.patch("allnorm.core.workspace._host_identity", return_value=name):
        c = allnorm.Communicator(device=device())
        with pytest.raises(ValueError, match=r"ranks \[0, 3\] are on different machines"):
            allnorm.Communicator(device=device(), islands=[[0, 3], [1, 2]])
    Case((6, 256), torch.float32).check(c)
    plan = c.plan(6, 256)
    assert (c.islands, plan.algorithm) == (PAIRS, "hierarchical")
    assert "2 islands of 2 ranks" in plan.reason
    c.close()


@on(cpu=(4,), gpu=(4,))
def test_operators_and_compiled_calls(rank: int, world_size: int) -> None:
    """Checks that torch.ops and torch.compile give the same bits, and compile to one graph."""
    c = comm(islands=PAIRS)
    case = Case((6, 256), torch.float32, algorithm="hierarchical")
    x, residual, weight = case.x(rank), case.residual_tensor(), case.weight()

    def layer(x: torch.Tensor, residual: torch.Tensor) -> Any:
        normed, total = c.all_reduce_add_rms_norm(x, residual, weight, 1e-6)
        return c.all_reduce_add_rms_norm_quant(normed + 1, total, weight, 1e-6)

    compiled = torch.compile(layer, fullgraph=True)
    for got, want in zip(compiled(x, residual), layer(x, residual), strict=True):
        assert (got is None) is (want is None)
        if got is not None:
            assert_same_bits(got, want)
    normed, _ = torch.ops.allnorm.all_reduce_add_rms_norm(
        x, residual, weight, 1e-6, 0.0, "rounded", c.name
    )
    assert_same_bits(normed, case.expected(world_size, c.islands)[0])


def check_graph(c: allnorm.Communicator, case: Case, rank: int) -> None:
    """Captures and replays a call. Returning frees the graph before the next capture."""
    case.check(c)  # loads kernels, which is not possible during a capture
    x, arguments = case.x(rank), case.call_arguments(c)
    with capture() as graph:
        results = case.method(c)(x, **arguments)
    for call in (5, 6):
        new = case.but(call=call)
        x.copy_(new.x(rank))
        if case.residual:
            arguments["residual"].copy_(new.call_arguments(c)["residual"])
        graph.replay()
        new.compare(c, *results)
        case.check(c)


def check_graphs(rank: int, world_size: int, islands: Any) -> None:
    """Replays calls over NCCL with new inputs, with eager calls in between."""
    c = comm(islands=islands)
    cases = [
        Case((rows, 1024), dtype, sharded=sharded, quant=quant, algorithm="hierarchical")
        for rows, (dtype, sharded, quant) in zip(
            (1, 16, 257, 2048, 3, 64),
            itertools.product(DTYPES, (False, True), (None,)),
            strict=True,
        )
    ]
    cases += [case.but(quant=allnorm.Fp8PerGroup()) for case in cases]
    cases += [Case((4096, 1024), torch.bfloat16, algorithm="hierarchical")]  # crosses in two hops
    cases += [case.but(algorithm="unfused") for case in cases]
    for case in cases:
        check_graph(c, case, rank)
    assert c.check() is None


@on(gpu=(2, 4))
@pytest.mark.own_gpus
@pytest.mark.parametrize("size", [1, 2], ids=["alone", "pairs"])
def test_graphs_over_nccl(pool: RankPool, size: int) -> None:
    """Groups two GPUs into two islands, and four GPUs into four islands or two pairs."""
    if pool.world_size // size > 1:
        pool.run(check_graphs, islands_of(pool, size))


def killed_on_gpus(rank: int, world_size: int, islands: Any, graph: bool) -> tuple[str, int]:
    c = allnorm.Communicator(device=device(), islands=islands, timeout=20)
    case = Case((64, 1024), torch.bfloat16)
    case.check(c)
    x = case.x(rank)
    with capture() as captured:
        c.all_reduce(x)
    dist.barrier()
    if rank == world_size - 1:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    deadline = time.monotonic() + 30
    with pytest.raises(allnorm.PeerTimeoutError) as caught:  # noqa: PT012
        while time.monotonic() < deadline:
            captured.replay() if graph else case.run(c)
            torch.cuda.synchronize()
            c.check()
    error = caught.value
    c.close()
    torch.ones(8, device=device()).sum().item()  # the context is usable
    return type(error).__name__, error.peer


@on(gpu=(2, 4))
@pytest.mark.own_gpus
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_a_killed_rank_ends_waits_of_nccl(pool: RankPool, graph: bool) -> None:
    last = pool.world_size - 1
    islands = islands_of(pool, pool.world_size // 2)
    found = pool.run(killed_on_gpus, islands, graph, may_die=[last])
    assert found[:last] == [("PeerDiedError", last)] * last
