"""The PTX model's relations over an execution: happening, communication and causality."""

from __future__ import annotations

import itertools
from collections import defaultdict

import z3

from .program import INITIALLY, Event, Program

Edge = tuple[Event, Event, z3.BoolRef]


def morally_strong(x: Event, y: Event) -> bool:
    """Returns whether x and y are morally strong (PTX 8.7); accesses must share a location."""
    if x.thread == y.thread:
        return True
    if not (x.access.strong and y.access.strong):
        return False
    return x.thread.within(x.access.scope, y.thread) and y.thread.within(y.access.scope, x.thread)


class Relations:
    """The relations of a program's executions, as a solver's variables and constraints.

    Attributes:
        reads_from: For each read, the writes that it may read from, with their variables.
        coherence: For each pair of writes of a location, whether the first precedes the second.
        stuck: For each wait, whether it never ends.
        happens: For each event, whether it is executed. No event follows a stuck wait.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.solver = z3.SolverFor("QF_IDL")
        self.locations = program.by_location()
        order = program.program_order()
        self._static = program.closure([*order, *program.synchronizes])
        self._in_thread = program.closure(order)
        self._dependent = program.closure([*order, *program.depends])
        self._define_happening()
        self._define_communication()
        self._define_causality()

    # ---- events and communication ----------------------------------------------------

    def _define_happening(self) -> None:
        waits = [e for e in self.program.events if e.accepts is not None]
        self.stuck = {e: z3.Bool(f"stuck:{e.index}") for e in waits}
        needed: dict[int, list[Event]] = defaultdict(list)
        for wait in waits:
            row = self._dependent[wait.index]
            for event in self.program.events:
                if row >> event.index & 1:
                    needed[event.index].append(wait)
        self.happens: dict[Event, z3.BoolRef] = {}
        for event in self.program.events:
            before = [z3.Not(self.stuck[w]) for w in needed[event.index]]
            if not before:
                self.happens[event] = z3.BoolVal(True)
                continue
            self.happens[event] = z3.Bool(f"happens:{event.index}")
            self.solver.add(self.happens[event] == z3.And(before))

    def _define_communication(self) -> None:
        self.reads_from: dict[Event, dict[Event, z3.BoolRef]] = {}
        self.coherence: dict[tuple[Event, Event], z3.BoolRef] = {}
        for writes, reads in self.locations.values():
            for w, other in itertools.permutations(writes, 2):
                self.coherence[w, other] = z3.Bool(f"co:{w.index},{other.index}")
            for r in reads:
                self.reads_from[r] = {w: z3.Bool(f"rf:{w.index},{r.index}") for w in writes}
        for r, sources in self.reads_from.items():
            choice = list(sources.values())
            self.solver.add(z3.Implies(self.happens[r], z3.Or(choice)))
            self.solver.add(z3.AtMost(*choice, 1))
            for w, variable in sources.items():
                self.solver.add(z3.Implies(variable, z3.And(self.happens[r], self.happens[w])))
                if r.accepts is not None:
                    accepted = bool(r.accepts(w.value))
                    self.solver.add(z3.Implies(variable, self.stuck[r] == (not accepted)))
        for r, variable in self.stuck.items():
            self.solver.add(z3.Implies(variable, self.happens[r]))
            self._forward_progress(r)

    def _forward_progress(self, r: Event) -> None:
        """Requires that a stuck poll reads the last of the writes that it must eventually see."""
        for w, variable in self.reads_from[r].items():
            for later in self.reads_from[r]:
                if later is not w and morally_strong(later, r):
                    overtaken = z3.And(self.happens[later], self.coherence[w, later])
                    self.solver.add(z3.Not(z3.And(self.stuck[r], variable, overtaken)))

    # ---- causality order -------------------------------------------------------------------------

    def _observed(self, w: Event, r: Event) -> z3.BoolRef | None:
        return self.reads_from[r][w] if morally_strong(w, r) else None

    def _patterns(self, pattern: str) -> list[tuple[Event, Event]]:
        """Returns (first, write) of release patterns, or (last, read) of acquire patterns."""
        found = []
        for events in self.program.threads.values():
            ordered = events if pattern == "release" else events[::-1]
            for at, first in enumerate(ordered):
                access = first.access
                if not (access.releases if pattern == "release" else access.acquires):
                    continue
                kind = "write" if pattern == "release" else "read"
                if first.kind not in {kind, "fence"}:
                    continue
                for then in ordered[at:]:
                    same = first.kind == "fence" or then.location == first.location
                    if then.kind != kind or not then.access.strong or not same:
                        continue
                    if then is first or not self._does_alone(first, then, pattern):
                        found.append((first, then))
        return found

    def _does_alone(self, first: Event, then: Event, pattern: str) -> bool:
        """Returns whether `then` is a pattern by itself, with the same or a wider scope.

        If so, program order implies the pattern that begins with `first`.
        """
        access = then.access
        alone = access.releases if pattern == "release" else access.acquires
        return alone and access.scope is not None and access.scope >= (first.access.scope or 0)

    def _synchronizing(self) -> list[Edge]:
        """Returns the "synchronizes" edges that depend on the execution, with their conditions."""
        edges: list[Edge] = []
        acquires = defaultdict(list)
        for last, read in self._patterns("acquire"):
            acquires[read.location].append((last, read))
        for first, write in self._patterns("release"):
            for last, read in acquires[write.location]:
                observed = self._observed(write, read)
                if first.thread == last.thread or not morally_strong(first, last):
                    continue
                if observed is not None:
                    edges.append((first, last, z3.And(observed, self.happens[last])))
        return edges + self._fence_sc()

    def _fence_sc(self) -> list[Edge]:
        """Defines the Fence-SC order of all pairs of morally strong fence.sc."""
        fences = [e for e in self.program.events if e.kind == "fence" and e.access.order == "sc"]
        place = {f: z3.Int(f"sc:{f.index}") for f in fences}
        if fences:
            self.solver.add(z3.Distinct(*place.values()))
        self._sc = {
            (f, g): place[f] < place[g]
            for f, g in itertools.permutations(fences, 2)
            if morally_strong(f, g)
        }
        return [(f, g, variable) for (f, g), variable in self._sc.items()]

    def _define_causality(self) -> None:
        self._edges = []
        for number, (first, last, condition) in enumerate(self._synchronizing()):
            active = z3.Bool(f"sync:{number}")
            self.solver.add(z3.Implies(condition, active))
            self._edges.append((first, last, active))
        # The edges' ends, and the pairs of ends that static order connects directly.
        self._ends = sorted({e for edge in self._edges for e in edge[:2]}, key=lambda e: e.index)
        pairs = [
            (a, b) for a in self._ends for b in self._ends if a is not b and self._reaches(a, b)
        ]
        through = set(pairs)
        self._steps = [
            (a, b)
            for a, b in pairs
            if not any((a, c) in through and (c, b) in through for c in self._ends)
        ]
        self._led_to: dict[int, dict[Event, z3.BoolRef]] = {}
        self._paths: dict[tuple[int, int], z3.BoolRef | bool] = {}
        self._causality: dict[tuple[Event, Event], z3.BoolRef | bool] = {}

    def _reaches(self, x: Event, y: Event) -> bool:
        return x is y or bool(self._static[x.index] >> y.index & 1)

    def _lead_to(self, direct: int) -> dict[Event, z3.BoolRef]:
        """Returns a variable for each end of an edge: whether base causality leads to the end.

        The paths start at events that lead statically to the ends in the bit set `direct`.
        """
        if direct not in self._led_to:
            label = len(self._led_to)
            there = {e: z3.Bool(f"from:{label},{e.index}") for e in self._ends}
            for number, end in enumerate(self._ends):
                if direct >> number & 1:
                    self.solver.add(there[end])
            for a, b in self._steps:
                self.solver.add(z3.Implies(there[a], there[b]))
            for first, last, active in self._edges:
                self.solver.add(z3.Or(z3.Not(there[first]), z3.Not(active), there[last]))
            self._led_to[direct] = there
        return self._led_to[direct]

    def base_causality(self, x: Event, y: Event) -> z3.BoolRef | bool:
        """Returns whether base causality orders x before y: accesses of one location, or fences."""
        if x is not y and self._reaches(x, y):
            return True
        direct = sum(1 << n for n, end in enumerate(self._ends) if self._reaches(x, end))
        into = sum(1 << n for n, end in enumerate(self._ends) if self._reaches(end, y))
        if direct == 0 or into == 0:
            return False
        if (direct, into) not in self._paths:
            there = self._lead_to(direct)
            ends = [there[end] for n, end in enumerate(self._ends) if into >> n & 1]
            self._paths[direct, into] = z3.Or(ends)
        return self._paths[direct, into]

    def causality(self, x: Event, y: Event) -> z3.BoolRef | bool:
        """Returns whether x precedes y in base causality, or in observation and then the former."""
        if (x, y) not in self._causality:
            self._causality[x, y] = self._define_path(x, y)
        return self._causality[x, y]

    def _define_path(self, x: Event, y: Event) -> z3.BoolRef | bool:
        if x.thread is INITIALLY and x is not y:
            return True
        paths = [self.base_causality(x, y)]
        if x.kind == "write":
            for z in self.locations[x.location][1]:
                observed = self._observed(x, z)
                if observed is None or z is y:
                    continue
                rest = self.base_causality(z, y)
                if rest is not False:
                    paths.append(z3.And(observed, rest))
        if any(path is True for path in paths):
            return True
        paths = [path for path in paths if path is not False]
        return z3.Or(paths) if paths else False
