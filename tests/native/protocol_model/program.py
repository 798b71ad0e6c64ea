"""Litmus programs: the events of threads, their static order, and waits."""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Callable, Hashable, Iterable
from typing import Any


class Scope(enum.IntEnum):
    CTA = 1
    GPU = 2
    SYS = 3


@dataclasses.dataclass(frozen=True)
class Access:
    """The order and scope of an instruction.

    `order` is weak (or non-atomic), relaxed, acquire, release, acq_rel or sc. Weak accesses have no
    scope.
    """

    order: str = "weak"
    scope: Scope | None = None

    @property
    def strong(self) -> bool:
        return self.order != "weak"

    @property
    def acquires(self) -> bool:
        return self.order in {"acquire", "acq_rel", "sc"}

    @property
    def releases(self) -> bool:
        return self.order in {"release", "acq_rel", "sc"}


@dataclasses.dataclass(frozen=True)
class Thread:
    name: str
    gpu: int = 0
    block: Hashable = 0

    def within(self, scope: Scope | None, other: Thread) -> bool:
        """Returns whether `scope`, seen from this thread, includes the thread `other`."""
        if scope is None:
            return False
        if scope == Scope.SYS:
            return True
        same_gpu = self.gpu == other.gpu
        return same_gpu and (scope == Scope.GPU or self.block == other.block)


@dataclasses.dataclass(frozen=True, eq=False)
class Event:
    """One operation of a thread.

    A read with `accepts` is a wait: it polls until `accepts` is true for the value. Later events of
    its thread happen only after that. `expected` is true for the correct values of a read or wait.
    """

    index: int
    kind: str  # read, write, fence, joint
    thread: Thread
    access: Access
    location: Any = None
    value: Hashable = None
    accepts: Callable[[Any], bool] | None = None
    expected: Callable[[Any], bool] | None = None
    name: str = ""

    def __repr__(self) -> str:
        what = {"write": f" = {self.value}", "read": "?"}.get(self.kind, "")
        where = "" if self.location is None else f" {self.location}"
        return f"{self.thread.name}: {self.name or self.kind}{where}{what}"


INITIALLY = Thread("initially", -1)


class Program:
    """Events in program order, joints between threads, and initial values.

    A joint is a barrier or the boundary between two kernels. Some threads reach it after their last
    event so far, and some threads continue from it.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.initial: dict[Hashable, Event] = {}
        self.threads: dict[Thread, list[Event]] = {}
        # Static "synchronizes" edges, and dependences. A dependence need not order memory: it only
        # means that the second event cannot happen before the first.
        self.synchronizes: list[tuple[Event, Event]] = []
        self.depends: list[tuple[Event, Event]] = []

    def _add(self, event: Event) -> Event:
        self.events.append(event)
        return event

    def initialize(self, location: Hashable, value: Hashable) -> None:
        access = Access()
        event = Event(len(self.events), "write", INITIALLY, access, location, value)
        self.initial[location] = self._add(event)

    def _append(self, event: Event) -> Event:
        self.threads.setdefault(event.thread, []).append(event)
        return self._add(event)

    def write(
        self, thread: Thread, access: Access, location: Hashable, value: Hashable, name: str = ""
    ) -> Event:
        index = len(self.events)
        return self._append(Event(index, "write", thread, access, location, value, name=name))

    def read(
        self,
        thread: Thread,
        access: Access,
        location: Hashable,
        accepts: Callable[[Any], bool] | None = None,
        expected: Callable[[Any], bool] | None = None,
        name: str = "",
    ) -> Event:
        index = len(self.events)
        event = Event(index, "read", thread, access, location, None, accepts, expected, name)
        return self._append(event)

    def fence(self, thread: Thread, access: Access, name: str = "") -> Event:
        return self._append(Event(len(self.events), "fence", thread, access, name=name))

    def joint(
        self, before: Iterable[Thread], after: Iterable[Thread], orders_memory: bool = True
    ) -> None:
        """Orders all events of `before` so far before all later events of `after`.

        Without `orders_memory`, the events are ordered only in time, not in causality order.
        """
        joint = self._add(Event(len(self.events), "joint", INITIALLY, Access(), name="joint"))
        for thread in before:
            end = self._append(Event(len(self.events), "joint", thread, Access(), name="arrive"))
            self.depends.append((end, joint))
            if orders_memory:
                self.synchronizes.append((end, joint))
        for thread in after:
            start = self._append(Event(len(self.events), "joint", thread, Access(), name="leave"))
            self.depends.append((joint, start))
            if orders_memory:
                self.synchronizes.append((joint, start))

    # ---- derived from a complete program --------------------------------------------------------

    def program_order(self) -> list[tuple[Event, Event]]:
        """Returns pairs of each event and the next event of its thread."""
        return [
            (first, second)
            for events in self.threads.values()
            for first, second in itertools.pairwise(events)
        ]

    def closure(self, edges: Iterable[tuple[Event, Event]]) -> list[int]:
        """Returns a bit mask per event x: bit y is set if a path of acyclic `edges` leads to y."""
        following: list[list[int]] = [[] for _ in self.events]
        for first, second in edges:
            following[first.index].append(second.index)
        rows: list[int | None] = [None] * len(self.events)

        def row(start: int) -> int:
            stack = [start]
            while stack:
                at = stack[-1]
                missing = [n for n in following[at] if rows[n] is None]
                if missing:
                    stack.extend(missing)
                    continue
                stack.pop()
                reached = 0
                for n in following[at]:
                    reached |= rows[n] | 1 << n  # type: ignore[operator]
                rows[at] = reached
            return rows[start]  # type: ignore[return-value]

        return [row(index) for index in range(len(self.events))]

    def by_location(self) -> dict[Hashable, tuple[list[Event], list[Event]]]:
        """Returns the writes, starting with the initial one, and the reads of each location."""
        found: dict[Hashable, tuple[list[Event], list[Event]]] = {}
        for event in self.events:
            if event.kind in {"read", "write"}:
                writes, reads = found.setdefault(event.location, ([], []))
                (writes if event.kind == "write" else reads).append(event)
        for location, (writes, _) in found.items():
            if location not in self.initial:
                raise ValueError(f"{location} has no initial value")
            assert writes[0] is self.initial[location] or self.initial[location] in writes
        return found
