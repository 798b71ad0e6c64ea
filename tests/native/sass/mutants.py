"""Defects that the rules must report, and how to compile a kernel with one.

Each leaves the results of a run on one machine as they are, or wrong once in a million calls: no
comparison of bits finds it. A defect is another order or scope of a verb in the table of accesses,
or a switch of the sources (`csrc/protocol/fault_switch.h`).
"""

from __future__ import annotations

import dataclasses
import pathlib

from native.accesses import CSRC, HEADER, header_of, read_table

from .disassembly import Kernel, disassemble, output_of
from .kernels import variant_of
from .rules import complaints

# Kernels that a mutant is compiled for, by what their sources include.
_ONE_SHOT = """
#include "gpu/kernel_table.cuh"
template __global__ void
allnorm::fused_kernel<allnorm::FusedKernel<
    allnorm::Bfloat16, 4, allnorm::DenseRows, allnorm::OneShot, allnorm::OneRowAhead,
    allnorm::Grid::kSparse, allnorm::kBasic, allnorm::Plain>>(
    const __grid_constant__ allnorm::FusedParams);
"""
_TWO_SHOT = """
#include "gpu/kernel_table.cuh"
template __global__ void
allnorm::fused_kernel<allnorm::FusedKernel<
    allnorm::Float16, 2, allnorm::DenseRows, allnorm::TwoShot, allnorm::Relayed,
    allnorm::Grid::kSparse, allnorm::kBasic, allnorm::E4m3>>(
    const __grid_constant__ allnorm::FusedParams);
"""
_OWNED = """
#include "gpu/kernel_table.cuh"
template __global__ void
allnorm::owned_rows_kernel<allnorm::OwnedKernel<
    allnorm::Bfloat16, 2, allnorm::DenseRows, allnorm::Owned::kFinished, false,
    allnorm::kBasic, allnorm::E4m3>>(
    const __grid_constant__ allnorm::OwnedRowsParams);
"""
_ANY_QUANTIZED = """
#include "gpu/kernel_table.cuh"
template __global__ void
allnorm::fused_kernel<allnorm::FusedKernel<
    allnorm::Bfloat16, 2, allnorm::ExpertRows, allnorm::OneShot, allnorm::OneRowAhead,
    allnorm::Grid::kSparse, allnorm::kExtended, allnorm::AnyQuantized>>(
    const __grid_constant__ allnorm::FusedParams);
"""
SOURCES = {
    "one_shot": _ONE_SHOT,
    "two_shot": _TWO_SHOT,
    "owned": _OWNED,
    "any_quantized": _ANY_QUANTIZED,
}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A defect, and the rule that reports it of the kernel of one of SOURCES.

    Attributes:
        rule: its name.
        fault: a switch of the sources, or "".
        verb: (verb, order) of the table, or ().
        source: the kernel.
    """

    rule: str
    fault: str = ""
    verb: tuple[str, ...] = ()
    source: str = "one_shot"

    @property
    def name(self) -> str:
        return self.fault or " ".join(self.verb)


NO_DEFECT = Mutant("")
MUTANTS = (
    # Scope and order of what crosses the link.
    Mutant("pushes", verb=("STORE_PACK", "relaxed.gpu")),
    Mutant("pushes", verb=("STORE_PACK", "weak")),
    Mutant("pushes", verb=("STORE_U64", "weak")),
    Mutant("pushes", verb=("STORE_U32", "weak"), source="owned"),
    Mutant("polls", verb=("LOAD_PACK", "relaxed.gpu")),
    Mutant("polls", verb=("LOAD_PACK", "weak")),
    Mutant("polls", verb=("LOAD_U64", "weak")),
    Mutant("polls", verb=("LOAD_U32", "weak"), source="owned"),
    Mutant("polls", verb=("ACQUIRE_U32", "weak")),
    Mutant("pushes", "sums_relayed_plainly", source="two_shot"),
    Mutant("polls_in_flight", "peers_polled_one_by_one"),
    Mutant("scopes", "counters_advanced_by_atomics"),
    # The fence that hands slots back.
    Mutant("one_system_fence", verb=("FENCE", "acq_rel.gpu")),
    Mutant("one_system_fence", "no_fence"),
    Mutant("one_system_fence", "fence_after_number"),
    Mutant("one_system_fence", "fence_on_the_data_path"),
    Mutant("numbers_are_acquired", "number_read_relaxed"),
    Mutant("numbers_are_acquired", verb=("ACQUIRE_U32", "acquire.gpu")),
    Mutant("numbers_are_acquired", "large_block_does_not_wait"),
    Mutant("no_other_barrier", verb=("FENCE", "sc.sys")),
    Mutant("no_other_barrier", "cluster_meets_for_each_row"),
    # Programmatic dependent launch.
    Mutant("dependent_launch", "grid_not_waited_for"),
    Mutant("dependent_launch", "counter_read_early"),
    Mutant("dependent_launch", "input_read_early"),
    Mutant("dependent_launch", "dependents_let_in_early"),
    # The rest.
    Mutant("fault_record", "fault_status_not_fenced"),
    Mutant("frame", "registers_spilled"),
)


def compile_kernel(
    folder: pathlib.Path, source: str, architecture: str = "sm_90", mutant: Mutant = NO_DEFECT
) -> Kernel:
    """The kernel of one of SOURCES, with the flags of cmake/cuda.cmake; files go to `folder`."""
    unit, cubin = folder / f"{source}.cu", folder / f"{source}.cubin"
    unit.write_text(SOURCES[source])
    flags = ("-std=c++20", "-O3", "-DNDEBUG", "-fmad=false", "-diag-suppress=1675")
    flags += (f"-arch={architecture}", f"-I{folder}", f"-I{CSRC}", f"-I{CSRC}/gpu/cuda", "-cubin")
    if mutant.fault:
        flags += (f"-DALLNORM_FAULT_{mutant.fault}",)
    if mutant.verb:
        header = folder / HEADER  # found before that of the tree
        header.parent.mkdir(parents=True)
        header.write_text(header_of(read_table().with_verb(*mutant.verb)))
    output_of("nvcc", *flags, "-o", str(cubin), str(unit))
    (kernel,) = disassemble(cubin)
    return kernel


def found_wrong(folder: pathlib.Path, source: str, mutant: Mutant = NO_DEFECT) -> list[str]:
    """Complaints about one kernel, with a defect or without."""
    kernel = compile_kernel(folder, source, mutant=mutant)
    variant = variant_of(kernel.name)
    assert variant is not None, kernel.name
    return complaints(kernel, variant)
