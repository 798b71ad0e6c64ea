"""What a trace has found, on one rank."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

FUSED, REDUCTION, NORM = "fused", "reduction", "norm"
KINDS = (FUSED, REDUCTION, NORM)


@dataclasses.dataclass(frozen=True)
class Entry:
    """Calls of one kind from one place.

    Attributes:
        kind: "fused", "reduction" (an all-reduce that was not fused) or "norm" (an RMSNorm of its
            own).
        what: the algorithm of a fused call, else the operator, module class or kernel.
        module: its path in the model, with `*` for the number of a layer; "" if unknown.
        calls: how many.
        time_us: spent in them: on the GPU if there is one, else on the host.
    """

    kind: str
    what: str
    module: str
    calls: int
    time_us: float


@dataclasses.dataclass(eq=False, repr=False)
class TraceReport:
    """What ran on one rank. Empty until the trace ends.

    Attributes:
        rank: in the default process group; 0 without one.
        world_size: of that group; 1 without one.
        passes: calls of the outermost modules.
        entries: what was found; largest times first within a kind.
    """

    rank: int = 0
    world_size: int = 1
    passes: int = 0
    entries: tuple[Entry, ...] = ()

    def calls(self, kind: str) -> int:
        """Calls of one kind."""
        return sum(entry.calls for entry in self.entries if entry.kind == kind)

    def time_us(self, kind: str) -> float:
        """Microseconds spent in one kind."""
        return sum(entry.time_us for entry in self.entries if entry.kind == kind)

    @property
    def fused(self) -> int:
        """Reductions that were fused with a norm."""
        return self.calls(FUSED)

    @property
    def reductions(self) -> int:
        """All reductions."""
        return self.calls(FUSED) + self.calls(REDUCTION)

    @property
    def fraction(self) -> float:
        """Part of the reductions that were fused; 0.0 if there was none."""
        return self.fused / self.reductions if self.reductions else 0.0

    def summary(self) -> str:
        """One line: "119 of 121 fused", for one forward pass if all were alike."""
        text = f"{self.fused} of {self.reductions} fused"
        if self.passes > 1:
            text += f" in {self.passes} forward passes"
            if self.fused % self.passes == self.reductions % self.passes == 0:
                each = f"{self.fused // self.passes} of {self.reductions // self.passes}"
                text = f"{each} fused, {self.passes} times"
        return text

    def __str__(self) -> str:
        lines = [f"rank {self.rank}: {self.summary()}"]
        for entry in self.entries:
            place = f" in {entry.module}" if entry.module else ""
            lines.append(
                f"  {entry.kind:9}  {entry.calls:6} x {entry.what}{place}, {entry.time_us:.0f} us"
            )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Numbers and words only, for JSON."""
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "passes": self.passes,
            "fused": self.fused,
            "reductions": self.reductions,
            "fraction": self.fraction,
            "entries": [dataclasses.asdict(entry) for entry in self.entries],
        }

    @staticmethod
    def from_dict(record: dict[str, Any]) -> TraceReport:
        """Of what `to_dict` gave."""
        entries = tuple(Entry(**entry) for entry in record["entries"])
        return TraceReport(record["rank"], record["world_size"], record["passes"], entries)


class Tally:
    """Adds up calls by kind, name and place."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str, str], list[float]] = {}

    def add(self, kind: str, what: str, module: str, time_us: float, calls: int = 1) -> None:
        """Counts calls; the numbers of layers in `module` become `*`."""
        key = (kind, what, re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module))
        found = self._sums.setdefault(key, [0, 0.0])
        found[0] += calls
        found[1] += time_us

    def entries(self) -> list[Entry]:
        """By kind, then by time."""
        found = [Entry(*key, int(calls), time) for key, (calls, time) in self._sums.items()]
        return sorted(found, key=lambda entry: (KINDS.index(entry.kind), -entry.time_us))
