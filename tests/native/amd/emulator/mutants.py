"""Defects that the emulator must notice: in machine code, in the sources, and in its own memory.

Edits of machine code remove every wait, barrier, scope, write-back and invalidation that a case
runs, one at a time. Some of them are not needed for the emulator's memory; the rules over machine
code require those. Faults of the sources are switches of `csrc/protocol/fault_switch.h`.
"""

from __future__ import annotations

import dataclasses
import functools
import re

from native.amd.disassembly import Function, Instruction, disassemble
from native.amd.mutants import complaints_of
from native.sass.kernels import Variant

from .calls import Call, loaded
from .cases import GFX942, Case, slices, streams
from .code_object import CodeObject, Line
from .machine import Settings, StopError

SEEDS = 4
KINDS = (
    "wait",
    "barrier",
    "scope of a load",
    "scope of a store",
    "scopes of all loads",
    "write-back",
    "invalidation",
)


@dataclasses.dataclass(frozen=True)
class Edit:
    """Instructions to replace.

    Attributes:
        kind: One of KINDS.
        changes: For each instruction its address in the image, and the mnemonic and the operands in
            its place.
    """

    kind: str
    changes: tuple[tuple[int, str, str], ...]


def edit_of(line: Line) -> Edit | None:
    """Returns the edit of an instruction, if it has one."""
    removed = ((line.address, "s_nop", "0"),)
    kinds = {
        "s_waitcnt": "wait",
        "s_barrier": "barrier",
        "buffer_wbl2": "write-back",
        "buffer_inv": "invalidation",
    }
    if line.name in kinds:
        return Edit(kinds[line.name], removed)
    if "sc0 sc1" in line.operands and re.match(r"(global|flat)_(load|store)", line.name):
        what = "load" if "load" in line.name else "store"
        plain = line.operands.replace(" sc0 sc1", "")
        return Edit(f"scope of a {what}", ((line.address, line.name, plain),))
    return None


def noticed(case: Case, **options: object) -> str:
    """Returns what notices a defect of a case within the seeds, or an empty string."""
    # A run that a defect keeps from ending is cut off early.
    usual = case.run(Settings(seed=1)).instructions
    for seed in range(1, SEEDS + 1):
        try:
            outcome = case.run(
                Settings(seed=seed),
                most_instructions=4 * usual,
                **options,  # type: ignore[arg-type]
            )
        except StopError as stop:
            text = str(stop)
            if "used before" in text:
                return "register used before the wait"
            if "does not end" in text:
                return "does not end"
            return "stops: " + text.split(": ")[-1][:60]
        if any(outcome.wrong):
            return "wrong bits"
        if any(fault.status for fault in outcome.faults):
            return "failure recorded"
        if outcome.not_at_rest:
            return "slot not empty at the end"
    return ""


def edits_of_case(case: Case) -> list[Edit]:
    """Returns the edits of all instructions that a case runs."""
    outcome = case.run(Settings(seed=1))
    (variant,) = outcome.kernels
    ran = outcome.executed[variant]
    lines = [line for line in loaded(variant, case.cpu).lines if line.address in ran]
    edits = [edit for line in lines if (edit := edit_of(line)) is not None]
    # A poll loads both halves of a pack. One load with the scope makes the cache drop the line.
    loads = [edit.changes[0] for edit in edits if edit.kind == "scope of a load"]
    return [*edits, Edit("scopes of all loads", tuple(loads))]


def noticed_edit(case: Case, edit: Edit) -> str:
    """Returns what notices an edit, with workspaces that caches may keep if nothing else does."""
    found = noticed(case, edit=functools.partial(edited, edit))
    if found or "scope" not in edit.kind:
        return found
    found = noticed(case, edit=functools.partial(edited, edit), caches_workspaces=True)
    return f"{found}, if workspaces are cached" if found else ""


def reported_edit(case: Case, edit: Edit) -> bool:
    """Returns whether a rule over machine code reports an edit."""
    variant = _kernel(case)
    changes = {address: (name, operands) for address, name, operands in edit.changes}

    def changed(found: Instruction) -> Instruction:
        if found.address not in changes:
            return found
        opcode, operands = changes[found.address]
        return dataclasses.replace(found, opcode=opcode, operands=operands)

    functions = [
        dataclasses.replace(function, instructions=tuple(map(changed, function.instructions)))
        for function in _disassembled(variant, case.cpu)
    ]
    return bool(complaints_of(functions, variant))


@functools.cache
def _kernel(case: Case) -> Variant:
    (variant,) = case.run(Settings(seed=1)).kernels
    return variant


@functools.cache
def _disassembled(variant: Variant, cpu: str) -> list[Function]:
    return disassemble(loaded(variant, cpu).path)


def edited(edit: Edit, code: CodeObject) -> CodeObject:
    """Returns a code object with an edit."""
    return code.edited({address: (name, operands) for address, name, operands in edit.changes})


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault of the sources, and the case that notices it."""

    name: str
    case: Case


# Several rows per block, and several waves per row.
_ROWS = Case(
    "rows", GFX942, 2, tuple(Call(1 + n % 5, 1024, few=False, num_blocks=2) for n in range(40))
)
_NASTY = Case("nasty", GFX942, 2, tuple(Call(2, 512, values="nasty", few=False) for _ in range(4)))
# Float32, because sums of a few bfloat16 numbers are mostly exact in any order.
_RELAYED = Case(
    "relayed",
    GFX942,
    4,
    tuple(Call(1 + n % 3, 256, algorithm=1, dtype="Float32") for n in range(12)),
)
_EXPERTS = Case("experts", GFX942, 2, (Call(6, 512, experts=True, num_blocks=2),))
# Several units per block, and sums whose bits are those of the empty word.
_SLICES = Case(
    "slices", GFX942, 2, tuple(slices(1 + n % 5, 64, 1024, 8, num_blocks=2) for n in range(20))
)
# Blocks of exactly two units: the second total follows the first without a barrier in between.
_TWO_UNITS = Case("two_units", GFX942, 2, tuple(slices(8, 2048, num_blocks=5) for _ in range(20)))
_SLICES_8 = Case("slices_8", GFX942, 8, tuple(slices(3, 64, 512) for _ in range(4)))
_NASTY_SLICES = Case(
    "nasty_slices",
    GFX942,
    2,
    tuple(slices(2, 8, 8, values="nasty", dtype="Float32") for _ in range(8)),
)
_STREAMS = Case("streams", GFX942, 2, (streams(2, 512, 4),))
FAULTS = (
    Fault("one_word_tested", _ROWS),
    Fault("not_canonicalized", _NASTY),
    Fault("partials_not_cleared", _ROWS),
    Fault("partial_of_the_row_before", _EXPERTS),
    Fault("row_sums_without_barrier", _ROWS),
    Fault("received_not_cleared", _RELAYED),
    Fault("slots_of_another_rank", _RELAYED),
    Fault("other_order_of_sums", _RELAYED),
    Fault("any_lane_suffices", _RELAYED),
    Fault("chunks_of_units_read_early", _SLICES),
    Fault("total_read_early", _SLICES),
    Fault("one_buffer_of_unit_sums", _TWO_UNITS),
    Fault("sums_not_cleared", _SLICES),
    Fault("sums_not_canonicalized", _NASTY_SLICES),
    Fault("last_sum_not_awaited", _SLICES_8),
    Fault("mix_transposed", _STREAMS),
)
