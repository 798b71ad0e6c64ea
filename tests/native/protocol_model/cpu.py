"""The CPU protocol as litmus programs, read from `csrc/cpu`.

Of C++'s memory model this needs happens-before over release, acquire and non-atomic accesses, which
is base causality order of `ptx.py` where every thread is in every scope; that races are undefined;
and that seq_cst accesses have one order, of which no more is demanded than program order and what
they read and overwrite.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import re

from .program import Access, Event, Program, Scope, Thread
from .source import SourceError, Sources

COMM, TRANSPORTS, MEMORY = "cpu/comm.cpp", "cpu/transports.cpp", "cpu/memory.h"
LAYOUT = "protocol/layout.h"

_ORDERS = {"RELAXED": "relaxed", "ACQUIRE": "acquire", "RELEASE": "release", "SEQ_CST": "sc"}
FIRST_OP = 120


@dataclasses.dataclass(frozen=True)
class Pull:
    """What the sources say.

    Attributes:
        verbs: function of cpu/memory.h to its order.
        phases: of a workspace.
        publish, sleep: (location, order) of what they access.
        wait: of the number of a peer; announce, compare: of a tag.
        algorithms: calls in program order: announce, copy_in, publish 1, wait 1, read partial,
            write sum, publish 2, wait 2, read sum.
    """

    phases: int
    publish: tuple[tuple[str, Access], ...]
    sleep: tuple[tuple[str, Access], ...]
    wait: Access
    announce: Access
    compare: Access
    algorithms: dict[str, tuple[str, ...]]


def read_pull(sources: Sources | None = None) -> Pull:
    """The CPU protocol of this tree's sources, or of a variant of them."""
    source = sources or Sources()
    orders = re.findall(r"inline \w+ (\w+)\([^)]*\) \{[^}]*?__ATOMIC_(\w+)", source[MEMORY])
    verbs = {name: Access(_ORDERS[order], Scope.SYS) for name, order in orders}

    def accesses(function: str) -> list[tuple[str, Access]]:
        body = source.function(COMM, function, after="void Communicator::announce")
        calls = re.findall(r"\b(\w+)\((?:published|sleepers|tags|word|address)", body)
        places = re.findall(r"\b\w+\((published|sleepers|tags|word)", body)
        pairs = [(p, c) for p, c in zip(places, calls, strict=True) if c in verbs]
        return [("published" if p == "word" else p, verbs[c]) for p, c in pairs]

    (announce,) = {access for _, access in accesses("announce")}
    (compare,) = {access for _, access in accesses("same_call")}
    (wait,) = (access for place, access in accesses("wait") if place == "published")
    source.one(COMM, r"if \(has_reached\(load_\w+\(word\), expected\)\) return same_call")
    return Pull(
        phases=int(source.one(LAYOUT, r"constexpr int kPullPhases = (\d+);")[1]),
        publish=tuple(accesses("publish")),
        sleep=tuple(accesses("sleep")[:2]),
        wait=wait,
        announce=announce,
        compare=compare,
        algorithms={name: _calls(source, name) for name in ("one_shot", "two_shot", "all_gather")},
    )


def _calls(source: Sources, algorithm: str) -> tuple[str, ...]:
    """The protocol's calls in a function of transports.cpp."""
    tokens = {
        r"announce\(": "announce",
        r"copy_in\(": "copy_in",
        r"publish\(([12])\)": "publish",
        r"wait\(\w+, ([12]),": "wait",
        r"exchange_partials\(chunk": "exchange_partials",
        r"run_rows\(|copy_rows\(from": "rows",
    }
    body = source.function(TRANSPORTS, algorithm, after="bool Communicator::one_shot")
    found = []
    for match in re.finditer("|".join(tokens), body):
        (name,) = (n for pattern, n in tokens.items() if re.fullmatch(pattern, match[0]))
        number = next((g for g in match.groups() if g), "")
        found.append(f"{name} {number}".strip())
    calls: list[str] = []
    for name in found:
        if name == "exchange_partials":
            calls += _calls(source, "exchange_partials")
        elif name == "rows":
            second = "wait 2" in calls
            calls.append("read sum" if second else "read partial")
            if algorithm == "two_shot" and not second:
                calls.append("write sum")
        else:
            calls.append(name)
    if calls[:1] != ["announce"]:
        raise SourceError(f"{algorithm}: {calls}")
    return tuple(calls)


def pull_program(pull: Pull, world_size: int, algorithms: tuple[str, ...]) -> Program:
    """Operations of the given algorithms, one after the other, on each of the ranks."""
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
    name, _, what = call.partition(" ")
    peers = [peer for peer in range(world_size) if peer != rank]
    if name == "announce":
        program.write(thread, pull.announce, ("tag", rank, phase), k, call)
    elif name == "copy_in":
        program.write(thread, plain, ("partial", rank, phase), k, call)
    elif name == "write":
        program.write(thread, plain, (what, rank, phase), k, call)
    elif name == "publish":
        number = 2 * (FIRST_OP + k) + int(what)
        program.write(thread, pull.publish[0][1], ("published", rank), number, call)
    for peer in peers if name in {"wait", "read"} else ():
        if name == "read":
            _expect(program, thread, plain, (what, peer, phase), k, call)
            continue
        number = 2 * (FIRST_OP + k) + int(what)
        program.read(
            thread,
            pull.wait,
            ("published", peer),
            accepts=functools.partial(operator.le, number),
            name=call,
        )
        _expect(program, thread, pull.compare, ("tag", peer, phase), k, "compare")


def _expect(
    program: Program, thread: Thread, access: Access, where: tuple[str, int, int], k: int, name: str
) -> None:
    """A read that must return what belongs to operation k."""
    program.read(
        thread,
        access,
        where,
        expected=lambda seen: seen == k,
        name=name,
    )


def sleep_program(pull: Pull) -> tuple[Program, Event, Event]:
    """publish() on one side, sleep() on the other, and the two reads of which one must see."""
    program = Program()
    program.initialize("published", 0)
    program.initialize("sleepers", 0)
    publisher, sleeper = Thread("publisher"), Thread("sleeper")
    (_, store), (_, look) = pull.publish
    (_, enter), (_, check) = pull.sleep
    program.write(publisher, store, "published", 1)
    sees_sleeper = program.read(publisher, look, "sleepers")
    program.write(sleeper, enter, "sleepers", 1)
    sees_number = program.read(sleeper, check, "published")
    return program, sees_sleeper, sees_number
