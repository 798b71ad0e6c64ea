"""An exchange's kernels for `counters.py`: the stores, clears and waits of each thread."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from .arithmetic import Compare
from .exchange import Exchange, Step

EMPTY = "empty"
DATA, LANE, HEAD = "data", "lane", "head"
WRAP = 1 << 32


@dataclasses.dataclass(frozen=True)
class Setting:
    """The operations to explore, and the events that may happen to them.

    Attributes:
        transport: The transport of all operations, or one for each.
        large, small: The operations that take a large phase, and those that take a unit.
        deadlines: Whether waits may time out.
        deaths: How many ranks may die.
        diverging: The rank and operation of a call that differs from the peers' calls.
        eager: Whether the steps that call the roll and return slots come first, as soon as they are
            possible. This only omits interleavings, provided that the values that these threads
            wait for do not disappear. Explorations that are not eager check this condition.
        bits: The rows' bits for all operations, or for each: "16" or "32".
        shift: The number of places by which each operation's slots are displaced, so that words of
            different layouts share a place.
    """

    world_size: int = 2
    operations: int = 5
    first_op: int = WRAP - 2
    transport: str | tuple[str, ...] = "one_shot"
    large: tuple[int, ...] = ()
    small: tuple[int, ...] = ()
    deadlines: bool = False
    deaths: int = 0
    diverging: tuple[int, int] | None = None
    eager: bool = False
    bits: str | tuple[str, ...] = "16"
    shift: tuple[int, ...] = ()

    def transport_of(self, k: int) -> str:
        return self.transport if isinstance(self.transport, str) else self.transport[k]

    def bits_of(self, k: int) -> str:
        return self.bits if isinstance(self.bits, str) else self.bits[k]


class Word(NamedTuple):
    """The value in a slot: data of one operation and rank, or a NaN with the same bits."""

    op: int
    rank: int
    where: str
    bits: str
    nan: bool = False


class Put(NamedTuple):
    """A store to a peer, or a clear of the rank's own slot.

    `sums`: whether the value depends on an earlier wait of the thread.
    """

    location: Any
    value: Any
    unless: str = ""
    sums: bool = False


class Wait(NamedTuple):
    """Locations that are polled together, each with its comparison and the expected value."""

    polled: tuple[tuple[Any, Compare | None, Any], ...]
    kind: str


class Kernels:
    """The programs of all threads of each rank and operation, and the initial memory."""

    def __init__(self, exchange: Exchange, setting: Setting) -> None:
        self.exchange, self.setting = exchange, setting
        self._slot_places = exchange.arithmetic.slot_places(
            setting.operations, setting.large, setting.small
        )
        self.memory = dict(self._initial())
        self.programs = {
            (rank, k): self._threads(rank, k)
            for rank in range(setting.world_size)
            for k in range(setting.operations)
        }

    def _op(self, k: int) -> int:
        return (self.setting.first_op + k) % WRAP

    def _tag_slot(self, k: int) -> int:
        return self._op(k) % self.exchange.arithmetic.tag_slots

    def _places(self) -> int:
        """The number of places per operation: a partial for each rank, a finished word, a scale."""
        return self.setting.world_size + 2

    # ---- the program of a kernel -----------------------------------------------------------------

    def _initial(self) -> Iterator[tuple[Any, Any]]:
        ranks = range(self.setting.world_size)
        for receiver in ranks:
            for slots in dict.fromkeys(place.slots for place in self._slot_places):
                for place in range(self._places()):
                    yield ("slot", receiver, slots, place), EMPTY
            for source in ranks:
                if source == receiver:
                    continue
                yield ("released", receiver, source), (self._op(self.exchange.first_released), 0)
                for before in range(-self.exchange.arithmetic.tag_slots, 0):
                    for word in ("tag0", "tag1"):
                        where = (word, receiver, self._tag_slot(before), source)
                        yield where, (self._op(before), -1)

    def _threads(self, rank: int, k: int) -> list[list[Any]]:
        """Returns each thread's program, a list of Put, Wait and "fence" items."""
        peers = [peer for peer in range(self.setting.world_size) if peer != rank]
        owner = self._slot_places[k].uses % max(1, self.setting.world_size - 1)
        steps = self.exchange.data_steps(self.setting.transport_of(k), rank, owner, peers)
        data = self._merged([self._data(s, rank, k, peers) for s, peers in steps])
        waits = [place for place, item in enumerate(data) if isinstance(item, Wait)]
        programs = [
            [
                item._replace(sums=bool(waits) and place > waits[0])
                if isinstance(item, Put)
                else item
                for place, item in enumerate(data)
            ]
        ]
        for lane in (self.exchange.roll_call, self.exchange.hand_back):
            done = [s for s in lane if self._slot_places[k].hands_back or not s.if_hands_back]
            programs += [
                self._merged([[self._number(s, rank, peer, k)] for s in done]) for peer in peers
            ]
        return [self._head(rank, peers, k) + program for program in programs]

    def _head(self, rank: int, peers: list[int], k: int) -> list[Any]:
        """Returns a large operation's first wait, which combines all lanes of the first warp."""
        if k not in self.setting.large:
            return []
        waits = [s for s in self.exchange.head if s.kind == "wait"]
        found = [self._number(step, rank, peer, k) for step in waits for peer in peers]
        return [Wait(tuple(p for w in found for p in w.polled), HEAD)]

    def _data(self, step: Step, rank: int, k: int, peers: list[int]) -> list[Any]:
        def slot(receiver: int, source: int) -> Any:
            world_size = self.setting.world_size
            place = {"partial": source, "finished": world_size, "scale": world_size + 1}[step.where]
            shift = self.setting.shift[k] if self.setting.shift else 0
            place = (place + shift) % self._places()
            return ("slot", receiver, self._slot_places[k].slots, place)

        def word(source: int) -> Word:
            return Word(k, source, step.where, step.bits or self.setting.bits_of(k))

        if step.kind == "store":
            return [Put(slot(peer, rank), word(rank), step.unless) for peer in peers]
        if step.kind == "clear":
            return [Put(slot(rank, peer), EMPTY, step.unless) for peer in peers]
        expected = [(slot(rank, peer), None, word(peer)) for peer in peers]
        return [Wait(tuple(expected), DATA)]

    def _number(self, step: Step, rank: int, peer: int, k: int) -> Any:
        if step.kind == "fence":
            return "fence"
        op = (self._op(k) + step.offset - step.since * self._slot_places[k].since) % WRAP
        slot = () if step.where == "released" else (self._tag_slot(k),)
        content = 0
        if step.where != "released":
            content = 1 + int(self.setting.diverging == (rank, k))
        if step.kind == "store":
            return Put((step.where, peer, *slot, rank), (op, content))
        polled = ((step.where, rank, *slot, peer), step.compare, (op, content))
        return Wait((polled,), LANE)

    def _merged(self, parts: list[list[Any]]) -> list[Any]:
        """Merges consecutive waits into one."""
        program: list[Any] = []
        for item in (item for part in parts for item in part):
            if program and isinstance(item, Wait) and isinstance(program[-1], Wait):
                item = Wait(program[-1].polled + item.polled, item.kind)
                program.pop()
            program.append(item)
        return program
