"""The exchange as a litmus program: a few operations of a few ranks, with one slot of each kind.

Every operation is a kernel with its own threads, because grids can have different shapes. Layouts
can differ too, so each use of a slot has a different sender.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Hashable, Iterator
from typing import Any

from .exchange import Exchange, Step
from .program import Access, Program, Scope, Thread

EMPTY = "empty"
FIRST_OP = 120  # earlier operations must not have negative numbers

# Kinds of threads. Each kind in one kernel has a boundary with each kind in the next kernel.
DATA, ROLL_CALL, HAND_BACK = "data", "roll call", "hand-back"
Threads = dict[str, list[Thread]]
BOUNDARIES = tuple(itertools.product((DATA, ROLL_CALL, HAND_BACK), repeat=2))


@dataclasses.dataclass(frozen=True)
class Setting:
    """The size of a program, and its kernel boundaries.

    Attributes:
        words: The word indices of a slot.
        large, small: The operations that take a large phase, and those that take a unit.
        unordered: Kernel boundaries that order time, but not memory accesses.
        boundary_scope: None: a kernel boundary is a "synchronizes" edge, as in PTX. Otherwise, a
            boundary is made only of flags and fences of this scope, in an extra thread per GPU.
    """

    world_size: int = 2
    operations: int = 5
    transport: str = "one_shot"
    words: tuple[int, ...] = (0,)
    large: tuple[int, ...] = ()
    small: tuple[int, ...] = ()
    unordered: frozenset[tuple[str, str]] = frozenset()
    boundary_scope: Scope | None = None


class ExchangeProgram:
    """Builds the litmus program of an exchange."""

    def __init__(self, exchange: Exchange, setting: Setting) -> None:
        self.exchange = exchange
        self.setting = setting
        self.program = Program()
        self._ranks = range(setting.world_size)
        self._slot_places = exchange.arithmetic.slot_places(
            setting.operations, setting.large, setting.small
        )
        self._initialize()
        kernels: dict[int, Threads] = {rank: {} for rank in self._ranks}
        for k in range(setting.operations):
            for rank in self._ranks:
                threads = self._threads(rank, k)
                if k > 0 and exchange.waits_for_grid:
                    self._boundary(rank, k, kernels[rank], threads)
                kernels[rank] = threads
                self._run(rank, k, threads)

    def _threads(self, rank: int, k: int) -> Threads:
        def thread(name: str, block: int) -> Thread:
            return Thread(f"rank {rank}, operation {k}, {name}", rank, (k, block))

        peers = [peer for peer in self._ranks if peer != rank]
        lanes = [thread(f"head for {peer}", 1) for peer in peers] if k in self.setting.large else []
        return {
            DATA: [thread(DATA, 1), *lanes],
            ROLL_CALL: [thread(f"{ROLL_CALL} of {peer}", 0) for peer in peers],
            HAND_BACK: [thread(f"{HAND_BACK} of {peer}", 0) for peer in peers],
        }

    def _boundary(self, rank: int, k: int, before: Threads, after: Threads) -> None:
        """Adds the kernel boundary between a rank's operations k - 1 and k."""
        unordered = self.setting.unordered
        if self.setting.boundary_scope is not None:
            self._flagged_boundary(rank, k, _all(before), _all(after))
        elif not unordered:
            self.program.joint(_all(before), _all(after))
        else:
            for kinds in BOUNDARIES:
                ordered = kinds not in unordered
                self.program.joint(before[kinds[0]], after[kinds[1]], orders_memory=ordered)

    def _flagged_boundary(
        self, rank: int, k: int, before: list[Thread], after: list[Thread]
    ) -> None:
        program, scope = self.program, self.setting.boundary_scope
        fence, relaxed = Access("acq_rel", scope), Access("relaxed", scope)
        scheduler = Thread(f"rank {rank}, scheduler before operation {k}", rank, "scheduler")
        for thread in before:
            program.initialize(("ended", thread.name), False)
            program.fence(thread, fence)
            program.write(thread, relaxed, ("ended", thread.name), True)
        for thread in before:
            program.read(scheduler, relaxed, ("ended", thread.name), accepts=bool)
        program.fence(scheduler, fence)
        program.initialize(("started", rank, k), False)
        program.write(scheduler, relaxed, ("started", rank, k), True)
        for thread in after:
            program.read(thread, relaxed, ("started", rank, k), accepts=bool)
            program.fence(thread, fence)

    # ---- locations ---------------------------------------------------------------------------

    def _initialize(self) -> None:
        tag_slots = self.exchange.arithmetic.tag_slots
        for receiver in self._ranks:
            for source in self._ranks:
                if source == receiver:
                    continue
                number = FIRST_OP + self.exchange.first_released
                self.program.initialize(("released", receiver, source), number)
                for back, word in itertools.product(range(1, tag_slots + 1), ("tag0", "tag1")):
                    number = FIRST_OP - back
                    place = (word, receiver, number % tag_slots, source)
                    self.program.initialize(place, number)
            for where in self._slots(receiver):
                self.program.initialize(where, EMPTY)

    def _slots(self, receiver: int) -> Iterator[Hashable]:
        numbers = range(self.setting.world_size - 1)
        used = dict.fromkeys(place.slots for place in self._slot_places)
        for slots, word in itertools.product(used, self.setting.words):
            for number in numbers:
                yield ("partial", receiver, slots, number, word)
            yield ("finished", receiver, slots, word)
            yield ("scale", receiver, slots, word)

    def _owner(self, k: int) -> int:
        """Returns the owner of operation k; with three ranks, it changes when slots are reused."""
        return self._slot_places[k].uses % max(1, self.setting.world_size - 1)

    def _slot(self, step: Step, k: int, receiver: int, source: int, word: int) -> Hashable:
        slot_place = self._slot_places[k]
        if step.where != "partial":
            return (step.where, receiver, slot_place.slots, word)
        number = source - (source > receiver) + slot_place.uses
        return ("partial", receiver, slot_place.slots, number % (self.setting.world_size - 1), word)

    # ---- steps ----------------------------------------------------------------------------

    def _run(self, rank: int, k: int, threads: Threads) -> None:
        peers = [peer for peer in self._ranks if peer != rank]
        if k in self.setting.large:
            self._begin_large(rank, k, peers, threads)
        for peer, thread in zip(peers, threads[ROLL_CALL], strict=True):
            for step in self.exchange.roll_call:
                self._number(step, thread, rank, peer, k)
        for peer, thread in zip(peers, threads[HAND_BACK], strict=True):
            for step in self.exchange.hand_back:
                if step.if_hands_back and not self._slot_places[k].hands_back:
                    continue
                self._number(step, thread, rank, peer, k)
        for step, of in self.exchange.data_steps(
            self.setting.transport, rank, self._owner(k), peers
        ):
            self._data(step, threads[DATA][0], rank, k, of)

    def _begin_large(self, rank: int, k: int, peers: list[int], threads: Threads) -> None:
        """Adds a large operation's head: each block's first warp waits, and a barrier follows."""
        data, *lanes = threads[DATA]
        serving = [*threads[ROLL_CALL], *threads[HAND_BACK]]
        for block, waiting in (([data, *lanes], lanes), (serving, threads[ROLL_CALL])):
            for step in self.exchange.head:
                if step.kind == "barrier":
                    self.program.joint(block, block)
                    continue
                for peer, thread in zip(peers, waiting, strict=True):
                    self._number(step, thread, rank, peer, k)

    def _number(self, step: Step, thread: Thread, rank: int, peer: int, k: int) -> None:
        """Adds a step that uses the operation's number, in the lane for `peer`."""
        op = FIRST_OP + k + step.offset - step.since * self._slot_places[k].since
        slot: tuple[int, ...] = ()
        if step.where != "released":
            slot = ((FIRST_OP + k) % self.exchange.arithmetic.tag_slots,)
        if step.kind == "fence":
            self.program.fence(thread, step.access, "fence")
        elif step.kind == "store":
            place = (step.where, peer, *slot, rank)
            self.program.write(thread, step.access, place, op, "store")
        else:
            compare = step.compare
            assert compare is not None
            self.program.read(
                thread,
                step.access,
                (step.where, rank, *slot, peer),
                accepts=lambda seen: compare(seen, op),
                expected=None if step.where == "released" else functools.partial(operator.eq, op),
                name="wait",
            )

    def _data(self, step: Step, thread: Thread, rank: int, k: int, peers: list[int]) -> None:
        """Adds a step of a thread that sends data to `peers` or receives data from them."""
        for peer, word in itertools.product(peers, self.setting.words):
            receiver, source = (peer, rank) if step.kind == "store" else (rank, peer)
            place = self._slot(step, k, receiver, source, word)
            payload = (step.where, k, source)
            if step.kind == "store":
                self.program.write(thread, step.access, place, payload, "push")
            elif step.kind == "clear":
                self.program.write(thread, step.access, place, EMPTY, "clear")
            else:
                tested = step.where != "partial" or word in self.exchange.arithmetic.tested_words
                self.program.read(
                    thread,
                    step.access,
                    place,
                    accepts=arrived if tested else None,
                    expected=functools.partial(operator.eq, payload),
                    name="wait",
                )


def arrived(seen: Any) -> bool:
    """Returns whether a slot is not empty."""
    return bool(seen != EMPTY)


def _all(threads: Threads) -> list[Thread]:
    return [thread for some in threads.values() for thread in some]


def exchange_program(exchange: Exchange, setting: Setting | None = None) -> Program:
    """Returns the litmus program of an exchange."""
    return ExchangeProgram(exchange, setting or Setting()).program
