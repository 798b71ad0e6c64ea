"""The kernels of an exchange as `counters.py` runs them: what each thread does, and on what."""

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
    """`transport`: of every operation, or of each; the same of `bits`, "16" or "32".

    `large`, `small`: which operations use large phases, and which a unit: SlotPlace.

    `shift`: by how many places the slots of each operation are displaced against those of one that
    says 0: the words of different layouts meet.

    `diverging`: the rank and the operation of a call unlike that of the others.

    `eager`: a step of the roll call or of handing back is taken as soon as it can be, and nothing
    else before it. That leaves out orders only, as long as what such a thread waits for stays
    there once it is there; the exploration that is not eager fails if it does not.
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

    def shift_of(self, k: int) -> int:
        return self.shift[k] if self.shift else 0


class Word(NamedTuple):
    """What is in a slot: of an operation and its rank, as it should be or a NaN of its bits."""

    op: int
    rank: int
    where: str
    bits: str
    nan: bool = False


class Put(NamedTuple):
    """A store to a peer, or a clear of an own slot.

    `sums`: what is stored depends on what the thread has waited for.
    """

    location: Any
    value: Any
    unless: str = ""
    sums: bool = False


class Wait(NamedTuple):
    """(Location, what it takes, what it should get) of everything that is polled together."""

    polled: tuple[tuple[Any, Compare | None, Any], ...]
    kind: str


class Kernels:
    """The program of each rank's threads in each operation, and what memory holds at first."""

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
        """Of an operation: a partial of each rank, a finished word, a scale."""
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
        """Of each thread: what it puts, waits for, and "fence"."""
        peers = [peer for peer in range(self.setting.world_size) if peer != rank]
        transport = self.exchange.transports[self.setting.transport_of(k)]
        owner = self._slot_places[k].uses % max(1, self.setting.world_size - 1)
        steps: list[tuple[Step, list[int]]] = []
        to = peers if transport.all_sum else [owner] if owner != rank else []
        steps += [(step, to) for step in transport.send]
        mine = transport.all_sum or owner == rank
        steps += [
            (step, peers if mine else [owner])
            for step in (transport.own if mine else transport.receive)
        ]
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
        """What every thread of a large operation waits for: all lanes of its block's first warp."""
        if k not in self.setting.large:
            return []
        waits = [s for s in self.exchange.head if s.kind == "wait"]
        found = [self._number(step, rank, peer, k) for step in waits for peer in peers]
        return [Wait(tuple(p for w in found for p in w.polled), HEAD)]

    def _data(self, step: Step, rank: int, k: int, peers: list[int]) -> list[Any]:
        def slot(receiver: int, source: int) -> Any:
            world_size = self.setting.world_size
            place = {"partial": source, "finished": world_size, "scale": world_size + 1}[step.where]
            place = (place + self.setting.shift_of(k)) % self._places()
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
        """Waits that follow each other are one, which polls all that they poll."""
        program: list[Any] = []
        for item in (item for part in parts for item in part):
            if program and isinstance(item, Wait) and isinstance(program[-1], Wait):
                item = Wait(program[-1].polled + item.polled, item.kind)
                program.pop()
            program.append(item)
        return program
