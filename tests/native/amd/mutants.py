"""Lists defects that the rules must report: in machine code, and in the sources.

A defect of machine code is an edit of a compiled kernel's instructions. A defect of the sources is
a switch (`csrc/protocol/fault_switch.h`), with which a kernel is compiled again. The tests on
simulated GPUs find few of them, because the simulated memory has no caches.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable

from native.sass.kernels import Variant

from .compiler import Unit, compile_unit, unit_of
from .disassembly import Function, Instruction, disassemble
from .rules import complaints, complaints_of_callee

# The kernels with a defect.
KERNELS = {
    "one_shot": Variant("one_shot", "Bfloat16", 4, False),
    "two_shot": Variant("two_shot", "Float16", 2, True),
    "local": Variant("local_rows", "Float32", 1, True),
}
Code = tuple[Instruction, ...]


def _first(code: Code, wanted: Callable[[Instruction], bool], after: int = 0) -> int:
    return next(i for i in range(after, len(code)) if wanted(code[i]))


def _replaced(code: Code, at: int, opcode: str, operands: str) -> Code:
    changed = dataclasses.replace(code[at], opcode=opcode, operands=operands)
    return (*code[:at], changed, *code[at + 1 :])


def _inserted(code: Code, at: int, opcode: str, operands: str) -> Code:
    """Returns the code with an instruction before `at`; addresses stay unique."""
    new = Instruction(code[at].address - 1, opcode, operands)
    return (*code[:at], new, *code[at:])


def _is_half(found: Instruction) -> bool:
    return found.is_system_wide and found.is_global and found.access_bytes == 8


def _with_scope(bits: str, wanted: Callable[[Instruction], bool]) -> Callable[[Code], Code]:
    """Returns an edit that gives all accesses of a kind a different scope."""

    def edit(code: Code) -> Code:
        return tuple(
            dataclasses.replace(x, operands=x.operands.replace("sc0 sc1", bits)) if wanted(x) else x
            for x in code
        )

    return edit


def _without(opcode: str, number: int = 0) -> Callable[[Code], Code]:
    """Returns an edit that drops an instruction: the first with this opcode, the second, ..."""

    def edit(code: Code) -> Code:
        at = -1
        for _ in range(number + 1):
            at = _first(code, lambda x: x.opcode == opcode, at + 1)
        return _replaced(code, at, "s_nop", "0")

    return edit


def _plain_half(code: Code) -> Code:
    at = _first(code, lambda x: x.is_load and _is_half(x))
    return _replaced(code, at, code[at].opcode, code[at].operands.replace(" sc0 sc1", ""))


def _number_not_waited_for(code: Code) -> Code:
    at = _first(code, lambda x: x.opcode == "buffer_inv")
    while not code[at].waits_for_all:
        at -= 1
    return _replaced(code, at, "s_nop", "0")


def _write_back_not_waited_for(code: Code) -> Code:
    """Drops all waits from the write-back to the next store: another one may wait for a load."""
    at = _first(code, lambda x: x.opcode == "buffer_wbl2")
    for i in range(at, _first(code, lambda x: x.is_store, at)):
        if code[i].waits_for_all:
            code = _replaced(code, i, "s_nop", "0")
    return code


def _waited_one_by_one(code: Code) -> Code:
    for at in reversed([i for i, x in enumerate(code) if x.is_load and _is_half(x)]):
        code = _inserted(code, at, "s_waitcnt", "vmcnt(0)")
    return code


def _number_stored_first(code: Code) -> Code:
    at = _first(code, lambda x: x.opcode == "buffer_wbl2")
    store = _first(code, lambda x: x.is_store and x.is_system_wide and x.access_bytes == 4)
    moved = code[store]
    return _replaced(_inserted(code, at, moved.opcode, moved.operands), store + 1, "s_nop", "0")


def _parameters_copied(code: Code) -> Code:
    return _inserted(code, 0, "scratch_store_dwordx4", "off, v[0:3], off")


def _spilled(code: Code) -> Code:
    at = _first(code, lambda x: x.is_global)
    return _inserted(code, at + 1, "scratch_store_dwordx4", "off, v[0:3], off")


@dataclasses.dataclass(frozen=True)
class Edit:
    """A defect of machine code, and the rule that reports it."""

    rule: str
    name: str
    edit: Callable[[Code], Code]
    kernel: str = "one_shot"
    callee: str = ""  # part of the name of the function to edit; "": the kernel


EDITS = (
    Edit("stores_across", "plain stores", _with_scope("", lambda x: x.is_store and _is_half(x))),
    Edit("loads_across", "plain loads", _with_scope("", lambda x: x.is_load and _is_half(x))),
    Edit("halves_alike", "plain load of one half", _plain_half),
    Edit(
        "scopes", "stores for this device", _with_scope("sc1", lambda x: x.is_store and _is_half(x))
    ),
    Edit(
        "scopes", "loads for this device", _with_scope("sc1", lambda x: x.is_load and _is_half(x))
    ),
    Edit(
        "scopes", "fence for this device", _with_scope("sc1", lambda x: x.opcode == "buffer_wbl2")
    ),
    Edit(
        "scopes", "acquires for this device", _with_scope("sc1", lambda x: x.opcode == "buffer_inv")
    ),
    Edit("polls_in_flight", "polls waited for one by one", _waited_one_by_one),
    Edit(
        "write_backs_are_waited_for",
        "no wait after the write-back",
        _write_back_not_waited_for,
    ),
    Edit(
        "write_backs_are_waited_for",
        "no wait in the record of a fault",
        _write_back_not_waited_for,
        callee="record_fault",
    ),
    Edit("one_system_fence", "no write-back", _without("buffer_wbl2")),
    Edit("one_system_fence", "number stored before the fence", _number_stored_first),
    Edit("numbers_are_acquired", "caches not emptied", _without("buffer_inv")),
    Edit("numbers_are_acquired", "number not waited for", _number_not_waited_for),
    Edit("numbers_are_acquired", "no barrier at the head", _without("s_barrier")),
    Edit("head", "parameters copied", _parameters_copied),
    Edit("spills", "register spilled", _spilled),
    Edit(
        "signed_zeros",
        "product rounded after +0 is added",
        lambda code: _inserted(code, 9, "v_fma_mixlo_f16", "v1, v2, v3, 0 op_sel_hi:[0,0,0]"),
        kernel="two_shot",
    ),
    Edit("fault_record", "status not fenced", _without("buffer_wbl2"), callee="record_fault"),
    Edit(
        "stays_local",
        "store with a scope",
        lambda code: _inserted(code, 9, "global_store_dword", "v0, v1, s[0:1] sc0 sc1"),
        kernel="local",
    ),
)


@dataclasses.dataclass(frozen=True)
class Fault:
    """A switch in the sources, and the rule that reports it."""

    rule: str
    name: str
    kernel: str = "one_shot"


FAULTS = (
    Fault("scopes", "device_scope"),
    Fault("write_backs_are_waited_for", "write_back_not_waited_for"),
    Fault("polls_in_flight", "others_polled_one_by_one"),
    Fault("head", "parameters_copied"),
    Fault("stores_across", "sums_relayed_plainly", "two_shot"),
    Fault("one_system_fence", "no_fence"),
    Fault("one_system_fence", "fence_after_number"),
    Fault("one_system_fence", "fence_on_the_data_path"),
    Fault("numbers_are_acquired", "number_read_relaxed"),
    Fault("numbers_are_acquired", "large_block_does_not_wait"),
    Fault("fault_record", "fault_status_not_fenced"),
)


def complaints_of(functions: list[Function], variant: Variant) -> list[str]:
    """Returns all complaints about the kernel of a code object and the functions that it calls."""
    found = []
    for function in functions:
        if function.needs is None:
            found += complaints_of_callee(function)
        else:
            found += complaints(function, variant)
    return found


def edited(functions: list[Function], edit: Edit) -> list[Function]:
    """Returns the functions of a code object with a defect."""

    def is_meant(function: Function) -> bool:
        return edit.callee in function.name if edit.callee else function.needs is not None

    return [
        dataclasses.replace(found, instructions=edit.edit(found.instructions))
        if is_meant(found)
        else found
        for found in functions
    ]


def compiled(
    folder: pathlib.Path, variant: Variant, architecture: str, fault: str = ""
) -> list[Function]:
    """Compiles one kernel, optionally with a fault, and returns its code object's functions."""
    unit: Unit = unit_of(variant)
    # A fault may leave a name unused.
    flags = [f"-DALLNORM_FAULT_{fault}=1", "-Wno-error"] if fault else []
    compile_unit(unit, architecture, folder, flags)
    return disassemble(unit.at(architecture, folder))
