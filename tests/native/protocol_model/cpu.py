"""The CPU protocol as litmus programs, derived from the access table.

csrc/tests/cpu_accesses_test.cpp compares the table with `csrc/cpu`. The
programs need three parts of C++'s memory model. Happens-before of release, acquire and non-atomic
accesses is the base causality order in `ptx.py` when every thread is in every scope. Races are
undefined. All seq_cst accesses have one order, which must agree with program order and with the
writes that the accesses read and overwrite.
"""

from __future__ import annotations

import dataclasses
import functools
import operator

from native.accesses import Table, read_table

from .arithmetic import Arithmetic
from .program import Access, Event, Program, Thread

FIRST_OP = 120


@dataclasses.dataclass(frozen=True)
class Pull:
    """The CPU protocol.

    Attributes:
        phases: The number of phases of a workspace.
        accesses: The accesses, keyed by part and place.
        algorithms: The steps of each algorithm in program order: announce, write_partial,
            publish_1, wait_1, read_partial, write_sum, publish_2, wait_2, read_sum.
    """

    phases: int
    accesses: dict[tuple[str, str], Access]
    algorithms: dict[str, tuple[str, ...]]


def pull_of(table: Table | None = None, faults: tuple[str, ...] = ()) -> Pull:
    """Returns the CPU protocol described by `table`, by default the table in the sources."""
    table = table or read_table()
    return Pull(
        phases=Arithmetic(faults=faults).pull_phases,
        accesses={(row.part, row.place): row.access for row in table.cpu_rows},
        algorithms=table.cpu_algorithms,
    )


def pull_program(pull: Pull, world_size: int, algorithms: tuple[str, ...]) -> Program:
    """Returns a program in which every rank runs operations of the given algorithms in order."""
    program = Program()
    for rank in range(world_size):
        program.initialize(("published", rank), 2 * FIRST_OP)
        for phase in range(pull.phases):
            program.initialize(("tag", rank, phase), None)
            for what in ("partial", "sum"):
                program.initialize((what, rank, phase), None)
    for rank in range(world_size):
        thread = Thread(f"rank {rank}")
        for k, algorithm in enumerate(algorithms):
            for call in pull.algorithms[algorithm]:
                _call(program, pull, thread, (rank, world_size), k, call)
    return program


def _call(
    program: Program, pull: Pull, thread: Thread, place: tuple[int, int], k: int, call: str
) -> None:
    rank, world_size = place
    phase, plain = (FIRST_OP + k) % pull.phases, Access()
    name, _, what = call.partition("_")
    peers = [peer for peer in range(world_size) if peer != rank]
    if name == "announce":
        program.write(thread, pull.accesses["announce", "tag"], ("tag", rank, phase), k, call)
    elif name == "write":
        program.write(thread, plain, (what, rank, phase), k, call)
    elif name == "publish":
        number, access = 2 * (FIRST_OP + k) + int(what), pull.accesses["publish", "published"]
        program.write(thread, access, ("published", rank), number, call)
    for peer in peers if name in {"wait", "read"} else ():
        if name == "read":
            _expect(program, thread, plain, (what, peer, phase), k, call)
            continue
        number = 2 * (FIRST_OP + k) + int(what)
        program.read(
            thread,
            pull.accesses["wait", "published"],
            ("published", peer),
            accepts=functools.partial(operator.le, number),
            name=call,
        )
        access = pull.accesses["compare", "tag"]
        _expect(program, thread, access, ("tag", peer, phase), k, "compare")


def _expect(
    program: Program, thread: Thread, access: Access, where: tuple[str, int, int], k: int, name: str
) -> None:
    """Adds a read that must return the value written by operation k."""
    program.read(
        thread,
        access,
        where,
        expected=lambda seen: seen == k,
        name=name,
    )


def sleep_program(pull: Pull) -> tuple[Program, Event, Event]:
    """Returns a program of publish() and sleep(), and its two reads; one of them must succeed."""
    program = Program()
    program.initialize("published", 0)
    program.initialize("sleepers", 0)
    publisher, sleeper = Thread("publisher"), Thread("sleeper")
    store, look = (pull.accesses["publish", place] for place in ("published", "sleepers"))
    enter, check = (pull.accesses["sleep", place] for place in ("sleepers", "published"))
    program.write(publisher, store, "published", 1)
    sees_sleeper = program.read(publisher, look, "sleepers")
    program.write(sleeper, enter, "sleepers", 1)
    sees_number = program.read(sleeper, check, "published")
    return program, sees_sleeper, sees_number
