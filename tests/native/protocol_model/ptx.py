"""The PTX memory consistency model as constraints on the executions of a program.

Follows the PTX ISA, chapter "Memory Consistency Model" (8.7 to 8.10 of PTX 9.0), for programs of
loads, stores, fences and barriers through the generic proxy: without read-modify-writes, with one
width for all accesses of a location, and one address per location. A vector access is written as
multiple scalar accesses to different locations.

Relations that only forbid executions (causality order, the closure for no-thin-air) are encoded in
one direction: the constraints only require the pairs that a relation must contain. Pairs that a
solver adds only forbid more, so it finds an execution if and only if the smallest relations allow
one.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable

import z3

from .program import Event, Program
from .relations import Relations, morally_strong


class Executions(Relations):
    """The executions of a program that the memory model allows."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self._coherence_axioms()
        self._causality_axioms()
        self._location_axioms()
        self._no_thin_air()
        self._sc_accesses()

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
        """Requires SC per location: no cycle of program order and morally strong communication."""
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
        """Forbids cycles of reads-from and dependences. Events after a wait depend on the wait."""
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
        """Requires one order of all seq_cst accesses, a rule of C++ and not of PTX."""
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

    # ---- queries -------------------------------------------------------------------------------

    def wrong(self) -> z3.BoolRef:
        """Returns the condition that a wait continues with a wrong value."""
        found = [
            variable
            for r, sources in self.reads_from.items()
            if r.expected is not None
            for w, variable in sources.items()
            if (r.accepts is None or r.accepts(w.value)) and not r.expected(w.value)
        ]
        return z3.Or(found)

    def hangs(self) -> z3.BoolRef:
        """Returns the condition that a wait never ends."""
        return z3.Or(list(self.stuck.values()))

    def races(self) -> z3.BoolRef:
        """Returns the condition that there is a data race (PTX 8.7.1)."""
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
        """Returns a description of an execution that meets all conditions, or None."""
        self.solver.push()
        self.solver.add(*conditions)
        try:
            answer = self.solver.check()
            if answer == z3.unsat:
                return None
            if answer != z3.sat:
                raise RuntimeError(f"z3 found no answer: {self.solver.reason_unknown()}")
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
        """Returns the condition that `read` returns `value`."""
        return z3.Or([v for w, v in self.reads_from[read].items() if w.value == value])
