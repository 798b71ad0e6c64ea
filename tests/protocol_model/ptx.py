"""The PTX memory consistency model as constraints: which executions of a program are allowed.

After the PTX ISA, chapter "Memory Consistency Model" (8.7 to 8.10 of PTX 9.0), for programs of
loads, stores, fences and barriers through the generic proxy: no read-modify-writes, every access of
a location with the same width, one address for every location. Vector accesses are given as
several scalar ones, each with a location of its own.

Every relation that only forbids (causality order, the closure behind no-thin-air) is encoded in one
direction, what it must contain: a solver that adds to it only forbids more, so that an execution is
found exactly if the smallest such relation allows one.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable

import z3

from protocol_model.program import INITIALLY, Event, Program

Edge = tuple[Event, Event, z3.BoolRef]


def morally_strong(x: Event, y: Event) -> bool:
    """PTX 8.7, of two operations of which memory operations are on the same location."""
    if x.thread == y.thread:
        return True
    if not (x.access.strong and y.access.strong):
        return False
    return x.thread.within(x.access.scope, y.thread) and y.thread.within(y.access.scope, x.thread)


class Executions:
    """The executions of `program` that the model allows, as a solver.

    Attributes:
        reads_from: of each read, the writes it may read from and the variable that says it does.
        coherence: of each pair of writes of a location, whether the first precedes the second.
        stuck: of each wait, whether it never gets what it waits for.
        happens: of each event, whether it is executed: nothing follows a stuck wait.
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
        self._coherence_axioms()
        self._causality_axioms()
        self._location_axioms()
        self._no_thin_air()
        self._sc_accesses()

    # ---- what happens, and what communicates ----------------------------------------------------

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
        """A poll that never ends reads a write that no write it is bound to see comes after."""
        for w, variable in self.reads_from[r].items():
            for later in self.reads_from[r]:
                if later is not w and morally_strong(later, r):
                    overtaken = z3.And(self.happens[later], self.coherence[w, later])
                    self.solver.add(z3.Not(z3.And(self.stuck[r], variable, overtaken)))

    # ---- causality order -------------------------------------------------------------------------

    def _observed(self, w: Event, r: Event) -> z3.BoolRef | None:
        return self.reads_from[r][w] if morally_strong(w, r) else None

    def _patterns(self, pattern: str) -> list[tuple[Event, Event]]:
        """(First operation, write) of release patterns, or (last operation, read) of acquires."""
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
                    if then.kind == kind and then.access.strong and same:
                        found.append((first, then))
        return found

    def _synchronizing(self) -> list[Edge]:
        """Edges of "synchronizes" that depend on the execution, with their condition."""
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
        """Fence-SC order: acyclic, of every pair of morally strong fence.sc."""
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
        # Ends of edges, and between which of them static order leads directly.
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
        """Of each end of an edge a variable: true if base causality leads there from events that
        statically lead to the ends `direct`, as bits."""
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
        """Whether x precedes y in base causality order; x and y on one location, or fences."""
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
        """Base causality order, or observation order followed by it."""
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

    # ---- axioms ----------------------------------------------------------------------------------

    def _forbid(self, *conditions: z3.BoolRef | bool) -> None:
        if any(c is False for c in conditions):
            return
        self.solver.add(z3.Not(z3.And([c for c in conditions if c is not True])))

    def _coherence_axioms(self) -> None:
        for writes, _ in self.locations.values():
            for w, other in itertools.permutations(writes, 2):
                order = self.coherence[w, other]
                self._forbid(order, self.coherence[other, w])
                self._forbid(
                    self.causality(w, other), self.happens[w], self.happens[other], z3.Not(order)
                )
                if w.index < other.index and morally_strong(w, other):
                    self.solver.add(z3.Or(order, self.coherence[other, w]))
            for a, b, c in itertools.permutations(writes, 3):
                self._forbid(
                    self.coherence[a, b], self.coherence[b, c], z3.Not(self.coherence[a, c])
                )
        for (f, g), before in self._sc.items():
            self._forbid(self.base_causality(f, g), z3.Not(before))

    def _causality_axioms(self) -> None:
        for r, sources in self.reads_from.items():
            for w, variable in sources.items():
                self._forbid(variable, self.causality(r, w))
            for w, later in itertools.permutations(sources, 2):
                self._forbid(
                    sources[w],
                    self.coherence[w, later],
                    self.happens[later],
                    self.causality(later, r),
                )

    def _location_axioms(self) -> None:
        """SC per location: program order and morally strong communication make no cycle."""
        for writes, reads in self.locations.values():
            place = {e: z3.Int(f"at:{e.index}") for e in (*writes, *reads)}
            for w, other in itertools.permutations(writes, 2):
                if morally_strong(w, other):
                    self.solver.add(z3.Implies(self.coherence[w, other], place[w] < place[other]))
            for r in reads:
                for w, variable in self.reads_from[r].items():
                    if morally_strong(w, r):
                        self.solver.add(z3.Implies(variable, place[w] < place[r]))
                    for later in writes:
                        if later is not w and morally_strong(r, later):
                            overwritten = z3.And(variable, self.coherence[w, later])
                            self.solver.add(z3.Implies(overwritten, place[r] < place[later]))
            for x, y in itertools.permutations((*writes, *reads), 2):
                if self._in_thread[x.index] >> y.index & 1:
                    self.solver.add(place[x] < place[y])

    def _no_thin_air(self) -> None:
        """Reads-from and dependences make no cycle. What follows a wait depends on it."""
        time = {e: z3.Int(f"time:{e.index}") for e in self.program.events if e.kind != "fence"}
        for r, sources in self.reads_from.items():
            for w, variable in sources.items():
                self.solver.add(z3.Implies(variable, time[w] < time[r]))
        for x, y in self.program.depends:
            self.solver.add(time[x] <= time[y])
        for events in self.program.threads.values():
            for at, first in enumerate(events):
                if first.accepts is None and first.name != "leave":
                    continue
                for then in events[at + 1 :]:
                    if then.kind in {"write", "joint"}:
                        self.solver.add(time[first] <= time[then])

    def _sc_accesses(self) -> None:
        """Of C++, not of PTX: accesses that are seq_cst are in one order."""
        sc = [e for e in self.program.events if e.access.order == "sc" and e.kind != "fence"]
        place = {e: z3.Int(f"order:{e.index}") for e in sc}
        for x, y in itertools.permutations(sc, 2):
            if self._in_thread[x.index] >> y.index & 1:
                self.solver.add(place[x] < place[y])
            if x.kind == "write" and (x, y) in self.coherence:
                self.solver.add(z3.Implies(self.coherence[x, y], place[x] < place[y]))
            if y in self.reads_from and x in self.reads_from[y]:
                self.solver.add(z3.Implies(self.reads_from[y][x], place[x] < place[y]))
        for r, later in itertools.product(sc, sc):
            if r.kind == "read" and later.kind == "write" and r.location == later.location:
                for w, variable in self.reads_from[r].items():
                    if w is not later:
                        overwritten = z3.And(variable, self.coherence[w, later])
                        self.solver.add(z3.Implies(overwritten, place[r] < place[later]))

    # ---- questions -------------------------------------------------------------------------------

    def wrong(self) -> z3.BoolRef:
        """Some wait goes on with a value that it should not have accepted."""
        found = [
            variable
            for r, sources in self.reads_from.items()
            if r.expected is not None
            for w, variable in sources.items()
            if (r.accepts is None or r.accepts(w.value)) and not r.expected(w.value)
        ]
        return z3.Or(found)

    def hangs(self) -> z3.BoolRef:
        """Some wait never ends."""
        return z3.Or(list(self.stuck.values()))

    def races(self) -> z3.BoolRef:
        """Some conflicting pair is neither morally strong nor ordered by causality (PTX 8.7.1)."""
        found = []
        for writes, reads in self.locations.values():
            for x, y in itertools.combinations((*writes, *reads), 2):
                if "write" not in {x.kind, y.kind} or morally_strong(x, y):
                    continue
                orders = [self.causality(x, y), self.causality(y, x)]
                if True not in orders:
                    unordered = [z3.Not(o) for o in orders if o is not False]
                    found.append(z3.And(self.happens[x], self.happens[y], *unordered))
        return z3.Or(found)

    def find(self, *conditions: z3.BoolRef) -> list[str] | None:
        """An execution in which all of `conditions` hold, in words; None if there is none."""
        self.solver.push()
        self.solver.add(*conditions)
        try:
            answer = self.solver.check()
            if answer == z3.unsat:
                return None
            if answer != z3.sat:
                raise RuntimeError(f"z3 does not know: {self.solver.reason_unknown()}")
            return self._describe(self.solver.model())
        finally:
            self.solver.pop()

    def _describe(self, model: z3.ModelRef) -> list[str]:
        lines = []
        for r, sources in self.reads_from.items():
            for w, variable in sources.items():
                if z3.is_true(model.eval(variable)):
                    ends = (
                        ""
                        if r not in self.stuck or not z3.is_true(model.eval(self.stuck[r]))
                        else ", for ever"
                    )
                    lines.append(f"{r} reads {w.value!r} of {w}{ends}")
        for location, (writes, _) in self.locations.items():
            ordered = [
                f"{w} < {v}"
                for w, v in itertools.permutations(writes, 2)
                if w.thread.gpu >= 0
                and z3.is_true(model.eval(self.coherence[w, v]))
                and z3.is_true(model.eval(self.happens[w]))
                and z3.is_true(model.eval(self.happens[v]))
            ]
            lines.extend(f"coherence of {location}: {pair}" for pair in ordered)
        return lines

    def reads(self, read: Event, value: Hashable) -> z3.BoolRef:
        """That `read` returns `value`."""
        return z3.Or([v for w, v in self.reads_from[read].items() if w.value == value])
