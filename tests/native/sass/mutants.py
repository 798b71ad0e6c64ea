"""Defects of the kernel sources that the rules must report, and how to compile one.

Each leaves the results of a run on one machine as they are, or wrong once in a million calls: no
comparison of bits finds it.
"""

from __future__ import annotations

import dataclasses
import pathlib
import shutil

from native.kernel_edits import CLEAR_ONE_SHOT

from .disassembly import Kernel, disassemble, output_of
from .kernels import variant_of
from .rules import complaints

# Kernels that a mutant is compiled for, by what their sources include.
_ONE_SHOT = """
#include "gpu/formats.cuh"
#include "gpu/fused.cuh"
#include "gpu/sources/dense_rows.cuh"
#include "gpu/transports/one_shot.cuh"
template __global__ void
allnorm::fused_kernel<allnorm::Bfloat16, allnorm::DenseRows, 4, allnorm::OneShot,
                      allnorm::Grid::kSparse, allnorm::Plain, false>(
    const __grid_constant__ allnorm::FusedParams);
"""
_TWO_SHOT = """
#include "gpu/formats.cuh"
#include "gpu/fused.cuh"
#include "gpu/sources/dense_rows.cuh"
#include "gpu/transports/two_shot.cuh"
template __global__ void
allnorm::fused_kernel<allnorm::Float16, allnorm::DenseRows, 2, allnorm::TwoShot,
                      allnorm::Grid::kSparse, allnorm::E4m3, false>(
    const __grid_constant__ allnorm::FusedParams);
"""
_OWNED = """
#include "gpu/formats.cuh"
#include "gpu/owned_rows.cuh"
#include "gpu/sources/dense_rows.cuh"
template __global__ void
allnorm::owned_rows_kernel<allnorm::Bfloat16, allnorm::DenseRows, 2, allnorm::Owned::kFinished,
                           false, allnorm::E4m3, false>(
    const __grid_constant__ allnorm::OwnedRowsParams);
"""
_ANY_QUANTIZED = """
#include "gpu/formats.cuh"
#include "gpu/fused.cuh"
#include "gpu/sources/expert_rows.cuh"
#include "gpu/transports/one_shot.cuh"
template __global__ void
allnorm::fused_kernel<allnorm::Bfloat16, allnorm::ExpertRows, 2, allnorm::OneShot,
                      allnorm::Grid::kSparse, allnorm::AnyQuantized, true>(
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
    """A defect: `edits` of one file below csrc/gpu, each text standing there exactly once."""

    name: str
    rule: str  # what reports it
    file: str
    edits: tuple[tuple[str, str], ...]
    source: str = "one_shot"


def _mutant(name: str, rule: str, file: str, *edits: str, source: str = "one_shot") -> Mutant:
    return Mutant(name, rule, file, tuple(zip(edits[::2], edits[1::2], strict=True)), source)


_MEMORY = "cuda/memory.cuh"
_PUSH = "st.relaxed.sys.global.v4.u32"
_POLL = "ld.relaxed.sys.global.v4.u32"
_POLL_CALL = '  Pack pack;\n  asm volatile("ld.relaxed.sys.global.v4.u32'
_PUSH_CALL = '  asm volatile("st.relaxed.sys.global.v4.u32'
_FENCE_CALL = "      fence_acq_rel_sys();\n"
_NUMBER_STORE = (
    "      store_relaxed_sys(params_.workspace[threadIdx.x % 32] + "
    "PushControl::released(params_.rank),\n                        op_);\n"
)
_EXCHANGE = "  Exchange<kWorldSize> exchange(params);\n"
_FAULT_FENCE = "    __threadfence_system();\n"
_FAULT_STATUS = "    fault->status = status;\n"

MUTANTS = (
    # Scope and width of what crosses the link.
    _mutant("push at gpu scope", "pushes", _MEMORY, _PUSH, "st.relaxed.gpu.global.v4.u32"),
    _mutant("push by a plain store", "pushes", _MEMORY, _PUSH, "st.global.v4.u32"),
    _mutant(
        *("push in two halves", "pushes", _MEMORY, _PUSH_CALL),
        "  const auto* half = reinterpret_cast<const uint64_t*>(&pack);\n"
        '  asm volatile("st.relaxed.sys.global.u64 [%0], %1; st.relaxed.sys.global.u64 [%0+8], %2;"'
        ' ::"l"(address), "l"(half[0]), "l"(half[1]) : "memory");\n  return;\n' + _PUSH_CALL,
    ),
    _mutant("poll at gpu scope", "polls", _MEMORY, _POLL, "ld.relaxed.gpu.global.v4.u32"),
    _mutant("poll by a plain load", "polls", _MEMORY, _POLL, "ld.global.v4.u32"),
    _mutant(
        *("poll in two halves", "polls", _MEMORY, _POLL_CALL),
        "  uint64_t half[2];\n"
        '  asm volatile("ld.relaxed.sys.global.u64 %0, [%2]; ld.relaxed.sys.global.u64 %1, [%2+8];"'
        ' : "=l"(half[0]), "=l"(half[1]) : "l"(address) : "memory");\n'
        "  return {uint32_t(half[0]), uint32_t(half[0] >> 32), uint32_t(half[1]),\n"
        "          uint32_t(half[1] >> 32)};\n" + _POLL_CALL,
    ),
    _mutant(
        *("peers polled one after the other", "polls_in_flight", "slots.cuh"),
        "        partial[source] = load_relaxed_sys("
        "slot + PushLayout::other(place, source) * stride);\n",
        "        partial[source] = load_relaxed_sys("
        "slot + PushLayout::other(place, source) * stride);\n"
        "        if (!arrived(partial[source])) return false;\n",
    ),
    *(
        _mutant(f"{what} by a plain access", rule, _MEMORY, f"{verb} ", f"{weak} ")
        for what, rule, verb, weak in (
            ("tags announced", "pushes", "st.relaxed.sys.global.u64", "st.global.u64"),
            ("tags read", "polls", "ld.relaxed.sys.global.u64", "ld.global.u64"),
            ("slots handed back", "pushes", "st.relaxed.sys.global.u32", "st.global.u32"),
            ("numbers read", "polls", "ld.acquire.sys.global.u32", "ld.global.u32"),
        )
    ),
    _mutant(
        *("sums relayed by a plain store", "pushes", "transports/two_shot.cuh"),
        "store_relaxed_sys(exchange_.slots(q) + sum_offset, sum)",
        "store_pack(exchange_.slots(q) + sum_offset, sum)",
        source="two_shot",
    ),
    _mutant(
        *("scales pushed by a plain store", "pushes", "transports/row_owners.cuh"),
        "store_relaxed_sys(finished_at(q, local) + layout_.finished_scale(i), scale)",
        "store_u32(finished_at(q, local) + layout_.finished_scale(i), scale)",
        source="owned",
    ),
    _mutant(
        *("scales polled by a plain load", "polls", "transports/row_owners.cuh"),
        "scale = load_relaxed_sys_u32(slot)",
        "scale = load_u32(slot)",
        source="owned",
    ),
    _mutant(
        *("counters advanced by an atomic", "scopes", "exchange.cuh"),
        "copies()[copy] = next;",
        "atomicExch(reinterpret_cast<unsigned long long*>(copies() + copy), next);",
    ),
    # The fence that hands slots back.
    _mutant(
        *("fence at gpu scope", "one_system_fence", _MEMORY),
        *("fence.acq_rel.sys;", "fence.acq_rel.gpu;"),
    ),
    _mutant("no fence", "one_system_fence", "exchange.cuh", _FENCE_CALL, ""),
    _mutant(
        *("fence behind the store", "one_system_fence", "exchange.cuh"),
        *(_FENCE_CALL, "", _NUMBER_STORE, _NUMBER_STORE + _FENCE_CALL),
    ),
    _mutant(
        *("fence before the preceding grid is waited for", "one_system_fence", "exchange.cuh"),
        *(_FENCE_CALL, "", "    wait_for_preceding_grid();\n"),
        "    if (threadIdx.x == 32) fence_acq_rel_sys();\n    wait_for_preceding_grid();\n",
    ),
    _mutant(
        *("a number handed back and not acquired", "numbers_are_acquired", "exchange.cuh"),
        *("load_acquire_sys_u32(number)", "load_relaxed_sys_u32(number)"),
    ),
    _mutant(
        *("fence on one of two paths", "one_system_fence", "exchange.cuh", _FENCE_CALL),
        "      if (params_.late_trigger) fence_acq_rel_sys();\n",
    ),
    _mutant(
        *("a fence on the data path too", "one_system_fence", "transports/one_shot.cuh"),
        CLEAR_ONE_SHOT,
        CLEAR_ONE_SHOT + "    fence_acq_rel_sys();\n",
    ),
    _mutant(
        *("an acquire at gpu scope", "numbers_are_acquired", _MEMORY),
        *("ld.acquire.sys.global.u32", "ld.acquire.gpu.global.u32"),
    ),
    _mutant(
        *("no barrier behind the acquire", "numbers_are_acquired", "exchange.cuh"),
        "    // nobody waits for it for ever.\n    __syncthreads();\n",
        "    // nobody waits for it for ever.\n",
    ),
    _mutant(
        *("a fence of all orders", "no_other_barrier", _MEMORY),
        *("fence.acq_rel.sys;", "fence.sc.sys;"),
    ),
    _mutant(
        *("a barrier of the cluster for each row", "no_other_barrier", "row_exchange.cuh"),
        "      wait_barrier(shared_ + arrived(buffer), parity);\n",
        "      wait_barrier(shared_ + arrived(buffer), parity);\n"
        "      arrive_in_cluster();\n      wait_for_cluster();\n",
    ),
    # Programmatic dependent launch.
    _mutant(
        *("no wait for the preceding grid", "dependent_launch", _MEMORY),
        *("griddepcontrol.wait;", ""),
    ),
    _mutant(
        *("the counter read before the wait", "dependent_launch", "exchange.cuh"),
        *("    wait_for_preceding_grid();\n", ""),
        *(
            "    op_ = static_cast<uint32_t>(counter);\n",
            "    op_ = static_cast<uint32_t>(counter);\n    wait_for_preceding_grid();\n",
        ),
    ),
    _mutant(
        *("input read before the wait", "dependent_launch", "fused.cuh", _EXCHANGE),
        "  const Pack early = load_pack(params.x.at(0, pack));\n" + _EXCHANGE,
        "  const Pack own = live && first >= 0 && first < end ? source.load(first) : Pack{};\n",
        "  const Pack own = early;\n",
    ),
    _mutant(
        *("dependents let in before the wait", "dependent_launch", "fused.cuh", _EXCHANGE),
        "  trigger_next_grid();\n" + _EXCHANGE,
    ),
    _mutant(
        *("dependents never let in", "dependent_launch", _MEMORY),
        *("griddepcontrol.launch_dependents;", ""),
    ),
    # The rest.
    _mutant(
        *("a fault's status not fenced", "fault_record", "exchange.cuh", _FAULT_FENCE, ""),
    ),
    _mutant(
        *("a fault's fence at gpu scope", "fault_record", "exchange.cuh", _FAULT_FENCE),
        "    __threadfence();\n",
    ),
    _mutant(
        *("a fault's status stored early", "fault_record", "exchange.cuh"),
        _FAULT_FENCE + _FAULT_STATUS,
        _FAULT_STATUS + _FAULT_FENCE,
    ),
    _mutant(
        *("registers spilled", "frame", "fused.cuh"),
        "kGrid == Grid::kDense && !Source<T>::kPrefetches ? 2 : 1)",
        "3)",
    ),
)


def mutate(csrc: pathlib.Path, mutant: Mutant) -> None:
    """Puts the defect into a copy of the sources."""
    path = csrc / "gpu" / mutant.file
    text = path.read_text()
    for old, new in mutant.edits:
        if text.count(old) != 1:
            raise ValueError(
                f"{mutant.name}: {mutant.file} has {text.count(old)} times {old!r}; expected once: "
                "adapt the mutant to the source"
            )
        text = text.replace(old, new)
    path.write_text(text)


def copy_sources(csrc: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """A copy of what kernels are made of."""
    copy = folder / "csrc"
    for part in ("gpu", "protocol"):
        shutil.copytree(csrc / part, copy / part)
    shutil.copy(csrc / "allnorm.h", copy)
    return copy


def compile_kernel(csrc: pathlib.Path, source: str, architecture: str = "sm_90") -> Kernel:
    """The kernel of one of SOURCES, with the flags of cmake/cuda.cmake."""
    unit, cubin = csrc / f"{source}.cu", csrc / f"{source}.cubin"
    unit.write_text(SOURCES[source])
    flags = ("-std=c++20", "-O3", "-DNDEBUG", "-fmad=false", "-diag-suppress=1675")
    flags += (f"-arch={architecture}", f"-I{csrc}", f"-I{csrc}/gpu/cuda", "-cubin")
    output_of("nvcc", *flags, "-o", str(cubin), str(unit))
    (kernel,) = disassemble(cubin)
    return kernel


def found_wrong(csrc: pathlib.Path, source: str) -> list[str]:
    """Complaints about one kernel of the sources in `csrc`."""
    kernel = compile_kernel(csrc, source)
    variant = variant_of(kernel.name)
    assert variant is not None, kernel.name
    return complaints(kernel, variant)
