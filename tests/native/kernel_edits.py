"""Defects of the CUDA protocol that more than one kind of check must find.

Each is an edit of the sources, (file under csrc/, text, replacement), without comments in the text:
`kernel_mutants` runs the kernels with it, `protocol_model` reads its model from them.
"""

from __future__ import annotations

Edits = tuple[tuple[str, str, str], ...]

EXCHANGE, SLOTS, LAYOUT = "gpu/exchange.cuh", "gpu/slots.cuh", "protocol/layout.h"
CALL_TAG, SLOT, SIGNAL = "protocol/call_tag.h", "protocol/slot.h", "protocol/signal.h"
ONE_SHOT, TWO_SHOT = "gpu/transports/one_shot.cuh", "gpu/transports/two_shot.cuh"
OWNED, ROW_OWNERS = "gpu/owned_rows.cuh", "gpu/transports/row_owners.cuh"

_FENCE = "      fence_acq_rel_sys();\n"
_WAIT = "    wait_for_number(peer);\n"
_PUBLISH = (
    "      store_relaxed_sys("
    "params_.workspace[threadIdx.x % 32] + PushControl::released(params_.rank),\n"
    "                        op_);\n"
)
_REACHED = "has_reached(load_acquire_sys_u32(number), op_ - 1 - turn_.since())"
_COMPARED = "static_cast<int32_t>(seen - expected) >= 0"
_CLEAR_PACK = "  if (live) clear_slot(exchange, slot);\n"
CLEAR_ONE_SHOT = "    if (live_) clear_partials(exchange_, slots, stride_);\n"


def _replaced(path: str, text: str, old: str, new: str) -> Edits:
    return ((path, text, text.replace(old, new)),)


# Handing slots back.
NO_FENCE: Edits = ((EXCHANGE, _FENCE, ""),)
FENCE_OF_GPU: Edits = ((EXCHANGE, _FENCE, "      __threadfence();\n"),)
PUBLISHED_BEFORE_FENCE: Edits = ((EXCHANGE, _FENCE, ""), (EXCHANGE, _PUBLISH, _PUBLISH + _FENCE))
READ_RELAXED: Edits = _replaced(EXCHANGE, _REACHED, "acquire", "relaxed")
PEERS_NOT_WAITED_FOR: Edits = ((EXCHANGE, _WAIT, ""),)
NOTHING_PUBLISHED: Edits = ((EXCHANGE, _PUBLISH, ""),)
PUBLISHED_AS_NEXT: Edits = _replaced(EXCHANGE, _PUBLISH, "op_);", "op_ + 1);")
REACHED_EARLIER: Edits = _replaced(EXCHANGE, _REACHED, "- 1", "- 3")
REACHED_THE_SAME: Edits = _replaced(EXCHANGE, _REACHED, " - 1", "")
SINCE_NOT_COUNTED: Edits = _replaced(EXCHANGE, _REACHED, " - turn_.since()", "")
EQUAL_FOR_REACHED: Edits = ((SIGNAL, _COMPARED, "seen == expected"),)
COMPARED_WITHOUT_WRAPPING: Edits = ((SIGNAL, _COMPARED, "seen >= expected"),)
# Where slots are.
HALF_OF_ONE_OPERATION: Edits = ((LAYOUT, "more = kHalfUnits / 2;", "more = kHalfUnits;"),)
ONE_UNIT: Edits = ((LAYOUT, "next_unit = (unit() + units) % kPushUnits", "next_unit = unit()"),)
HALF_NOT_HANDED_BACK: Edits = ((LAYOUT, "large || unit() % kHalfUnits == 0", "large"),)
HALF_AS_MANY_TAGS: Edits = ((LAYOUT, "kTagSlots = kPushUnits", "kTagSlots = kHalfUnits"),)
PRECEDING_GRID_NOT_WAITED_FOR: Edits = ((EXCHANGE, "    wait_for_preceding_grid();\n", ""),)

# The slots of large operations.
LARGE_NOT_WAITED_FOR: Edits = ((EXCHANGE, "    if (params_.large) wait_for_slots();\n", ""),)
LARGE_NOT_HANDED_BACK: Edits = (
    (LAYOUT, "large || unit() % kHalfUnits == 0", "unit() % kHalfUnits == 0"),
)
ONE_LARGE_PHASE: Edits = ((LAYOUT, "kLargePhases = 2", "kLargePhases = 1"),)

# Slots that are not cleared.
PARTIALS_STAY: Edits = ((ONE_SHOT, CLEAR_ONE_SHOT, ""),)
RECEIVED_STAY: Edits = ((SLOTS, _CLEAR_PACK, ""),)  # sums of two_shot, finished rows
QUANTISED_STAY: Edits = (
    (
        ROW_OWNERS,
        "      store_words(slot, Packed::filled_with(kEmptyWord), exchange_.slot_policy());\n",
        "",
    ),
)
SCALES_STAY: Edits = ((ROW_OWNERS, "    store_u32(slot, kEmptyWord);\n", ""),)

# What a rank still stores after an operation before this one has failed: the second hops.
_UNLESS_FAILED_BEFORE = "if (!live_ || exchange_.failed_before()) return"
RELAYED_AFTER_FAILURE: Edits = (
    (TWO_SHOT, f"{_UNLESS_FAILED_BEFORE} sum;", "if (!live_) return sum;"),
)
PUBLISHED_AFTER_FAILURE: Edits = ((ROW_OWNERS, f"{_UNLESS_FAILED_BEFORE};", "if (!live_) return;"),)
QUANTISED_AFTER_FAILURE: Edits = ((ROW_OWNERS, "if (live_ && !silent) {", "if (live_) {"),)
SCALES_AFTER_FAILURE: Edits = ((ROW_OWNERS, "    if (silent) return;\n", ""),)
# ... and the first.
_UNLESS_FAILED = " || exchange_.failed()) return;"
ONE_SHOT_AFTER_FAILURE: Edits = ((ONE_SHOT, _UNLESS_FAILED, ") return;"),)
TWO_SHOT_AFTER_FAILURE: Edits = ((TWO_SHOT, _UNLESS_FAILED, ") return;"),)
OWNED_AFTER_FAILURE: Edits = ((ROW_OWNERS, _UNLESS_FAILED, ") return;"),)
