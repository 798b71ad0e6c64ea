"""Meetings: the ranks of a group create something together, in steps that have deadlines.

A meeting uses the process group's store, not its collectives. Collectives have the group's own
timeout, do not report which rank is missing, and in some cases abort the process. In each step,
every rank writes a report under its own key and reads the other ranks' reports. A rank that gives
up publishes the reason, and the exit of a process is noticed, so no rank keeps waiting in either
case. arrival.py describes how the ranks find each other.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import pickle
import time
import uuid
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from allnorm.core import threads
from allnorm.core.arrival import (
    LONGEST_PAUSE_SECONDS,
    SHORTEST_PAUSE_SECONDS,
    Arrival,
    died_error,
    late_error,
    members_of,
)
from allnorm.core.watch import SETTLED_SECONDS, Process, Watch
from allnorm.errors import AllnormError, PeerDiedError, PeerTimeoutError, UnsupportedError

Look = Callable[[set[int], list[int]], None]
"""Called repeatedly during a wait. Takes the missing ranks, and a list of those among them whose
process has exited. Raises to end the wait."""

_LOOK_SECONDS = 0.05
# Unique, unlike a process id: processes on hosts that run the same image may have equal ids.
_process_id = uuid.uuid4().hex


class Rendezvous:
    """One meeting of all ranks of a group. Collective.

    Args:
        group: the ranks that meet.
        seconds: time limit of all steps together.

    Attributes:
        rank: this rank.
        world_size: number of ranks.
        ranks: the ranks' numbers in the group; in a part of a meeting, ranks have other numbers.
        processes: the ranks' processes; empty before the first step.
        name: name of the meeting, unique in the group; set by the first step.

    Raises:
        ValueError: this process does not know the group.
        UnsupportedError: the ranks of the group are not processes.
    """

    def __init__(self, group: dist.ProcessGroup, seconds: float) -> None:
        self._store = store_of(group)
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        if self.world_size > 1 and dist.get_backend(group) == "fake":
            raise UnsupportedError(
                'the backend of the process group is "fake": its ranks are not processes, and '
                "nothing can be exchanged. Make the group with gloo or nccl."
            )
        self.ranks: tuple[int, ...] = tuple(range(self.world_size))
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._root = f"allnorm/{group.group_name}"
        self._members = members_of(group)
        self._arrival: Arrival | None = None  # during the first step
        self._steps = 0
        self.processes: list[Process] = []
        self.name = ""
        self._keys = ""  # prefix of the keys of this meeting, or of a part of it
        self._last_keys: list[str] = []
        self._parts: list[Rendezvous] = []
        self._dead: set[int] = set()
        self._failed = False
        self._stop: Callable[[], object] = lambda: None

    def agree(self, step: Callable[[], Any], what: str, *, waits: bool = False) -> list[Any]:
        """Runs `step` on every rank and returns all results, or raises on every rank.

        A rank whose step fails raises its own error (an AllnormError in place of another library's
        RuntimeError). The other ranks raise an AllnormError that names that rank. No rank returns
        before all have reported, so no rank waits for a rank that has given up.

        Args:
            step: function to run.
            what: name of the step in errors.
            waits: whether the step waits for other ranks in a library that does not notice their
                exits. It then runs in a thread, which is abandoned if a rank exits.

        Raises:
            PeerTimeoutError: a rank did not come before the deadline, or (PeerDiedError) its
                process has exited.
        """
        if self.world_size == 1:
            return [step()]
        error: Exception | None = None
        value: Any = None
        try:
            value = self._run_watched(step, what) if waits else step()
        except Exception as caught:  # noqa: BLE001 - reported to every rank, and raised below
            error = self._in_words(caught, what)
        report = (value, None if error is None else f"{type(error).__name__}: {error}")
        try:
            reports = self._exchange(report, what)
        except BaseException as caught:
            self._failed = True
            self.end()
            with contextlib.suppress(Exception):
                reason = " ".join(str(caught).split()) or type(caught).__name__
                text = f"rank {self.ranks[self.rank]}: {reason}"[:1000]
                if self._arrival is not None:
                    self._arrival.give_up(text)
                if self.name:
                    self._store.set(self._given_up(), text)
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
        """Returns a meeting of some of the ranks, nested in one step of this one (not the first).

        `ranks` is ascending and contains this rank. A rank of the part is numbered by its index in
        `ranks`, and belongs to only one part. The outer step ends when all parts have ended, and
        reports a failure in one of them to all ranks.
        """
        part = copy.copy(self)
        part.rank, part.world_size, part.ranks = ranks.index(self.rank), len(ranks), tuple(ranks)
        part.processes = [self.processes[rank] for rank in ranks]
        # Keys of a part start with the keys of the step that contains it.
        part._keys = f"{self._keys}/{self._steps}/part{ranks[0]}"
        part._steps, part._last_keys, part._parts, part._failed = 1, [], [], False
        part._stop = lambda: None
        self._parts.append(part)
        return part

    def prefix(self, name: str) -> str:
        """Returns a prefix for the keys of an object that this meeting creates."""
        return f"{self._keys}/{name}"

    @property
    def store(self) -> Any:
        """The store in which the ranks meet."""
        return self._store

    def end(self) -> None:
        """Ends the meeting after its last step, and stops watching processes. Idempotent.

        Not collective. The last rank to end a meeting in which no rank gave up deletes its keys.
        """
        self._stop()
        for ended in (*self._parts, self):
            keys, ended._last_keys = ended._last_keys, []
            if keys and not ended._failed:
                read = f"{keys[0]}/read"
                with contextlib.suppress(Exception):
                    if self._store.add(read, 1) == ended.world_size:
                        for key in (*keys, read):
                            self._store.delete_key(key)

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def _exchange(self, report: Any, what: str) -> list[Any]:
        """Returns every rank's report of this step."""
        if self._steps:
            with self._reaching_store(what):
                return self._gather(report, what)
        self._arrival = Arrival(
            *(self._store, self._root, self.rank, self.world_size, self._members),
            *(self._seconds, self._deadline),
        )
        with self._arrival.taking_turns(what), self._reaching_store(what):
            self.name, self.processes = self._arrival.find(what)
            self._keys = f"{self._root}/{self.name}"
            watch = Watch(self.processes, _adder(self._dead))
            # Stops the watch even if the meeting is abandoned between two steps.
            self._stop = weakref.finalize(self, watch.stop)
            found = self._gather((_process_id, report), what)
            self._arrival.leave()
            self._arrival = None
        _check_processes([process_id for process_id, _ in found])
        return [report for _, report in found]

    def _run_watched(self, step: Callable[[], Any], what: str) -> Any:
        """Returns the result of `step` or raises its error; raises if a peer dies or gives up."""
        thread, results, errors = threads.start(step)
        while thread.is_alive():
            thread.join(_LOOK_SECONDS)
            if thread.is_alive():
                gone = list(self._gone())
                others = set(range(self.world_size)) - {self.rank}
                self._look(what, set(gone) or others, gone)
        if errors:
            raise errors[0]
        return results[0]

    def _in_words(self, error: Exception, what: str) -> Exception:
        """Returns an allnorm error in place of an error from torch, gloo, NCCL or CUDA.

        torch.OutOfMemoryError is kept, because programs catch it by its type.
        """
        foreign = isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError)
        if isinstance(error, AllnormError) or not foreign:
            return error
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        number = _find_ended(self.processes)
        if number is None:
            translated = AllnormError(
                f"{what}: {reason} No communicator was created. Check that every rank still runs "
                "and can use the process group; otherwise create the group again."
            )
        else:
            translated = self._died(number, what, f" ({reason})")
        translated.__cause__ = error
        return translated

    def _gather(self, report: Any, what: str) -> list[Any]:
        keys = [f"{self._keys}/{self._steps}/{rank}" for rank in range(self.world_size)]
        self._store.set(keys[self.rank], pickle.dumps(report))
        _wait_for(self._store, keys, self.rank, self._gone, functools.partial(self._look, what))
        reports = [pickle.loads(data) for data in self._store.multi_get(keys)]
        if self._last_keys:  # every rank has read the previous step's keys
            self._store.delete_key(self._last_keys[self.rank])
        self._last_keys = keys
        self._steps += 1
        return reports

    def _gone(self) -> Iterable[int]:
        """Returns the ranks whose process has exited."""
        return [number for number, rank in enumerate(self.ranks) if rank in self._dead]

    def _given_up(self) -> str:
        return f"{self._root}/{self.name}/given_up"

    def _look(self, what: str, missing: set[int], dead: list[int]) -> None:
        """Raises if the wait for the missing ranks must end."""
        for number in dead:
            raise self._died(number, what)
        if self._store.check([self._given_up()]):
            reason = self._store.get(self._given_up()).decode(errors="replace")
            raise AllnormError(f"{what}: another rank has given up, {reason}")
        if time.monotonic() > self._deadline:
            late = sorted(self.ranks[number] for number in missing)
            raise late_error(self.ranks[self.rank], late, self._seconds, what)

    def _died(self, number: int, what: str, reason: str = "") -> AllnormError:
        process = self.processes[number]
        return died_error(self.ranks[self.rank], self.ranks[number], process, what, reason)

    @contextlib.contextmanager
    def _reaching_store(self, what: str) -> Iterator[None]:
        """Converts the store's errors to AllnormErrors; to PeerDiedError if a rank has exited."""
        processes = self.processes or self._members.processes
        try:
            with _reaching_store(what):
                yield
        except PeerTimeoutError:
            raise
        except AllnormError as error:
            if error.__cause__ is None:
                raise
            number = _find_ended(processes)
            if number is None:
                raise
            raise PeerDiedError(
                f"{error} Process {processes[number].pid} of rank {self.ranks[number]} has ended.",
                rank=self.ranks[self.rank],
                peer=self.ranks[number],
                expected=what,
            ) from error.__cause__


def _adder(ranks: set[int]) -> Callable[[int, bool], None]:
    """Returns the callback for a Watch, which does not keep the meeting alive."""
    return lambda rank, settled: ranks.add(rank)


def _find_ended(processes: Sequence[Process]) -> int | None:
    """Returns a rank whose process has exited, or exits within moments; None if there is none."""
    if not processes:
        return None
    watch = Watch(processes, lambda rank, settled: None)
    watch.stop()
    return watch.find_ended(SETTLED_SECONDS)


def _check_processes(ids: Sequence[str]) -> None:
    """Raises UnsupportedError, on every rank, if two ranks are threads of one process."""
    for rank, process_id in enumerate(ids):
        other = ids.index(process_id)
        if other != rank:
            raise UnsupportedError(
                f"ranks {other} and {rank} are threads of one process: expected a process for each "
                "rank. Start the ranks with torchrun or torch.multiprocessing."
            )


class Mailbox:
    """Exchanges values among the ranks of an ended meeting, through keys of the same store.

    An exchange takes at most `seconds`; `calls` counts the exchanges.
    """

    def __init__(self, meeting: Rendezvous, seconds: float) -> None:
        self.rank, self.seconds, self.calls = meeting.rank, seconds, 0
        self._world_size, self._store = meeting.world_size, meeting._store
        self._prefix = meeting.prefix(f"{meeting._steps}/mail")

    def exchange(self, value: Any, dead: Collection[int], look: Look) -> list[Any]:
        """Returns every rank's value, in rank order. Collective.

        `dead` contains the ranks that are known to have exited; `look` raises to end the wait.
        """
        what = "announcing an unfused call"
        keys = [f"{self._prefix}/{self.calls}/{rank}" for rank in range(self._world_size)]
        with _reaching_store(what):
            self._store.set(keys[self.rank], pickle.dumps(value))
            _wait_for(self._store, keys, self.rank, lambda: dead, look)
            values = [pickle.loads(data) for data in self._store.multi_get(keys)]
            # Every rank has come to this exchange, so it has read the values of the previous one.
            if self.calls:
                self._store.delete_key(f"{self._prefix}/{self.calls - 1}/{self.rank}")
        self.calls += 1
        return values


def _wait_for(
    store: Any, keys: Sequence[str], own: int, dead: Callable[[], Iterable[int]], look: Look
) -> None:
    """Waits until every rank has written its key; `dead` returns the ranks that have exited."""
    pause = SHORTEST_PAUSE_SECONDS
    missing = set(range(len(keys))) - {own}
    while not store.check([keys[rank] for rank in sorted(missing)]):
        gone = frozenset(dead())  # read before the keys that they may have written
        missing = {rank for rank in missing if not store.check([keys[rank]])}
        if not missing:
            return
        look(missing, sorted(missing & gone))
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


@contextlib.contextmanager
def _reaching_store(what: str) -> Iterator[None]:
    try:
        yield
    except AllnormError:
        raise
    except (RuntimeError, EOFError, OSError) as error:
        text = " ".join(str(error).split("\n")[0].split())
        raise AllnormError(
            f"{what}: the store of the process group does not answer ({type(error).__name__}: "
            f"{text}). The process that holds it has ended or cannot be reached: rank 0 of the "
            "default group, unless another store was passed to init_process_group(). Start all "
            "ranks again."
        ) from error


def store_of(group: dist.ProcessGroup) -> Any:
    """Returns the store in which the ranks of a group have met.

    Raises:
        ValueError: this process is not in the group.
    """
    known = dist.distributed_c10d._world.pg_map.get(group)
    if known is None:
        raise ValueError(
            f"group={group!r}: torch.distributed does not know it in this process. It was "
            "destroyed, or made by a constructor. Expected a group of init_process_group() or "
            "new_group()."
        )
    return known[1]


def _become_fork() -> None:
    global _process_id
    _process_id = uuid.uuid4().hex


os.register_at_fork(after_in_child=_become_fork)
