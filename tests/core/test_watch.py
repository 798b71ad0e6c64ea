"""Tests process watching and the rendezvous: deadlines, and errors that name missing ranks."""

from __future__ import annotations

import builtins
import contextlib
import io
import json
import multiprocessing
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from limits import HANG_SECONDS
from rank_helpers import Case, device, on

import allnorm
from allnorm.core import watch
from allnorm.core.rendezvous import Rendezvous
from allnorm.testing import gather

LATE_SECONDS = 10.0  # limit on a busy machine
NO_PID = 2**22 + 1  # the highest process ID of Linux is 2**22


def start_process() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    made = start_process()
    yield made
    made.kill()
    made.wait()


def identity(pid: int) -> watch.Process:
    return watch.Process(pid, watch._state(pid)[1], watch.this_process().namespace)


@contextlib.contextmanager
def elsewhere(machine: str, absent: int = NO_PID) -> Iterator[None]:
    """Makes this process appear to run on a different machine, without a process `absent`."""
    real = builtins.open

    def fake(file: Any, *args: Any, **kwargs: Any) -> Any:
        if file == "/proc/sys/kernel/random/boot_id":
            return io.StringIO(machine)
        if file == f"/proc/{absent}/stat":
            raise FileNotFoundError(file)
        return real(file, *args, **kwargs)

    with mock.patch("builtins.open", fake):
        yield


class Ends:
    """Records the process exits that a Watch reports."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, bool, float]] = []
        self.event = threading.Condition()

    def __call__(self, rank: int, settled: bool) -> None:
        with self.event:
            self.seen.append((rank, settled, time.monotonic()))
            self.event.notify_all()

    def wait(self, count: int, seconds: float = LATE_SECONDS) -> bool:
        with self.event:
            return self.event.wait_for(lambda: len(self.seen) >= count, seconds)


def no_pidfd(pid: int, flags: int = 0) -> int:
    raise PermissionError("seccomp")


@pytest.mark.parametrize("allowed", [True, False], ids=["pidfd", "proc"])
@pytest.mark.parametrize("reaped", [True, False], ids=["reaped", "zombie"])
def test_an_end_is_reported(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, allowed: bool, reaped: bool
) -> None:
    if not allowed:
        monkeypatch.setattr(os, "pidfd_open", no_pidfd)
    ends = Ends()
    w = watch.Watch([watch.this_process(), identity(process.pid)], ends)
    assert not w.blind
    assert list(w.watched) == [1], "a process does not watch itself"
    assert not ends.wait(1, 0.3), "the process is alive"
    process.kill()
    if reaped:
        process.wait()
    assert ends.wait(2)
    (rank, settled, first), (again, finally_settled, second) = ends.seen
    assert (rank, settled, again, finally_settled) == (1, False, 1, True)
    assert second - first >= watch.SETTLED_SECONDS * 0.9
    w.stop()


def test_several_watches_of_one_process(process: subprocess.Popen[bytes]) -> None:
    all_ends = [Ends() for _ in range(3)]
    watches = [watch.Watch([identity(process.pid)], ends) for ends in all_ends]
    watches[0].stop()
    watches[0].stop()
    process.kill()
    assert all(ends.wait(2) for ends in all_ends[1:])
    late = Ends()
    watches.append(watch.Watch([identity(process.pid)], late))
    assert late.wait(1), "an earlier end must be reported too"
    assert not all_ends[0].seen
    for w in watches:
        w.stop()


def test_a_finalizer_may_stop_a_watch_at_any_point(process: subprocess.Popen[bytes]) -> None:
    """Finalizers run wherever memory is allocated, even while the watcher holds its lock."""
    ends = Ends()
    w, other = (watch.Watch([identity(process.pid)], each) for each in (Ends(), ends))
    stopping = threading.Thread(target=w.stop, daemon=True)
    with watch._watcher._lock:
        stopping.start()
        stopping.join(5)
        assert not stopping.is_alive()
    end = time.monotonic() + LATE_SECONDS
    while w in watch._watcher._watches and time.monotonic() < end:
        time.sleep(0.01)
    assert w not in watch._watcher._watches
    assert other in watch._watcher._watches
    process.kill()
    assert ends.wait(2)
    other.stop()


def test_a_later_process_with_the_same_id(process: subprocess.Popen[bytes]) -> None:
    ends = Ends()
    w = watch.Watch([identity(process.pid)._replace(started="1")], ends)
    assert ends.wait(1), "a process with a different start time is not the watched one"
    assert process.poll() is None
    w.stop()


def test_a_process_that_cannot_be_seen(process: subprocess.Popen[bytes]) -> None:
    elsewhere = identity(process.pid)._replace(namespace="pid:[1]")
    unread = identity(process.pid)._replace(started="")
    w = watch.Watch([elsewhere, unread, watch.this_process()], Ends())
    assert w.blind == {0, 1}
    assert not w.watched


def test_a_process_of_a_different_machine(process: subprocess.Popen[bytes]) -> None:
    """A PID namespace's ID is not enough: every machine's first namespace has the same ID."""
    with elsewhere("machine 1"):
        same_number, no_process = identity(process.pid), identity(process.pid)
    no_process = no_process._replace(pid=NO_PID)
    assert same_number.namespace != watch.this_process().namespace
    ends = Ends()
    w = watch.Watch([same_number, no_process, watch.this_process()], ends)
    assert w.blind == {0, 1}
    assert not w.watched
    assert w.find_ended(0) is None
    w.stop()


def test_unreadable_namespaces_are_not_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: str) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "readlink", fails)
    own = watch.this_process()
    w = watch.Watch([own._replace(pid=NO_PID), own], Ends())
    assert w.blind == {0, 1}


@on(cpu=(2,))
def test_peers_of_different_machines_are_not_mistaken_for_dead(rank: int, world_size: int) -> None:
    """The peer's process ID does not exist on this machine."""
    pids: list[Any] = [None] * world_size
    dist.all_gather_object(pids, os.getpid())
    with elsewhere(f"machine {rank}", absent=pids[1 - rank]):
        c = allnorm.Communicator(device=device(), timeout=60)
        assert c.islands == ((0,), (1,))
        assert c._endpoint.failure.watch is not None
        assert c._endpoint.failure.watch.blind == {1 - rank}
        case = Case((3, 130), torch.float32)
        for _ in range(3):
            case.check(c)
            c.check()
        dist.barrier()
        if rank == 0:  # the peer is late, not dead
            with pytest.raises(allnorm.PeerTimeoutError) as error:
                allnorm.Communicator(device=device(), timeout=1)
            assert type(error.value) is allnorm.PeerTimeoutError
        dist.barrier()
        c.close()


def test_a_callback_that_raises_stops_no_watch(process: subprocess.Popen[bytes]) -> None:
    def fails(rank: int, settled: bool) -> None:
        raise ValueError

    ends = Ends()
    watches = [watch.Watch([identity(process.pid)], each) for each in (fails, ends)]
    process.kill()
    assert ends.wait(2)
    other = start_process()
    watches.append(watch.Watch([identity(other.pid)], ends))
    other.kill()
    other.wait()
    assert ends.wait(4)
    for w in watches:
        w.stop()


def watches_in_fork(pid: int) -> None:
    ends = Ends()
    w = watch.Watch([identity(pid)], ends)
    os.kill(pid, signal.SIGKILL)
    ok = ends.wait(1)
    w.stop()
    os._exit(0 if ok else 1)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_its_own_watcher(process: subprocess.Popen[bytes]) -> None:
    ends = Ends()
    w = watch.Watch([identity(process.pid)], ends)
    child = multiprocessing.get_context("fork").Process(target=watches_in_fork, args=(process.pid,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert ends.wait(1), "the parent's watcher must continue"
    w.stop()


# ---- Meetings ----------------------------------------------------------------------------------


@on(cpu=(3,))
def test_ranks_meet_repeatedly(rank: int, world_size: int) -> None:
    for _ in range(3):
        meeting = Rendezvous(dist.group.WORLD, 60)
        for step in range(3):
            got = meeting.agree(lambda s=step: (s, rank), "testing")
            assert got == [(step, r) for r in range(world_size)]
        assert [process.pid for process in meeting.processes][rank] == os.getpid()
        meeting.end()


@on(cpu=(3,))
def test_a_step_that_fails_on_one_rank_fails_on_all(rank: int, world_size: int) -> None:
    meeting = Rendezvous(dist.group.WORLD, 60)

    def step() -> None:
        if rank == 1:
            raise KeyError("mine")

    with pytest.raises((allnorm.AllnormError, KeyError)) as caught:
        meeting.agree(step, "testing")
    assert meeting.agree(lambda: rank, "the next step") == list(range(world_size))
    meeting.end()
    if rank == 1:
        assert type(caught.value) is KeyError
    else:
        assert "testing failed on rank 1: KeyError" in str(caught.value)


@on(cpu=(3,))
def test_creation_is_bounded_and_names_missing_ranks(rank: int, world_size: int) -> None:
    """The last rank is too late for the first attempt. The second attempt succeeds."""
    text = ""
    if rank == 2:
        time.sleep(2.5)
    else:
        start = time.monotonic()
        with pytest.raises((allnorm.PeerTimeoutError, allnorm.AllnormError)) as caught:
            allnorm.Communicator(device="cpu", timeout=1.0)
        text = str(caught.value)
        assert 0.9 < time.monotonic() - start < LATE_SECONDS
        # The first rank that times out names rank 2. The second may name the first rank.
        assert getattr(caught.value, "peer", -1) == 2 or "another rank has given up" in text
    # The late rank joins the meeting of the second attempt directly.
    with allnorm.Communicator(device="cpu", timeout=60) as c:
        assert c.timeout.total_seconds() == 60
    assert any("waited 1 s for rank 2 while checking the arguments" in t for t in gather(text))


@on(cpu=(3,))
def test_a_rank_that_stops_between_two_steps(rank: int, world_size: int) -> None:
    meeting = Rendezvous(dist.group.WORLD, 2.0)
    meeting.agree(lambda: None, "the first step")
    text = ""
    if rank != 0:
        with pytest.raises((allnorm.PeerTimeoutError, allnorm.AllnormError)) as caught:
            meeting.agree(lambda: None, "the second step")
        text = str(caught.value)
    assert any("rank 0 while the second step" in text for text in gather(text))
    again = Rendezvous(dist.group.WORLD, 60)
    assert again.agree(lambda: rank, "testing") == [0, 1, 2]
    again.end()


@on(cpu=(2,), may_die=[1])
@pytest.mark.parametrize("after", [0.03, 0.1, 0.171])
def test_a_death_during_creation(rank: int, world_size: int, after: float) -> None:
    pids = gather(os.getpid())
    if rank == 1:
        kill = threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL))
        kill.start()
    start, error = time.monotonic(), None
    with contextlib.suppress(allnorm.AllnormError):
        for _ in range(10000):
            try:
                allnorm.Communicator(device="cpu", timeout=3).close()
            except allnorm.PeerTimeoutError as caught:
                error = caught
                break
    # Before the first step, ranks do not know each other's processes, so the timeout ends the wait.
    assert type(error) in (allnorm.PeerDiedError, allnorm.PeerTimeoutError)
    assert error.peer == 1
    assert time.monotonic() - start - after < LATE_SECONDS
    shared_memory = pathlib.Path("/dev/shm")
    assert not [path for pid in pids for path in shared_memory.glob(f"allnorm-{pid}-*")]


# ---- Deaths ------------------------------------------------------------------------------------

KILLS, RIGS = 60, 2


@pytest.mark.long
@pytest.mark.timeout(HANG_SECONDS + 300)
def test_kills_at_random_moments(record_property: Any) -> None:
    """Every survivor names the dead rank and its process, long before the timeout of 600 s."""
    rig = pathlib.Path(__file__).parents[1] / "kill_rig.py"
    start = time.monotonic()
    running = [
        subprocess.Popen(
            [
                *(sys.executable, str(rig), "--hurts", "kill", "--rounds", str(KILLS // RIGS)),
                *("--seed", str(1000 * number)),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(RIGS)
    ]
    rounds = []
    for process in running:
        out, _ = process.communicate(timeout=HANG_SECONDS)
        assert process.returncode == 0, out
        rounds += [json.loads(line) for line in out.splitlines()]
    assert len(rounds) == KILLS
    seconds = []
    for one in rounds:
        assert len(one["survivors"]) == one["world_size"] - 1, one
        for survivor in one["survivors"]:
            assert survivor["error"] == "PeerDiedError", one
            assert survivor["peer"] == one["victim"], one
            assert f"process {one['victim_pid']} has ended" in survivor["message"], one
            seconds.append(survivor["seconds"])
    text = (
        f"{len(seconds)} survivors of {KILLS} kills: named after {statistics.median(seconds):.3f} s"
        f" (median), {max(seconds):.3f} s at most; {time.monotonic() - start:.0f} s in all"
    )
    record_property("kills", text)
    assert statistics.median(seconds) < 1.0, text
    assert max(seconds) < LATE_SECONDS, text
    assert not [name for one in rounds for name in one["left"]]
