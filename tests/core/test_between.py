"""Tests communicators and user collectives that share one process group in multiple threads.

Threads run in a different order on each rank, so a communicator must not depend on any other
traffic in its group.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_helpers import Case, Experts, device, on

import allnorm
from allnorm.core import connection
from allnorm.core.failure import Failure
from allnorm.core.notes import CROSSED, Cause
from allnorm.testing import RankPool, assert_same_bits

PAIRS = ((0, 1), (2, 3))
APART = ((0,), (1,))
CASES = (
    Case((7, 96), torch.float32),
    Case((13, 512), quant=allnorm.Fp8PerGroup(128), return_normed=True),
    Case((5, 200), torch.float16, post_norm=True, scale=0.5),
    Case((9, 384), experts=Experts(shared=True), residual=False),
    Case((11, 256), sharded=True),
)


def in_threads(bodies: Sequence[Callable[[], None]]) -> None:
    """Runs each function in its own thread; raises the first error."""
    errors: list[BaseException] = []

    def run(body: Callable[[], None]) -> None:
        try:
            if device().type == "cuda":
                torch.cuda.set_device(device())
            body()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def check_rows(c: allnorm.Communicator, case: Case) -> None:
    """Compares the result of all_gather_rows with the ranks' rows."""
    tokens = case.shape[0]
    rows = [case.but(sharded=False).x(rank) for rank in range(c.world_size)]
    bounds = [allnorm.reference.row_shard(tokens, c.world_size, q) for q in range(c.world_size)]
    want = torch.cat([part[lo:hi] for part, (lo, hi) in zip(rows, bounds, strict=True)])
    lo, hi = bounds[c.rank]
    assert_same_bits(c.all_gather_rows(rows[c.rank][lo:hi].clone(), tokens), want)


def make_calls(
    c: allnorm.Communicator, algorithms: Sequence[str], number: int, count: int, pauses: Any
) -> None:
    """Makes the same calls for `number` on every rank, but at different times."""
    order = random.Random(f"calls {number}")
    for call in range(count):
        # Since shapes are few, one communicator's rows could be taken for another's.
        case = order.choice(CASES).but(
            call=1000 * (number + 1) + call, algorithm=order.choice(algorithms)
        )
        if order.random() < 0.15:
            check_rows(c, case.but(experts=None, quant=None, algorithm="auto"))
        else:
            case.check(c)
        if pauses.random() < 0.3:
            time.sleep(pauses.random() * 2e-3)


FLAT, MIXED, UNEVEN = ("auto",) * 3, ("auto", APART, APART), ((0, 1, 2), (3,))


@on(cpu=(2,))
@pytest.mark.parametrize(
    ("islands", "algorithms"),
    [
        (islands, names)
        for islands in (FLAT, MIXED)
        for names in (("unfused",), ("unfused", "auto"))
    ],
    ids=["flat-all", "flat-some", "apart-all", "apart-some"],
)
def test_threads_with_a_communicator_each(
    rank: int, world_size: int, islands: Sequence[Any], algorithms: Sequence[str]
) -> None:
    run_in_threads(rank, islands, algorithms, 60)


@on(cpu=(4,))
def test_threads_with_communicators_of_different_islands(rank: int, world_size: int) -> None:
    run_in_threads(rank, (PAIRS, UNEVEN, PAIRS, "auto"), ("auto", "unfused"), 25)


def run_in_threads(
    rank: int, islands: Sequence[Any], algorithms: Sequence[str], count: int
) -> None:
    """Creates a communicator per entry of `islands`, each called from its own thread."""
    comms = [allnorm.Communicator(device=device(), islands=part, timeout=120) for part in islands]
    pauses = [random.Random(f"pauses {rank} {number}") for number in range(len(comms))]
    in_threads(
        [
            functools.partial(make_calls, c, algorithms, number, count, pauses[number])
            for number, c in enumerate(comms)
        ]
    )
    for c in comms:
        c.check()
        c.close()


@on(cpu=(2,))
@pytest.mark.parametrize(("islands", "algorithm"), [("auto", "unfused"), (APART, "auto")])
def test_collectives_of_the_user(rank: int, world_size: int, islands: Any, algorithm: str) -> None:
    """Runs user collectives on the same group, both in a thread and asynchronously."""
    c = allnorm.Communicator(device=device(), islands=islands, timeout=120)
    pauses = random.Random(rank)

    def own() -> None:
        for number in range(80):
            # The same size in bytes as a call's rows, so it could be mistaken for them.
            given = torch.full((7 * 96,), float(number + rank), device=device())
            gathered = torch.empty(world_size * given.numel(), device=device())
            dist.all_gather_into_tensor(gathered, given)
            want = torch.arange(world_size, device=device()).repeat_interleave(7 * 96) + number
            assert torch.equal(gathered, want.float())
            time.sleep(pauses.random() * 2e-3)

    def calls() -> None:
        for number in range(60):
            Case((7, 96), torch.float32, call=number, algorithm=algorithm).check(c)
            time.sleep(pauses.random() * 2e-3)

    in_threads([own, calls])
    # One rank starts the collective before the call, the other rank after it.
    for number in range(6):
        held = torch.full((7 * 96,), float(rank), device=device())
        work = None
        if (rank + number) % 2:
            work = dist.all_reduce(held, async_op=True)
        Case((7, 96), torch.float32, call=number, algorithm=algorithm).check(c)
        if work is None:
            work = dist.all_reduce(held, async_op=True)
        work.wait()
        assert (held == sum(range(world_size))).all()
    c.close()


@on(cpu=(2,))
def test_threads_with_a_group_each(rank: int, world_size: int) -> None:
    """Two threads create communicators for two groups, in a different order on each rank."""
    groups = [dist.new_group(range(world_size)) for _ in range(2)]
    with mock.patch.dict(os.environ, {"ALLNORM_TIMEOUT_SECONDS": "20"}):

        def calls(number: int) -> None:
            time.sleep(0.3 * ((rank + number) % 2))
            for call in range(20):
                x = torch.full((7, 96), float(100 * number + call + rank), device=device())
                want = sum(100 * number + call + other for other in range(world_size))
                assert (allnorm.all_reduce(x, group=groups[number]) == want).all()

        in_threads([functools.partial(calls, number) for number in range(2)])


def make_at_the_same_time(rank: int, world_size: int) -> list[str]:
    seen: list[str] = []

    def body() -> None:
        try:
            c = allnorm.Communicator(device=device(), timeout=60)
        except allnorm.AllnormError as error:
            seen.append(str(error))
        else:
            seen.append("made")
            time.sleep(0.5)
            c.close()

    in_threads([body] * 2)
    CASES[0].check(allnorm.Communicator(device=device(), timeout=60))
    return seen


@on(cpu=(2,))
def test_threads_that_make_communicators_of_one_group(pool: RankPool) -> None:
    """Creation must fail, because ranks could pair communicators of different threads."""
    found = pool.run(make_at_the_same_time)
    for seen in found:
        assert any("two threads of this process" in text for text in seen), found
        assert seen.count("made") == found[0].count("made") < 2


# ---- the first unfused call ----------------------------------------------------------------------


@on(cpu=(2,))
def test_nothing_is_connected_before_an_unfused_call(rank: int, world_size: int) -> None:
    with mock.patch.object(connection, "GroupExchange", side_effect=AssertionError("not needed")):
        c = allnorm.Communicator(device=device(), timeout=60)
        CASES[0].check(c)
        CASES[4].check(c)
    for case in CASES:
        case.but(algorithm="unfused").check(c)
    c.close()


@on(cpu=(3,))
def test_a_rank_that_cannot_connect_is_named_by_all(rank: int, world_size: int) -> None:
    c = allnorm.Communicator(device=device(), timeout=60)
    case = CASES[1].but(algorithm="unfused")
    fails = mock.patch.object(
        connection, "own_store", side_effect=OSError("no more file descriptors")
    )
    with fails if rank == 1 else contextlib.nullcontext():
        start = time.monotonic()
        with pytest.raises(allnorm.AllnormError) as caught:
            case.run(c)
        assert time.monotonic() - start < 30
    assert "rank 1: OSError: no more file descriptors" in str(caught.value)
    assert "Nothing was computed" in str(caught.value)
    case.check(c)  # the ranks are in step again and reconnect
    c.check()
    c.close()


def interrupted_connecting(rank: int, world_size: int, how: str) -> tuple[str, int]:
    """Stops rank 1 during its first unfused call, and returns this rank's error."""
    timeout = 3.0 if how == "stands still" else 120.0
    c = allnorm.Communicator(device=device(), timeout=timeout)
    case = CASES[1].but(algorithm="unfused")
    dist.barrier()

    def stop(*arguments: Any) -> Any:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "closes":
            threading.Thread(target=c.close).start()
        time.sleep(8)
        raise OSError("too late")

    wrong = mock.patch.object(connection, "own_store", side_effect=stop)
    with wrong if rank == 1 else contextlib.nullcontext():
        start = time.monotonic()
        with pytest.raises(allnorm.AllnormError) as caught:
            case.run(c)
        assert time.monotonic() - start < timeout + 30
    with pytest.raises(allnorm.AllnormError):
        case.run(c)
    c.close()
    return type(caught.value).__name__, getattr(caught.value, "peer", -1)


@on(cpu=(3,))
def test_a_rank_that_dies_while_it_connects(pool: RankPool) -> None:
    found = pool.run(interrupted_connecting, "dies", may_die=[1])
    assert [found[0], found[2]] == [("PeerDiedError", 1)] * 2


@on(cpu=(3,))
def test_a_rank_that_stands_still_while_it_connects(pool: RankPool) -> None:
    """No rank can tell which rank is late, so allnorm's or gloo's timeout ends the wait."""
    found = pool.run(interrupted_connecting, "stands still")
    kinds = {"PeerTimeoutError", "PeerLeftError", "AllnormError"}
    assert {kind for kind, _ in found} <= kinds, found


@on(cpu=(3,))
def test_a_communicator_that_is_closed_while_it_connects(pool: RankPool) -> None:
    found = pool.run(interrupted_connecting, "closes")
    assert found[1][0] == "CommunicatorClosedError"
    assert [found[0], found[2]] == [("PeerLeftError", 1)] * 2


# ---- one communicator, several threads -----------------------------------------------------------


def cross(rank: int, world_size: int, how: str, algorithm: str) -> list[str]:
    """Uses one communicator from three threads at the same time; returns the errors."""
    islands = APART if algorithm == "hierarchical" else "auto"
    c = allnorm.Communicator(device=device(), islands=islands, timeout=120)
    pauses = random.Random(rank)
    seen: list[str] = []

    def calls(number: int) -> None:
        case = Case((7, 96), torch.float32, call=number, algorithm=algorithm)
        try:
            for _ in range(100_000):
                if how == "functions":
                    allnorm.all_reduce(case.x(rank))
                else:
                    case.run(c)
                time.sleep(pauses.random() * 1e-3)
        except allnorm.AllnormError as error:
            seen.append(f"{type(error).__name__}: {error}")

    in_threads([functools.partial(calls, number) for number in range(3)])
    call = allnorm.all_reduce if how == "functions" else c.all_reduce
    with pytest.raises(allnorm.AllnormError, match="threads"):
        call(torch.ones(7, 96))
    if how == "functions":
        allnorm.Communicator.for_group().close()
    c.close()
    return seen


@on(cpu=(2,))
@pytest.mark.parametrize(
    ("how", "algorithm"),
    [
        *(("methods", name) for name in ("one_shot", "unfused", "auto", "hierarchical")),
        ("functions", "auto"),
    ],
)
def test_threads_that_call_at_the_same_time(pool: RankPool, how: str, algorithm: str) -> None:
    """All ranks raise, because the order of the threads' calls differs between ranks."""
    for seen in pool.run(cross, how, algorithm):
        assert len(seen) == 3
        for text in seen:
            assert "at the same time" in text
            assert "a Communicator of its own" in text


def close_before_the_record_is_read(rank: int, world_size: int, algorithm: str) -> str:
    """Returns the error of a failed wait whose record another thread closes before it is read."""
    islands = APART if algorithm == "hierarchical" else "auto"
    c = allnorm.Communicator(device=device(), islands=islands, timeout=120)
    if rank == 1:
        c.close()
        return ""
    end_wait = Failure.end_wait

    def crossed(failure: Failure, status: int, *fault: object) -> None:
        failure.end_with(Cause(rank, CROSSED))  # as another thread does
        end_wait(failure, status, *(channel._fault() for _ in fault))

    channel = c._endpoint._channel
    with mock.patch.object(Failure, "end_wait", crossed), pytest.raises(allnorm.AllnormError) as e:
        c.all_reduce(torch.ones(7, 96), algorithm=algorithm)
    c.close()
    return f"{type(e.value).__name__}: {e.value}"


@on(cpu=(2,))
@pytest.mark.parametrize("algorithm", ["unfused", "hierarchical"])
def test_a_record_that_another_thread_closed(pool: RankPool, algorithm: str) -> None:
    text, _ = pool.run(close_before_the_record_is_read, algorithm)
    assert "at the same time" in text
