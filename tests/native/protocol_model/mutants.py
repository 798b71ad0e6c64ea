"""Defects, as edits of the sources: (file, text, replacement)."""

from __future__ import annotations

import re

from native import kernel_edits as edits
from native.kernel_edits import CALL_TAG, EXCHANGE, ONE_SHOT, SLOT, Edits

from .reader import PREPARE
from .source import MEMORY

_RECEIVE_ONE_SHOT = (
    "    const Pack sum =\n"
    "        receive_partials<T, kWorldSize>"
    "(exchange_, slots, stride_, rank_, own(), live_, peeked);\n"
)


def _ptx(old: str, new: str) -> Edits:
    return ((MEMORY, f'"{old}', f'"{new}'),)


# Weaker accesses: (name, instruction, what moves with it). Each becomes weak, and of GPU scope.
ACCESSES = {
    "push": "st.relaxed.sys.global.v4.u32",
    "poll of a slot": "ld.relaxed.sys.global.v4.u32",
    "announcement": "st.relaxed.sys.global.u64",
    "poll of an announcement": "ld.relaxed.sys.global.u64",
    "handed-back number": "st.relaxed.sys.global.u32",
    "poll of a handed-back number": "ld.acquire.sys.global.u32",
}
WEAKENED: dict[str, Edits] = {
    f"{name}: {kind}": _ptx(ptx, re.sub(r"\.(relaxed|acquire)\.sys", replacement, ptx))
    for name, ptx in ACCESSES.items()
    for kind, replacement in {"weak": "", "of the GPU": r".\1.gpu"}.items()
}

# Of the exchange itself; each breaks it at 2 ranks with any transport.
EXCHANGE_MUTANTS: dict[str, Edits] = {
    "no fence": edits.NO_FENCE,
    "fence of the GPU": _ptx("fence.acq_rel.sys", "fence.acq_rel.gpu"),
    "fence of the block": _ptx("fence.acq_rel.sys", "fence.acq_rel.cta"),
    "published before the fence": edits.PUBLISHED_BEFORE_FENCE,
    "number read relaxed": edits.READ_RELAXED,
    "peers' numbers not waited for": edits.PEERS_NOT_WAITED_FOR,
    "nothing published": edits.NOTHING_PUBLISHED,
    "number of an earlier half": edits.REACHED_EARLIER,
    "== for >=": edits.EQUAL_FOR_REACHED,
    "halves of one operation": edits.HALF_OF_ONE_OPERATION,
    "one unit": edits.ONE_UNIT,
    "a half begun and nothing handed back": edits.HALF_NOT_HANDED_BACK,
    "not waiting for the preceding grid": edits.PRECEDING_GRID_NOT_WAITED_FOR,
    "first word of an announcement not tested": (
        (CALL_TAG, "word0 >> 32 == op && word1 >> 56 == (op & 0xff)", "word1 >> 56 == (op & 0xff)"),
    ),
    "second word of an announcement not tested": (
        (CALL_TAG, "word0 >> 32 == op && word1 >> 56 == (op & 0xff)", "word0 >> 32 == op"),
    ),
}

# Of large operations.
LARGE_MUTANTS: dict[str, Edits] = {
    "no wait at the head": edits.LARGE_NOT_WAITED_FOR,
    "no barrier after the head": ((EXCHANGE, "    __syncthreads();\n  }", "  }"),),
    "head: number of two operations ago": edits.REACHED_EARLIER,
    "head: number of the same operation": edits.REACHED_THE_SAME,
    "published as of the next operation": edits.PUBLISHED_AS_NEXT,
    "large operations hand nothing back": edits.LARGE_NOT_HANDED_BACK,
    "head: relaxed": _ptx("ld.acquire.sys", "ld.relaxed.sys"),
    "head: of the GPU": _ptx("ld.acquire.sys", "ld.acquire.gpu"),
    "one large phase": edits.ONE_LARGE_PHASE,
    "a new workspace's slots not handed back": (
        (PREPARE, "kPushMaxWorldSize, first_op - 1", "kPushMaxWorldSize, first_op - 2"),
    ),
}

# Of one transport.
TRANSPORT_MUTANTS: dict[str, tuple[str, Edits]] = {
    "no clear": ("one_shot", edits.PARTIALS_STAY),
    "clear before the wait": (
        "one_shot",
        (
            (ONE_SHOT, edits.CLEAR_ONE_SHOT, ""),
            (ONE_SHOT, _RECEIVE_ONE_SHOT, edits.CLEAR_ONE_SHOT + _RECEIVE_ONE_SHOT),
        ),
    ),
    "no clear of a sum": ("two_shot", edits.RECEIVED_STAY),
    "no clear of a finished row": ("owned_rows", edits.RECEIVED_STAY),
    "no clear of quantised elements": (
        "owned_quantized",
        edits.QUANTISED_STAY,
    ),
    "no clear of a scale": (
        "owned_quantized",
        edits.SCALES_STAY,
    ),
}

# Seen where a slot has more than one word.
WORD_MUTANTS: dict[str, Edits] = {
    "one word of a slot not tested": ((SLOT, " && pack.word[1] != kEmptyWord", ""),),
}

# Of a rank that stores into slots after an operation has failed: (kind of call of the operation
# that a peer is still in, kind of the later ones, shift of their slots).
LATE_MUTANTS: dict[str, tuple[tuple[str, str, int], Edits]] = {
    "sums relayed after a failure": (
        ("owned_quantized", "two_shot", 0),
        edits.RELAYED_AFTER_FAILURE,
    ),
    "sums of rows with owners published after a failure": (
        ("owned_quantized", "owned_rows", 0),
        edits.PUBLISHED_AFTER_FAILURE,
    ),
    "gathered rows published after a failure": (
        ("one_shot", "gather", 2),
        edits.PUBLISHED_AFTER_FAILURE,
    ),
    "quantised rows published after a failure": (
        ("two_shot", "owned_quantized", 0),
        edits.QUANTISED_AFTER_FAILURE,
    ),
    "scales published after a failure": (
        ("one_shot", "owned_quantized", 1),
        edits.SCALES_AFTER_FAILURE,
    ),
    "partials sent after a failure, one_shot": (
        ("gather", "one_shot", 2),
        edits.ONE_SHOT_AFTER_FAILURE,
    ),
    "partials sent after a failure, two_shot": (
        ("one_shot", "two_shot", 0),
        edits.TWO_SHOT_AFTER_FAILURE,
    ),
    "partials sent after a failure, rows with owners": (
        ("one_shot", "owned_rows", 0),
        edits.OWNED_AFTER_FAILURE,
    ),
}

# Of numbers and slots: seen by exploring, some of them only where numbers wrap.
COUNTER_MUTANTS: dict[str, Edits] = {
    **{
        name: EXCHANGE_MUTANTS[name]
        for name in (
            *("no fence", "nothing published", "== for >="),
            *("halves of one operation", "one unit", "a half begun and nothing handed back"),
        )
    },
    **{name: TRANSPORT_MUTANTS[name][1] for name in ("no clear", "clear before the wait")},
    "numbers compared without wrapping": edits.COMPARED_WITHOUT_WRAPPING,
    "what hands nothing back not counted": edits.SINCE_NOT_COUNTED,
}
# Of these, what goes right if a half has two operations.
SEEN_IN_LONGER_HALVES = ("what hands nothing back not counted",)
