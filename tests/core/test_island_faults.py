"""Tests that all ranks name a rank that dies, is late or diverges, on any island, in time."""

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
from limits import HANG_SECONDS
from rank_helpers import Case, device, on, used_communicator

import allnorm
from allnorm.core import between, channel, watch

PAIRS = ((0, 1), (2, 3))
CASE = Case((24, 256), torch.float32)
NAMED_SECONDS = 10.0  # until all ranks know of a death, even those on other machines


one_or_two_machines = pytest.mark.parametrize(
    "far", [False, True], ids=["one_machine", "two_machines"]
)


def make(far: bool, rank: int, islands: Any = PAIRS, **arguments: Any) -> allnorm.Communicator:
    """Creates a communicator over islands, or two islands on seemingly two machines if `far`."""
    arguments = {"device": device(), "timeout": 60.0, **arguments}
    if not far:
        return allnorm.Communicator(islands=islands, **arguments)
    here = watch.this_process()._replace(namespace=f"host {rank // 2}")
    with (
        mock.patch("allnorm.core.workspace._host_identity", return_value=f"host {rank // 2}"),
        mock.patch("allnorm.core.arrival.this_process", return_value=here),
        mock.patch("allnorm.core.watch.this_process", return_value=here),
    ):
        c = allnorm.Communicator(**arguments)
    assert c.islands == PAIRS
    assert isinstance(c._endpoint._channel, channel._Messages)
    assert c._endpoint.failure.watch is not None
    assert c._endpoint.failure.watch.blind == {q for q in range(4) if q // 2 != rank // 2}
    return c


def fails(call: Any, seconds: float) -> allnorm.PeerTimeoutError:
    """Repeats a call until it raises PeerTimeoutError; returns the error."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            call()
        except allnorm.PeerTimeoutError as error:
            return error
    raise AssertionError(f"no error within {seconds} s")


def check_afterwards(c: allnorm.Communicator) -> None:
    """Checks that the next call, `check` and `stats` report the same error."""
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
    c = make(False, rank, timeout=HANG_SECONDS)
    CASE.check(c)
    CASE.but(algorithm="unfused").check(c)
    pid = os.fork()
    if pid == 0:
        ctypes.pythonapi.Py_Exit(0)  # like sys.exit(), without unwinding the rank's frames
    deadline = time.monotonic() + HANG_SECONDS / 2
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            raise AssertionError("a forked child does not exit")
        time.sleep(0.01)
    CASE.check(c)
    c.close()


@on(cpu=(4,), may_die=[3])
@one_or_two_machines
def test_a_killed_rank_is_named_by_all(rank: int, world_size: int, far: bool) -> None:
    c = make(far, rank)
    CASE.check(c)
    dist.barrier()
    if rank == 3:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    start = time.monotonic()
    error = fails(lambda: CASE.run(c), 30)
    assert time.monotonic() - start - 0.3 < NAMED_SECONDS
    assert (type(error), error.peer) == (allnorm.PeerDiedError, 3)
    check_afterwards(c)


@pytest.mark.sampled(2)
@on(cpu=(4,))
@one_or_two_machines
def test_a_late_rank_is_named_by_all(rank: int, world_size: int, far: bool) -> None:
    c = used_communicator(4.0, CASE.check, create=make, far=far, rank=rank)
    if rank == 3:
        time.sleep(12)
        c.close()
        return
    start = time.monotonic()
    error = fails(lambda: CASE.run(c), 30)
    assert 3.9 < time.monotonic() - start < 4.0 + NAMED_SECONDS
    assert (type(error), error.peer) == (allnorm.PeerTimeoutError, 3)
    check_afterwards(c)


def stops_within_waits(
    rank: int, victim: int, islands: Any, algorithm: str, far: bool = False
) -> None:
    """Stops the victim during its first wait, then during its second wait, and so on.

    The victim stops as soon as its note records the wait. All other ranks must name it.
    """
    for number in range(1, 6 if algorithm == "auto" else 4):
        case = CASE.but(algorithm=algorithm)
        c = used_communicator(
            2.5, case.check, create=make, far=far, rank=rank, islands=islands, device="cpu"
        )
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
                dist.barrier()  # returns after the other ranks have timed out
                raise RuntimeError("too late")

        dist.barrier()
        if rank == victim:
            notes.enter = enter
            with pytest.raises((allnorm.PeerTimeoutError, RuntimeError)):
                case.run(c)
        else:
            # An island that no longer needs the victim in this call fails in the next call.
            error = fails(lambda c=c, case=case: case.run(c), 60)
            assert (type(error), error.peer) == (allnorm.PeerTimeoutError, victim)
            check_afterwards(c)
            dist.barrier()
        c.close()


@pytest.mark.sampled(2)
@on(cpu=(6,))
@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.long), 5])
@pytest.mark.parametrize(
    ("islands", "algorithm"),
    [
        (((0, 1), (2, 3), (4, 5)), "auto"),
        pytest.param(((0, 1, 2), (3, 4, 5)), "auto", marks=pytest.mark.long),
        ("auto", "unfused"),
    ],
    ids=["pairs", "triples", "unfused"],
)
def test_a_rank_that_stops_within_any_wait_is_named_by_all(
    rank: int, world_size: int, victim: int, islands: Any, algorithm: str
) -> None:
    stops_within_waits(rank, victim, islands, algorithm)


@pytest.mark.long
@on(cpu=(4,))
@pytest.mark.parametrize("victim", [0, pytest.param(3, marks=pytest.mark.long)])
def test_a_rank_that_stops_within_any_wait_is_named_by_two_machines(
    rank: int, world_size: int, victim: int
) -> None:
    stops_within_waits(rank, victim, PAIRS, "auto", far=True)


@on(cpu=(4,))
@one_or_two_machines
def test_a_different_call_is_refused_by_all(rank: int, world_size: int, far: bool) -> None:
    """All ranks refuse if one rank's call differs, and the communicator stays usable."""
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
    if rank == 1:  # peers cannot see this invalid argument
        arguments["residual_out"] = torch.empty(23, 256)
    with pytest.raises((allnorm.PeerDivergedError, ValueError)):
        c.all_reduce_add_rms_norm(CASE.x(rank), **arguments)
    CASE.check(c)
    c.close()


@pytest.mark.sampled(2)
@on(cpu=(4,), may_die=[3])
@one_or_two_machines
@pytest.mark.parametrize("how", ["ends", "stands_still"])
def test_a_rank_lost_during_a_call_is_named_by_all(
    rank: int, world_size: int, far: bool, how: str
) -> None:
    """Rank 3 exits or stops after the ranks have compared calls and its island has summed."""
    seconds = 60.0 if how == "ends" else 4.0
    c = used_communicator(seconds, CASE.check, create=make, far=far, rank=rank)
    between = c._endpoint._hierarchy.between
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
    if rank != 3:
        kind = allnorm.PeerDiedError if how == "ends" else allnorm.PeerTimeoutError
        assert (type(caught.value), caught.value.peer) == (kind, 3)
        assert out.isnan().all()


class StartsSlowly(threading.Thread):
    """A thread that can already have ended when start() returns."""

    def start(self) -> None:
        super().start()
        time.sleep(0.3)


@pytest.mark.sampled(2)
@on(cpu=(4,))
@pytest.mark.parametrize("whom", [1, 2], ids=["between", "inside"])
def test_an_interrupt_during_a_call_ends_it_for_all(rank: int, world_size: int, whom: int) -> None:
    """Rank 3 stops in a call. Rank 1 waits for it between islands, rank 2 within its island."""
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
    if rank == whom:
        assert time.monotonic() - start < 11.0  # before rank 3 continues
        assert type(caught.value) is KeyboardInterrupt
    else:
        assert (type(caught.value), caught.value.peer) == (allnorm.PeerLeftError, whom)
    check_afterwards(c)
