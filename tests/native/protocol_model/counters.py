"""Explores the exchange as a state machine: all states of numbers, slots, deadlines and deaths.

Numbers wrap modulo 2^32, as on the device. A rank runs one kernel at a time, with the threads
that `kernels.py` describes. A store to a peer takes effect immediately. Only the receiver reads the
stored value, so a late store is equivalent to a wait that ends late. A clear takes effect at any
later time, but its own rank sees it immediately. A fence waits until the clears of earlier kernels
have taken effect. If the setting allows it, a wait can time out and a rank can die at any time.

Words are modelled with their bits. Operations with different transports, and therefore different
layouts, can use the same unit. The same place can then hold a different kind of word in each
operation. Whether the word is a NaN depends on how the reader interprets its bits.

The access table lists the stores that a thread omits after a failure. This file defines the rest of
its behavior after a failure. csrc/tests/cuda_accesses_test.cpp compares both with the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from .exchange import Exchange
from .kernels import DATA, EMPTY, HEAD, LANE, Kernels, Put, Setting, Wait, Word


class Rank(NamedTuple):
    kernel: int  # the current or next operation
    running: bool
    threads: tuple[int, ...]  # each thread's position in its program; -1: at the end
    failed: tuple[bool, ...]
    poisoned: int  # the operation that failed, or -1
    nan_of: int  # the first operation that received a NaN from a peer, or -1
    dead: bool


class Clear(NamedTuple):
    rank: int
    kernel: int
    location: Any


class State(NamedTuple):
    """The state of all ranks. Code constructs it directly, because _replace() is slow."""

    ranks: tuple[Rank, ...]
    memory: tuple[Any, ...]
    pending: frozenset[Clear]


class WrongError(Exception):
    """A rank accepted a wrong value."""


def is_nan(word: int, bits: str) -> bool:
    """Returns whether all numbers in a 32-bit word are NaN if the word is read as `bits`."""
    if bits == "e4m3":
        return all(word >> shift & 0x7F == 0x7F for shift in (0, 8, 16, 24))
    if bits == "nvfp4":  # the scale is NaN and the elements are zero
        return word >> 16 & 0x7F == 0x7F and word & 0xFFFF == 0
    if bits == "16":  # NaN both as bfloat16 and as float16
        halves = (word & 0x7FFF, word >> 16 & 0x7FFF)
        return all(half > 0x7F80 for half in halves)
    return word & 0x7FFFFFFF > 0x7F800000


class Machine:
    """The state machine of an exchange in the given setting."""

    def __init__(self, exchange: Exchange, setting: Setting) -> None:
        kernels = Kernels(exchange, setting)
        self._nan_words = exchange.arithmetic.nan_words
        self.setting = setting
        self.memory = kernels.memory
        self._places = {location: n for n, location in enumerate(kernels.memory)}
        self._programs = kernels.programs

    # ---- steps -----------------------------------------------------------------------------------

    def start(self) -> State:
        rank = Rank(0, False, (), (), -1, -1, False)
        return State((rank,) * self.setting.world_size, tuple(self.memory.values()), frozenset())

    def _seen(self, state: State, rank: int, location: Any) -> Any:
        """Returns the value that a rank reads: EMPTY if its own clear is pending, else memory."""
        for clear in state.pending:
            if clear.rank == rank and clear.location == location:
                return EMPTY
        return state.memory[self._places[location]]

    def _store(self, state: State, location: Any, value: Any) -> State:
        memory = list(state.memory)
        memory[self._places[location]] = value
        return State(state.ranks, tuple(memory), state.pending)

    def _advance(self, state: State, rank: int, thread: int) -> State:
        """Advances a thread to its next wait or fence."""
        me = state.ranks[rank]
        program = self._programs[rank, me.kernel][thread]
        place, is_lane = me.threads[thread], thread > 0
        failed = me.failed[thread]
        while 0 <= place < len(program):
            item = program[place]
            if failed and is_lane:
                place = len(program)
            elif isinstance(item, Wait) or item == "fence":
                if not failed:
                    break
                place += 1
            else:
                assert isinstance(item, Put)
                location, value = item.location, item.value
                if self._is_kept_back(item, me, failed):
                    pass
                elif value == EMPTY:
                    clear = Clear(rank, me.kernel, location)
                    state = State(state.ranks, state.memory, state.pending | {clear})
                else:
                    if failed and item.sums and isinstance(value, Word):
                        value = value._replace(nan=True)
                    state = self._store(state, location, value)
                place += 1
        place = -1 if place >= len(program) else place
        threads = (*me.threads[:thread], place, *me.threads[thread + 1 :])
        return self._with(state, rank, state.ranks[rank]._replace(threads=threads))

    @staticmethod
    def _is_kept_back(put: Put, me: Rank, failed: bool) -> bool:
        if put.unless == "failed_before":
            return failed and 0 <= me.poisoned < me.kernel
        return put.unless == "failed" and failed

    def _takes_as_nan(self, seen: Any, expected: Any) -> bool:
        return seen.nan and is_nan(self._nan_words[seen.bits], expected.bits)

    def _with(self, state: State, rank: int, new: Rank) -> State:
        ranks = (*state.ranks[:rank], new, *state.ranks[rank + 1 :])
        return State(ranks, state.memory, state.pending)

    def _launch(self, state: State, rank: int) -> State:
        me = state.ranks[rank]
        count = len(self._programs[rank, me.kernel])
        failed = me.poisoned >= 0
        me = me._replace(running=True, threads=(0,) * count, failed=(failed,) * count)
        state = self._with(state, rank, me)
        for thread in range(count):
            state = self._advance(state, rank, thread)
        return self._ended(state, rank)

    def _ended(self, state: State, rank: int) -> State:
        me = state.ranks[rank]
        if max(me.threads) >= 0:
            return state
        me = me._replace(kernel=me.kernel + 1, running=False, threads=(), failed=())
        return self._with(state, rank, me)

    def _fail(self, state: State, rank: int, thread: int) -> State:
        """Returns the state after a thread's wait has timed out."""
        me = state.ranks[rank]
        failed = (*me.failed[:thread], True, *me.failed[thread + 1 :])
        poisoned = me.kernel if me.poisoned < 0 else me.poisoned
        state = self._with(state, rank, me._replace(failed=failed, poisoned=poisoned))
        return self._ended(self._advance(state, rank, thread), rank)

    def _ready(self, state: State, rank: int, wait: Wait) -> bool:
        for location, compare, expected in wait.polled:
            seen = self._seen(state, rank, location)
            if compare is None:
                if seen == EMPTY:
                    return False
            elif not compare(seen[0], expected[0]):
                return False
        return True

    def _taken(self, state: State, rank: int, thread: int, wait: Wait) -> State:
        """Completes a wait with the values that it polled."""
        me = state.ranks[rank]
        diverged = False
        for location, _, expected in wait.polled:
            seen = self._seen(state, rank, location)
            if wait.kind == DATA and seen != expected:
                if not self._takes_as_nan(seen, expected):
                    raise WrongError(f"rank {rank} took {seen} for {expected}")
                if me.nan_of < 0:
                    me = me._replace(nan_of=me.kernel)
            elif wait.kind == LANE and location[0] != "released":
                diverged = diverged or seen != expected
        if diverged and self.setting.diverging is None:
            raise WrongError(f"rank {rank} accepted a wrong tag in operation {me.kernel}")
        if diverged and me.poisoned < 0:
            me = me._replace(poisoned=me.kernel)
        return self._beyond(state, rank, thread, me)

    def _forget(self, state: State) -> State:
        """Removes state that no live rank can still read, so that equivalent states are equal."""
        if not (self.setting.deadlines or self.setting.deaths or self.setting.diverging):
            return state
        blind = set()
        for rank, me in enumerate(state.ranks):
            if me.dead or (me.poisoned >= 0 and not me.running):
                blind.add(rank)
            if me.dead and (me.threads or me.kernel or me.poisoned >= 0):
                state = self._with(state, rank, Rank(0, False, (), (), -1, -1, True))
        if not blind:
            return state
        memory = tuple(
            EMPTY if location[1] in blind else value
            for location, value in zip(self._places, state.memory, strict=True)
        )
        pending = frozenset(clear for clear in state.pending if clear.rank not in blind)
        return State(state.ranks, memory, pending)

    def next_states(self, state: State) -> Iterator[State]:
        """Returns all states that one step can lead to."""
        if self.setting.eager:
            for rank, thread in self._lanes(state):
                step = self._success(state, rank, thread)
                if step is not None:
                    return iter([self._forget(step)])
            return map(self._forget, self._successors(state))
        ready = [at for at in self._lanes(state) if self._is_ready(state, *at)]
        return (self._checked(state, after, ready) for after in self._successors(state))

    def _lanes(self, state: State) -> list[tuple[int, int]]:
        """Returns the threads that move no data and have not finished."""
        return [
            (rank, thread)
            for rank, me in enumerate(state.ranks)
            for thread, place in enumerate(me.threads)
            if not me.dead and thread > 0 and place >= 0
        ]

    def _is_ready(self, state: State, rank: int, thread: int) -> bool:
        me = state.ranks[rank]
        item = self._programs[rank, me.kernel][thread][me.threads[thread]]
        return isinstance(item, Wait) and self._ready(state, rank, item)

    def _checked(self, state: State, after: State, ready: list[tuple[int, int]]) -> State:
        for rank, thread in ready:
            before, now = state.ranks[rank], after.ranks[rank]
            same = before.running and now.running and before.kernel == now.kernel
            waits = same and not now.dead and before.threads[thread] == now.threads[thread]
            if waits and not self._is_ready(after, rank, thread):
                raise WrongError(f"a value that rank {rank} waits for has disappeared: {after}")
        return self._forget(after)

    def _successors(self, state: State) -> Iterator[State]:
        for rank, me in enumerate(state.ranks):
            if me.dead:
                continue
            died = sum(r.dead for r in state.ranks)
            if died < self.setting.deaths and me.kernel < self.setting.operations:
                yield self._with(state, rank, me._replace(dead=True))
            if not me.running:
                if me.kernel < self.setting.operations:
                    yield self._launch(state, rank)
                continue
            for thread, place in enumerate(me.threads):
                if place >= 0:
                    yield from self._thread_steps(state, rank, thread)
        for clear in state.pending:
            rest = State(state.ranks, state.memory, state.pending - {clear})
            yield self._store(rest, clear.location, EMPTY)

    def _thread_steps(self, state: State, rank: int, thread: int) -> Iterator[State]:
        success = self._success(state, rank, thread)
        if success is not None:
            yield success
        me = state.ranks[rank]
        item = self._programs[rank, me.kernel][thread][me.threads[thread]]
        if isinstance(item, Wait) and (self.setting.deadlines or me.poisoned >= 0):
            yield self._fail(state, rank, thread)
            if item.kind == HEAD:  # the block's other threads continue normally
                poisoned = me.kernel if me.poisoned < 0 else me.poisoned
                yield self._beyond(state, rank, thread, me._replace(poisoned=poisoned))

    def _success(self, state: State, rank: int, thread: int) -> State | None:
        """Returns the state after a wait or fence, or None if it cannot complete yet."""
        me = state.ranks[rank]
        item = self._programs[rank, me.kernel][thread][me.threads[thread]]
        if isinstance(item, Wait):
            return (
                self._taken(state, rank, thread, item) if self._ready(state, rank, item) else None
            )
        for clear in state.pending:
            if clear.rank == rank and clear.kernel < me.kernel:
                return None
        return self._beyond(state, rank, thread, me)

    def _beyond(self, state: State, rank: int, thread: int, me: Rank) -> State:
        """Moves a thread past its wait or fence; `me` becomes the state of its rank."""
        threads = (*me.threads[:thread], me.threads[thread] + 1, *me.threads[thread + 1 :])
        state = self._with(state, rank, me._replace(threads=threads))
        return self._ended(self._advance(state, rank, thread), rank)


def explore(exchange: Exchange, setting: Setting) -> tuple[int, str | None]:
    """Visits every state. Returns the number of states, and a problem or None."""
    machine = Machine(exchange, setting)
    known = {machine.start()}
    pending = list(known)
    while pending:
        state = pending.pop()
        final = True
        try:
            for after in machine.next_states(state):
                final = False
                if after not in known:
                    known.add(after)
                    pending.append(after)
        except WrongError as error:
            return len(known), str(error)
        problem = _judge(machine, state) if final else None
        if problem is not None:
            return len(known), problem
    return len(known), None


def _judge(machine: Machine, state: State) -> str | None:
    """Returns the problem of a final state, or None."""
    setting = machine.setting
    healthy = not setting.deadlines and setting.deaths == 0 and setting.diverging is None
    for rank, me in enumerate(state.ranks):
        if me.dead:
            continue
        if me.kernel < setting.operations:
            return f"rank {rank} waits for ever in operation {me.kernel}: {state}"
        if healthy and me.poisoned >= 0:
            return f"rank {rank} failed without a reason: {state}"
        if setting.diverging is not None and me.poisoned < 0:
            return f"rank {rank} did not notice a different call: {state}"
        if me.poisoned < 0 <= me.nan_of < setting.operations - 1:
            return f"rank {rank} has a NaN of operation {me.nan_of} and has not failed: {state}"
    if healthy and any(
        value != EMPTY
        for location, value in zip(machine.memory, state.memory, strict=True)
        if location[0] == "slot"
    ):
        return f"a slot is not empty at the end: {state}"
    return None
