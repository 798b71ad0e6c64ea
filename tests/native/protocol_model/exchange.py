"""The CUDA protocol for the models: its arithmetic, and its steps from the access table."""

from __future__ import annotations

import dataclasses

from native.accesses import Row, Table, read_table

from .arithmetic import Arithmetic, Compare
from .program import Access


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of a thread in the exchange.

    Attributes:
        kind: "store" to peers, "wait" for peers, "clear" of the rank's own slot, "fence" or
            "barrier".
        where: "tag0", "tag1", "released", "partial", "finished" or "scale".
        offset: Added to the operation's number to get the number that is stored or waited for.
        compare: Function of (seen, expected) that returns whether a wait accepts a number; None:
            the wait accepts any word but the empty one.
        unless: When the store is omitted: if the rank "failed", or "failed_before" this operation;
            "": never.
        since: Whether the number of operations since slots were last returned is subtracted.
        if_hands_back: Whether only operations that return slots do this step.
        bits: Contents of the word that is stored or waited for: "e4m3", "nvfp4" or "scale"; "":
            the bits of the rows.
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
    """Steps on slots: every rank runs `send`; ranks that sum run `own`, the others `receive`."""

    all_sum: bool
    send: tuple[Step, ...]
    own: tuple[Step, ...]
    receive: tuple[Step, ...] = ()


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The protocol, as defined by the access table and the sources.

    Attributes:
        arithmetic: Arithmetic of numbers and slot places.
        waits_for_grid: Whether kernels wait until the preceding grid is complete.
        roll_call: Steps of a lane in the service cluster's first warp, for the lane's peer.
        hand_back: Steps of a lane in the service cluster's second warp.
        transports: Transports by name.
        head: First steps of lanes in every block of a large operation; the last of them is a
            "barrier" of the block.
        first_released: The operation number that a new workspace's slots were "returned" by,
            relative to the first operation's number.
    """

    arithmetic: Arithmetic
    waits_for_grid: bool
    roll_call: tuple[Step, ...]
    hand_back: tuple[Step, ...]
    transports: dict[str, Transport]
    head: tuple[Step, ...]
    first_released: int

    def data_steps(
        self, transport: str, rank: int, owner: int, peers: list[int]
    ) -> list[tuple[Step, list[int]]]:
        """Returns a rank's steps on slots, each with the peers that it exchanges data with."""
        of = self.transports[transport]
        sums = of.all_sum or rank == owner
        to = peers if of.all_sum else [] if sums else [owner]
        steps = [(step, to) for step in of.send]
        return steps + [(s, peers if sums else [owner]) for s in (of.own if sums else of.receive)]


# Maps a transport to whether all ranks sum, and to its `send`, `own` and `receive` table parts.
_TRANSPORTS = {
    "one_shot": (True, ("one_shot_send",), ("one_shot_own",), ()),
    "sums": (True, ("sums_send",), ("sums_own",), ()),
    "two_shot": (False, ("two_shot_send",), ("two_shot_own",), ("two_shot_receive",)),
    "owned_rows": (False, ("owners_send",), ("owners_own", "rows_own"), ("rows_receive",)),
    "owned_quantized": (False, ("owners_send",), ("owners_own", "packed_own"), ("packed_receive",)),
    "owned_nvfp4": (False, ("owners_send",), ("owners_own", "packed_own"), ("packed_receive",)),
    "gather": (False, (), ("rows_own",), ("rows_receive",)),
}
_NUMBERS = {
    "op": {"offset": 0},
    "last": {"offset": -1, "since": True},
    # Used only by defects.
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
    raise LookupError(f"no step for {row}")


def exchange_of(
    table: Table | None = None, half_units: int = 2, faults: tuple[str, ...] = ()
) -> Exchange:
    """Returns the protocol described by `table`, by default the table in the sources.

    With halves of two units (two operations), slots are soon reused, so few operations suffice.
    With four units, some operations wait for a number but do not return slots.
    """
    table = table or read_table()
    arithmetic = Arithmetic(half_units, faults)

    def steps(part: str, bits: dict[str, str] | None = None) -> tuple[Step, ...]:
        rows = [row for row in table.rows if row.part == part]
        return tuple(_step(table, arithmetic, r, (bits or {}).get(r.place, "")) for r in rows)

    def transport(name: str) -> Transport:
        all_sum, *parts = _TRANSPORTS[name]
        # In the second hop, quantized rows have different bits; NVFP4 words contain their scale.
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
