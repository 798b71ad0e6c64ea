"""Tests that kernels for AMD GPUs follow the rules, and that rules report defects.

CI compiles a dozen kernels; `make amd` compiles and checks all of them.
"""

from __future__ import annotations

import concurrent.futures
import pathlib

import pytest

from native.sass.kernels import Variant, all_variants, traits

from . import mutants
from .compiler import ARCHITECTURES, PROBE, ToolMissingError, Unit, compile_unit, require_tools
from .disassembly import Function, disassemble
from .rules import EXCHANGE_RULES, LOCAL_RULES

# Together they have every kind of kernel, world size, dtype and format.
COMPILED = (
    ("gfx950", Variant("one_shot", "Bfloat16", 8, True)),
    ("gfx942", Variant("one_shot", "Float16", 0, False)),
    ("gfx950", Variant("one_shot_dense", "Float16", 4, True)),
    ("gfx942", Variant("two_shot", "Bfloat16", 8, False)),
    ("gfx950", Variant("owned_sum", "Bfloat16", 4, False)),
    ("gfx942", Variant("owned_sum_few", "Float32", 2, False)),
    ("gfx950", Variant("owned_finished", "Bfloat16", 2, True)),
    ("gfx942", Variant("owned_given", "Float32", 0, False)),
    ("gfx942", Variant("slices", "Bfloat16", 0, False)),
    ("gfx950", Variant("local_slices", "Float32", 1, False)),
    ("gfx942", Variant("streams_one_shot", "Bfloat16", 0, False, "kExperts")),
    ("gfx950", Variant("streams_one_shot_dense", "Float16", 2, False)),
    ("gfx942", Variant("streams_two_shot", "Float32", 2, False)),
    ("gfx950", Variant("local_streams", "Bfloat16", 1, False)),
    ("gfx942", Variant("local_input", "Bfloat16", 1, False)),
    ("gfx950", Variant("local_input_any", "Float32", 1, False)),
    ("gfx942", Variant("local_any", "Float32", 1, False)),
    ("gfx950", Variant("local_aligned", "Bfloat16", 1, True)),
    *(("gfx942", variant) for variant in mutants.KERNELS.values()),
)
# CI tries these faults; the long run tries all.
QUICK_FAULTS = ("write_back_not_waited_for", "others_polled_one_by_one", "parameters_copied")


@pytest.fixture(scope="module", autouse=True)
def tools() -> None:
    try:
        require_tools()
    except ToolMissingError as missing:
        pytest.skip(str(missing))


Compiled = dict[tuple[str, Variant], list[Function]]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    folder = tmp_path_factory.mktemp("code_objects")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = {
            (architecture, variant): pool.submit(mutants.compiled, folder, variant, architecture)
            for architecture, variant in COMPILED
        }
        return {key: functions.result() for key, functions in found.items()}


def test_kernels_of_ci_have_every_kind() -> None:
    variants = {variant for _, variant in COMPILED}
    narrow = {v for v in all_variants(clusters=False) if not v.is_wide}
    assert variants <= narrow
    assert {v.kind for v in variants} == {v.kind for v in narrow}
    assert {architecture for architecture, _ in COMPILED} == set(ARCHITECTURES)


@pytest.mark.slow
def test_every_kernel_follows_the_rules(compiled: Compiled) -> None:
    wrong = {
        (architecture, *traits(variant)): found
        for (architecture, variant), functions in compiled.items()
        if (found := mutants.complaints_of(functions, variant))
    }
    assert wrong == {}


@pytest.mark.slow
@pytest.mark.parametrize("edit", [pytest.param(e, id=e.name) for e in mutants.EDITS])
def test_edited_code_is_reported(compiled: Compiled, edit: mutants.Edit) -> None:
    variant = mutants.KERNELS[edit.kernel]
    functions = mutants.edited(compiled["gfx942", variant], edit)
    found = mutants.complaints_of(functions, variant)
    assert edit.rule in {text.partition(":")[0] for text in found}, found


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(
            fault,
            id=fault.name,
            marks=pytest.mark.slow if fault.name in QUICK_FAULTS else pytest.mark.long,
        )
        for fault in mutants.FAULTS
    ],
)
def test_fault_is_reported(fault: mutants.Fault, tmp_path: pathlib.Path) -> None:
    variant = mutants.KERNELS[fault.kernel]
    functions = mutants.compiled(tmp_path, variant, "gfx950", fault.name)
    found = mutants.complaints_of(functions, variant)
    assert fault.rule in {text.partition(":")[0] for text in found}, found


def test_every_rule_has_a_mutant() -> None:
    rules = {rule.__name__ for rule in (*EXCHANGE_RULES, *LOCAL_RULES)} | {"fault_record"}
    assert {edit.rule for edit in mutants.EDITS} == rules


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_probe_stores_one_word_with_system_scope(
    architecture: str, tmp_path: pathlib.Path
) -> None:
    unit = Unit(PROBE)
    compile_unit(unit, architecture, tmp_path)
    (probe,) = disassemble(unit.at(architecture, tmp_path))
    stores = [found for found in probe.instructions if found.is_store]
    assert [(found.access_bytes, found.is_system_wide) for found in stores] == [(4, True)]
    assert probe.needs is not None
    assert probe.needs.scratch_bytes == 0
