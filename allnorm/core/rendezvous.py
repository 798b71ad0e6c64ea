"""How the ranks of a group come together to make something: steps, each with a deadline.

Over the store of the process group and not by its collectives: these have the group's own timeout,
do not say who is missing, and some end the process. Every rank leaves a report of each step under
its own key and reads those of the others. A rank that gives up leaves word, and a process that ends
is noticed, so that nobody waits for them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import pickle
import time
import uuid
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch.distributed as dist

from allnorm.core.watch import Process, Watch, this_process
from allnorm.errors import AllnormError, PeerDiedError, PeerTimeoutError

Look = Callable[[set[int], list[int]], None]
"""Called again and again in a wait, with the ranks that are missing and those of them whose process
has ended; raises to end it."""

_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1e-4, 1e-2
# How many meetings of a group this process has been to. Equal on all ranks, but for those that
# never came to one that the others gave up.
_meetings: dict[str, int] = {}


class Rendezvous:
    """One meeting of all ranks of a group. Collective.

    Args:
        group: whose ranks meet.
        seconds: how long all the steps together may take.

    Attributes:
        rank: this one.
        world_size: number of ranks.
        ranks: their numbers in the group: those of a part are others than its own.
        processes: of the ranks, after the first step.
    """

    processes: list[Process]

    def __init__(self, group: dist.ProcessGroup, seconds: float) -> None:
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.ranks: tuple[int, ...] = tuple(range(self.world_size))
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._name = f"allnorm/{group.group_name}"
        self._store = store_of(group)
        self._steps = 0
        self._digest = ""
        self._last_keys: list[str] = []
        self._dead: set[int] = set()
        self._stop: Callable[[], object] = lambda: None

    def agree(self, step: Callable[[], Any], what: str) -> list[Any]:
        """Runs `step` on every rank and returns all results, or raises on every rank.

        A rank whose step fails raises its own error; the others raise an AllnormError that names
        it. No rank leaves before all have reported, so that no rank waits for one that has given
        up.

        Raises:
            PeerTimeoutError: a rank has not come before the deadline, or (PeerDiedError) its
                process has ended.
        """
        if self.world_size == 1:
            return [step()]
        error: Exception | None = None
        value: Any = None
        try:
            value = step()
        except Exception as caught:  # noqa: BLE001 - reported to every rank, and raised below
            error = caught
        report = (value, None if error is None else f"{type(error).__name__}: {error}")
        try:
            reports = self._exchange(report, what)
        except BaseException as caught:
            self.end()
            with contextlib.suppress(Exception):
                reason = " ".join(str(caught).split()) or type(caught).__name__
                text = f"rank {self.ranks[self.rank]}: {reason}"
                self._store.set(self._given_up(), text[:1000])
            if error is not None:
                raise error from caught
            raise
        if error is not None:
            raise error
        for rank, (_, failure) in enumerate(reports):
            if failure is not None:
                raise AllnormError(f"{what} failed on rank {self.ranks[rank]}: {failure}")
        return [result for result, _ in reports]

    def part(self, ranks: Sequence[int]) -> Rendezvous:
        """A meeting of some of the ranks within a step of this one, after its first step.

        Ranks of the part are numbered by their place in it. Every rank is in one part at most, and
        the step of the whole ends when all parts have: what goes wrong in one is told to all.

        Args:
            ranks: in rising order, this one among them.
        """
        part = object.__new__(Rendezvous)
        part.rank, part.world_size, part.ranks = ranks.index(self.rank), len(ranks), tuple(ranks)
        part.processes = [self.processes[rank] for rank in ranks]
        part._seconds, part._deadline = self._seconds, self._deadline
        part._name, part._store, part._dead = self._name, self._store, self._dead
        # Keys of a part begin with those of the step that it is in, and steps of it are later ones.
        part._digest = f"{self._digest}/{self._steps}/part{ranks[0]}"
        part._steps, part._last_keys, part._stop = 1, [], lambda: None
        return part

    def prefix(self, name: str) -> str:
        """For keys of the store that belong to what is made at this meeting."""
        return f"{self._name}/{_meetings[self._name]}/{self._digest}/{name}"

    @property
    def store(self) -> Any:
        """Where the ranks meet."""
        return self._store

    def end(self) -> None:
        """After the last step: nobody is watched any more. Idempotent, not collective."""
        self._stop()

    def _exchange(self, report: Any, what: str) -> list[Any]:
        """Every rank's report of this step."""
        first = self._steps == 0
        if first:
            # A nonce each: what an earlier group of this name has left is never taken for ours.
            report = (uuid.uuid4().hex, this_process(), report)
            self._find_meeting()
        prefix = f"{self._name}/{_meetings[self._name]}/{self._digest}/{self._steps}"
        keys = [f"{prefix}/{rank}" for rank in range(self.world_size)]
        with _reaching_store(what):
            self._store.set(keys[self.rank], pickle.dumps(report))
            _wait_for(self._store, keys, self.rank, self._gone, functools.partial(self._look, what))
            reports = [pickle.loads(data) for data in self._store.multi_get(keys)]
            # Everybody has read those of the step before.
            for key in self._last_keys:
                self._store.delete_key(key)
        self._last_keys = [keys[self.rank]]
        self._steps += 1
        if first:
            nonces = "".join(nonce for nonce, *_ in reports)
            self._digest = hashlib.sha256(nonces.encode()).hexdigest()[:16]
            self.processes = [process for _, process, _ in reports]
            watch = Watch(self.processes, _adder(self._dead))
            # Also if the meeting is given up somewhere between two steps.
            self._stop = weakref.finalize(self, watch.stop)
            reports = [report for *_, report in reports]
        return reports

    def _gone(self) -> Iterable[int]:
        """Ranks whose process has ended."""
        return [number for number, rank in enumerate(self.ranks) if rank in self._dead]

    def _find_meeting(self) -> None:
        """The next one; not one that the others have given up before this rank came."""
        number = _meetings.get(self._name, 0) + 1
        while self._store.check([f"{self._name}/{number}/given_up"]):
            number += 1
        _meetings[self._name] = number

    def _given_up(self) -> str:
        return f"{self._name}/{_meetings.get(self._name, 0)}/given_up"

    def _look(self, what: str, missing: set[int], dead: list[int]) -> None:
        """Raises if the wait for those who are missing is to end."""
        for number in dead:
            raise self._error(
                PeerDiedError,
                f"rank {self.ranks[self.rank]} waited for rank {self.ranks[number]} while {what}, "
                f"but process {self.processes[number].pid} has ended. Make one over healthy ranks.",
                number,
                what,
            )
        if self._store.check([self._given_up()]):
            reason = self._store.get(self._given_up()).decode(errors="replace")
            raise AllnormError(f"{what}: another rank has given up, {reason}")
        if time.monotonic() > self._deadline:
            late = ", ".join(str(self.ranks[number]) for number in sorted(missing))
            ranks = f"rank{'s' if len(missing) > 1 else ''} {late}"
            raise self._error(
                PeerTimeoutError,
                f"rank {self.ranks[self.rank]} waited {self._seconds:g} s in vain for {ranks} "
                f"while {what}: every rank of the group must make the Communicator, in the same "
                "order. Find out what became of the missing, or give a longer timeout.",
                min(missing),
                what,
            )

    def _error(
        self, kind: type[PeerTimeoutError], message: str, peer: int, what: str
    ) -> PeerTimeoutError:
        return kind(message, rank=self.ranks[self.rank], peer=self.ranks[peer], expected=what)


def _adder(ranks: set[int]) -> Callable[[int, bool], None]:
    """What a Watch calls; it does not keep the meeting."""
    return lambda rank, settled: ranks.add(rank)


class Mailbox:
    """Exchanges among the ranks of a meeting after it is over, by keys of the same store.

    Attributes:
        rank: this rank.
        seconds: how long an exchange may take.
        calls: how many there have been.
    """

    def __init__(self, meeting: Rendezvous, seconds: float) -> None:
        self.rank, self.seconds, self.calls = meeting.rank, seconds, 0
        self._world_size, self._store = meeting.world_size, meeting._store
        self._prefix = f"{meeting._name}/{meeting._digest}/{meeting._steps}/mail"

    def exchange(self, value: Any, dead: Collection[int], look: Look) -> list[Any]:
        """Every rank's value, by rank. Collective.

        Args:
            value: this rank's, picklable.
            dead: ranks whose process has ended, as far as is known by now.
            look: raises to end the wait.
        """
        what = "exchanging words before an unfused call"
        keys = [f"{self._prefix}/{self.calls}/{rank}" for rank in range(self._world_size)]
        with _reaching_store(what):
            self._store.set(keys[self.rank], pickle.dumps(value))
            _wait_for(self._store, keys, self.rank, lambda: dead, look)
            values = [pickle.loads(data) for data in self._store.multi_get(keys)]
            # Everybody has come to this exchange, and so has read those of the one before.
            if self.calls:
                self._store.delete_key(f"{self._prefix}/{self.calls - 1}/{self.rank}")
        self.calls += 1
        return values

    def tell(self, text: str) -> None:
        """Leaves word for ranks that cannot see what this one sees; the first stays."""
        with contextlib.suppress(Exception):
            self._store.compare_set(f"{self._prefix}/told", "", text)

    def told(self) -> str | None:
        """What a rank has told."""
        key = f"{self._prefix}/told"
        return self._store.get(key).decode() if self._store.check([key]) else None


def _wait_for(
    store: Any, keys: Sequence[str], own: int, dead: Callable[[], Iterable[int]], look: Look
) -> None:
    """Until every rank has left something under its key; `dead`: who has ended by now."""
    pause = _SHORTEST_PAUSE_SECONDS
    missing = set(range(len(keys))) - {own}
    while not store.check([keys[rank] for rank in sorted(missing)]):
        gone = frozenset(dead())  # before the look at what they have left
        missing = {rank for rank in missing if not store.check([keys[rank]])}
        if not missing:
            return
        look(missing, sorted(missing & gone))
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


@contextlib.contextmanager
def _reaching_store(what: str) -> Any:
    try:
        yield
    except AllnormError:
        raise
    except (RuntimeError, EOFError, OSError) as error:
        raise AllnormError(
            f"{what}: the store of the process group does not answer ({error}). The process that "
            "holds it, as a rule that of rank 0, may have ended."
        ) from error


def store_of(group: dist.ProcessGroup) -> Any:
    """The store over which the ranks of a group have met before.

    Raises:
        ValueError: this process is not in the group.
    """
    known = dist.distributed_c10d._world.pg_map.get(group)
    if known is None:
        raise ValueError(f"group={group!r}: torch.distributed does not know it in this process.")
    return known[1]
