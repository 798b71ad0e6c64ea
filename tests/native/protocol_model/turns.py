"""Which slots an operation uses, and whether it hands slots back: `PushTurn`, run in Python."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Hashable, Iterable
from typing import Any

from .source import SourceError, block

_CONSTANTS = ("kHalfUnits", "kPushUnits", "kLargePhases", "kTagSlots", "kLargeShift", "kSinceShift")
_FUNCTIONS = ("free_unit", "unit", "large_phase", "hands_back", "since", "next")


@dataclasses.dataclass(frozen=True)
class Turn:
    """Of one operation.

    Attributes:
        slots: which it uses, a unit or a large phase.
        uses: how many operations have used them before.
        hands_back: whether it hands slots back.
        since: how many operations lie between it and the last before it that has.
    """

    slots: Hashable
    uses: int
    hands_back: bool
    since: int


class Turns:
    """From the text of `layout.h`, without comments."""

    def __init__(self, text: str) -> None:
        self._names: dict[str, int] = {}
        for name in _CONSTANTS:
            match = re.search(rf"\b{name} = ([^;,]+)[;,]", text)
            if match is None:
                raise SourceError(f"no constant {name}")
            self._names[name] = _evaluated(match[1], self._names)
        struct = block(text, text.index("{", text.index("struct PushTurn {")))
        self._bodies = {}
        for name in _FUNCTIONS:
            match = re.search(rf"\b{name}\(\) const \{{", struct)
            if match is None:
                raise SourceError(f"PushTurn has no {name}()")
            self._bodies[name] = block(struct, match.end() - 1)

        taken = re.search(r"const uint32_t more = ([^;]*);", text)
        if taken is None:
            raise SourceError("what an operation takes")
        self._half_of_half = _evaluated(taken[1], self._names)

    @property
    def tag_slots(self) -> int:
        return self._names["kTagSlots"]

    def of(self, operations: int, large: Iterable[int], small: Iterable[int]) -> list[Turn]:
        """Of that many operations: large ones, small ones, which take a unit, and others, which
        take half of a half."""
        turns: list[Turn] = []
        kept, large, small = 0, set(large), set(small)
        for k in range(operations):
            units = 1 if k in large | small else self._half_of_half
            known = {"kept": kept, "units": units, "large": k in large}

            def call(name: str, known: dict[str, Any] = known) -> int:
                return self._call(name, known)

            slots = ("large", call("large_phase")) if k in large else ("unit", call("unit"))
            uses = sum(turn.slots == slots for turn in turns)
            turns.append(Turn(slots, uses, bool(call("hands_back")), call("since")))
            kept = call("next")
        return turns

    def _call(self, name: str, known: dict[str, Any]) -> int:
        names = {**self._names, **known}
        for function in _FUNCTIONS:
            names[function] = lambda f=function: self._call(f, known)
        for statement in filter(None, map(str.strip, self._bodies[name].split(";"))):
            if match := re.fullmatch(r"const uint32_t (\w+) = (.*)", statement, re.DOTALL):
                names[match[1]] = _evaluated(match[2], names)
            elif match := re.fullmatch(r"return (.*)", statement, re.DOTALL):
                return _evaluated(match[1], names)
            else:
                raise SourceError(f"{name}(): {statement}")
        raise SourceError(f"{name}() returns nothing")


def _evaluated(text: str, names: dict[str, Any]) -> int:
    """An expression of C++ over unsigned numbers that do not wrap."""
    if match := re.fullmatch(r"([^?]*)\?([^?:]*):([^?:]*)", text, re.DOTALL):
        return _evaluated(match[2 if _evaluated(match[1], names) else 3], names)
    if not re.fullmatch(r"[\w\s()+\-*/%<>|&=]*", text):
        raise SourceError(f"an expression {text}")
    python = re.sub(r"\|\|", " or ", text).replace("&&", " and ").replace("/", "//")
    return int(eval(" ".join(python.split()), {"__builtins__": {}}, names))
