"""Parses litmus tests, which have a column of PTX-like instructions for each thread."""

from __future__ import annotations

import re
from collections.abc import Hashable

from .program import Access, Event, Program, Scope, Thread

# Maps a thread's letter to its GPU and block: threads with the same letter share a block.
_PLACES = {"A": (0, 0), "N": (0, 1), "B": (1, 1), "C": (2, 2), "D": (3, 3)}
_SCOPES = {"cta": Scope.CTA, "gpu": Scope.GPU, "sys": Scope.SYS}
_INSTRUCTION = re.compile(
    r"(?P<verb>ld|st|fence)(\.(?P<order>weak|relaxed|acquire|release|acq_rel|sc))?"
    r"(\.(?P<scope>cta|gpu|sys))?( (?P<operands>.+))?"
)


def parse(*columns: str, data_dependent: bool = False) -> tuple[Program, dict[str, Event]]:
    """Parses threads such as `"A: st.relaxed.sys x 1; ld.acquire.sys r1 y"`.

    `bar.sync` is a barrier among all threads of a block that execute it. Locations are initially 0.

    Args:
        columns: The threads.
        data_dependent: Whether each store depends on the earlier loads of its thread.

    Returns:
        The program, and a dict that maps register names to the program's reads.
    """
    program = Program()
    reads: dict[str, Event] = {}
    bodies = []
    for number, column in enumerate(columns):
        place, body = column.split(":")
        gpu, block = _PLACES[place.strip()]
        instructions = [text.strip() for text in body.split(";")]
        bodies.append((Thread(f"T{number}", gpu, block), instructions))
    locations: set[Hashable] = set()
    for text in re.findall(r"(?:st|ld)\S* ([^;]+)", ";".join(c.split(":")[1] for c in columns)):
        locations.update(word for word in text.split() if word.isalpha())
    for location in sorted(locations, key=str):
        program.initialize(location, 0)
    longest = max(len(instructions) for _, instructions in bodies)
    waiting: list[Thread] = []
    for row in range(longest):
        for thread, instructions in bodies:
            if row >= len(instructions):
                continue
            if instructions[row] == "bar.sync":
                waiting.append(thread)
                continue
            event = _instruction(program, thread, instructions[row], reads)
            if data_dependent and event.kind == "write":
                earlier = [e for e in program.threads[thread] if e.kind == "read"]
                program.depends.extend((e, event) for e in earlier)
        if waiting:
            for block in {(t.gpu, t.block) for t in waiting}:
                there = [t for t in waiting if (t.gpu, t.block) == block]
                program.joint(there, there)
            waiting = []
    return program, reads


def _instruction(program: Program, thread: Thread, text: str, reads: dict[str, Event]) -> Event:
    match = _INSTRUCTION.fullmatch(text)
    if match is None:
        raise ValueError(f"not an instruction: {text!r}")
    access = Access(match["order"] or "weak", _SCOPES.get(match["scope"]))
    operands = (match["operands"] or "").split()
    if match["verb"] == "fence":
        return program.fence(thread, access)
    if match["verb"] == "st":
        location, value = operands
        return program.write(thread, access, location, int(value))
    register, location = operands
    reads[register] = program.read(thread, access, location)
    return reads[register]
