"""Lists defects that the rules must report, and compiles kernels with a defect.

On one machine, results stay correct or are wrong once in a million calls, so comparing results does
not find these defects. A defect is a different order or scope of a verb in the access table, or a
switch in the sources (`csrc/protocol/fault_switch.h`).
"""

from __future__ import annotations

import dataclasses
import pathlib

from native.accesses import CSRC, HEADER, header_of, read_table

from .disassembly import Kernel, disassemble, output_of
from .kernels import variant_of
from .rules import complaints

# The kernels that are compiled with a defect.
SOURCES = {
    "one_shot": "fused_kernel<FusedKernel<Bfloat16, 4, DenseRows, OneShot, OneRowAhead, "
    "Grid::kSparse, kBasic, Plain>>(const __grid_constant__ FusedParams)",
    "two_shot": "fused_kernel<FusedKernel<Float16, 2, DenseRows, TwoShot, Relayed, "
    "Grid::kSparse, kBasic, E4m3>>(const __grid_constant__ FusedParams)",
    "owned": "owned_rows_kernel<OwnedKernel<Bfloat16, 2, DenseRows, Owned::kFinished, false, "
    "kBasic, E4m3>>(const __grid_constant__ OwnedRowsParams)",
    "any_quantized": "fused_kernel<FusedKernel<Bfloat16, 2, ExpertRows, OneShot, OneRowAhead, "
    "Grid::kSparse, kExtended, AnyQuantized>>(const __grid_constant__ FusedParams)",
}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A defect, and the rule that reports it.

    Attributes:
        rule: The name of the rule.
        fault: A switch in the sources, or "".
        verb: A verb from the access table and its wrong order, or ().
        source: The kernel to compile, a key of SOURCES.
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
    # The scope and order of accesses across the link.
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
    # The fence before slots are returned.
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
    # Other defects.
    Mutant("fault_record", "fault_status_not_fenced"),
    Mutant("frame", "registers_spilled"),
)


def compile_kernel(
    folder: pathlib.Path, source: str, architecture: str = "sm_90", mutant: Mutant = NO_DEFECT
) -> Kernel:
    """Compiles a kernel from SOURCES in `folder`, with the flags from cmake/cuda.cmake."""
    unit, cubin = folder / f"{source}.cu", folder / f"{source}.cubin"
    kernel = f"namespace allnorm {{ template __global__ void {SOURCES[source]}; }}"
    unit.write_text(f'#include "gpu/kernel_table.cuh"\n{kernel}\n')
    flags = ("-std=c++20", "-O3", "-DNDEBUG", "-fmad=false", "-diag-suppress=1675")
    flags += (f"-arch={architecture}", f"-I{folder}", f"-I{CSRC}", f"-I{CSRC}/gpu/cuda", "-cubin")
    if mutant.fault:
        flags += (f"-DALLNORM_FAULT_{mutant.fault}",)
    if mutant.verb:
        header = folder / HEADER  # the compiler finds this header before the one in csrc
        header.parent.mkdir(parents=True)
        header.write_text(header_of(read_table().with_verb(*mutant.verb)))
    output_of("nvcc", *flags, "-o", str(cubin), str(unit))
    (found,) = disassemble(cubin)
    return found


def found_wrong(folder: pathlib.Path, source: str, mutant: Mutant = NO_DEFECT) -> list[str]:
    """Returns the complaints about a kernel from SOURCES, compiled with or without a defect."""
    kernel = compile_kernel(folder, source, mutant=mutant)
    variant = variant_of(kernel.name)
    assert variant is not None, kernel.name
    return complaints(kernel, variant)
