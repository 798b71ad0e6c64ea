"""What a model knows of the CUDA protocol: its steps, from the table of accesses, and numbers."""

from __future__ import annotations

import dataclasses

from native.accesses import Row, Table, read_table

from .arithmetic import Arithmetic, Compare
from .program import Access


@dataclasses.dataclass(frozen=True)
class Step:
    """Something that a thread does.

    Attributes:
        kind: "store" to peers, "wait" for peers, "clear" (an own slot), "fence" or "barrier".
        where: "tag0", "tag1", "released", "partial", "finished" or "scale".
        offset: the number stored or waited for is that of the operation plus this.
        compare: which numbers a wait takes, (seen, expected); None: whatever is not empty.
        unless: what a rank that stores nothing has done: "failed", "failed_before" (in an operation
            before this one); "": it always stores.
        since: ... less how many operations there have been since the last that handed slots back.
        if_hands_back: only operations that hand slots back do it.
        bits: of a word that is stored or waited for: "16" or "32", whichever rows have, "e4m3" or
            "scale".
    """

    kind: str
    access: Access
    where: str = ""
    offset: int = 0
    compare: Compare | None = None
    unless: str = ""
    bits: str = ""
    since: bool = False
    if_hands_back: bool = False


@dataclasses.dataclass(frozen=True)
class Transport:
    """What threads do with slots. All do `send`; who sums does `own`; the others do `receive`."""

    all_sum: bool
    send: tuple[Step, ...]
    own: tuple[Step, ...]
    receive: tuple[Step, ...] = ()


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The protocol, as the table and the sources have it.

    Attributes:
        arithmetic: of numbers, and which slots operations use.
        waits_for_grid: nothing is done before the preceding grid is complete.
        roll_call: what a lane of the first serving warp does, for its peer.
        hand_back: ... of the second.
        transports: by name.
        head: what lanes of every block of a large operation do first; a "barrier" of the block,
            if there is one, is last.
        first_released: what a new workspace holds, relative to the number of the first operation.
    """

    arithmetic: Arithmetic
    waits_for_grid: bool
    roll_call: tuple[Step, ...]
    hand_back: tuple[Step, ...]
    transports: dict[str, Transport]
    head: tuple[Step, ...]
    first_released: int


# Of which parts a transport consists: whether all ranks sum, send, own, receive. The second hop of
# quantized rows is not of the bits of x; words of NVFP4 have their scale in them.
_TRANSPORTS = {
    "one_shot": (True, ("one_shot_send",), ("one_shot_own",), ()),
    "two_shot": (False, ("two_shot_send",), ("two_shot_own",), ("two_shot_receive",)),
    "owned_rows": (False, ("owners_send",), ("owners_own", "rows_own"), ("rows_receive",)),
    "owned_quantized": (False, ("owners_send",), ("owners_own", "packed_own"), ("packed_receive",)),
    "owned_nvfp4": (False, ("owners_send",), ("owners_own", "packed_own"), ("packed_receive",)),
    "gather": (False, (), ("rows_own",), ("rows_receive",)),
}
_NUMBERS = {
    "op": {"offset": 0},
    "last": {"offset": -1, "since": True},
    # Of defects: two operations before that, the same as the operation, the next one, and without
    # counting the operations that hand nothing back.
    "last - 2": {"offset": -3, "since": True},
    "same": {"offset": 0, "since": True},
    "next": {"offset": 1},
    "op - 1": {"offset": -1},
}


def _step(table: Table, arithmetic: Arithmetic, row: Row, bits: str = "") -> Step:
    access = table.verbs[row.verb].access
    numbers = _NUMBERS.get(row.number, {})
    unless = row.when.removeprefix("unless_") if row.when.startswith("unless_") else ""
    match table.operation(row):
        case "fence":
            return Step("fence", access, if_hands_back=row.when == "hands_back")
        case "barrier":
            return Step("barrier", Access())
        case "ld" if row.place.startswith("tag"):
            return Step("wait", access, row.place, compare=arithmetic.is_tag_of(int(row.place[3])))
        case "ld" if row.place == "released":
            return Step("wait", access, row.place, compare=arithmetic.reached, **numbers)
        case "ld":
            return Step("wait", access, row.place, bits=bits)
        case "st" if row.number == "none":
            return Step("clear", access, row.place, unless=unless, bits=bits)
        case "st" if row.place == "released":
            hands_back = row.when == "hands_back"
            return Step("store", access, row.place, if_hands_back=hands_back, **numbers)
        case "st" if row.place.startswith("tag"):
            return Step("store", access, row.place)
        case "st":
            return Step("store", access, row.place, unless=unless, bits=bits)
    raise LookupError(f"a row that no model knows: {row}")


def exchange_of(
    table: Table | None = None, half_units: int = 2, faults: tuple[str, ...] = ()
) -> Exchange:
    """The protocol of the table, this tree's or another, and of arithmetic with such halves.

    With halves of two units, that is, of two operations, all is used again soon, for models of few
    operations; with four some operations wait for a number and hand nothing back.
    """
    table = table or read_table()
    arithmetic = Arithmetic(half_units, faults)

    def steps(part: str, bits: dict[str, str] | None = None) -> tuple[Step, ...]:
        rows = [row for row in table.rows if row.part == part]
        return tuple(_step(table, arithmetic, r, (bits or {}).get(r.place, "")) for r in rows)

    def transport(name: str) -> Transport:
        all_sum, *parts = _TRANSPORTS[name]
        second = {"owned_quantized": "e4m3", "owned_nvfp4": "nvfp4"}.get(name)
        bits = {"finished": second, "scale": "scale"} if second else {}
        send, own, receive = (
            tuple(
                step
                for part in of
                for step in steps(part, bits)
                if name != "owned_nvfp4" or step.where != "scale"
            )
            for of in parts
        )
        return Transport(all_sum, send, own, receive)

    return Exchange(
        arithmetic=arithmetic,
        waits_for_grid=any(row.part == "begin" for row in table.rows),
        roll_call=steps("roll_call"),
        hand_back=steps("hand_back"),
        transports={name: transport(name) for name in _TRANSPORTS},
        head=steps("head"),
        first_released=arithmetic.first_released,
    )
