"""What a model knows of the CUDA protocol: its steps, numbers and slots."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from .program import Access
from .turns import Turns

Compare = Callable[[int, int], bool]


def _signed(distance: int) -> int:
    return (distance + (1 << 31)) % (1 << 32) - (1 << 31)


# What has_reached() may say, and what it means.
COMPARISONS: dict[str, Compare] = {
    "static_cast<int32_t>(seen - expected) >= 0": lambda seen, expected: (
        _signed(seen - expected) >= 0
    ),
    "seen >= expected": lambda seen, expected: seen >= expected,
    "seen == expected": lambda seen, expected: seen == expected,
}


def equal_bits(bits: int) -> Compare:
    """Whether the low `bits` of two numbers are the same."""
    return lambda seen, expected: (seen - expected) % (1 << bits) == 0


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
    """The protocol, as the sources have it.

    Attributes:
        turns: which slots operations use.
        waits_for_grid: nothing is done before the preceding grid is complete.
        roll_call: what a lane of the first serving warp does, for its peer.
        hand_back: ... of the second.
        transports: by name.
        tested_words: of the four of a slot, those that a receiver looks at.
        head: what lanes of every block of a large operation do first; a "barrier" of the block,
            if there is one, is last.
        first_released: what a new workspace holds, relative to the number of the first operation.
        nan_words: by the bits of a Step, what is stored for a NaN.
    """

    turns: Turns
    waits_for_grid: bool
    roll_call: tuple[Step, ...]
    hand_back: tuple[Step, ...]
    transports: dict[str, Transport]
    tested_words: frozenset[int]
    head: tuple[Step, ...]
    first_released: int
    nan_words: dict[str, int]
