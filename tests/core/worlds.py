"""Runs random worlds: processes join one world of ranks after another, and are replaced.

A world's seed, equal on every rank, determines what happens in it. `Workers` holds the processes.
Each has been in different worlds before, or in none.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import multiprocessing
import os
import random
import re
import signal
import time
import traceback
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

import allnorm
from allnorm import reference
from allnorm.core import rendezvous
from allnorm.testing import rank_input, same_bits, shared_input

TIMEOUT_SECONDS = 120.0
SHAPES = ((1, 8), (3, 200), (17, 1000), (40, 512))


class Workers:
    """Processes in numbered slots, each with a pipe.

    Attributes:
        store: the store of all worlds, which outlives every process.
    """

    def __init__(self, count: int) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            ["torch", "pytest", "allnorm.core.opening", "allnorm.reference"]
        )
        self._processes: list[Any] = [None] * count
        self._pipes: list[Any] = [None] * count
        for slot in range(count):
            self.replace(slot)

    def replace(self, slot: int) -> None:
        """Kills the process of a slot and starts a new one."""
        self.kill(slot)
        self._pipes[slot], theirs = self._context.Pipe()
        arguments = (theirs, self.store.port)
        self._processes[slot] = self._context.Process(target=_work, args=arguments, daemon=True)
        self._processes[slot].start()
        theirs.close()

    def kill(self, slot: int) -> None:
        if self._processes[slot] is not None:
            self._processes[slot].kill()
            self._processes[slot].join()

    def pid(self, slot: int) -> int:
        return int(self._processes[slot].pid)

    def start(self, slots: Sequence[int], function: Any, *arguments: Any) -> None:
        """Runs `function(store, rank, number of slots, *arguments)` in the given slots."""
        for rank, slot in enumerate(slots):
            self._pipes[slot].send((function, (rank, len(slots), *arguments)))

    def results(self, slots: Sequence[int], seconds: float) -> list[Any]:
        """Returns a result per slot: "raised ..." for an error, or "died" or "hangs"."""
        until, found = time.monotonic() + seconds, []
        for slot in slots:
            try:
                if not self._pipes[slot].poll(max(0.0, until - time.monotonic())):
                    os.kill(self._processes[slot].pid, signal.SIGUSR1)
                    time.sleep(0.5)
                    found.append("hangs")
                    continue
                found.append(self._pipes[slot].recv())
            except (EOFError, ConnectionError):
                found.append("died")
        return found

    def run(self, slots: Sequence[int], function: Any, *arguments: Any) -> list[Any]:
        self.start(slots, function, *arguments)
        return self.results(slots, 2 * TIMEOUT_SECONDS)

    def close(self) -> None:
        for slot in range(len(self._processes)):
            self.kill(slot)


def _work(pipe: Any, port: int) -> None:
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    with contextlib.suppress(EOFError):
        while True:
            function, arguments = pipe.recv()
            try:
                answer = function(store, *arguments)
            except BaseException:  # noqa: BLE001 - sent to the parent
                answer = f"raised {traceback.format_exc()}"
            pipe.send(answer)
    os._exit(0)


def join(store: Any, rank: int, world_size: int, name: str, seconds: float) -> None:
    """Leaves the previous world, and joins a new one."""
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()
    # torch numbers a process's groups, and does not reset the number after a failure.
    dist.distributed_c10d._world.group_count = 0
    os.environ["ALLNORM_TIMEOUT_SECONDS"] = str(seconds)  # for for_group()
    dist.init_process_group(
        "gloo",
        store=PrefixStore(name, store),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=seconds),
    )


def check_calls(comm: allnorm.Communicator, chosen: random.Random) -> None:
    """Makes random calls and compares their bits with the reference."""
    for number in range(chosen.randint(1, 4)):
        shape, dtype = chosen.choice(SHAPES), chosen.choice((torch.float32, torch.bfloat16))
        algorithm = chosen.choice(("auto", "auto", "unfused"))
        xs = [rank_input(shape, dtype, r, call=number) for r in range(comm.world_size)]
        residual = shared_input(shape, dtype, "residual")
        weight = shared_input(shape[1:], dtype, "weight")
        arguments = {"numerics": "rounded"}
        got = comm.all_reduce_add_rms_norm(
            xs[comm.rank], residual, weight, 1e-6, algorithm=algorithm, **arguments
        )
        want = reference.all_reduce_add_rms_norm(
            xs, residual, weight, 1e-6, islands=comm.islands, **arguments
        )
        assert all(map(same_bits, got, want)), (shape, dtype, algorithm, comm)


def use(group: dist.ProcessGroup, chosen: random.Random, seconds: float) -> str:
    """Creates a group's communicator in a random way and uses it; returns its name."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    way = chosen.choice(("plain", "for_group", "islands", "refused", "late", "left open"))
    odd_one = chosen.randrange(world_size)
    arguments: dict[str, Any] = {"workspace_bytes": 1 << 16, "timeout": seconds}
    if way == "for_group":
        comm = allnorm.Communicator.for_group(group, device="cpu")
        check_calls(comm, chosen)
        return comm.name
    if way == "islands":
        half = world_size // 2
        pairs = (tuple(range(half)), tuple(range(half, 2 * half)))
        fits = world_size % 2 == 0 and chosen.random() < 0.5
        arguments["islands"] = pairs if fits else tuple((r,) for r in range(world_size))
    if way == "refused":  # one rank passes a different argument
        wrong = {**arguments, "workspace_bytes": 1 << (17 if rank == odd_one else 16)}
        raises = pytest.raises(ValueError, match="workspace_bytes is")
        with raises if world_size > 1 else contextlib.nullcontext():
            allnorm.Communicator(group, device="cpu", **wrong)
    if way == "late" and world_size > 1:
        store, key = rendezvous.store_of(group), f"given up {chosen.random()}"
        if rank != odd_one:
            with pytest.raises(allnorm.AllnormError) as caught:
                allnorm.Communicator(group, device="cpu", **{**arguments, "timeout": 0.1})
            if isinstance(caught.value, allnorm.PeerDiedError):
                raise caught.value
            text = str(caught.value)
            missing = re.search(r"for ranks? ([\d, ]+) while", text)
            assert missing, text
            assert str(odd_one) in missing[1].split(", "), text
            store.add(key, 1)
        while store.add(key, 0) < world_size - 1:  # the late rank waits until the others timed out
            time.sleep(0.01)
    comm = allnorm.Communicator(group, device="cpu", **arguments)
    check_calls(comm, chosen)
    if way != "left open":
        comm.close()
    return comm.name


def live(store: Any, rank: int, world_size: int, name: str, seed: int, seconds: float) -> Any:
    """Runs one rank of a world: creates, uses and destroys groups.

    Returns:
        The communicators' names, with the ranks of their groups.
    """
    chosen = random.Random(seed)
    join(store, rank, world_size, name, seconds)
    store.add(f"{name}/begun", 1)
    names, groups = [], []
    for _ in range(chosen.randint(2, 5)):
        ranks = sorted(chosen.sample(range(world_size), chosen.randint(1, world_size)))
        kept = [group for group, _ in groups]
        if kept and chosen.random() < 0.3:
            index = chosen.randrange(len(kept))
            group, ranks = groups[index]
        elif chosen.random() < 0.3:
            group, ranks = dist.group.WORLD, list(range(world_size))
        else:
            # The default timeout is 30 minutes, regardless of the world's timeout.
            group = dist.new_group(ranks, timeout=datetime.timedelta(seconds=seconds))
            groups.append((group, ranks))
        one_seed = chosen.random()
        times = chosen.randint(1, 2) * (rank in ranks)
        seeds = [f"{one_seed} {number}" for number in range(times)]
        names += [(use(group, random.Random(one), seconds), tuple(ranks)) for one in seeds]
        if groups and chosen.random() < 0.4:
            group, ranks = groups.pop(chosen.randrange(len(groups)))
            if rank in ranks:
                dist.destroy_process_group(group)
            del group
            gc.collect()
    dist.barrier()  # a rank that left earlier would close its peers' connections
    return names


def random_worlds(seed: int, seconds: float, slots: int = 4) -> dict[str, int]:
    """Runs random worlds for `seconds`; returns counts of what happened.

    Raises:
        AssertionError: a rank of a world hung, raised the wrong error or computed a wrong result.
    """
    chosen = random.Random(seed)
    counts = {"worlds": 0, "replaced": 0, "killed": 0, "named": 0}
    workers = Workers(slots)
    until = time.monotonic() + seconds
    try:
        while time.monotonic() < until or counts["worlds"] < 4:
            members = chosen.sample(range(slots), chosen.choice((2, 3, 4, 4)))
            number, world_seed = counts["worlds"], chosen.randrange(1 << 30)
            what = f"seed {seed}, world {number}"
            doomed = chosen.random() < 0.25
            patience = 20.0 if doomed else TIMEOUT_SECONDS
            workers.start(members, live, f"world{number}", world_seed, patience)
            if doomed:
                victim = chosen.choice(members)
                begun = time.monotonic()
                while workers.store.add(f"world{number}/begun", 0) < len(members):
                    time.sleep(0.01)
                    if time.monotonic() > begun + patience:
                        break
                time.sleep(chosen.random())
                pid = workers.pid(victim)
                workers.kill(victim)
                counts["killed"] += 1
            results = workers.results(members, 2 * TIMEOUT_SECONDS)
            assert "hangs" not in results, (what, results)
            if doomed:
                # torch's collectives raise torch's errors. allnorm's errors name only the victim.
                text = "\n".join(map(str, results))
                assert "AssertionError" not in text, (what, text)
                named = set(re.findall(r"rocess (\d+)(?: of rank \d+)? has ended", text))
                assert named <= {str(pid)}, (what, text)
                counts["named"] += len(named)
                workers.replace(victim)
            else:
                wrong = [result for result in results if not isinstance(result, list)]
                assert not wrong, "\n".join([what, *wrong])
                _check_names(results, what)
                if chosen.random() < 0.5:
                    workers.replace(chosen.randrange(slots))
                    counts["replaced"] += 1
            counts["worlds"] += 1
    finally:
        workers.close()
    return counts


def _check_names(results: list[Any], what: str) -> None:
    """Checks that all ranks of a group have the same communicator names, in the same order."""
    by_ranks: dict[tuple[int, ...], dict[int, list[str]]] = {}
    for rank, names in enumerate(results):
        for name, ranks in names:
            by_ranks.setdefault(ranks, {}).setdefault(rank, []).append(name)
    for ranks, lists in by_ranks.items():
        assert set(lists) == set(ranks), (what, by_ranks)
        assert len({tuple(names) for names in lists.values()}) == 1, (what, ranks, lists)
