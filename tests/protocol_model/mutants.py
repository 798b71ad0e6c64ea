"""Defects, as edits of the sources: (file, text, replacement)."""

from __future__ import annotations

from protocol_model.reader import EXCHANGE, LAYOUT, ONE_SHOT, OWNED, PREPARE, TWO_SHOT, WORDS
from protocol_model.source import MEMORY

Edits = tuple[tuple[str, str, str], ...]

_FENCE = "    fence_acq_rel_sys();\n"
_WAIT = "    if (!wait_until(released, [&] { return peer; })) return;\n"
_PUBLISH = (
    "    store_relaxed_sys("
    "params_.workspace[threadIdx.x % 32] + PushControl::released(params_.rank),\n"
    "                      op_);\n"
)
_REACHED = "has_reached(load_relaxed_sys_u32(slot), op_ - 1)"
_WAIT_FOR_GRID = "    wait_for_preceding_grid();\n"
_CLEAR_ONE_SHOT = "    clear_partials<kWorldSize>(slots, stride_);\n"
_RECEIVE_ONE_SHOT = (
    "    const Pack sum = receive_partials<T, kWorldSize>"
    "(exchange_, slots, stride_, rank_, own());\n"
)
_CLEAR_SUM = "    store_pack(slot, {kEmptyWord, kEmptyWord, kEmptyWord, kEmptyWord});\n"


def _ptx(old: str, new: str) -> Edits:
    return ((MEMORY, f'"{old}', f'"{new}'),)


# Weaker accesses: (name, instruction, what moves with it). Each becomes weak, and of GPU scope.
ACCESSES = {
    "push": "st.relaxed.sys.global.v4.u32",
    "poll of a slot": "ld.relaxed.sys.global.v4.u32",
    "announcement": "st.relaxed.sys.global.u64",
    "poll of an announcement": "ld.relaxed.sys.global.u64",
    "handed-back number": "st.relaxed.sys.global.u32",
    "poll of a handed-back number": "ld.relaxed.sys.global.u32",
}
WEAKENED: dict[str, Edits] = {
    f"{name}: {kind}": _ptx(ptx, ptx.replace(".relaxed.sys", replacement))
    for name, ptx in ACCESSES.items()
    for kind, replacement in {"weak": "", "of the GPU": ".relaxed.gpu"}.items()
}

# Of the exchange itself; each breaks it at 2 ranks with any transport.
EXCHANGE_MUTANTS: dict[str, Edits] = {
    "no fence": ((EXCHANGE, _FENCE, ""),),
    "fence of the GPU": _ptx("fence.acq_rel.sys", "fence.acq_rel.gpu"),
    "fence of the block": _ptx("fence.acq_rel.sys", "fence.acq_rel.cta"),
    "published before the fence": ((EXCHANGE, _FENCE, ""), (EXCHANGE, _PUBLISH, _PUBLISH + _FENCE)),
    "fence before the wait": ((EXCHANGE, _FENCE, ""), (EXCHANGE, _WAIT, _FENCE + _WAIT)),
    "published before the wait": (
        (EXCHANGE, _PUBLISH, ""),
        (EXCHANGE, _WAIT, _PUBLISH + _WAIT),
    ),
    "peers' numbers not waited for": ((EXCHANGE, _WAIT, ""),),
    "nothing published": ((EXCHANGE, _PUBLISH, ""),),
    "published as of the next operation": (
        (EXCHANGE, _PUBLISH, _PUBLISH.replace("op_);", "op_ + 1);")),
    ),
    "number of two operations ago": ((EXCHANGE, _REACHED, _REACHED.replace("- 1", "- 2")),),
    "number of the same operation": ((EXCHANGE, _REACHED, _REACHED.replace(" - 1", "")),),
    "== for >=": ((WORDS, "static_cast<int32_t>(seen - expected) >= 0", "seen == expected"),),
    "two phases": ((LAYOUT, "kPushPhases = 3", "kPushPhases = 2"),),
    "one phase": ((LAYOUT, "kPushPhases = 3", "kPushPhases = 1"),),
    "not waiting for the preceding grid": ((EXCHANGE, _WAIT_FOR_GRID, ""),),
    "first word of an announcement not tested": (
        (WORDS, "word0 >> 32 == op && word1 >> 56 == (op & 0xff)", "word1 >> 56 == (op & 0xff)"),
    ),
    "second word of an announcement not tested": (
        (WORDS, "word0 >> 32 == op && word1 >> 56 == (op & 0xff)", "word0 >> 32 == op"),
    ),
    "a new workspace's slots not handed back": (
        (PREPARE, "kPushMaxWorldSize, first_op - 1", "kPushMaxWorldSize, first_op - 2"),
    ),
}

_LARGE_REACHED = "has_reached(load_acquire_sys_u32(slot), op_ - 1)"

# Of large operations.
LARGE_MUTANTS: dict[str, Edits] = {
    "no wait at the head": ((EXCHANGE, "    if (params.large) wait_for_slots();\n", ""),),
    "no barrier after the head": ((EXCHANGE, "    __syncthreads();\n  }", "  }"),),
    "head: number of two operations ago": (
        (EXCHANGE, _LARGE_REACHED, _LARGE_REACHED.replace("- 1", "- 2")),
    ),
    "head: number of the same operation": (
        (EXCHANGE, _LARGE_REACHED, _LARGE_REACHED.replace(" - 1", "")),
    ),
    "head: relaxed": _ptx("ld.acquire.sys", "ld.relaxed.sys"),
    "head: of the GPU": _ptx("ld.acquire.sys", "ld.acquire.gpu"),
    "one large phase": ((LAYOUT, "kLargePhases = 2", "kLargePhases = 1"),),
}

# Of one transport.
TRANSPORT_MUTANTS: dict[str, tuple[str, Edits]] = {
    "no clear": ("one_shot", ((ONE_SHOT, _CLEAR_ONE_SHOT, ""),)),
    "clear before the wait": (
        "one_shot",
        (
            (ONE_SHOT, _CLEAR_ONE_SHOT, ""),
            (ONE_SHOT, _RECEIVE_ONE_SHOT, _CLEAR_ONE_SHOT + _RECEIVE_ONE_SHOT),
        ),
    ),
    "no clear of a sum": ("two_shot", ((TWO_SHOT, _CLEAR_SUM, ""),)),
    "no clear of a finished row": ("owned_rows", ((OWNED, _CLEAR_SUM, ""),)),
    "no clear of quantised elements": (
        "owned_quantized",
        ((OWNED, "      store_quantized(slot, uniform_pack<T>(kEmptyWord));\n", ""),),
    ),
    "no clear of a scale": (
        "owned_quantized",
        ((OWNED, "      store_u32(slot, kEmptyWord);\n", ""),),
    ),
}

# Seen where a slot has more than one word.
WORD_MUTANTS: dict[str, Edits] = {
    "one word of a slot not tested": ((WORDS, " && pack.word[1] != kEmptyWord", ""),),
}

_NEXT_PHASE = "phase() + 1 == kPushPhases ? 0 : phase() + 1"

# Of numbers and phases: seen by exploring, some of them only where numbers wrap.
COUNTER_MUTANTS: dict[str, Edits] = {
    **{
        name: EXCHANGE_MUTANTS[name]
        for name in (
            *("no fence", "nothing published", "number of the same operation", "== for >="),
            *("two phases", "one phase", "a new workspace's slots not handed back"),
        )
    },
    **{name: TRANSPORT_MUTANTS[name][1] for name in ("no clear", "clear before the wait")},
    "numbers compared without wrapping": (
        (WORDS, "static_cast<int32_t>(seen - expected) >= 0", "seen >= expected"),
    ),
    "phase by the number": ((EXCHANGE, _NEXT_PHASE, "(op_ + 1) % kPushPhases"),),
}
