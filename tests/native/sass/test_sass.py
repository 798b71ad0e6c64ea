"""Tests that the CUDA kernels' machine code follows the rules, and that rules report defects."""

from __future__ import annotations

import pathlib
import shutil

import pytest

import allnorm

from . import mutants
from .disassembly import Kernel, ToolMissingError, disassemble_library, tool
from .kernels import all_variants, variant_of
from .rules import EXCHANGE_RULES, complaints

ARCHITECTURE = "sm_90"
CHEAPEST = "FENCE acq_rel.gpu"
PROBE = "probe_peers"  # csrc/gpu/kernels_probe.cu
# CI tries one defect per rule.
FIRST_OF_RULE = {m.rule: m for m in reversed(mutants.MUTANTS)}.values()


@pytest.fixture(scope="module", autouse=True)
def tools() -> None:
    try:
        for name in ("cuobjdump", "nvdisasm"):
            tool(name)
    except ToolMissingError as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[Kernel]:
    library = pathlib.Path(allnorm.__file__).parent / "lib" / "liballnorm_cuda.so"
    if not library.exists():
        pytest.skip("this installation was built without nvcc")
    found = disassemble_library(library, ARCHITECTURE, tmp_path_factory.mktemp("cubins"))
    if not found:
        pytest.skip(f"the library has no code for {ARCHITECTURE}")
    return found


@pytest.mark.slow
def test_library_has_every_kernel(kernels: list[Kernel]) -> None:
    variants = [variant_of(kernel.name) for kernel in kernels if PROBE not in kernel.name]
    assert len(variants) == len(set(variants))
    assert set(variants) == all_variants()


@pytest.mark.slow
def test_the_probe_stores_one_word_at_system_scope(kernels: list[Kernel]) -> None:
    (probe,) = (kernel for kernel in kernels if PROBE in kernel.name)
    stores = [found for found in probe.body if found.is_store]
    assert [(found.access_bytes, found.is_system_wide) for found in stores] == [(4, True)]


@pytest.mark.slow
def test_every_kernel_follows_the_rules(kernels: list[Kernel]) -> None:
    wrong = {}
    for kernel in kernels:
        variant = variant_of(kernel.name)
        if variant is not None and (found := complaints(kernel, variant)):
            wrong[variant] = found
    assert wrong == {}


@pytest.fixture(scope="module")
def compiler() -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on this machine")


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("source", mutants.SOURCES)
def test_no_complaints_without_a_defect(
    compiler: None, source: str, tmp_path: pathlib.Path
) -> None:
    assert mutants.found_wrong(tmp_path, source) == []


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_90", "sm_100f", "sm_120f"])
def test_conversion_to_e2m1_is_an_instruction(
    compiler: None, architecture: str, tmp_path: pathlib.Path
) -> None:
    """Tests the conversion in a kernel for few tokens, which must not spill."""
    kernel = mutants.compile_kernel(tmp_path, "any_quantized", architecture)
    converts = [found for found in kernel.instructions if "E2M1" in found.parts]
    assert len(converts) == (0 if architecture == "sm_90" else 4)  # each converts two elements
    assert kernel.frame_bytes == 0


def marks_of(mutant: mutants.Mutant) -> list[pytest.MarkDecorator]:
    if mutant.name == CHEAPEST:
        return []
    return [pytest.mark.slow if mutant in FIRST_OF_RULE else pytest.mark.long]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "mutant", [pytest.param(m, id=m.name, marks=marks_of(m)) for m in mutants.MUTANTS]
)
def test_defect_is_reported(compiler: None, mutant: mutants.Mutant, tmp_path: pathlib.Path) -> None:
    found = mutants.found_wrong(tmp_path, mutant.source, mutant)
    assert mutant.rule in {text.partition(":")[0] for text in found}, found


def test_every_rule_has_a_mutant() -> None:
    assert {m.rule for m in mutants.MUTANTS} == {rule.__name__ for rule in EXCHANGE_RULES}
