"""The report on one rank's trace."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

FUSED, REDUCTION, NORM = "fused", "reduction", "norm"
KINDS = (FUSED, REDUCTION, NORM)


@dataclasses.dataclass(frozen=True)
class Entry:
    """The calls of one kind from one module.

    Attributes:
        kind: "fused", "reduction" (an all-reduce that was not fused) or "norm" (a separate
            RMSNorm).
        what: the algorithm of a fused call; otherwise the operator, module class or kernel.
        module: path of the calling module, with `*` for layer numbers; "" if unknown.
        calls: number of calls.
        time_us: total time of the calls in microseconds: on the GPU if there is one, else on the
            host.
    """

    kind: str
    what: str
    module: str
    calls: int
    time_us: float


@dataclasses.dataclass(eq=False, repr=False)
class TraceReport:
    """The calls that ran on one rank. Empty until the trace ends.

    Attributes:
        rank: this rank in the default process group; 0 without one.
        world_size: size of that group; 1 without one.
        passes: number of calls of outermost modules (forward passes).
        entries: calls by kind and module; within a kind, the largest times come first.
    """

    rank: int = 0
    world_size: int = 1
    passes: int = 0
    entries: tuple[Entry, ...] = ()

    def calls(self, kind: str) -> int:
        """Returns the number of calls of one kind."""
        return sum(entry.calls for entry in self.entries if entry.kind == kind)

    def time_us(self, kind: str) -> float:
        """Returns the microseconds spent in calls of one kind."""
        return sum(entry.time_us for entry in self.entries if entry.kind == kind)

    @property
    def fused(self) -> int:
        """The number of reductions that were fused with a norm."""
        return self.calls(FUSED)

    @property
    def reductions(self) -> int:
        """The number of all reductions, fused or not."""
        return self.calls(FUSED) + self.calls(REDUCTION)

    @property
    def fraction(self) -> float:
        """The fraction of reductions that were fused; 0.0 if there were no reductions."""
        return self.fused / self.reductions if self.reductions else 0.0

    def summary(self) -> str:
        """Returns a line such as "119 of 121 fused"; per forward pass if they divide evenly."""
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
        """Converts the report to a dict for JSON."""
        counts = {"fused": self.fused, "reductions": self.reductions, "fraction": self.fraction}
        return dataclasses.asdict(self) | counts

    @staticmethod
    def from_dict(record: dict[str, Any]) -> TraceReport:
        """Converts the result of `to_dict` back to a report."""
        entries = tuple(Entry(**entry) for entry in record["entries"])
        return TraceReport(record["rank"], record["world_size"], record["passes"], entries)


class Tally:
    """Sums of calls and times by kind, name and module."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str, str], list[float]] = {}

    def add(self, kind: str, what: str, module: str, time_us: float, calls: int = 1) -> None:
        """Adds calls; layer numbers in `module` become `*`."""
        key = (kind, what, re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module))
        found = self._sums.setdefault(key, [0, 0.0])
        found[0] += calls
        found[1] += time_us

    def entries(self) -> list[Entry]:
        """Returns the entries, by kind, then by descending time."""
        found = [Entry(*key, int(calls), time) for key, (calls, time) in self._sums.items()]
        return sorted(found, key=lambda entry: (KINDS.index(entry.kind), -entry.time_us))
