"""Rules for the machine code of every kernel. A rule yields a message for each violation.

Paths are paths in the control flow graph, in which every predicate can have either value. A rule
that holds on every path therefore holds for every input and every order of threads.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from .disassembly import Instruction, Kernel
from .kernels import TABLE, Variant

Rule = Callable[[Kernel, Variant], Iterator[str]]


def sizes_of(instructions: Iterable[Instruction]) -> Counter[int]:
    return Counter(found.access_bytes for found in instructions)


def _compare(what: str, found: Counter[int], wanted: Counter[int]) -> Iterator[str]:
    """Compares counts. Extra 16-byte accesses are allowed, because the compiler duplicates code."""
    for size in sorted(found | wanted):
        if found[size] < wanted[size] or (size < 16 and found[size] > wanted[size]):
            yield f"{what} of {size} bytes: {found[size]}; expected {wanted[size]}"


def pushes(kernel: Kernel, variant: Variant) -> Iterator[str]:
    """Requires strong, system-wide stores to peers, 16 bytes wide if the payload has 16 bytes."""
    strong = [found for found in kernel.body if found.is_store and found.is_system_wide]
    yield from _compare("system-wide stores", sizes_of(strong), variant.traffic.pushes)


def polls(kernel: Kernel, variant: Variant) -> Iterator[str]:
    """Requires strong, system-wide polls of slots, 16 bytes wide if the payload has 16 bytes."""
    strong = [found for found in kernel.body if found.is_load and found.is_system_wide]
    yield from _compare("system-wide loads", sizes_of(strong), variant.traffic.polls)


def _counts_launches(found: Instruction) -> bool:
    """Returns whether an instruction adds to PushControl::kLaunches without using the result."""
    is_addition = found.verb in ("RED", "ATOMG") and "ADD" in found.parts
    is_kept = found.verb == "ATOMG" and not found.operands.startswith("PT,RZ,")
    return is_addition and not is_kept and "+0x2010]" in found.operands


def scopes(kernel: Kernel, variant: Variant) -> Iterator[str]:
    """Forbids atomics, generic addresses, and strong accesses with a narrower scope.

    The only exception is the launch counter, which no thread waits for.
    """
    counts = [found for found in kernel.body if _counts_launches(found)]
    if len(counts) != 1:
        yield f"{len(counts)} additions to the counts of launches: expected one"
    for found in kernel.body:
        if found in counts:
            continue
        if "STRONG" in found.parts and not found.is_system_wide:
            yield f"narrow scope: {found}"
        elif found.is_global and found.verb not in ("LDG", "STG", "LDGSTS"):
            yield f"neither a load, a copy nor a store of global memory: {found}"


def _registers(load: Instruction) -> set[str]:
    first = int(re.match(r"R(\d+)", load.operands)[1])
    return {f"R{first + i}" for i in range(load.access_bytes // 4)}


def polls_in_flight(kernel: Kernel, variant: Variant) -> Iterator[str]:
    """Requires that all loads of a group of polls are issued before the first result is used."""
    most, pending = 0, 0
    waited_for: set[str] = set()
    for found in kernel.body:
        if found.is_load and found.is_system_wide and found.access_bytes == 16:
            pending += 1
            most = max(most, pending)
            waited_for |= _registers(found)
        elif waited_for & set(re.findall(r"\bR\d+", found.operands)):
            pending, waited_for = 0, set()
    wanted = 1 if variant.kind == "owned_given" else max(variant.polled_together)
    if most < wanted:
        yield f"{most} polls of 16 bytes are in flight together; expected {wanted}"


def _is_system_fence(found: Instruction) -> bool:
    return found.verb == "MEMBAR" and "SYS" in found.parts


def _is_number_access(found: Instruction) -> bool:
    return found.verb in ("LDG", "STG") and found.is_system_wide and found.access_bytes == 4


def one_system_fence(kernel: Kernel, variant: Variant) -> Iterator[str]:
    """Requires a single system-wide fence, before the store of the number that returns slots.

    See "Why a slot may be reused" in csrc/gpu/exchange.cuh.
    """
    fences = [i for i, found in enumerate(kernel.instructions) if _is_system_fence(found)]
    fences = [i for i in fences if kernel.instructions[i] in kernel.body]
    wanted = sum(TABLE.operation(row) == "fence" for row in TABLE.rows)
    if len(fences) != wanted:
        yield f"{len(fences)} system-wide fences on the data path; expected {wanted}"
        return
    (fence,) = fences
    # The instructions up to the next branch.
    following: list[Instruction] = []
    for found in kernel.instructions[fence + 1 :]:
        if found.verb in ("BRA", "BSYNC", "BAR", "EXIT", "CALL"):
            break
        following.append(found)
    touched = [found for found in following if found.is_global]
    if not touched or not (touched[0].is_store and _is_number_access(touched[0])):
        yield f"the fence is followed by {touched[0] if touched else 'no access'}, not the number"
        return
    store = touched[0].address // 16
    if store in kernel.reachable(stop=_is_system_fence):
        yield "the number is stored on a path that has not passed the fence"
    if fence in kernel.reachable(stop=lambda found: found.verb == "ACQBULK"):
        yield "the fence is reached before the wait for the preceding grid"


def numbers_are_acquired(kernel: Kernel, variant: Variant) -> Iterator[str]:
    """Requires acquire loads of peers' numbers, in large operations before any push of the block.

    csrc/gpu/exchange.cuh describes how slots and large phases are reused.
    """
    acquires = []
    for i, found in enumerate(kernel.instructions):
        if found.is_load and _is_number_access(found):
            touched = [
                x for x in kernel.instructions[i + 1 : i + 8] if x.verb == "CCTL" or x.is_global
            ]
            if touched and touched[0].opcode == "CCTL.IVALL":
                acquires.append(i)
    wanted = sum(TABLE.verbs[row.verb].access.order == "acquire" for row in TABLE.rows)
    if len(acquires) != wanted:
        yield f"{len(acquires)} loads of a number acquire; expected {wanted}, one at the head"
    for acquire in acquires:
        for i in sorted(kernel.reachable(acquire, stop=lambda found: found.verb == "BAR")):
            found = kernel.instructions[i]
            if found.is_store and found.access_bytes == 16:
                yield f"stored before the barrier after an acquire: {found}"


def no_other_barrier(kernel: Kernel, variant: Variant) -> Iterator[str]:
    """Forbids other fences that wait for stores to peers. Clusters synchronize once, unfenced.

    Blocks arrive at the cluster's barrier before they wait for the preceding grid. Blocks with and
    without rows wait at the barrier after that.
    """
    known = {"MEMBAR.ALL.CTA", "MEMBAR.ALL.SYS"}
    for found in kernel.body:
        if found.verb == "MEMBAR" and found.opcode not in known:
            yield f"unexpected: {found}"
    arrivals, joins = (
        [i for i, found in enumerate(kernel.instructions) if found.opcode == opcode]
        for opcode in ("UCGABAR_ARV", "UCGABAR_WAIT")
    )
    if variant.has_single_blocks:
        if arrivals or joins:
            yield "a barrier of a cluster; expected none"
        return
    if len(arrivals) != 1:
        yield f"the cluster arrives {len(arrivals)} times; expected once"
    elif arrivals[0] not in kernel.reachable(stop=lambda found: found.verb == "ACQBULK"):
        yield f"after the wait for the preceding grid: {kernel.instructions[arrivals[0]]}"
    if not joins:
        yield "no block waits for its cluster"
    for join in joins:
        for following in kernel.successors[join]:
            for again in sorted(kernel.reachable(following).intersection(joins)):
                yield f"the cluster synchronizes again: {kernel.instructions[again]}"


def dependent_launch(kernel: Kernel, variant: Variant) -> Iterator[str]:
    """Requires griddepcontrol.wait before all accesses to global memory, on every path."""
    if not any(found.verb == "ACQBULK" for found in kernel.body):
        yield "no ACQBULK: the kernel does not wait for the preceding grid"
        return
    if not any(found.verb == "PREEXIT" for found in kernel.body):
        yield "no PREEXIT: the kernel does not trigger dependent launch"
    for i in sorted(kernel.reachable(stop=lambda found: found.verb == "ACQBULK")):
        found = kernel.instructions[i]
        if found.is_global or found.verb in ("CALL", "EXIT", "PREEXIT"):
            yield f"before the wait for the preceding grid: {found}"


def fault_record(kernel: Kernel, variant: Variant) -> Iterator[str]:
    """Requires that a fault's status is stored after its other fields and a system-wide fence."""
    code = kernel.subroutines
    fences = [i for i, found in enumerate(code) if _is_system_fence(found)]
    if len(fences) != 1:
        yield f"{len(fences)} system-wide fences in the record of a fault; expected one"
        return
    (fence,) = fences
    stores = [i for i, found in enumerate(code) if found.is_store and found.is_system_wide]
    after = [i for i in stores if i > fence]
    if len(after) != 1 or any(found.verb == "RET" for found in code[fence : after[0]]):
        yield f"{len(after)} stores follow the fence of a fault; expected one, of the status"
    if len(stores) - len(after) != 8:
        yield f"{len(stores) - len(after)} stores precede it; expected eight"


def frame(kernel: Kernel, variant: Variant) -> Iterator[str]:
    """Requires that a kernel's local memory is within the kernel's limit."""
    if kernel.frame_bytes > variant.most_frame_bytes:
        yield f"{kernel.frame_bytes} bytes of local memory; at most {variant.most_frame_bytes}"


def stays_local(kernel: Kernel, variant: Variant) -> Iterator[str]:
    """Forbids fences and strong accesses in a local kernel.

    The only exception is a cluster's barrier: its release is a fence with GPU scope.
    """
    clusters = variant.kind == "local_rows"
    for found in kernel.instructions:
        fence = found.verb == "MEMBAR" and not (clusters and "SYS" not in found.parts)
        if fence or "STRONG" in found.parts:
            yield f"unexpected: {found}"


LOCAL_RULES: tuple[Rule, ...] = (dependent_launch, frame, stays_local)
EXCHANGE_RULES: tuple[Rule, ...] = (
    *(pushes, polls, scopes, polls_in_flight, one_system_fence, no_other_barrier),
    *(numbers_are_acquired, dependent_launch, fault_record, frame),
)


def complaints(kernel: Kernel, variant: Variant) -> list[str]:
    """Returns a kernel's violations of all rules, each with the rule's name."""
    rules = LOCAL_RULES if variant.is_local else EXCHANGE_RULES
    return [f"{rule.__name__}: {text}" for rule in rules for text in rule(kernel, variant)]
