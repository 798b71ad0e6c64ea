"""Defects of the protocol: edits of the table of accesses, or faults of the sources, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from native.accesses import Place, Table, read_table

from .exchange import Exchange, exchange_of


@dataclasses.dataclass(frozen=True)
class Defect:
    """An edit of the table, and switches of `csrc/protocol/fault_switch.h`.

    Attributes:
        edit: what becomes of the table.
        faults: the switches.
        first_released: what a new workspace holds, if another number than it does.
    """

    edit: Callable[[Table], Table] = lambda table: table
    faults: tuple[str, ...] = ()
    first_released: int | None = None

    def exchange(self, half_units: int = 2) -> Exchange:
        """The protocol with the defect."""
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


# Each verb of what crosses the link, weak and of GPU scope. Those of 8 and 4 bytes are also how
# packed rows and their scales are pushed.
_LINK = {
    "push": ("STORE_PACK", "relaxed"),
    "poll of a slot": ("LOAD_PACK", "relaxed"),
    "announcement": ("STORE_U64", "relaxed"),
    "poll of an announcement": ("LOAD_U64", "relaxed"),
    "handed-back number": ("STORE_U32", "relaxed"),
    "poll of a handed-back number": ("ACQUIRE_U32", "acquire"),
}
WEAKENED = {
    **{f"{name}: weak": _verb(verb, "weak") for name, (verb, _) in _LINK.items()},
    **{f"{name}: of the GPU": _verb(verb, f"{order}.gpu") for name, (verb, order) in _LINK.items()},
}

_ROW_FENCE = ("hand_back", "none", "FENCE")
_ROW_STORED = ("hand_back", "released", "STORE_U32")
_ROW_REACHED = ("hand_back", "released", "ACQUIRE_U32")
_ROW_HEAD = ("head", "released", "ACQUIRE_U32")


def _numbers_waited_for(number: str) -> Defect:
    return Defect(
        lambda table: table.changed(_ROW_REACHED, number=number).changed(_ROW_HEAD, number=number)
    )


# Of the exchange itself; each breaks it at 2 ranks with any transport.
EXCHANGE_MUTANTS = {
    "no fence": _without(_ROW_FENCE),
    "fence of the GPU": _verb("FENCE", "acq_rel.gpu"),
    "fence of the block": _verb("FENCE", "acq_rel.cta"),
    "published before the fence": Defect(lambda table: table.swapped("hand_back")),
    "number read relaxed": _changed(_ROW_REACHED, verb="LOAD_U32"),
    "peers' numbers not waited for": _without(_ROW_REACHED),
    "nothing published": _without(_ROW_STORED),
    "number of an earlier half": _numbers_waited_for("last - 2"),
    "== for >=": _fault("equal_for_reached"),
    "halves of one operation": _fault("half_of_one_operation"),
    "one unit": _fault("one_unit"),
    "a half begun and nothing handed back": _fault("half_not_handed_back"),
    "not waiting for the preceding grid": _without(("begin", "none", "GRID_WAIT")),
    "first word of an announcement not tested": _fault("first_tag_word_not_tested"),
    "second word of an announcement not tested": _fault("second_tag_word_not_tested"),
}

# Of large operations.
LARGE_MUTANTS = {
    "no wait at the head": _without(_ROW_HEAD),
    "no barrier after the head": _without(("head", "none", "BLOCK_BARRIER")),
    "head: number of two operations ago": _numbers_waited_for("last - 2"),
    "head: number of the same operation": _numbers_waited_for("same"),
    "published as of the next operation": _changed(_ROW_STORED, number="next"),
    "large operations hand nothing back": _fault("large_not_handed_back"),
    "head: relaxed": _verb("ACQUIRE_U32", "relaxed.sys"),
    "head: of the GPU": _verb("ACQUIRE_U32", "acquire.gpu"),
    "one large phase": _fault("one_large_phase"),
    "a new workspace's slots not handed back": Defect(first_released=-2),
}

# Of one transport.
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

# Seen where a slot has more than one word.
WORD_MUTANTS = {"one word of a slot not tested": _fault("one_word_tested")}

# Of a rank that stores into slots after an operation has failed: (kind of call of the operation
# that a peer is still in, kind of the later ones, shift of their slots).
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

# Of numbers and slots: seen by exploring, some of them only where numbers wrap.
COUNTER_MUTANTS = {
    **{
        name: EXCHANGE_MUTANTS[name]
        for name in (
            *("no fence", "nothing published", "== for >="),
            *("halves of one operation", "one unit", "a half begun and nothing handed back"),
        )
    },
    **{name: TRANSPORT_MUTANTS[name][1] for name in ("no clear", "clear before the wait")},
    "numbers compared without wrapping": _fault("compared_without_wrapping"),
    "what hands nothing back not counted": _numbers_waited_for("op - 1"),
}
# Of these, what goes right if a half has two operations.
SEEN_IN_LONGER_HALVES = ("what hands nothing back not counted",)

ALL = (
    *WEAKENED.values(),
    *EXCHANGE_MUTANTS.values(),
    *LARGE_MUTANTS.values(),
    *(defect for _, defect in TRANSPORT_MUTANTS.values()),
    *WORD_MUTANTS.values(),
    *COUNTER_MUTANTS.values(),
    Defect(faults=("one_pull_phase",)),  # test_cpu.py
)
