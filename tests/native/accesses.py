"""Reads the access table (`csrc/protocol/accesses.h`), and creates defective copies of it."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from typing import Any

from .protocol_model.program import Access, Scope

CSRC = pathlib.Path(__file__).resolve().parents[2] / "csrc"
HEADER = "protocol/accesses.h"
_VERB = re.compile(r"#define ALLNORM_(\w+) +\((\w+), +([\w.]+), +([\w.]+)\)")
Place = tuple[str, str, str]  # a row's part, place and verb, which identify the row
_ROW = re.compile(r"  (ACCESS|DO)\(([\w, ]+)\)")


@dataclasses.dataclass(frozen=True)
class Verb:
    """An instruction: its operation, its type, and its order and scope, such as `relaxed.sys`."""

    operation: str
    order: str
    type: str

    @property
    def access(self) -> Access:
        """The order and scope of this instruction, as a memory model's `Access`."""
        order, _, scope = self.order.partition(".")
        return Access(order, Scope[scope.upper()] if scope else None)

    @property
    def bytes(self) -> int:
        """The number of bytes that the instruction moves."""
        return {"v4.u32": 16, "u64": 8, "u32": 4}[self.type]


@dataclasses.dataclass(frozen=True)
class Row:
    """An access of the CUDA kernels. The head of the table describes the columns."""

    part: str
    place: str
    verb: str
    number: str
    when: str
    partner: str


@dataclasses.dataclass(frozen=True)
class CpuRow:
    """An access of the CPU protocol in `csrc/cpu`."""

    part: str
    place: str
    order: str
    partner: str

    @property
    def access(self) -> Access:
        return Access({"seq_cst": "sc"}.get(self.order, self.order), Scope.SYS)


@dataclasses.dataclass(frozen=True)
class Table:
    """The whole access table. It is immutable: methods that change something return a copy."""

    verbs: dict[str, Verb]
    rows: tuple[Row, ...]
    cpu_rows: tuple[CpuRow, ...]
    cpu_algorithms: dict[str, tuple[str, ...]]

    def part(self, name: str) -> tuple[Row, ...]:
        """Returns a part's rows, in order."""
        found = tuple(row for row in self.rows if row.part == name)
        if not found:
            raise LookupError(f"{HEADER} has no part {name}")
        return found

    def operation(self, row: Row) -> str:
        return self.verbs[row.verb].operation

    def _at(self, row: Place) -> int:
        (found,) = (i for i, r in enumerate(self.rows) if (r.part, r.place, r.verb) == row)
        return found

    def with_verb(self, name: str, order: str) -> Table:
        """Returns a copy that gives a verb a different order and scope."""
        verb = dataclasses.replace(self.verbs[name], order=order)
        return dataclasses.replace(self, verbs={**self.verbs, name: verb})

    def without(self, row: Place) -> Table:
        """Returns a copy without the given row."""
        at = self._at(row)
        return dataclasses.replace(self, rows=self.rows[:at] + self.rows[at + 1 :])

    def changed(self, row: Place, **columns: str) -> Table:
        """Returns a copy with some of a row's columns changed."""
        rows = list(self.rows)
        at = self._at(row)
        rows[at] = dataclasses.replace(rows[at], **columns)
        return dataclasses.replace(self, rows=tuple(rows))

    def swapped(self, part: str) -> Table:
        """Returns a copy with the first two rows of a part swapped."""
        at = next(i for i, row in enumerate(self.rows) if row.part == part)
        first, second = self.rows[at : at + 2]
        rows = (*self.rows[:at], second, first, *self.rows[at + 2 :])
        return dataclasses.replace(self, rows=rows)

    def with_cpu_order(self, part: str, place: str, order: str) -> Table:
        """Returns a copy that gives one access of the CPU protocol a different order."""
        rows = [
            dataclasses.replace(row, order=order) if (row.part, row.place) == (part, place) else row
            for row in self.cpu_rows
        ]
        assert tuple(rows) != self.cpu_rows
        return dataclasses.replace(self, cpu_rows=tuple(rows))

    def with_cpu_algorithm(self, name: str, *steps: str) -> Table:
        """Returns a copy that gives one algorithm of the CPU protocol different steps."""
        return dataclasses.replace(self, cpu_algorithms={**self.cpu_algorithms, name: steps})


def read_table() -> Table:
    """Reads the access table from the sources."""
    verbs, rows, cpu_rows = {}, [], []
    algorithms: dict[str, tuple[str, ...]] = {}
    for line in (CSRC / HEADER).read_text().splitlines():
        if match := _VERB.fullmatch(line):
            verbs[match[1]] = Verb(*match.groups()[1:])
        elif match := _ROW.match(line):
            columns: Any = [word.strip() for word in match[2].split(",")]
            if match[1] == "DO":
                algorithms[columns[0]] = (*algorithms.get(columns[0], ()), columns[1])
            elif len(columns) == len(dataclasses.fields(Row)):
                rows.append(Row(*columns))
            else:
                cpu_rows.append(CpuRow(*columns))
    return Table(verbs, tuple(rows), tuple(cpu_rows), algorithms)


def header_of(table: Table) -> str:
    """Returns the text of `accesses.h` with the verbs of `table`."""
    lines = []
    for line in (CSRC / HEADER).read_text().splitlines():
        if match := _VERB.fullmatch(line):
            verb = table.verbs[match[1]]
            line = f"#define ALLNORM_{match[1]} ({verb.operation}, {verb.order}, {verb.type})"
        lines.append(line)
    return "\n".join(lines) + "\n"
