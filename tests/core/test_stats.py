"""Tests `Communicator.stats()`: calls by algorithm, reasons for unfused calls, the failure."""

from __future__ import annotations

import torch
import torch.distributed as dist
from rank_helpers import Case, comm, message_of, on

import allnorm
from allnorm.testing.rank import device

CASE = Case((4, 512))


@on(cpu=(2, 3), gpu=(2,))
def test_calls_are_counted(rank: int, world_size: int) -> None:
    with allnorm.Communicator(device=device(), workspace_bytes=1 << 20) as c:
        nothing = allnorm.Stats({"one_shot": 0, "two_shot": 0, "unfused": 0}, {}, None)
        assert c.stats() == nothing
        for _ in range(5):
            CASE.but(algorithm="one_shot").check(c)
        for sharded in (False, True):
            for _ in range(3):
                CASE.but(algorithm="two_shot", sharded=sharded).check(c)
        c.all_gather_rows(CASE.own_rows(c, CASE.x(rank)), 4)
        for _ in range(2):
            CASE.but(algorithm="unfused").check(c)
        found = c.stats()
        assert found.calls == {"one_shot": 5, "two_shot": 7, "unfused": 2}, found
        ((reason, unfused),) = found.unfused.items()
        assert (unfused, found.fault) == (2, None)
        assert "caller" in reason or "asked" in reason, reason
        # A call with too many rows for the workspace counts one launch per chunk.
        large = CASE.but(shape=(2000, 512), algorithm="one_shot")
        chunks = c.plan(2000, 512, large.dtype, algorithm="one_shot").num_chunks
        assert chunks > 1
        large.check(c)
        assert c.stats().calls["one_shot"] == 5 + chunks
    text = message_of(allnorm.CommunicatorClosedError, c.stats)
    assert "is closed" in text


@on(cpu=(1,), gpu=(1,))
def test_one_rank(rank: int, world_size: int) -> None:
    c = comm()
    before = c.stats()
    CASE.check(c)
    assert c.stats() == before


@on(gpu=(2,))
def test_replays_are_counted(rank: int, world_size: int) -> None:
    c = allnorm.Communicator(device=device())
    x, arguments = CASE.x(rank), CASE.but(algorithm="one_shot").call_arguments(c)
    c.all_reduce_add_rms_norm(x, **arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        c.all_reduce_add_rms_norm(x, **arguments)
        inside = c.stats().calls["one_shot"]
    assert inside == 1, "a captured call has not run"
    for _ in range(7):
        graph.replay()
    torch.cuda.synchronize()
    assert c.stats().calls["one_shot"] == 8
    c.close()


@on(cpu=(2,))
def test_faults_are_reported(rank: int, world_size: int) -> None:
    with allnorm.Communicator(device=device(), timeout=1.5) as c:
        if rank == 0:
            text = message_of(allnorm.PeerTimeoutError, lambda: c.all_reduce(CASE.x(rank)))
            assert "rank 0 timed out after 1.5 s" in text
            assert c.stats().fault == text
        dist.barrier()
