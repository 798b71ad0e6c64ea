"""Tests the rendezvous of ranks whose processes, groups and worlds change but share one store."""

from __future__ import annotations

import datetime
import os
import random
import re
import threading
import time
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore
from torch.testing._internal.distributed.fake_pg import FakeStore

import allnorm
from allnorm.core import rendezvous
from allnorm.core.rendezvous import Rendezvous

from . import worlds

WAIT_SECONDS = 60.0
ENOUGH_MEETINGS = 4


class Died(BaseException):
    """Ends a simulated process."""


class MortalStore:
    """The store of a simulated process, which dies after a given number of operations."""

    def __init__(self, store: Any, operations: float, pauses: random.Random) -> None:
        self._store, self._left, self._pauses = store, operations, pauses

    def __getattr__(self, name: str) -> Any:
        def operate(*arguments: Any) -> Any:
            if self._left <= 0:
                raise Died
            self._left -= 1
            if self._pauses.random() < 0.2:
                time.sleep(self._pauses.random() * 2e-3)
            return getattr(self._store, name)(*arguments)

        return operate


class ThreadGroup:
    """A process group whose ranks are threads of the test process."""

    group_name = "tp"

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self.store, self.rank, self.world_size = store, rank, world_size


@pytest.fixture
def threads_are_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "store_of", lambda group: group.store)
    monkeypatch.setattr(rendezvous, "_check_processes", lambda ids: None)
    known = types.SimpleNamespace(
        get_rank=lambda group: group.rank,
        get_world_size=lambda group: group.world_size,
        get_backend=lambda group: "gloo",
    )
    monkeypatch.setattr(rendezvous, "dist", known)


def meet(group: ThreadGroup, seconds: float, value: Any, steps: int = 2) -> list[Any]:
    with Rendezvous(group, seconds) as meeting:
        found = [meeting.agree(lambda: (meeting.name, value), "testing") for _ in range(steps)]
        return found[-1]


def run_ranks(functions: list[Any]) -> list[Any]:
    """Runs one function per thread; returns their results or errors."""
    results: list[Any] = [None] * len(functions)

    def run(rank: int) -> None:
        try:
            results[rank] = functions[rank]()
        except BaseException as error:  # noqa: BLE001 - the test reports it
            results[rank] = error

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * WAIT_SECONDS)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("threads_are_ranks")
@pytest.mark.parametrize("seed", range(12))
def test_ranks_meet_in_spite_of_entries_of_earlier_ranks(seed: int) -> None:
    """Processes die at any operation, time out, arrive late and are replaced. Then all meet."""
    chosen = random.Random(seed)
    world_size, store = chosen.choice((2, 3, 4)), HashStore()
    store.set_timeout(datetime.timedelta(seconds=WAIT_SECONDS))
    calm = threading.Barrier(world_size)
    met: dict[str, set[tuple[Any, ...]]] = {}
    lock = threading.Lock()

    def rank_main(rank: int, own: random.Random) -> list[Any]:
        group, lives = None, 0
        start = time.monotonic()
        # A busy machine may need longer for enough meetings.
        while time.monotonic() < start + (1.5 if len(met) >= ENOUGH_MEETINGS else WAIT_SECONDS):
            if group is None:  # simulates a new process with the same rank
                operations = own.choice((own.randrange(40), own.randrange(400), float("inf")))
                group = ThreadGroup(MortalStore(store, operations, own), rank, world_size)
                lives += 1
            try:
                found = meet(group, own.choice((0.02, 0.1, 0.3)), (rank, lives), own.randint(2, 4))
                with lock:
                    met.setdefault(found[0][0], set()).add(tuple(found))
            except allnorm.AllnormError:
                pass
            except Died:
                group = None
            if own.random() < 0.2:
                time.sleep(own.random() * 0.1)
        calm.wait(2 * WAIT_SECONDS)
        group = group or ThreadGroup(store, rank, world_size)
        group.store = store
        return [meet(group, WAIT_SECONDS, (rank, number)) for number in range(3)]

    seeds = [random.Random(chosen.random()) for _ in range(world_size)]
    functions = [lambda r=r: rank_main(r, seeds[r]) for r in range(world_size)]
    results = run_ranks(functions)
    for result in results:
        assert not isinstance(result, BaseException), result
    assert all(result == results[0] for result in results)
    for number, found in enumerate(results[0]):
        assert [value for _, value in found] == [(rank, number) for rank in range(world_size)]
        assert len({name for name, _ in found}) == 1
    # If an aborted meeting gave any ranks a result, it gave all of them the same one.
    assert all(len(founds) == 1 for founds in met.values()), met
    assert len(met) >= ENOUGH_MEETINGS


@pytest.mark.usefixtures("threads_are_ranks")
@pytest.mark.parametrize("kind", ["hash", "file"])
def test_meetings_leave_one_entry_per_rank(kind: str, tmp_path: Any) -> None:
    stores = [HashStore()] * 3 if kind == "hash" else []
    stores = stores or [FileStore(str(tmp_path / "store"), 3) for _ in range(3)]
    groups = [ThreadGroup(store, rank, 3) for rank, store in enumerate(stores)]

    def many(group: ThreadGroup) -> int:
        for number in range(20):
            with Rendezvous(group, WAIT_SECONDS) as meeting:
                meeting.agree(lambda n=number: n, "testing")
                if group.rank:
                    meeting.part([1, 2]).agree(lambda: None, "testing a part")
                meeting.agree(lambda: None, "testing")
        return group.store.num_keys()

    counts = run_ranks([lambda g=group: many(g) for group in groups])
    assert all(isinstance(count, int) for count in counts), counts
    extra = 1 if kind == "file" else 0  # FileStore counts its users in an additional key
    assert stores[0].num_keys() <= 3 + extra


@pytest.mark.usefixtures("threads_are_ranks")
def test_threads_of_a_rank_take_turns() -> None:
    """If multiple threads create communicators of one group, all ranks pair them alike."""
    store = HashStore()
    groups = [ThreadGroup(store, rank, 2) for rank in range(2)]
    functions = [lambda g=group: meet(g, WAIT_SECONDS, g.rank) for group in groups * 4]
    results = run_ranks(functions)
    names = [found[0][0] if isinstance(found, list) else found for found in results]
    assert sorted(names[0::2]) == sorted(names[1::2])
    assert len(set(names)) == 4


# ---- Processes -----------------------------------------------------------------------------------


@pytest.fixture
def workers() -> Iterator[worlds.Workers]:
    started = worlds.Workers(4)
    yield started
    started.close()


def make_pairs(store: Any, rank: int, world_size: int, name: str) -> str:
    worlds.join(store, rank, world_size, name, WAIT_SECONDS)
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for _ in range(1 + rank // 2):  # each pair creates a different number of communicators
        comm = allnorm.Communicator(groups[rank // 2], device="cpu", timeout=WAIT_SECONDS)
        worlds.check_calls(comm, random.Random(0))
    dist.barrier()
    return comm.name


def make_four(store: Any, rank: int, world_size: int, name: str) -> list[str]:
    worlds.join(store, rank, world_size, name, WAIT_SECONDS)
    group = dist.new_group(list(range(world_size)))
    names = []
    for _ in range(2):
        comm = allnorm.Communicator(group, device="cpu", timeout=WAIT_SECONDS)
        worlds.check_calls(comm, random.Random(0))
        names.append(comm.name)
    dist.barrier()
    return names


def test_groups_of_the_same_name_with_different_ranks(workers: worlds.Workers) -> None:
    """Tests a group of four ranks with the name that a group of two ranks had earlier."""
    assert workers.run(range(4), make_pairs, "pairs") == ["1#1", "1#1", "2#2", "2#2"]
    workers.replace(3)
    assert workers.run(range(4), make_four, "four") == [["1#2", "1#3"]] * 4
    # Numbering continues from the highest number on any rank, so no name is reused.
    assert workers.run([3, 2, 1, 0], make_four, "again") == [["1#4", "1#5"]] * 4


def dies_before_the_next(
    store: Any, rank: int, world_size: int, name: str, islands: Any, own_store: str
) -> tuple[str, int, str, float] | None:
    """Ends the last rank's process between the creation of two communicators."""
    if own_store:
        if rank == world_size - 1:
            mine = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            store.set(f"{name}/port", str(mine.port))
        else:
            mine = TCPStore("127.0.0.1", int(store.get(f"{name}/port")), is_master=False)
        store = mine
    worlds.join(store, rank, world_size, name, WAIT_SECONDS)
    arguments = {"device": "cpu", "timeout": 600, "islands": islands}
    comms = [allnorm.Communicator(**arguments)]
    worlds.check_calls(comms[0], random.Random(0))
    dist.barrier()
    if rank == world_size - 1:
        os._exit(1)
    start = time.monotonic()
    with pytest.raises(allnorm.AllnormError) as caught:
        comms.append(allnorm.Communicator(**arguments))
    error = caught.value
    seconds = time.monotonic() - start
    return type(error).__name__, getattr(error, "peer", -1), str(error), seconds


@pytest.mark.parametrize("own_store", ["", "of the victim"])
@pytest.mark.parametrize("islands", ["auto", ((0, 1), (2, 3))], ids=["flat", "islands"])
def test_a_death_before_the_first_step(
    workers: worlds.Workers, islands: Any, own_store: str
) -> None:
    """Checks that no rank waits 600 s: ranks that have met watch each other's processes."""
    results = workers.run(range(4), dies_before_the_next, "a", islands, own_store)
    assert results.pop() == "died"
    for result in results:
        assert isinstance(result, tuple), result
        kind, peer, text, seconds = result
        if kind == "AllnormError":
            assert "another rank has given up" in text
        else:
            assert (kind, peer) == ("PeerDiedError", 3), text
        assert "process " in text.lower()
        assert "has ended" in text
        assert seconds < WAIT_SECONDS


def comes_and_dies(store: Any, rank: int, world_size: int, name: str) -> tuple[str, int, float]:
    worlds.join(store, rank, world_size, name, WAIT_SECONDS)
    if rank == 0:  # dies after it has arrived, before it has met a peer
        threading.Timer(1.0, os._exit, (1,)).start()
    elif rank == 1:
        time.sleep(3)  # arrives after rank 0 has died
    start = time.monotonic()
    with pytest.raises(allnorm.AllnormError) as caught:
        allnorm.Communicator(device="cpu", timeout=8)
    return str(caught.value), getattr(caught.value, "peer", -1), time.monotonic() - start


def test_the_first_rank_that_comes_dies(workers: worlds.Workers) -> None:
    died, late, waiting = workers.run(range(3), comes_and_dies, "b")
    assert died == "died"
    # Rank 2 saw rank 0 alive. Rank 1 cannot tell rank 0's entry from an earlier group's.
    assert waiting[1] == 0, waiting
    assert "has ended" in waiting[0], waiting
    assert "given up" in late[0] or "came as rank 0 and has ended" in late[0], late


def never_comes(store: Any, rank: int, world_size: int, name: str) -> tuple[str, int] | None:
    worlds.join(store, rank, world_size, name, WAIT_SECONDS)
    if rank in (1, 3):
        return None
    with pytest.raises(allnorm.AllnormError) as caught:
        allnorm.Communicator(device="cpu", timeout=2)
    return str(caught.value), getattr(caught.value, "peer", 1)


def test_ranks_that_never_come_are_named(workers: worlds.Workers) -> None:
    results = workers.run(range(4), never_comes, "c")
    for text, peer in (results[0], results[2]):
        assert re.search(r"rank \d waited 2 s for ranks 1, 3 while checking", text), text
        assert peer == 1


def dead_store(store: Any, rank: int, world_size: int, name: str) -> tuple[str, str, float]:
    """Ends the process that serves the store before any communicator is created."""
    if rank == 0:
        mine = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        store.set(f"{name}/port", str(mine.port))
    else:
        mine = TCPStore("127.0.0.1", int(store.get(f"{name}/port")), is_master=False)
    worlds.join(mine, rank, world_size, name, WAIT_SECONDS)
    group = dist.new_group([1, 2])
    dist.barrier()
    if rank == 0:
        os._exit(1)
    time.sleep(1)
    start = time.monotonic()
    with pytest.raises(allnorm.AllnormError) as caught:
        allnorm.Communicator(group, device="cpu", timeout=600)
    return type(caught.value).__name__, str(caught.value), time.monotonic() - start


def test_a_dead_store(workers: worlds.Workers) -> None:
    died, *results = workers.run(range(3), dead_store, "d")
    assert died == "died"
    for kind, text, seconds in results:
        assert kind == "AllnormError"
        assert "the store of the process group does not answer" in text
        assert "Start all ranks again" in text
        assert seconds < WAIT_SECONDS


def refuses_groups(store: Any, rank: int, world_size: int, name: str) -> list[str]:
    texts = []

    def refuse(group: Any) -> None:
        with pytest.raises((ValueError, TypeError)) as caught:
            allnorm.Communicator(group, device="cpu", timeout=5)
        texts.append(f"{type(caught.value).__name__}: {caught.value}")

    worlds.join(store, rank, world_size, name, WAIT_SECONDS)
    other = dist.new_group([0])
    if rank:
        refuse(other)
    group = dist.new_group([0, 1])
    bare = dist.ProcessGroupGloo(
        PrefixStore("bare", store), rank, world_size, datetime.timedelta(seconds=60)
    )
    refuse(bare)
    refuse(dist.ProcessGroup(PrefixStore("empty", store), rank, world_size))
    refuse("tp")
    refuse([0, 1])
    dist.destroy_process_group(group)
    refuse(group)
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    refuse(None)
    dist.destroy_process_group()
    return texts


def test_wrong_groups_are_refused(workers: worlds.Workers) -> None:
    for texts in workers.run([0, 1], refuses_groups, "e"):
        assert isinstance(texts, list), texts
        *others, fake = texts
        assert '"fake"' in fake
        assert all("xpected" in text for text in others), texts


def threads_as_ranks(store: Any, rank: int, world_size: int, name: str) -> list[str]:
    from torch.testing._internal.distributed.multi_threaded_pg import _install_threaded_pg

    if dist.is_initialized():
        dist.destroy_process_group()
    _install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    shared = HashStore()

    def run(thread_rank: int) -> str:
        dist.init_process_group("threaded", rank=thread_rank, world_size=2, store=shared)
        with pytest.raises(allnorm.UnsupportedError) as caught:
            allnorm.Communicator(device="cpu", timeout=WAIT_SECONDS)
        return str(caught.value)

    return [str(result) for result in run_ranks([lambda r=r: run(r) for r in range(2)])]


def test_threads_as_ranks_are_refused(workers: worlds.Workers) -> None:
    (texts,) = workers.run([0], threads_as_ranks, "f")
    assert isinstance(texts, list), texts
    for text in texts:
        assert text.startswith("ranks 0 and 1 are threads of one process: expected"), text


def takes_long_timeouts(store: Any, rank: int, world_size: int, name: str) -> None:
    worlds.join(store, rank, world_size, name, WAIT_SECONDS)
    for timeout in (1e9, 9.3e9, 1e12, 1e300, datetime.timedelta.max):
        for islands in ("auto", ((0,), (1,))):
            with allnorm.Communicator(device="cpu", timeout=timeout, islands=islands) as comm:
                worlds.check_calls(comm, random.Random(1))
    dist.barrier()


def test_very_long_timeouts(workers: worlds.Workers) -> None:
    assert workers.run([0, 1], takes_long_timeouts, "g") == [None, None]


def is_a_different_user(store: Any, rank: int, world_size: int, name: str, islands: Any) -> str:
    worlds.join(store, rank, world_size, name, WAIT_SECONDS)
    # Loads the library and all modules now, because the second user has no permission to read them.
    allnorm.Communicator(device="cpu", timeout=WAIT_SECONDS, islands=islands).close()
    if rank:
        os.seteuid(65534)
    with pytest.raises((allnorm.AllnormError, OSError)) as caught:
        allnorm.Communicator(device="cpu", timeout=WAIT_SECONDS, islands=islands)
    return str(caught.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may start ranks as two users")
@pytest.mark.parametrize("islands", ["auto", ((0,), (1,))], ids=["flat", "islands"])
def test_ranks_of_two_users(workers: worlds.Workers, islands: Any) -> None:
    """The ranks can open neither a workspace nor the memory for the islands' announcements."""
    texts = workers.run([0, 1], is_a_different_user, "h", islands)
    for text in texts:
        assert "this process runs as user 65534: start all ranks as the same user" in text, texts
        assert "container" not in text


# ---- Random worlds -------------------------------------------------------------------------------


@pytest.mark.long
def test_worlds_come_and_go() -> None:
    print(worlds.random_worlds(seed=1, seconds=15))


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_many_worlds_come_and_go() -> None:
    seed, seconds = os.environ.get("WORLDS_SEED", "0"), os.environ.get("WORLDS_SECONDS", "600")
    print(worlds.random_worlds(int(seed), float(seconds)))
