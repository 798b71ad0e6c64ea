"""Rules for the machine code of every kernel. A rule yields a message for each violation.

Paths are paths in the control flow graph, in which every condition can have either value. A rule
that holds on every path therefore holds for every input and every order of threads.
`docs/reference/amd-memory.md` explains why each wait and scope is there.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator

from native.sass.kernels import ANY_WORLD_SIZE, TABLE, Variant

from .disassembly import Function, Instruction

Rule = Callable[[Function, Variant], Iterator[str]]

# Packs cross the link in halves: csrc/gpu/hip/memory.cuh.
HALF_BYTES = 8
PARTS = 4  # kMaxParts in csrc/gpu/hip/machine.h
# Scratch memory of the functions that a kernel calls when it has waited for long.
CALL_BYTES = 16


def _packs(variant: Variant) -> tuple[int, int, int, int]:
    """Returns what a kernel does with packs of slots in the sources.

    These are the packs sent, the groups of polls of all peers, the polls of one peer, and the packs
    marked as empty. `Variant.traffic` explains the numbers.
    """
    peers = variant.most_ranks - 1
    rows_ahead = 3 if variant.features == "kExtendedDense" else 2
    return {
        "one_shot": (2 * peers, 1, 0, peers),
        "one_shot_dense": (rows_ahead * peers, 1, 0, peers),
        "one_shot_wide": (PARTS * peers, PARTS, 0, PARTS * peers),
        "two_shot": (3 + 2 * peers, 2, 1, 2 * peers + 1),
        "two_shot_wide": (PARTS * (1 + peers), PARTS, PARTS, PARTS * (peers + 1)),
        "owned_sum": (2 + peers, 1, 1, peers + 1),
        "owned_sum_few": (2 + peers, 1, 1, peers + 1),
        "owned_finished": (2 + peers, 1, 1, peers + 1),
        "owned_given": (peers, 0, 1, 1),
        # The sums of eight ranks are polled, and their slot is cleared, as two packs.
        "slices": (0, 1, 1, 2),
    }[variant.kind.removeprefix("streams_")]


def _groups(variant: Variant) -> list[int]:
    """Returns the number of peers in each group of polls that the kernel contains."""
    if variant.world_size == ANY_WORLD_SIZE:
        return [ranks - 1 for ranks in variant.polled_together]
    return [variant.world_size - 1]


def _wanted(variant: Variant) -> tuple[Counter[int], Counter[int]]:
    """Returns the stores and loads across the link by their size in bytes."""
    sent, groups, single, cleared = _packs(variant)
    stores = Counter({HALF_BYTES: 2 * (sent + cleared)})
    loads = Counter({HALF_BYTES: 2 * (groups * sum(_groups(variant)) + single)})
    parts = {"roll_call": 1, "hand_back": 1, "head": 1}
    if variant.kind == "owned_finished" and variant.quantized:
        parts |= {"packed_own": variant.most_ranks - 1, "packed_receive": 1}
    if variant.exchanges_sums:
        parts |= {"sums_send": 2}  # the first unit, and one ahead
    for part, times in parts.items():
        for row in TABLE.part(part):
            verb = TABLE.verbs[row.verb]
            # A float32 pack has half as many elements.
            halved = row.place == "finished" and variant.dtype == "Float32"
            if verb.operation == "st":
                stores[verb.bytes // (1 + halved)] += times
            elif verb.operation == "ld":
                loads[verb.bytes // (1 + halved)] += times
    return stores, loads


def _compare(what: str, found: list[Instruction], wanted: Counter[int]) -> Iterator[str]:
    """Compares counts. More are allowed, because the compiler duplicates code."""
    counts = Counter(x.access_bytes for x in found if x.is_system_wide)
    for size in sorted(wanted):
        if counts[size] < wanted[size]:
            yield f"{what} of {size} bytes: {counts[size]}; expected {wanted[size]}"
    for size in sorted(counts.keys() - wanted.keys()):
        yield f"{what} of {size} bytes: {counts[size]}; expected none"


def stores_across(kernel: Function, variant: Variant) -> Iterator[str]:
    """Requires that everything sent to peers, and every mark of an empty slot, has system scope."""
    found = [x for x in kernel.instructions if x.is_store]
    yield from _compare("system-wide stores", found, _wanted(variant)[0])


def loads_across(kernel: Function, variant: Variant) -> Iterator[str]:
    """Requires that every poll has system scope."""
    found = [x for x in kernel.instructions if x.is_load]
    yield from _compare("system-wide loads", found, _wanted(variant)[1])


def _place(found: Instruction) -> tuple[str, int]:
    """Returns the address that a load reads: its registers and its offset."""
    registers = found.operands.partition(",")[2].strip()
    offset = re.search(r" offset:(-?\d+)", registers)
    base = registers.partition(" offset:")[0].removesuffix(" sc0 sc1").strip()
    return base, int(offset[1]) if offset else 0


def halves_alike(function: Function, variant: Variant | None = None) -> Iterator[str]:
    """Requires that both halves of a pack or a tag that is polled have system scope.

    The compiler duplicates polls, so their number does not show that one of them has no scope. The
    halves are neighbors, or have the same address registers.
    """
    code = function.instructions
    for i, found in enumerate(code):
        if not found.is_load or found.is_system_wide or found.access_bytes != HALF_BYTES:
            continue
        base, offset = _place(found)
        for k in range(max(0, i - 4), min(len(code), i + 5)):
            beside = _place(code[k]) in ((base, offset - 8), (base, offset + 8))
            if _is_poll(code[k]) and (beside or abs(k - i) == 1):
                yield f"{found} has no scope, and its other half {code[k]} has"


def _counts_launches(found: Instruction) -> bool:
    """Returns whether an instruction adds to PushControl::kLaunches without using the result."""
    return found.opcode == "global_atomic_add_x2" and not found.bits


def scopes(kernel: Function, variant: Variant) -> Iterator[str]:
    """Forbids scopes other than the wave and the system, and atomics but that of the counter."""
    counts = [x for x in kernel.instructions if _counts_launches(x)]
    if len(counts) != 1:
        yield f"{len(counts)} additions to the counts of launches: expected one"
    for found in kernel.instructions:
        is_cache = found.opcode in ("buffer_wbl2", "buffer_inv")
        narrow = found.bits & {"sc0", "sc1"} and not found.is_system_wide
        if narrow or (is_cache and not found.is_system_wide):
            yield f"narrow scope: {found}"
        if found.is_atomic and found not in counts:
            yield f"unexpected: {found}"


def _is_poll(found: Instruction) -> bool:
    return found.is_load and found.is_system_wide and found.access_bytes == HALF_BYTES


def polls_in_flight(kernel: Function, variant: Variant) -> Iterator[str]:
    """Requires that the loads of all peers are issued before the kernel waits for one of them."""
    most = pending = 0
    for found in kernel.instructions:
        if _is_poll(found):
            pending += 1
            most = max(most, pending)
        elif found.most_outstanding is not None:
            pending = min(pending, found.most_outstanding)
    wanted = 2 * (1 if variant.kind == "owned_given" else max(_groups(variant)))
    if most < wanted:
        yield f"{most} polls of {HALF_BYTES} bytes are in flight together; expected {wanted}"


def write_backs_are_waited_for(function: Function, variant: Variant | None = None) -> Iterator[str]:
    """Requires a wait for all accesses between a write-back and the next store, on every path."""
    for i, found in enumerate(function.instructions):
        if found.opcode != "buffer_wbl2":
            continue
        for following in function.after(i, stop=lambda x: x.waits_for_all):
            if following.is_store or following.is_atomic or following.opcode == "s_endpgm":
                yield f"{found} is not waited for before {following}"


def _is_number(found: Instruction) -> bool:
    return found.is_system_wide and found.is_global and found.access_bytes == 4


def one_system_fence(kernel: Function, variant: Variant) -> Iterator[str]:
    """Requires a single write-back, before the store of the number that returns slots.

    See "Why a slot may be reused" in csrc/gpu/exchange.cuh.
    """
    fences = [i for i, x in enumerate(kernel.instructions) if x.opcode == "buffer_wbl2"]
    wanted = sum(TABLE.operation(row) == "fence" for row in TABLE.rows)
    if len(fences) != wanted:
        yield f"{len(fences)} write-backs on the data path; expected {wanted}"
        return

    def crosses(found: Instruction) -> bool:  # unlike a load of a parameter
        return found.is_store or (found.is_global and found.is_system_wide)

    touched = [x for x in kernel.after(fences[0], stop=crosses) if crosses(x)]
    if not touched or not (touched[0].is_store and _is_number(touched[0])):
        yield f"the fence is followed by {', '.join(map(str, touched))}, not by the number"
        return
    unfenced = kernel.reachable(stop=lambda x: x.opcode == "buffer_wbl2")
    for store in (x for x in touched if x.is_store and _is_number(x)):
        if kernel.instructions.index(store) in unfenced:
            yield f"the number is stored on a path that has not passed the fence: {store}"


def _acquires(kernel: Function) -> Iterator[int]:
    """Yields the loads of a number after which the caches are emptied, before other accesses."""
    for i, found in enumerate(kernel.instructions):
        if not (found.is_load and _is_number(found)):
            continue
        waited = False
        for following in kernel.instructions[i + 1 : i + 8]:
            waited = waited or following.waits_for_all
            if following.is_global or following.opcode == "buffer_inv":
                if following.opcode == "buffer_inv" and following.is_system_wide and waited:
                    yield i
                break


def _is_tag(found: Instruction) -> bool:
    """Returns whether an instruction accesses a word of a tag: PushControl::tag()."""
    return re.search(r"offset:(256|264)\b", found.operands) is not None


def numbers_are_acquired(kernel: Function, variant: Variant) -> Iterator[str]:
    """Requires acquire loads of peers' numbers, in large operations before any push of the block.

    csrc/gpu/exchange.cuh describes how slots and large phases are reused.
    """
    acquires = list(_acquires(kernel))
    wanted = sum(TABLE.verbs[row.verb].access.order == "acquire" for row in TABLE.rows)
    if len(acquires) < wanted:
        yield f"{len(acquires)} loads of a number acquire; expected {wanted}, one at the head"
    for acquire in acquires:
        for found in kernel.after(acquire, stop=lambda x: x.opcode == "s_barrier"):
            is_half = found.access_bytes == HALF_BYTES and not _is_tag(found)
            if found.is_store and found.is_system_wide and is_half:
                yield f"stored before the barrier after an acquire: {found}"


def head(kernel: Function, variant: Variant) -> Iterator[str]:
    """Forbids scratch memory before the first access to global memory, except for spills.

    Otherwise each lane copies the kernel's parameters, or keeps an array.
    """
    assert kernel.needs is not None
    reached = kernel.reachable(stop=lambda x: x.is_global or x.opcode == "s_barrier")
    found = [kernel.instructions[i] for i in sorted(reached)]
    stored = [x for x in found if x.is_scratch and "_store_" in x.opcode]
    if sum(x.access_bytes for x in stored) > 4 * kernel.needs.vector_spills:
        yield f"scratch memory at the kernel's head, from {stored[0]} to {stored[-1]}"


def most_spills(variant: Variant) -> int:
    """Returns the number of vector registers that a kernel may spill, with clang 22.

    Kernels of wide rows keep the addresses of several packs per peer. Without instructions that
    take float16 sources, those for float16 spill up to 45 (`one_shot_wide`) and 75.
    """
    return {"one_shot_wide": 46, "two_shot_wide": 76}.get(variant.kind, 0)


def spills(kernel: Function, variant: Variant) -> Iterator[str]:
    """Requires that spilled registers are within the kernel's limit, and nothing else is stored."""
    needs = kernel.needs
    assert needs is not None
    most = most_spills(variant)
    if needs.vector_spills > most:
        yield f"{needs.vector_spills} vector registers are spilled; at most {most}"
    used = 4 * needs.vector_spills + CALL_BYTES
    if needs.scratch_bytes > -(-used // 16) * 16 + 16:
        yield f"{needs.scratch_bytes} bytes of scratch memory; {used} for spills and calls"
    if needs.vector_spills == 0:
        for found in kernel.instructions:
            if found.is_scratch:
                yield f"scratch memory without spills: {found}"


def fault_record(function: Function) -> Iterator[str]:
    """Requires that a fault's status is stored after its other fields and a write-back."""
    code = function.instructions
    fences = [i for i, found in enumerate(code) if found.opcode == "buffer_wbl2"]
    if len(fences) != 1:
        yield f"{len(fences)} write-backs in the record of a fault; expected one"
        return
    stores = [i for i, x in enumerate(code) if x.is_store and x.is_system_wide]
    after = [i for i in stores if i > fences[0]]
    if len(after) != 1:
        yield f"{len(after)} stores follow the fence of a fault; expected one, of the status"
    if len(stores) - len(after) != 8:
        yield f"{len(stores) - len(after)} stores precede it; expected eight"


def stays_local(kernel: Function, variant: Variant) -> Iterator[str]:
    """Forbids fences and accesses with a scope in a local kernel."""
    for found in kernel.instructions:
        if found.bits & {"sc0", "sc1"} or found.opcode in ("buffer_wbl2", "buffer_inv"):
            yield f"unexpected: {found}"


def signed_zeros(kernel: Function, variant: Variant) -> Iterator[str]:
    """Forbids products that are rounded to float16 after +0 is added, which makes +0 of -0."""
    for found in kernel.instructions:
        if found.opcode.startswith("v_fma_mix") and found.operands.split(",")[3].split()[0] == "0":
            yield f"loses the sign of zero: {found}"


LOCAL_RULES: tuple[Rule, ...] = (head, spills, signed_zeros, stays_local)
EXCHANGE_RULES: tuple[Rule, ...] = (
    *(stores_across, loads_across, halves_alike, scopes, polls_in_flight),
    *(write_backs_are_waited_for, one_system_fence, numbers_are_acquired),
    *(head, spills, signed_zeros),
)


def complaints(kernel: Function, variant: Variant) -> list[str]:
    """Returns a kernel's violations of all rules, each with the rule's name."""
    rules = LOCAL_RULES if variant.is_local else EXCHANGE_RULES
    return [f"{rule.__name__}: {text}" for rule in rules for text in rule(kernel, variant)]


def complaints_of_callee(function: Function) -> list[str]:
    """Returns the violations of a function that kernels call."""
    rules = (write_backs_are_waited_for, halves_alike)
    found = [f"{rule.__name__}: {text}" for rule in rules for text in rule(function)]
    if "record_fault" in function.name:
        found += [f"fault_record: {text}" for text in fault_record(function)]
    return found
