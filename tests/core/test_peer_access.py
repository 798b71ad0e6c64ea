"""Tests communicators' device memory: stores that do not reach a peer, and full devices."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from rank_helpers import Case, device, on

import allnorm
from allnorm.core import _native, workspace
from allnorm.errors import AllnormError

MIB = 1 << 20


class Ranks:
    """Simulates ranks as threads; implements `Rendezvous.agree` without a store."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._barrier = threading.Barrier(world_size, timeout=60)
        self._reports: dict[int, tuple[Any, Exception | None]] = {}

    def agree(self, rank: int, step: Callable[[], Any], what: str) -> list[Any]:
        try:
            report = step(), None
        except Exception as error:  # noqa: BLE001 - reported, and raised below
            report = None, error
        self._reports[rank] = report
        self._barrier.wait()
        reports = dict(self._reports)
        self._barrier.wait()
        if report[1] is not None:
            raise report[1]
        for other, (_, error) in reports.items():
            if error is not None:
                raise AllnormError(f"{what} failed on rank {other}: {error}")
        return [reports[r][0] for r in range(self.world_size)]

    def run(self, function: Callable[[Any], Any]) -> list[Any]:
        """Returns, for each rank, the result of `function(meeting)` or the error it raised."""
        results: list[Any] = [None] * self.world_size

        def work(rank: int) -> None:
            meeting = Meeting(self, rank)
            try:
                results[rank] = function(meeting)
            except Exception as error:  # noqa: BLE001 - returned
                results[rank] = error

        threads = [threading.Thread(target=work, args=(r,)) for r in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


class Meeting:
    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.rank, self.world_size = rank, ranks.world_size
        self.ranks = tuple(range(ranks.world_size))
        self.agree = functools.partial(ranks.agree, rank)


class Devices:
    """A fake CUDA library. An address is 1000 plus the rank that owns the memory.

    Attributes:
        lost: pairs (from, to) of ranks whose stores do not arrive.
        mapped: memory that is currently mapped or allocated.
        full: how many allocations fail.
    """

    def __init__(self, lost: Sequence[tuple[int, int]] = (), full: int = 0) -> None:
        self.lost, self.full = set(lost), full
        self.mapped: set[tuple[str, int, int]] = set()
        self._words: set[tuple[int, int]] = set()
        self._lock = threading.Lock()
        self._made = itertools.count()

    def ipc_create(self, index: int, num_bytes: int) -> tuple[int, bytes]:
        with self._lock:
            if self.full:
                self.full -= 1
                raise OSError("allocating the workspace failed: out of memory (cudaError2)")
            address = 1000 + index
            self.mapped.add(("own", index, address))
            return address, str(address).encode()

    def ipc_open(self, index: int, handle: bytes) -> int:
        self.mapped.add(("peer", index, int(handle)))
        return int(handle)

    def ipc_probe(self, index: int, rank: int, addresses: list[int]) -> None:
        for peer, address in enumerate(addresses):
            assert address == 1000 + peer
            if peer != rank and (rank, peer) not in self.lost:
                self._words.add((rank, peer))

    def ipc_probed(
        self, index: int, rank: int, world_size: int, address: int, timeout_ns: int
    ) -> list[int]:
        assert address == 1000 + rank
        assert timeout_ns > 1e9
        peers = (peer for peer in range(world_size) if peer != rank)
        return [peer for peer in peers if (peer, rank) not in self._words]

    def ipc_leave(self, index: int, rank: int, addresses: list[int]) -> None:
        for peer, address in enumerate(addresses):
            if address and peer != rank:
                self.mapped.remove(("peer", index, address))

    def ipc_free(self, index: int, rank: int, world_size: int, address: int) -> bool:
        with self._lock:
            if world_size and any(a == address and kind == "peer" for kind, _, a in self.mapped):
                return False
            self.mapped.remove(("own", index, address))
            return True


def create(
    monkeypatch: pytest.MonkeyPatch, devices: Devices, world_size: int
) -> tuple[list[Any], list[str]]:
    """Returns each rank's workspace or error, and an entry per time torch's cache was emptied."""
    emptied: list[str] = []
    monkeypatch.setattr(_native, "library", lambda backend: devices)
    monkeypatch.setattr(workspace, "_left_behind", [])
    for name, function in (
        ("init", lambda: None),
        ("get_device_properties", lambda place: place),
        ("empty_cache", lambda: emptied.append("emptied")),
        ("mem_get_info", lambda place: (100 * MIB, 80_000 * MIB)),
        ("memory_allocated", lambda place: 70_000 * MIB),
    ):
        monkeypatch.setattr(torch.cuda, name, function)
    # Each rank has its own device, because get_device_properties() returns the device.
    results = Ranks(world_size).run(
        lambda meeting: workspace.create(meeting, torch.device("cuda", meeting.rank), MIB)
    )
    return results, emptied


def test_stores_that_arrive_make_a_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = Devices()
    results, emptied = create(monkeypatch, devices, 4)
    assert not emptied
    for made in results:
        assert made.addresses == [1000, 1001, 1002, 1003]
        assert not made.obstacle
    for made in results:
        made.release()
    workspace._free_left_behind()
    assert not devices.mapped


@pytest.mark.parametrize("lost", [(0, 1), (1, 0), (2, 0), (1, 2)])
def test_lost_stores_are_an_obstacle_on_every_rank(
    monkeypatch: pytest.MonkeyPatch, lost: tuple[int, int]
) -> None:
    devices = Devices([lost])
    results, _ = create(monkeypatch, devices, 3)
    for made in results:
        assert made.addresses == []
        assert f"stores of rank {lost[0]} do not reach rank {lost[1]}" in made.obstacle
        assert "IOMMU" in made.obstacle
        assert made.reach == ()  # three ranks form no islands if two cannot reach each other
    assert not devices.mapped


def test_ranks_that_reach_each_other_are_islands(monkeypatch: pytest.MonkeyPatch) -> None:
    halves = (0, 1), (2, 3)
    across = [(a, b) for a in range(4) for b in range(4) if (a < 2) != (b < 2)]
    devices = Devices(across)
    results, _ = create(monkeypatch, devices, 4)
    assert [made.reach for made in results] == [halves] * 4
    assert not devices.mapped


def test_a_full_device_is_retried_without_torchs_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = Devices(full=1)
    results, emptied = create(monkeypatch, devices, 2)
    assert [made.obstacle for made in results] == ["", ""]
    assert emptied == ["emptied"]


def test_a_device_that_stays_full_is_an_error_on_every_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices = Devices(full=4)
    results, emptied = create(monkeypatch, devices, 2)
    assert len(emptied) == 2
    for error in results:
        assert isinstance(error, MemoryError)
        for part in ("1 MiB", "out of memory", "100 of 80000 MiB", "70000 MiB", "workspace_bytes"):
            assert part in str(error)
    assert not devices.mapped


@contextlib.contextmanager
def losing_stores(rank: int, culprit: int) -> Iterator[None]:
    """Makes rank `culprit` write its first peer's probe to unrelated memory."""
    library = _native.library("cuda")
    decoy = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    original = library.ipc_probe

    def probe(index: int, own: int, addresses: list[int]) -> None:
        peer = 1 if own == 0 else 0
        original(
            index, own, [decoy.data_ptr() if q == peer else a for q, a in enumerate(addresses)]
        )

    if rank == culprit:
        library.ipc_probe = probe
    try:
        yield
    finally:
        if rank == culprit:
            del library.ipc_probe


@on(gpu=[2])
@pytest.mark.own_gpus
def test_a_probe_that_is_lost_on_gpus(rank: int, world_size: int) -> None:
    for culprit in (0, world_size - 1):
        with losing_stores(rank, culprit), allnorm.Communicator(device=device(), timeout=60) as c:
            plan = c.plan(5, 4096, torch.bfloat16)
            assert plan.algorithm in ("unfused", "hierarchical"), plan
            assert f"stores of rank {culprit} do not reach" in plan.reason, plan
            for case in (Case((5, 4096)), Case((33, 2880))):
                case.compare(c, *case.run(c))
    with allnorm.Communicator(device=device(), timeout=60) as c:
        assert c.plan(5, 4096, torch.bfloat16).algorithm in ("one_shot", "two_shot")
        case = Case((5, 4096))
        case.compare(c, *case.run(c))
