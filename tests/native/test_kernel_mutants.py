"""Tests that every fault switch in the sources has a test that must report the fault."""

from __future__ import annotations

from native.accesses import CSRC
from native.amd import mutants as of_amd_code
from native.kernel_mutants.table import FAULTS, OF_AMD_CODE, OF_MACHINE_CODE, OF_MODELS
from native.protocol_model import mutants as of_models
from native.sass import mutants as of_machine_code


def test_table_lists_all_fault_switches() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names)
    switched = set()
    for path in CSRC.rglob("*"):
        if path.is_file() and path.name != "fault_switch.h":
            text = "".join(path.read_text().split())
            switched |= {part.split(",")[0] for part in text.split("ALLNORM_FAULT(")[1:]}
    assert switched == {*names, *OF_MODELS, *OF_MACHINE_CODE, *OF_AMD_CODE}


def test_models_and_rules_cover_the_other_faults() -> None:
    assert {mutant.fault for mutant in of_machine_code.MUTANTS} >= set(OF_MACHINE_CODE)
    assert {fault.name for fault in of_amd_code.FAULTS} >= set(OF_AMD_CODE)
    assert {fault for defect in of_models.ALL for fault in defect.faults} >= set(OF_MODELS)
