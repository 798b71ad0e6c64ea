"""Ranks of other islands that die, are late or make another call: named by all, within bounds."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import threading
import time
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_helpers import Case, device, on

import allnorm
from allnorm.core import between, channel, watch
from allnorm.testing import RankPool

PAIRS = ((0, 1), (2, 3))
CASE = Case((24, 256), torch.float32)
# A death is seen, told to those who cannot see it, and read by them.
NAMED_SECONDS = 10.0


def make(far: bool, rank: int, timeout: float = 60.0) -> allnorm.Communicator:
    """Over two islands; `far`: of two machines, which share no memory and see no processes."""
    if not far:
        return allnorm.Communicator(device=device(), islands=PAIRS, timeout=timeout)
    here = watch.this_process()._replace(namespace=f"host {rank // 2}")
    with (
        mock.patch("allnorm.core.workspace._host_identity", return_value=f"host {rank // 2}"),
        mock.patch("allnorm.core.arrival.this_process", return_value=here),
        mock.patch("allnorm.core.watch.this_process", return_value=here),
    ):
        c = allnorm.Communicator(device=device(), timeout=timeout)
    assert c.islands == PAIRS
    assert isinstance(c._endpoint._channel, channel._Messages)
    assert c._endpoint.failure.watch is not None
    assert c._endpoint.failure.watch.blind == {q for q in range(4) if q // 2 != rank // 2}
    return c


def fails(call: Any, seconds: float) -> allnorm.PeerTimeoutError:
    """The error of a call that is made again and again until it fails."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            call()
        except allnorm.PeerTimeoutError as error:
            return error
    raise AssertionError(f"no error within {seconds} s")


def check_afterwards(c: allnorm.Communicator) -> None:
    """The next call, `check` and `stats` agree, and the process can go on."""
    with pytest.raises(allnorm.PeerTimeoutError) as again:
        CASE.run(c)
    with pytest.raises(allnorm.PeerTimeoutError) as checked:
        c.check()
    text = f"{type(checked.value).__name__}: {checked.value}"
    assert text == f"{type(again.value).__name__}: {again.value}"
    assert c.stats().fault == text
    assert not c.is_closed
    c.close()


@on(cpu=(4,))
def test_a_child_of_fork_ends(rank: int, world_size: int) -> None:
    c = make(False, rank)
    CASE.check(c)
    CASE.but(algorithm="unfused").check(c)
    pid = os.fork()
    if pid == 0:
        ctypes.pythonapi.Py_Exit(0)  # sys.exit() without the frames of this rank
    deadline = time.monotonic() + 60
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            raise AssertionError("a child of fork() hangs as it ends")
        time.sleep(0.01)
    CASE.check(c)
    c.close()


def killed(rank: int, world_size: int, far: bool) -> tuple[str, int, float]:
    c = make(far, rank)
    CASE.check(c)
    dist.barrier()
    if rank == 3:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    start = time.monotonic()
    error = fails(lambda: CASE.run(c), 30)
    seconds = time.monotonic() - start - 0.3
    check_afterwards(c)
    return type(error).__name__, error.peer, seconds


@on(cpu=(4,))
@pytest.mark.parametrize("far", [False, True], ids=["one_machine", "two_machines"])
def test_a_killed_rank_is_named_by_all(pool: RankPool, far: bool) -> None:
    results = pool.run(killed, far, may_die=[3])
    for kind, peer, seconds in results[:3]:
        assert (kind, peer) == ("PeerDiedError", 3), results
        assert seconds < NAMED_SECONDS


def stopped(rank: int, world_size: int, far: bool) -> tuple[str, int, float]:
    """Rank 3 stands still in the middle of its calls."""
    c = make(far, rank, timeout=4.0)
    CASE.check(c)
    dist.barrier()
    if rank == 3:
        time.sleep(12)
        c.close()
        return "", 3, 0.0
    start = time.monotonic()
    error = fails(lambda: CASE.run(c), 30)
    seconds = time.monotonic() - start
    check_afterwards(c)
    return type(error).__name__, error.peer, seconds


@on(cpu=(4,))
@pytest.mark.parametrize("far", [False, True], ids=["one_machine", "two_machines"])
def test_a_late_rank_is_named_by_all(pool: RankPool, far: bool) -> None:
    results = pool.run(stopped, far)
    for kind, peer, seconds in results[:3]:
        assert (kind, peer) == ("PeerTimeoutError", 3), results
        assert 3.9 < seconds < 4.0 + NAMED_SECONDS


def stops_within(
    rank: int, world_size: int, victim: int, islands: Any, algorithm: str, far: bool = False
) -> list[tuple[str, int]]:
    """A rank stands still within a wait, each time a later one, as soon as its note says so."""
    seen = []
    for number in range(1, 6 if algorithm == "auto" else 4):
        if far:
            c = make(True, rank, timeout=2.5)
        else:
            c = allnorm.Communicator(device="cpu", islands=islands, timeout=2.5)
        case = CASE.but(algorithm=algorithm)
        case.check(c)
        notes = c._endpoint.failure.notes
        enters = notes.enter
        count = itertools.count(1)

        def enter(
            peers: Any,
            enters: Any = enters,
            count: Iterator[int] = count,
            number: int = number,
        ) -> None:
            enters(peers)
            if next(count) == number:
                dist.barrier()  # the others have given up
                raise RuntimeError("too late")

        dist.barrier()
        if rank == victim:
            notes.enter = enter
            with pytest.raises((allnorm.PeerTimeoutError, RuntimeError)):
                case.run(c)
        else:
            # Islands that need nothing of the victim any more do so in the next call.
            error = fails(lambda c=c, case=case: case.run(c), 60)
            seen.append((type(error).__name__, error.peer))
            check_afterwards(c)
            dist.barrier()
        c.close()
    return seen


@on(cpu=(6,))
@pytest.mark.parametrize("victim", [0, 5])
@pytest.mark.parametrize(
    ("islands", "algorithm"),
    [(((0, 1), (2, 3), (4, 5)), "auto"), (((0, 1, 2), (3, 4, 5)), "auto"), ("auto", "unfused")],
    ids=["pairs", "triples", "unfused"],
)
def test_a_rank_that_stops_within_any_wait_is_named_by_all(
    pool: RankPool, victim: int, islands: Any, algorithm: str
) -> None:
    results = pool.run(stops_within, victim, islands, algorithm)
    for rank in {*range(6)} - {victim}:
        assert set(results[rank]) == {("PeerTimeoutError", victim)}, (rank, results)


@on(cpu=(4,))
@pytest.mark.parametrize("victim", [0, 3])
def test_a_rank_that_stops_within_any_wait_is_named_by_two_machines(
    pool: RankPool, victim: int
) -> None:
    results = pool.run(stops_within, victim, PAIRS, "auto", True)
    for rank in {*range(4)} - {victim}:
        assert set(results[rank]) == {("PeerTimeoutError", victim)}, (rank, results)


@on(cpu=(4,))
@pytest.mark.parametrize("far", [False, True], ids=["one_machine", "two_machines"])
def test_another_call_is_refused_by_all(rank: int, world_size: int, far: bool) -> None:
    """Another call of one rank is refused by all; then they go on."""
    c = make(far, rank)
    for changed in ({"eps": 1e-3}, {"shape": (23, 256)}, {"algorithm": "unfused", "eps": 1.0}):
        other = CASE.but(**changed)
        CASE.check(c)
        with pytest.raises(allnorm.PeerDivergedError) as caught:
            (other if rank == 2 else CASE).run(c)
        assert caught.value.peer == (0 if rank == 2 else 2)
        assert caught.value.rank == rank
    CASE.check(c)
    arguments = CASE.call_arguments(c)
    if rank == 1:  # memory that only this rank sees
        arguments["residual_out"] = torch.empty(23, 256)
    with pytest.raises((allnorm.PeerDivergedError, ValueError)):
        c.all_reduce_add_rms_norm(CASE.x(rank), **arguments)
    CASE.check(c)
    c.close()


def breaks_between(rank: int, world_size: int, far: bool, how: str) -> tuple[str, int, bool]:
    """Rank 3 ends, or stands still, after all have agreed and its island has summed."""
    c = make(far, rank, timeout=60.0 if how == "ends" else 4.0)
    CASE.check(c)
    between = c._endpoint._hierarchy.between
    dist.barrier()
    if rank == 3:

        def gather(*_: Any) -> torch.Tensor:
            if how == "ends":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(12)
            raise RuntimeError("too late")

        between.start_gather = gather
    out = torch.zeros(24, 256)
    start = time.monotonic()
    with pytest.raises(allnorm.PeerTimeoutError) as caught:
        CASE.run(c, out=out)
    seconds = time.monotonic() - start
    assert rank == 3 or seconds < (0.0 if how == "ends" else 4.0) + NAMED_SECONDS, seconds
    check_afterwards(c)
    error = caught.value
    return type(error).__name__, error.peer, bool(out.isnan().all())


@on(cpu=(4,))
@pytest.mark.parametrize("far", [False, True], ids=["one_machine", "two_machines"])
@pytest.mark.parametrize("how", ["ends", "stands_still"])
def test_a_rank_lost_amid_a_call_is_named_by_all(pool: RankPool, far: bool, how: str) -> None:
    results = pool.run(breaks_between, far, how, may_die=[3])
    kind = "PeerDiedError" if how == "ends" else "PeerTimeoutError"
    assert results[:3] == [(kind, 3, True)] * 3


class StartsSlowly(threading.Thread):
    """Whoever starts it is late: the thread may be done by then."""

    def start(self) -> None:
        super().start()
        time.sleep(0.3)


def interrupted(rank: int, world_size: int, whom: int) -> tuple[str, int]:
    """While rank 3 stands still amid a call: rank 1 waits for it between, rank 2 inside."""
    c = make(False, rank, timeout=60.0)
    CASE.check(c)
    dist.barrier()
    if rank == 3:

        def start_gather(*_: Any) -> Any:
            time.sleep(12)
            raise RuntimeError("too late")

        c._endpoint._hierarchy.between.start_gather = start_gather
    if rank == whom:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with (
            mock.patch.object(between, "threading", types.SimpleNamespace(Thread=StartsSlowly)),
            pytest.raises((KeyboardInterrupt, allnorm.PeerTimeoutError)) as caught,
        ):
            CASE.run(c)
    finally:
        signal.signal(signal.SIGINT, before)
    seconds = time.monotonic() - start
    if rank == whom:
        assert seconds < 11.0, seconds  # sooner than rank 3 goes on
    check_afterwards(c)
    return type(caught.value).__name__, getattr(caught.value, "peer", rank)


@on(cpu=(4,))
@pytest.mark.parametrize("whom", [1, 2], ids=["between", "inside"])
def test_an_interrupt_amid_a_call_ends_it_for_all(pool: RankPool, whom: int) -> None:
    results = pool.run(interrupted, whom)
    assert results[whom] == ("KeyboardInterrupt", whom)
    for rank in {0, 1, 2, 3} - {whom}:
        assert results[rank] == ("PeerLeftError", whom), results
