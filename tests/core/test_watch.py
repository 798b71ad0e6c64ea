"""Whether processes live, and how ranks meet: deadlines, and names of who is missing."""

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
from allnorm.testing import RankPool

LATE_SECONDS = 10.0  # a machine that is busy with other work
NO_PID = 2**22 + 1  # Linux gives no process a higher number than 2**22


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
    """Moves this process to a different machine on which there is no process `absent`."""
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
    """What a Watch reports."""

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
    assert list(w.watched) == [1], "nobody watches himself"
    assert not ends.wait(1, 0.3), "it lives"
    killed = time.monotonic()
    process.kill()
    if reaped:
        process.wait()
    assert ends.wait(2)
    (rank, settled, first), (again, finally_settled, second) = ends.seen
    assert (rank, settled, again, finally_settled) == (1, False, 1, True)
    print(f"seen after {first - killed:.3f} s, settled after {second - killed:.3f} s")
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
    assert late.wait(1), "one that has ended already"
    assert not all_ends[0].seen
    for w in watches:
        w.stop()


def test_a_finalizer_may_stop_a_watch_at_any_point(process: subprocess.Popen[bytes]) -> None:
    """Garbage is collected wherever memory is allocated, under the watcher's own lock too."""
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


def test_a_later_process_of_the_same_number(process: subprocess.Popen[bytes]) -> None:
    ends = Ends()
    w = watch.Watch([identity(process.pid)._replace(started="1")], ends)
    assert ends.wait(1), "the process that is meant has ended, this is another"
    assert process.poll() is None
    w.stop()


def test_a_process_that_cannot_be_seen(process: subprocess.Popen[bytes]) -> None:
    elsewhere = identity(process.pid)._replace(namespace="pid:[1]")
    unread = identity(process.pid)._replace(started="")
    w = watch.Watch([elsewhere, unread, watch.this_process()], Ends())
    assert w.blind == {0, 1}
    assert not w.watched


def test_a_process_of_a_different_machine(process: subprocess.Popen[bytes]) -> None:
    """Every machine has the same number for its first namespace of processes."""
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


def peers_of_different_machines(rank: int, world_size: int) -> str:
    """The process number of each peer is that of no process here."""
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
        said = ""
        if rank == 0:  # the peer is late, which does not mean that it died
            with pytest.raises(allnorm.PeerTimeoutError) as error:
                allnorm.Communicator(device=device(), timeout=1)
            said = type(error.value).__name__
        dist.barrier()
        c.close()
        return said


@on(cpu=(2,))
def test_peers_of_different_machines_are_not_taken_for_dead(pool: RankPool) -> None:
    assert pool.run(peers_of_different_machines)[0] == "PeerTimeoutError"


def test_a_callback_that_raises_ends_nothing(process: subprocess.Popen[bytes]) -> None:
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
def test_a_fork_has_a_watcher_of_its_own(process: subprocess.Popen[bytes]) -> None:
    ends = Ends()
    w = watch.Watch([identity(process.pid)], ends)
    child = multiprocessing.get_context("fork").Process(target=watches_in_fork, args=(process.pid,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert ends.wait(1), "and the parent's goes on"
    w.stop()


# ---- Meetings ----------------------------------------------------------------------------------


def meets(rank: int, world_size: int) -> None:
    for _ in range(3):
        meeting = Rendezvous(dist.group.WORLD, 60)
        for step in range(3):
            got = meeting.agree(lambda s=step: (s, rank), "testing")
            assert got == [(step, r) for r in range(world_size)]
        assert [process.pid for process in meeting.processes][rank] == os.getpid()
        meeting.end()


def fails_in_one(rank: int, world_size: int) -> str:
    meeting = Rendezvous(dist.group.WORLD, 60)

    def step() -> None:
        if rank == 1:
            raise KeyError("mine")

    with pytest.raises((allnorm.AllnormError, KeyError)) as caught:
        meeting.agree(step, "testing")
    assert meeting.agree(lambda: rank, "going on") == list(range(world_size))
    meeting.end()
    return f"{type(caught.value).__name__} {caught.value}"


@on(cpu=(3,))
def test_ranks_meet_again_and_again(pool: RankPool) -> None:
    pool.run(meets)
    texts = pool.run(fails_in_one)
    assert texts[1].startswith("KeyError")
    assert all("testing failed on rank 1: KeyError" in texts[rank] for rank in (0, 2))


def misses(rank: int, world_size: int, seconds: float) -> tuple[str, int, float] | None:
    """The last rank comes late; then all meet."""
    start = time.monotonic()
    if rank == world_size - 1:
        time.sleep(seconds + 1.5)
    else:
        with pytest.raises((allnorm.PeerTimeoutError, allnorm.AllnormError)) as caught:
            allnorm.Communicator(device="cpu", timeout=seconds)
    waited = time.monotonic() - start
    # Who was missing goes straight to the meeting that the others go to now.
    with allnorm.Communicator(device="cpu", timeout=60) as c:
        assert c.timeout.total_seconds() == 60
    if rank == world_size - 1:
        return None
    return str(caught.value), getattr(caught.value, "peer", -1), waited


@on(cpu=(3,))
def test_construction_is_bounded_and_names_who_is_missing(pool: RankPool) -> None:
    results = pool.run(misses, 1.0)
    texts = [result[0] for result in results[:2]]
    # The first to give up names the missing, and is named by the others if they were not done.
    assert any("waited 1 s for rank 2 while checking the arguments" in t for t in texts)
    for text, peer, waited in results[:2]:
        assert peer == 2 or "another rank has given up" in text
        assert 0.9 < waited < LATE_SECONDS


def misses_midway(rank: int, world_size: int) -> str:
    """A rank that raises between two steps leaves the others in the next one."""
    meeting = Rendezvous(dist.group.WORLD, 2.0)
    meeting.agree(lambda: None, "the first step")
    if rank == 0:
        return ""
    with pytest.raises((allnorm.PeerTimeoutError, allnorm.AllnormError)) as caught:
        meeting.agree(lambda: None, "the second step")
    return str(caught.value)


@on(cpu=(3,))
def test_a_rank_that_stops_midway(pool: RankPool) -> None:
    texts = pool.run(misses_midway)
    assert any("rank 0 while the second step" in text for text in texts[1:]), texts
    pool.run(meets)


def dies_in_construction(rank: int, world_size: int, after: float) -> tuple[str, float] | None:
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
    assert error is not None
    assert error.peer == 1
    return type(error).__name__, time.monotonic() - start - after


@on(cpu=(2,))
@pytest.mark.parametrize("after", [0.03, 0.1, 0.171])
def test_a_death_amid_construction(pool: RankPool, after: float) -> None:
    before = set(pathlib.Path("/dev/shm").glob("allnorm-*"))
    results = pool.run(dies_in_construction, after, may_die=[1])
    assert results[0] is not None
    # Before the first step nobody knows which process to watch: there the deadline decides.
    assert results[0][0] in ("PeerDiedError", "PeerTimeoutError")
    assert results[0][1] < LATE_SECONDS
    assert set(pathlib.Path("/dev/shm").glob("allnorm-*")) <= before


# ---- Deaths ------------------------------------------------------------------------------------

KILLS, RIGS = 60, 2


@pytest.mark.timeout(HANG_SECONDS + 300)
def test_kills_at_random_moments(record_property: Any) -> None:
    """Every survivor names the rank and its process, far before the deadline of 600 s."""
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
        f" in the middle, {max(seconds):.3f} s at most; {time.monotonic() - start:.0f} s in all"
    )
    print(text)
    record_property("kills", text)
    assert statistics.median(seconds) < 1.0, text
    assert max(seconds) < LATE_SECONDS, text
    assert not [name for one in rounds for name in one["left"]]
