"""The ordering soak: would a byte of a wrong peer, an older call or a later one ever be seen?

Calls of every kind come in bursts without host synchronisation, eager and from CUDA graphs, on two
communicators in turn; every rank waits at its own random times. Payloads differ by rank and call,
and every element of every result is compared with the reference on the device.
"""

from __future__ import annotations

import datetime
import random
import time
from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist

import allnorm
from allnorm.testing import report
from allnorm.verify.record import Recorder
from allnorm.verify.run import Context
from allnorm.verify.stress.calls import Called, call, record
from allnorm.verify.stress.delays import Delays
from allnorm.verify.stress.graphs import Graph
from allnorm.verify.stress.kinds import TOKENS, Kind, algorithms, random_kind
from allnorm.verify.stress.tape import Tape, make_tape

BURST = 64  # calls between two looks at the results, at least
_BURSTS = (BURST, 96, 128, 256)
_TIMEOUT = datetime.timedelta(seconds=120)
_MAX_ELEMS = {"cuda": 1 << 22, "cpu": 1 << 17}  # of a call
_FIRST_ROWS = {"cuda": 1024, "cpu": 96}  # where a call's rows may begin on a tape
_NUM_KINDS = {"cuda": 48, "cpu": 24}  # of a section
_GRAPHS, _CALLS_PER_GRAPH, _GRAPH_MAX_ELEMS = 5, 16, 1 << 20
_GRAPH_SHARE = 0.04  # of what is issued; each replay counts as its calls
_IDLE_SECONDS = {"cuda": 1.5, "cpu": 0.3}
_IDLE_BEFORE = (0, 20)  # bursts of a section: the first replay of a graph, and a later one


@dataclass(frozen=True)
class _Settings:
    """How the two communicators of a section are made."""

    wraps: tuple[int, int]  # the operation number that each crosses
    early_trigger: tuple[bool, bool]  # of each
    dependent_launch: tuple[bool, bool]  # of each
    workspace_bytes: int | None  # of both; small ones cut calls into chunks


_SECTIONS = (
    _Settings((1 << 31, 1 << 32), (True, False), (True, True), None),
    _Settings((1 << 32, 1 << 31), (True, True), (False, True), 2 << 20),
    _Settings((1 << 31, 1 << 32), (False, True), (True, False), None),
    _Settings((1 << 32, 1 << 31), (True, False), (True, True), 1 << 20),
)


def soak(context: Context, recorder: Recorder) -> None:
    """Runs `job.stress` calls or a few more, in sections of other communicators and kinds."""
    total, done = context.job.stress, 0
    delays = Delays(context.job.seed, context.comm.rank, context.comm.device)
    figures: Counter[str] = Counter()
    sections = _SECTIONS[: max(1, min(len(_SECTIONS), total // BURST))]
    for index, settings in enumerate(sections):
        section = _Section(context, recorder, settings, delays, figures, index)
        goal = total * (index + 1) // len(sections)
        with section:
            section.prepare(goal - done)
            while done < goal:
                report({"text": recorder.name, "done": done, "total": total})
                done += section.burst(done, goal - done)
    recorder.figures = dict(figures)
    recorder.note = (
        f"{figures['bursts']:,} bursts without host synchronisation, {figures['replays']:,} graph "
        f"replays, {figures['elements']:.1e} elements compared"
    )


class _Section:
    """Two communicators, the kinds of calls that they make, and their rows."""

    def __init__(
        self,
        context: Context,
        recorder: Recorder,
        settings: _Settings,
        delays: Delays,
        figures: Counter[str],
        index: int,
    ) -> None:
        self.bursts = 0
        self._context, self._recorder, self._figures = context, recorder, figures
        self._settings, self._delays = settings, delays
        self._device = context.comm.device
        self._rng = random.Random(f"soak {context.job.seed} {index}")
        self._tapes: dict[tuple[torch.dtype, int], Tape] = {}
        self._comms: list[allnorm.Communicator] = []
        self._kinds: list[Kind] = []
        self._rows: list[list[int]] = []  # of each kind: where its next calls begin
        self._graphs: list[tuple[Graph, list[int]]] = []

    def __enter__(self) -> _Section:
        return self

    def __exit__(self, *_: object) -> None:
        self._graphs.clear()
        for comm in self._comms:
            comm.close()

    def prepare(self, num_calls: int) -> None:
        """Makes communicators that will wrap within so many calls, kinds, and graphs."""
        settings = self._settings
        for which in range(2):
            before_wrap = self._rng.randint(1, max(2, num_calls // 8))
            self._comms.append(
                allnorm.Communicator(
                    device=self._device,
                    workspace_bytes=settings.workspace_bytes,
                    timeout=_TIMEOUT,
                    early_trigger=settings.early_trigger[which],
                    dependent_launch=settings.dependent_launch[which],
                    first_op=settings.wraps[which] - before_wrap,
                )
            )
        while len(self._kinds) < _NUM_KINDS[self._device.type]:
            kind = random_kind(self._rng, self._device, _MAX_ELEMS[self._device.type])
            if algorithms(kind, self._comms) == {kind.algorithm} or kind.algorithm == "auto":
                self._kinds.append(kind)
                self._tape(kind).expected(kind)
        self._rows = [[] for _ in self._kinds]
        if self._device.type == "cuda":
            fitting = self._capturable()
            self._graphs = [self._make_graph(fitting) for _ in range(_GRAPHS) if fitting]

    def burst(self, number: int, left: int) -> int:
        """Makes calls without waiting for any, then compares them all; how many, at least BURST.

        The first has that number; the section wants as many as are left.
        """
        called: list[Called] = []
        if self.bursts in _IDLE_BEFORE:
            self._idle()
            called += self._replay(number, "replay after idling") if self._graphs else []
        size, room_bytes = min(left, self._rng.choice(_BURSTS)), _most_bytes(self._device)
        while len(called) < BURST or (len(called) < size and room_bytes > 0):
            self._delays.before_call()
            if self._graphs and self._rng.random() < _GRAPH_SHARE:
                new = self._replay(number + len(called), "replay")
            else:
                new = [self._call(number + len(called))]
            called += new
            room_bytes -= sum(one.num_bytes for one in new)
        record(called, self._recorder)
        for one in called:
            self._figures["elements"] += sum(part.numel() for part in one.results.values())
        for comm in self._comms:
            comm.check()
        self.bursts += 1
        self._figures["bursts"] += 1
        return len(called)

    def _call(self, number: int) -> Called:
        which, comm_index = self._rng.randrange(len(self._kinds)), self._rng.randrange(2)
        kind, row = self._kinds[which], self._next_row(which)
        where = f"communicator {comm_index}"
        return call(self._comms[comm_index], kind, self._tape(kind), row, number, where)

    def _replay(self, number: int, where: str) -> list[Called]:
        graph, kinds = self._rng.choice(self._graphs)
        self._figures["replays"] += 1
        return graph.replay(number, [self._next_row(which) for which in kinds], where)

    def _capturable(self) -> list[int]:
        """The kinds that graphs hold: short ones that run in one of allnorm's kernels."""
        return [
            which
            for which, kind in enumerate(self._kinds)
            if kind.num_tokens * kind.hidden_size <= _GRAPH_MAX_ELEMS
            and "unfused" not in algorithms(kind, self._comms)
        ]

    def _make_graph(self, fitting: list[int]) -> tuple[Graph, list[int]]:
        chosen = [self._rng.choice(fitting) for _ in range(_CALLS_PER_GRAPH)]
        calls = []
        for which in chosen:
            kind = self._kinds[which]
            comm = self._comms[self._rng.randrange(2)]
            calls.append((comm, kind, self._tape(kind), self._rng.random() < 0.5))
        return Graph(calls), chosen

    def _next_row(self, which: int) -> int:
        """No two calls of a kind begin at the same row before all have been used."""
        if not self._rows[which]:
            self._rows[which] = list(range(_FIRST_ROWS[self._device.type]))
            self._rng.shuffle(self._rows[which])
        return self._rows[which].pop()

    def _tape(self, kind: Kind) -> Tape:
        key = (kind.dtype, kind.hidden_size)
        if key not in self._tapes:
            comm = self._context.comm
            rows = max(TOKENS[self._device.type]) + _FIRST_ROWS[self._device.type]
            seed = self._rng.randrange(1 << 31)
            self._tapes[key] = make_tape(
                rows, kind.hidden_size, kind.dtype, self._device, comm.rank, comm.world_size, seed
            )
        return self._tapes[key]

    def _idle(self) -> None:
        """Long enough for clocks to fall and caches to be lost to others."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        time.sleep(_IDLE_SECONDS[self._device.type])


def _most_bytes(device: torch.device) -> int:
    """Of results kept until they are compared."""
    if device.type == "cpu":
        return 1 << 28
    return int(torch.cuda.get_device_properties(device).total_memory) // 16
