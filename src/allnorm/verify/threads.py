"""A soak of communicators in separate threads, which must not disturb each other.

In each round, the ranks open communicators of equal, overlapping and separate groups, with every
kind of islands. Each communicator has its own thread, which runs calls of every kind. All ranks run
the same calls on a communicator, at different times. Meanwhile, another thread runs a user's
collectives on the same process group. Every element of every result is compared with the reference.
"""

from __future__ import annotations

import datetime
import random
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import allnorm
from allnorm.core.threads import start
from allnorm.islands import of_size
from allnorm.testing import gather, report
from allnorm.verify.calls import TOKENS, Cases, algorithms
from allnorm.verify.case import Case
from allnorm.verify.context import Context, Recorder
from allnorm.verify.soak import Tape, compare_all, make_call, make_tape

_TIMEOUT = datetime.timedelta(seconds=120)
_COMMUNICATORS = (3, 6)  # minimum and maximum number per round
_KINDS = 8  # kinds of calls per communicator
_CALLS = (60, 200)  # minimum and maximum number per communicator and round
_MAX_ELEMS = 1 << 14  # maximum elements of a call
_FIRST_ROWS = 16  # number of rows of a tape at which a call may start
_UNFUSED_SHARE = 0.4  # share of unfused kinds, which share the most between communicators
_PAUSE_SHARE, _PAUSE_SECONDS = 0.1, 2e-3
_LONG_SHARE, _LONG_SECONDS = 0.005, 5e-2
_USER_ELEMS = (1, 256, 4096)


def threads(context: Context, recorder: Recorder) -> None:
    """Runs rounds until `job.threads` seconds have passed."""
    began, figures = time.monotonic(), Counter[str]()
    groups = _groups(context.comm.world_size)
    while True:
        used = max(gather(time.monotonic() - began))  # the ranks must stop together
        if figures["rounds"] and used >= context.job.threads:
            break
        done, total = min(int(used), int(context.job.threads)), int(context.job.threads)
        report({"text": recorder.name, "done": done, "total": total})
        _Round(context, groups, figures["rounds"]).run(recorder, figures)
        figures["rounds"] += 1
    recorder.figures = dict(figures)
    recorder.note = (
        f"{figures['rounds']:,} rounds, {figures['communicators']:,} communicators, of whose calls "
        f"{figures['unfused']:,} were unfused and {figures['hierarchical']:,} hierarchical on "
        "rank 0"
    )


def _groups(world_size: int) -> list[tuple[list[int], Any]]:
    """Returns the ranks and process groups of a round: all ranks, and overlapping parts.

    A group is None on ranks outside it. Collective.
    """
    parts = [list(range(world_size))]
    if world_size > 2:
        parts += [list(range(world_size - 1)), list(range(1, world_size)), [0, world_size - 1]]
    whole: Any = dist.group.WORLD
    made = [dist.new_group(ranks) if ranks != parts[0] else whole for ranks in parts]
    return list(zip(parts, made, strict=True))


def _islands(size: int) -> list[Any]:
    """Returns every kind of islands for `size` ranks."""
    kinds: list[Any] = ["auto"]
    kinds += [of_size(part, size) for part in range(1, size) if size % part == 0]
    if size > 2:
        kinds.append((tuple(range(size - 1)), (size - 1,)))
    if size == 4:
        kinds.append(((0, 2), (1, 3)))
    return kinds


class _Round:
    """The communicators of a round, and their threads."""

    def __init__(self, context: Context, groups: list[tuple[list[int], Any]], number: int) -> None:
        self._context, self._number = context, number
        self._rng = random.Random(f"threads {context.job.seed} {number}")
        self._drivers: list[_Driver] = []
        rank, place = context.comm.rank, context.comm.device
        for index in range(self._rng.randint(*_COMMUNICATORS)):
            ranks, group = self._rng.choice(groups)
            islands = self._rng.choice(_islands(len(ranks)))
            num_calls, seed = self._rng.randint(*_CALLS), self._rng.randrange(1 << 31)
            small = self._rng.random() < 0.3
            comm = None
            if rank in ranks:
                comm = allnorm.Communicator(
                    *(group, place),
                    workspace_bytes=64 << 10 if small else None,  # cuts calls into chunks
                    timeout=_TIMEOUT,
                    islands=islands,
                )
            where = f"round {number}, communicator {index} of ranks {ranks}, islands {islands}"
            self._drivers.append(_Driver(comm, where, seed, num_calls, rank))

    def run(self, recorder: Recorder, figures: Counter[str]) -> None:
        """Runs all threads to completion; records their calls in communicator order."""
        mine = [driver for driver in self._drivers if driver.comm is not None]
        rounds = self._rng.randint(20, 100)
        bodies = [*(driver.run for driver in mine), lambda: self._use_group(rounds)]
        started = [start(body) for body in bodies]
        for thread, _, _ in started:
            thread.join()
        for _, _, errors in started:
            if errors:
                raise errors[0]
        for driver in self._drivers:
            driver.finish(recorder, figures)

    def _use_group(self, count: int) -> None:
        """Runs collectives of all ranks, as a user of the same group might."""
        comm, pauses = (
            self._context.comm,
            random.Random(f"{self._number} {self._context.comm.rank}"),
        )
        order = random.Random(f"user {self._context.job.seed} {self._number}")
        for call in range(count):
            given = torch.full((order.choice(_USER_ELEMS),), float(comm.rank + call))
            expected = float(sum(rank + call for rank in range(comm.world_size)))
            work = dist.all_reduce(given, async_op=True)
            time.sleep(pauses.random() * _PAUSE_SECONDS)
            work.wait()
            if not (given == expected).all():
                raise AssertionError(f"collective {call} of the user is wrong: {given}")


class _Driver:
    """A communicator and its thread's calls; `comm` is None on ranks outside the group."""

    def __init__(
        self, comm: allnorm.Communicator | None, where: str, seed: int, num_calls: int, rank: int
    ) -> None:
        self.comm = comm
        self._where, self._seed, self._num_calls, self._rank = where, seed, num_calls, rank
        self._found = Recorder(where)
        self._tapes: dict[tuple[torch.dtype, int], Tape] = {}

    def run(self) -> None:
        """Runs all calls, and compares each with the reference."""
        comm = self.comm
        assert comm is not None
        order = random.Random(f"calls {self._seed}")
        pauses = random.Random(f"pauses {self._seed} {self._rank}")
        kinds = self._kinds(order, comm)
        for number in range(self._num_calls):
            kind, row = order.choice(kinds), order.randrange(_FIRST_ROWS)
            chance = pauses.random()
            if chance < _LONG_SHARE:
                time.sleep(pauses.random() * _LONG_SECONDS)
            elif chance < _PAUSE_SHARE:
                time.sleep(pauses.random() * _PAUSE_SECONDS)
            call = make_call(comm, kind, self._tape(kind, comm), row, number, self._where)
            compare_all([call], self._found)
        comm.check()

    def finish(self, recorder: Recorder, figures: Counter[str]) -> None:
        """Records what was found, with equal counts on every rank; closes the communicator."""
        failures = dict(self._found.failures)
        for number in range(self._num_calls):
            recorder.count(failures.get(number, ""))
        figures["communicators"] += 1
        if self.comm is not None:
            calls = self.comm.stats().calls
            figures["unfused"] += calls["unfused"]
            figures["hierarchical"] += calls.get("hierarchical", 0)
            self.comm.close()

    def _kinds(self, order: random.Random, comm: allnorm.Communicator) -> list[Case]:
        kinds: list[Case] = []
        cases = Cases(order, comm.device, _MAX_ELEMS)
        while len(kinds) < _KINDS:
            kind = cases.draw()
            if order.random() < _UNFUSED_SHARE:
                kind = replace(kind, algorithm="unfused")
            if kind.algorithm == "auto" or algorithms(kind, [comm]) == {kind.algorithm}:
                kinds.append(kind)
        return kinds

    def _tape(self, kind: Case, comm: allnorm.Communicator) -> Tape:
        key = kind.dtype, kind.hidden_size
        if key not in self._tapes:
            rows = max(TOKENS[comm.device.type]) + _FIRST_ROWS
            self._tapes[key] = make_tape(
                *(rows, kind.hidden_size, kind.dtype, comm.device, comm.rank, comm.world_size),
                self._seed + kind.hidden_size,
                comm.islands,
            )
        return self._tapes[key]
