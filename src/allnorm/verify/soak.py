"""Soaks: long runs that detect data from a wrong peer, an older call or a later call.

Calls of every kind run in bursts without host synchronization, eagerly and from CUDA graphs,
alternating between two communicators. Every rank pauses at different random times. Inputs differ by
rank and call, and every element of every result is compared with the reference on the device.
"""

from __future__ import annotations

import datetime
import functools
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

import allnorm
from allnorm.islands import of_size
from allnorm.names import FUSED
from allnorm.testing import capture, describe_difference, report
from allnorm.testing.bits import as_integers
from allnorm.testing.inputs import normal_maker
from allnorm.verify.calls import EPS, TOKENS, Cases, algorithms
from allnorm.verify.case import Case, Results
from allnorm.verify.context import Context, Recorder
from allnorm.verify.unlike_norms import squares_of

BURST = 64  # minimum number of calls between two comparisons
_BURSTS = (BURST, 96, 128, 256)
_TIMEOUT = datetime.timedelta(seconds=120)
_MAX_ELEMS = {"cuda": 1 << 22, "cpu": 1 << 17}  # maximum elements of a call
_FIRST_ROWS = {"cuda": 1024, "cpu": 96}  # number of rows of a tape at which a call may start
_NUM_KINDS = {"cuda": 48, "cpu": 24}  # kinds of calls per section
_SLICES_SHARE = 0.12  # share of kinds that norm slices of rows
_STREAMS_SHARE = 0.12  # share of kinds that mix residual streams
_GRAPHS, _CALLS_PER_GRAPH = 5, 16
_GRAPH_MAX_ELEMS = 1 << 20  # maximum elements of a call in a graph
_GRAPH_SHARE = 0.04  # share of graph replays; a replay counts as all of its calls
_IDLE_SECONDS = {"cuda": 1.5, "cpu": 0.3}
_IDLE_BEFORE = (0, 20)  # bursts of a section that follow a pause: with a first and a later replay


@dataclass(frozen=True)
class _Settings:
    """The settings of the two communicators of a section."""

    wraps: tuple[int, int]  # for each: the operation number that it crosses
    early_trigger: tuple[bool, bool]  # for each
    dependent_launch: tuple[bool, bool]  # for each
    workspace_bytes: int | None  # for both; small workspaces cut calls into chunks


_SECTIONS = (
    _Settings((1 << 31, 1 << 32), (True, False), (True, True), None),
    _Settings((1 << 32, 1 << 31), (True, True), (False, True), 2 << 20),
    _Settings((1 << 31, 1 << 32), (False, True), (True, False), None),
    _Settings((1 << 32, 1 << 31), (True, False), (True, True), 1 << 20),
)


def soak(context: Context, recorder: Recorder) -> None:
    """Runs at least `job.stress` calls, in sections with new communicators and kinds of calls."""
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
        f"{figures['bursts']:,} bursts without host synchronization, {figures['replays']:,} graph "
        f"replays, {figures['elements']:.1e} elements compared"
    )


class _Section:
    """Two communicators, and the kinds of calls and the input rows that they use."""

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
        self._kinds: list[Case] = []
        self._rows: list[list[int]] = []  # by kind: first rows of its next calls
        self._graphs: list[tuple[Graph, list[int]]] = []

    def __enter__(self) -> _Section:
        return self

    def __exit__(self, *_: object) -> None:
        self._graphs.clear()
        for comm in self._comms:
            comm.close()

    def prepare(self, num_calls: int) -> None:
        """Creates kinds, graphs, and communicators whose counters wrap within `num_calls` calls."""
        settings = self._settings
        for number in range(2):
            before_wrap = self._rng.randint(1, max(2, num_calls // 8))
            self._comms.append(
                allnorm.Communicator(
                    device=self._device,
                    workspace_bytes=settings.workspace_bytes,
                    timeout=_TIMEOUT,
                    early_trigger=settings.early_trigger[number],
                    dependent_launch=settings.dependent_launch[number],
                    first_op=settings.wraps[number] - before_wrap,
                    islands=of_size(self._context.job.island_size, self._context.comm.world_size),
                )
            )
        cases = Cases(self._rng, self._device, _MAX_ELEMS[self._device.type])
        while len(self._kinds) < _NUM_KINDS[self._device.type]:
            share = self._rng.random()
            if share < _SLICES_SHARE:
                kind = cases.draw_slices()
            elif share < _SLICES_SHARE + _STREAMS_SHARE:
                kind = cases.draw_streams()
            else:
                kind = cases.draw()
            if algorithms(kind, self._comms) == {kind.algorithm} or kind.algorithm == "auto":
                self._kinds.append(kind)
                self._tape(kind).expected(kind)
        self._rows = [[] for _ in self._kinds]
        if self._device.type == "cuda" and not self._context.exchanges_over_gloo:
            fitting = self._capturable()
            self._graphs = [self._make_graph(fitting) for _ in range(_GRAPHS) if fitting]

    def burst(self, number: int, left: int) -> int:
        """Runs calls without waiting, then compares all results; returns the number of calls.

        The first call has the number `number`. The section has `left` calls left.
        """
        calls: list[PendingCall] = []
        if self.bursts in _IDLE_BEFORE:
            self._idle()
            calls += self._replay(number, "replay after idling") if self._graphs else []
        size, room_bytes = min(left, self._rng.choice(_BURSTS)), _most_bytes(self._device)
        while len(calls) < BURST or (len(calls) < size and room_bytes > 0):
            self._delays.before_call()
            if self._graphs and self._rng.random() < _GRAPH_SHARE:
                new = self._replay(number + len(calls), "replay")
            else:
                new = [self._call(number + len(calls))]
            calls += new
            room_bytes -= sum(call.num_bytes for call in new)
        compare_all(calls, self._recorder)
        for call in calls:
            self._figures["elements"] += sum(part.numel() for part in call.results.values())
        for comm in self._comms:
            comm.check()
        self.bursts += 1
        self._figures["bursts"] += 1
        return len(calls)

    def _call(self, number: int) -> PendingCall:
        kind_index, comm_index = self._rng.randrange(len(self._kinds)), self._rng.randrange(2)
        kind, row = self._kinds[kind_index], self._next_row(kind_index)
        where = f"communicator {comm_index}"
        return make_call(self._comms[comm_index], kind, self._tape(kind), row, number, where)

    def _replay(self, number: int, where: str) -> list[PendingCall]:
        graph, kinds = self._rng.choice(self._graphs)
        self._figures["replays"] += 1
        return graph.replay(number, [self._next_row(kind_index) for kind_index in kinds], where)

    def _capturable(self) -> list[int]:
        """Returns the kinds that graphs may contain: small calls that run in allnorm's kernels."""
        return [
            kind_index
            for kind_index, kind in enumerate(self._kinds)
            if kind.num_tokens * kind.hidden_size <= _GRAPH_MAX_ELEMS
            and "unfused" not in algorithms(kind, self._comms)
        ]

    def _make_graph(self, fitting: list[int]) -> tuple[Graph, list[int]]:
        chosen = [self._rng.choice(fitting) for _ in range(_CALLS_PER_GRAPH)]
        calls = []
        for kind_index in chosen:
            kind = self._kinds[kind_index]
            comm = self._comms[self._rng.randrange(2)]
            calls.append((comm, kind, self._tape(kind), self._rng.random() < 0.5))
        return Graph(calls), chosen

    def _next_row(self, kind_index: int) -> int:
        """Returns a call's first row; a kind uses every row once before it repeats one."""
        if not self._rows[kind_index]:
            self._rows[kind_index] = list(range(_FIRST_ROWS[self._device.type]))
            self._rng.shuffle(self._rows[kind_index])
        return self._rows[kind_index].pop()

    def _tape(self, kind: Case) -> Tape:
        key = (kind.dtype, kind.hidden_size)
        if key not in self._tapes:
            comm = self._context.comm
            rows = max(TOKENS[self._device.type]) + _FIRST_ROWS[self._device.type]
            seed = self._rng.randrange(1 << 31)
            self._tapes[key] = make_tape(
                *(rows, kind.hidden_size, kind.dtype, self._device, comm.rank, comm.world_size),
                seed,
                self._comms[0].islands,
            )
        return self._tapes[key]

    def _idle(self) -> None:
        """Waits long enough for clocks to drop and for caches to be evicted."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        time.sleep(_IDLE_SECONDS[self._device.type])


def _most_bytes(device: torch.device) -> int:
    """Returns the maximum bytes of results that are kept until they are compared."""
    if device.type == "cpu":
        return 1 << 28
    return int(torch.cuda.get_device_properties(device).total_memory) // 16


# ---- given shapes --------------------------------------------------------------------------------


def repeat_shapes(context: Context, recorder: Recorder) -> None:
    """Runs `job.repeat` calls of each of `job.shapes` with each fused algorithm.

    The algorithms are one_shot and two_shot, or hierarchical with multiple islands. No two calls of
    a shape have the same inputs. On GPUs, every other burst of small calls replays a graph.
    """
    comm, job = context.comm, context.job
    delays = Delays(job.seed, comm.rank, comm.device)
    kinds = []
    for num_tokens, hidden_size in job.shapes:
        for algorithm in FUSED if len(comm.islands) == 1 else ("hierarchical",):
            kind = Case((num_tokens, hidden_size), eps=EPS, algorithm=algorithm)
            # A shape that the algorithm cannot run is tested unfused.
            if algorithms(kind, [comm]) != {algorithm}:
                kind = replace(kind, algorithm="unfused")
            kinds.append(kind)
    kinds = list(dict.fromkeys(kinds))
    for index, kind in enumerate(kinds):
        seed = job.seed * 1009 + index
        num_rows, num_elems = kind.num_tokens + job.repeat, kind.num_tokens * kind.hidden_size
        where = (comm.device, comm.rank, comm.world_size)
        size = num_rows, kind.hidden_size, kind.dtype
        tape = make_tape(*size, *where, seed, comm.islands)
        rows = list(range(job.repeat))
        random.Random(seed).shuffle(rows)
        report({"text": f"{recorder.name}: {kind}", "done": index, "total": len(kinds)})
        small = num_elems <= _GRAPH_MAX_ELEMS and kind.algorithm != "unfused"
        small = small and not context.exchanges_over_gloo
        for begin in range(0, job.repeat, BURST):
            burst = rows[begin : begin + BURST]
            if small and comm.device.type == "cuda" and begin // BURST % 2:
                graph = Graph([(comm, kind, tape, index % 2 == 1) for index in range(len(burst))])
                calls = graph.replay(begin, burst, "replay")
            else:
                calls = []
                for number, row in enumerate(burst, start=begin):
                    delays.before_call()
                    calls.append(make_call(comm, kind, tape, row, number, "eager"))
            compare_all(calls, recorder)
            comm.check()
    recorder.note = f"{job.repeat:,} each of " + ", ".join(f"{t}x{h}" for t, h in job.shapes)


# ---- rows ----------------------------------------------------------------------------------------


_CHUNK_ELEMS = {"cuda": 1 << 26, "cpu": 1 << 20}  # limits the memory of a run of the reference
_EXPONENTS = 5  # rows are scaled by powers of two, so that scales and norms differ


@dataclass
class Tape:
    """One rank's input rows of one dtype and width, and their expected results."""

    x: torch.Tensor  # [num_rows, hidden_size], this rank's partial sums, different on every rank
    reduced: torch.Tensor  # their sum over the ranks, computed by the reference
    residual: torch.Tensor  # in the same shape, equal on every rank
    weight: torch.Tensor  # [hidden_size]
    squares: torch.Tensor  # sums of squares of the slices of `x` over the ranks; see `squares_of`
    world_size: int  # number of ranks
    _known: dict[Any, dict[str, torch.Tensor]] = field(default_factory=dict)

    def expected(self, kind: Case) -> dict[str, torch.Tensor]:
        """Returns the expected results of this kind of call for every row, by name."""
        key = kind.result_key()
        if key not in self._known:
            weight = self.weight_of(kind)
            parts = [
                kind.expected_slices(self.x[rows], self.squares[rows], weight, self.world_size)
                if kind.op == "rms_norm_sharded"
                else kind.expected_of(self.reduced[rows], self.residual[rows], weight)
                for rows in self._chunks(kind)
            ]
            self._known[key] = {n: torch.cat([part[n] for part in parts]) for n in parts[0]}
        return self._known[key]

    def weight_of(self, kind: Case) -> torch.Tensor:
        """Returns the weight in the dtype of the call."""
        return self.weight.float() if kind.float32_weight else self.weight

    def _chunks(self, kind: Case) -> list[slice]:
        num_rows, hidden_size = self.x.shape
        elems = hidden_size * (kind.streams if kind.op == "all_reduce_hyper_connection" else 1)
        step = max(1, _CHUNK_ELEMS[self.x.device.type] // elems)
        return [slice(low, low + step) for low in range(0, num_rows, step)]


def make_tape(
    num_rows: int,
    hidden_size: int,
    dtype: torch.dtype,
    device: torch.device,
    rank: int,
    world_size: int,
    seed: int,
    islands: Sequence[Sequence[int]],
) -> Tape:
    """Creates all ranks' rows from the seed; keeps this rank's and the sum. Not collective.

    The rows depend only on the arguments other than `rank`.
    """
    normal = normal_maker(seed * 7919, device)  # spread by a prime
    exponents = torch.arange(num_rows, device=device) * 7 % _EXPONENTS - _EXPONENTS // 2
    scale = torch.exp2(exponents.float())[:, None]
    mine = None
    sums: list[torch.Tensor | None] = [None] * len(islands)
    squares: torch.Tensor | None = None
    for source in range(world_size):
        x = (normal(source + 2, num_rows, hidden_size) * scale).to(dtype)
        mine = x if source == rank else mine
        squares = squares_of(x) if squares is None else squares + squares_of(x)
        # In rank order, like reference.all_reduce(), without holding all partials at once.
        number = next(i for i, island in enumerate(islands) if source in island)
        so_far = sums[number]
        sums[number] = x.float() if so_far is None else so_far + x.float()
    assert mine is not None
    assert squares is not None
    total = functools.reduce(torch.add, [one for one in sums if one is not None])
    residual = (normal(0, num_rows, hidden_size) * scale).to(dtype)
    weight = (1.0 + 0.1 * normal(1, hidden_size)).to(dtype)
    return Tape(mine, total.to(dtype), residual, weight, squares, world_size)


# ---- calls and their results ---------------------------------------------------------------------


_MAX_DESCRIBED = 20


@dataclass
class PendingCall:
    """A call whose results have not been compared yet."""

    number: int  # number of the call in its soak
    where: str  # origin of the call for messages, such as "replay"
    kind: Case  # the call
    tape: Tape  # tape with its rows
    row: int  # its first row
    results: Results  # its results by name; a sharded residual is gathered with the other rows
    own: tuple[int, int] | None  # this rank's rows of the call, if results have only these

    def wrong(self) -> torch.Tensor:
        """Returns the number of wrong elements, on the device, without waiting.

        No result is NaN, because the inputs are finite and small.
        """
        counts = [
            torch.count_nonzero(as_integers(got) != as_integers(self._expected(name)))
            for name, got in self.results.items()
        ]
        return torch.stack(counts).sum()

    def describe(self) -> str:
        """Describes the wrong results; waits for the device."""
        parts = [
            f"{name}: {difference}"
            for name, got in self.results.items()
            if (difference := describe_difference(got, self._expected(name)))
        ]
        return f"call {self.number}, {self.where}, {self.kind}: " + "; ".join(parts)

    @property
    def num_bytes(self) -> int:
        """The size of the results."""
        return sum(part.numel() * part.element_size() for part in self.results.values())

    def _expected(self, name: str) -> torch.Tensor:
        low, high = self.own or (0, self.kind.num_tokens)
        return self.tape.expected(self.kind)[name][self.row + low : self.row + high]


def make_call(
    comm: allnorm.Communicator, kind: Case, tape: Tape, row: int, number: int, where: str
) -> PendingCall:
    """Runs a call on a tape's rows, starting at `row`; does not wait for CUDA."""
    x, residual = (part[row : row + kind.num_tokens] for part in (tape.x, tape.residual))
    results = kind.issue(comm, x, residual, tape.weight_of(kind))
    return PendingCall(number, where, kind, tape, row, results, _own_rows(comm, kind))


def _own_rows(comm: allnorm.Communicator, kind: Case) -> tuple[int, int] | None:
    """Returns the rows that results of the call have on this rank; None: all rows."""
    return None if kind.gather else comm.row_shard(kind.num_tokens)


def compare_all(calls: Sequence[PendingCall], recorder: Recorder) -> None:
    """Counts every call, and describes the first wrong ones; waits for the device."""
    wrong = torch.stack([call.wrong() for call in calls])
    for call, count in zip(calls, wrong.tolist(), strict=True):
        failure = f"call {call.number}, {call.kind}: {count} elements wrong" if count else ""
        if count and len(recorder.failures) < _MAX_DESCRIBED:
            failure = call.describe()
        recorder.count(failure)


# ---- CUDA graphs ---------------------------------------------------------------------------------


@dataclass
class _CapturedCall:
    """One call in a graph, with its inputs and results."""

    comm: allnorm.Communicator
    kind: Case
    tape: Tape
    x: torch.Tensor
    residual: torch.Tensor
    in_place: bool
    results: Results


class Graph:
    """A graph of calls on multiple communicators, in the given order.

    Each call is given as its communicator, kind, tape, and whether results overwrite its inputs.
    """

    def __init__(self, calls: Sequence[tuple[allnorm.Communicator, Case, Tape, bool]]) -> None:
        self.calls = [
            _CapturedCall(
                *(comm, kind, tape),
                torch.zeros_like(tape.x[: kind.num_tokens]),
                torch.zeros_like(tape.residual[: kind.num_tokens]),
                in_place,
                {},
            )
            for comm, kind, tape, in_place in calls
        ]
        self._weights = [call.tape.weight_of(call.kind) for call in self.calls]  # kept alive
        self._issue()  # loads the kernels, which a capture does not allow
        with capture() as self._graph:
            self._issue()

    def replay(self, number: int, rows: Sequence[int], where: str) -> list[PendingCall]:
        """Replays the graph with different tape rows and copies the results; never waits.

        `rows` holds the first row of each call; call numbers start at `number`.
        """
        for call, row in zip(self.calls, rows, strict=True):
            call.x.copy_(call.tape.x[row : row + call.kind.num_tokens])
            call.residual.copy_(call.tape.residual[row : row + call.kind.num_tokens])
        self._graph.replay()
        return [
            PendingCall(
                number + index,
                f"{where}, call {index} of {len(rows)}",
                call.kind,
                call.tape,
                row,
                {name: part.clone() for name, part in call.results.items()},
                _own_rows(call.comm, call.kind),
            )
            for index, (call, row) in enumerate(zip(self.calls, rows, strict=True))
        ]

    def _issue(self) -> None:
        for call, weight in zip(self.calls, self._weights, strict=True):
            call.results = call.kind.issue(call.comm, call.x, call.residual, weight, call.in_place)


# ---- delays --------------------------------------------------------------------------------------


_HOST_SHARE, _LONG_HOST_SHARE = 0.02, 0.0005
_STREAM_SHARE, _LONG_STREAM_SHARE = 0.08, 0.002
_NOISE_SHARE = 0.03
_STREAM_CYCLES, _LONG_STREAM_CYCLES = 100_000, 4_000_000  # 50 us and 2 ms on an H200
_NOISE_ELEMS = 1 << 24  # read and written by a concurrent kernel, in up to 30 us on an H200


class Delays:
    """Decides before each call whether this rank waits, and where. Each rank has its own."""

    def __init__(self, seed: int, rank: int, device: torch.device) -> None:
        self._rng = random.Random(f"delays {seed} {rank}")
        self._noise: torch.Tensor | None = None
        self._beside: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._noise = torch.ones(_NOISE_ELEMS, device=device)
            self._beside = torch.cuda.Stream(device)

    def before_call(self) -> None:
        """Waits, or makes the stream wait, at random."""
        chance = self._rng.random()
        if chance < _LONG_HOST_SHARE:
            time.sleep(self._rng.random() * 2e-2)
        elif chance < _HOST_SHARE:
            time.sleep(self._rng.random() * 1e-3)
        if self._noise is None:
            return
        chance = self._rng.random()
        if chance < _LONG_STREAM_SHARE:
            torch.cuda._sleep(self._rng.randrange(_LONG_STREAM_CYCLES))
        elif chance < _STREAM_SHARE:
            torch.cuda._sleep(self._rng.randrange(_STREAM_CYCLES))
        elif chance < _STREAM_SHARE + _NOISE_SHARE:
            # Takes SMs and bandwidth from concurrent calls, which makes their blocks start one by
            # one.
            with torch.cuda.stream(self._beside):
                for _ in range(self._rng.randint(1, 4)):
                    self._noise[: self._rng.randint(1, _NOISE_ELEMS)].mul_(1.0)
