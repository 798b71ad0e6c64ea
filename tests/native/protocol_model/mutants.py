"""Named protocol defects: edits of the access table, or faults in the sources."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from native.accesses import Place, Table, read_table

from .exchange import Exchange, exchange_of


@dataclasses.dataclass(frozen=True)
class Defect:
    """A defect of the protocol.

    Attributes:
        edit: Changes the access table.
        faults: Switches from `csrc/protocol/fault_switch.h`.
        first_released: A wrong number in new workspaces, or None.
    """

    edit: Callable[[Table], Table] = lambda table: table
    faults: tuple[str, ...] = ()
    first_released: int | None = None

    def exchange(self, half_units: int = 2) -> Exchange:
        """Returns the protocol with the defect."""
        exchange = exchange_of(self.edit(read_table()), half_units, self.faults)
        if self.first_released is None:
            return exchange
        return dataclasses.replace(exchange, first_released=self.first_released)


def _fault(name: str) -> Defect:
    return Defect(faults=(name,))


def _without(row: Place) -> Defect:
    return Defect(lambda table: table.without(row))


def _changed(row: Place, **columns: str) -> Defect:
    return Defect(lambda table: table.changed(row, **columns))


def _verb(name: str, order: str) -> Defect:
    return Defect(lambda table: table.with_verb(name, order))


def _always_stored(row: Place) -> Defect:
    return _changed(row, when="always")


# Verbs that access memory across the link, each made weak or reduced to GPU scope. The 8-byte and
# 4-byte verbs also push packed rows and their scales.
_LINK = {
    "push": ("STORE_PACK", "relaxed"),
    "poll of a slot": ("LOAD_PACK", "relaxed"),
    "announcement": ("STORE_U64", "relaxed"),
    "poll of an announcement": ("LOAD_U64", "relaxed"),
    "number of returned slots": ("STORE_U32", "relaxed"),
    "poll of that number": ("ACQUIRE_U32", "acquire"),
}
WEAKENED = {
    **{f"{name}: weak": _verb(verb, "weak") for name, (verb, _) in _LINK.items()},
    **{f"{name}: GPU scope": _verb(verb, f"{order}.gpu") for name, (verb, order) in _LINK.items()},
}

_ROW_FENCE = ("hand_back", "none", "FENCE")
_ROW_STORED = ("hand_back", "released", "STORE_U32")
_ROW_REACHED = ("hand_back", "released", "ACQUIRE_U32")
_ROW_HEAD = ("head", "released", "ACQUIRE_U32")


def _numbers_waited_for(number: str) -> Defect:
    return Defect(
        lambda table: table.changed(_ROW_REACHED, number=number).changed(_ROW_HEAD, number=number)
    )


# Defects of the exchange itself: each breaks the exchange with two ranks and any transport.
EXCHANGE_MUTANTS = {
    "no fence": _without(_ROW_FENCE),
    "fence of GPU scope": _verb("FENCE", "acq_rel.gpu"),
    "fence of block scope": _verb("FENCE", "acq_rel.cta"),
    "number stored before the fence": Defect(lambda table: table.swapped("hand_back")),
    "number read relaxed": _changed(_ROW_REACHED, verb="LOAD_U32"),
    "no wait for peers' numbers": _without(_ROW_REACHED),
    "no number stored": _without(_ROW_STORED),
    "number of an earlier half": _numbers_waited_for("last - 2"),
    "== for >=": _fault("equal_for_reached"),
    "halves of one operation": _fault("half_of_one_operation"),
    "one unit": _fault("one_unit"),
    "slots not returned at the begin of a half": _fault("half_not_handed_back"),
    "no wait for the preceding grid": _without(("begin", "none", "GRID_WAIT")),
    "first word of a tag not tested": _fault("first_tag_word_not_tested"),
    "second word of a tag not tested": _fault("second_tag_word_not_tested"),
}

# Defects of large operations.
LARGE_MUTANTS = {
    "no wait at the head": _without(_ROW_HEAD),
    "no barrier after the head": _without(("head", "none", "BLOCK_BARRIER")),
    "head: number of two operations before": _numbers_waited_for("last - 2"),
    "head: number of the same operation": _numbers_waited_for("same"),
    "number of the next operation stored": _changed(_ROW_STORED, number="next"),
    "large operations do not return slots": _fault("large_not_handed_back"),
    "head: relaxed": _verb("ACQUIRE_U32", "relaxed.sys"),
    "head: GPU scope": _verb("ACQUIRE_U32", "acquire.gpu"),
    "one large phase": _fault("one_large_phase"),
    "slots of a new workspace not returned": Defect(first_released=-2),
}

# Defects of one transport.
TRANSPORT_MUTANTS = {
    "no clear": ("one_shot", _without(("one_shot_own", "partial", "CLEAR_PACK"))),
    "clear before the wait": ("one_shot", Defect(lambda table: table.swapped("one_shot_own"))),
    "no clear of a sum": ("two_shot", _without(("two_shot_receive", "finished", "CLEAR_PACK"))),
    "no clear of a finished row": (
        "owned_rows",
        _without(("rows_receive", "finished", "CLEAR_PACK")),
    ),
    "no clear of quantized elements": (
        "owned_quantized",
        _without(("packed_receive", "finished", "CLEAR_U64")),
    ),
    "no clear of a scale": ("owned_quantized", _without(("packed_receive", "scale", "CLEAR_U32"))),
}

# Defects that only show in slots with more than one word.
WORD_MUTANTS = {"one word of a slot not tested": _fault("one_word_tested")}

# Stores into slots after a failure. Each has the transport of the operation that a peer is still
# running, the transport of later operations, and the shift of the later operations' slots.
LATE_MUTANTS = {
    "sums relayed after a failure": (
        ("owned_quantized", "two_shot", 0),
        _always_stored(("two_shot_own", "finished", "STORE_PACK")),
    ),
    "sums of rows with owners published after a failure": (
        ("owned_quantized", "owned_rows", 0),
        _always_stored(("rows_own", "finished", "STORE_PACK")),
    ),
    "gathered rows published after a failure": (
        ("one_shot", "gather", 2),
        _always_stored(("rows_own", "finished", "STORE_PACK")),
    ),
    "quantized rows published after a failure": (
        ("two_shot", "owned_quantized", 0),
        _always_stored(("packed_own", "finished", "STORE_U64")),
    ),
    "scales published after a failure": (
        ("one_shot", "owned_quantized", 1),
        _always_stored(("packed_own", "scale", "STORE_U32")),
    ),
    "partials sent after a failure, one_shot": (
        ("gather", "one_shot", 2),
        _always_stored(("one_shot_send", "partial", "STORE_PACK")),
    ),
    "partials sent after a failure, two_shot": (
        ("one_shot", "two_shot", 0),
        _always_stored(("two_shot_send", "partial", "STORE_PACK")),
    ),
    "partials sent after a failure, rows with owners": (
        ("one_shot", "owned_rows", 0),
        _always_stored(("owners_send", "partial", "STORE_PACK")),
    ),
}

# Defects of numbers and slots, for the state machine. Some show only where numbers wrap.
COUNTER_MUTANTS = {
    **{
        name: EXCHANGE_MUTANTS[name]
        for name in (
            *("no fence", "no number stored", "== for >="),
            *("halves of one operation", "one unit", "slots not returned at the begin of a half"),
        )
    },
    **{name: TRANSPORT_MUTANTS[name][1] for name in ("no clear", "clear before the wait")},
    "numbers compared without wrapping": _fault("compared_without_wrapping"),
    "operations that do not return slots not counted": _numbers_waited_for("op - 1"),
}
# Defects that do not show if halves hold two operations.
SEEN_IN_LONGER_HALVES = ("operations that do not return slots not counted",)

ALL = (
    *WEAKENED.values(),
    *EXCHANGE_MUTANTS.values(),
    *LARGE_MUTANTS.values(),
    *(defect for _, defect in TRANSPORT_MUTANTS.values()),
    *WORD_MUTANTS.values(),
    *COUNTER_MUTANTS.values(),
    Defect(faults=("one_pull_phase",)),  # test_cpu.py
)
