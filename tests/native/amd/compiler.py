"""Compiles kernels for AMD GPUs to code objects, one per dtype and kind of kernel."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import pathlib
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator

from native.sass.kernels import Variant, all_variants, instantiation, traits

ROOT = pathlib.Path(__file__).resolve().parents[3]
BUILD = ROOT / "build" / "amd"
ARCHITECTURES = ("gfx942", "gfx950")
VERSION = 22  # of clang, lld and llvm
TOOLS = ("clang++", "lld", "llvm-objdump", "llvm-readelf", "llvm-mc")
FLAGS = (
    # For the GPU only; kernels need neither HIP's headers nor its device libraries.
    *("-x", "hip", "--cuda-device-only", "--no-gpu-bundle-output", "-nogpuinc", "-nogpulib"),
    # Results are specified bit for bit: no contraction to fused multiply-add.
    *("-std=c++20", "-O3", "-DNDEBUG", "-ffp-contract=off", "-fno-math-errno"),
    # clang 22 compiles the rounding of a product to float16 to v_fma_mixlo_f16 with +0 as third
    # source, which makes +0 of -0.
    *("-Xclang", "-target-feature", "-Xclang", "-fma-mix-insts"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"),
    # The leaf, and what nvcc has built in.
    *(f"-I{ROOT}/csrc", f"-I{ROOT}/csrc/gpu/hip", "-include", "gpu.h"),
)
PROBE = "probe"


class ToolMissingError(Exception):
    """Raised if a program of LLVM is not installed."""


def tool(name: str) -> str:
    """Returns the path of an LLVM program."""
    found = shutil.which(f"{name}-{VERSION}")
    if found is None:
        raise ToolMissingError(
            f"{name}-{VERSION} is not installed: it comes with Debian's packages clang-{VERSION}, "
            f"lld-{VERSION} and llvm-{VERSION}"
        )
    return found


def require_tools() -> None:
    """Raises ToolMissingError unless all programs of LLVM are installed."""
    for name in TOOLS:
        tool(name)


def output_of(*command: str) -> str:
    """Runs a program and returns its output. If it fails, raises RuntimeError."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return done.stdout


@dataclasses.dataclass(frozen=True)
class Unit:
    """A code object: all chosen kernels of a dtype and a kind, or the probe."""

    name: str
    variants: tuple[Variant, ...] = ()

    @property
    def source(self) -> str:
        """The text of the translation unit."""
        if not self.variants:
            return '#include "gpu/kernels_probe.cu"\n'
        kernels = [f"template __global__ void {instantiation(found)};" for found in self.variants]
        body = ("using enum Grid;", "using enum Owned;", *kernels)
        lines = ('#include "gpu/kernel_table.cuh"', "namespace allnorm {", *body, "}")
        return "\n".join(lines) + "\n"

    def at(self, architecture: str, build: pathlib.Path = BUILD) -> pathlib.Path:
        """Returns the path of the code object."""
        return build / architecture / f"{self.name}.co"


def unit_of(variant: Variant) -> Unit:
    """Returns a code object with a single kernel."""
    return Unit("-".join(traits(variant)), (variant,))


def units(only: Iterable[str] = ()) -> list[Unit]:
    """Returns the code objects to compile.

    Args:
        only: Words that a kernel's name must contain: a dtype (`bfloat16`), a kind (`two_shot`), a
            world size (`x8`; `any`), `basic`, `extended` or
            `dense` (extended without experts), `plain` or `quantized`. Words of the
            same property are alternatives. Without words, all kernels are compiled.

    Raises:
        ValueError: A word is unknown.
    """
    wanted = set(only)
    groups: dict[str, list[Variant]] = {}
    for variant in sorted(all_variants(clusters=False), key=traits):
        chosen = [wanted & values for values in _properties().values()]
        words_of = set(traits(variant))
        if all(not words or words & words_of for words in chosen):
            dtype, kind, *_ = traits(variant)
            groups.setdefault(f"{dtype}-{kind}", []).append(variant)
    known = set().union(*_properties().values()) | {PROBE}
    if unknown := wanted - known:
        raise ValueError(f"{', '.join(sorted(unknown))}: expected {', '.join(sorted(known))}")
    found = [Unit(name, tuple(variants)) for name, variants in groups.items()]
    if not wanted:
        return [*found, Unit(PROBE)]
    return [Unit(PROBE)] if wanted == {PROBE} else found


@functools.cache
def _properties() -> dict[int, set[str]]:
    """Returns the values of each property of a kernel."""
    found: dict[int, set[str]] = {}
    for variant in all_variants(clusters=False):
        for place, value in enumerate(traits(variant)):
            found.setdefault(place, set()).add(value)
    return found


def compile_unit(
    unit: Unit, architecture: str, build: pathlib.Path = BUILD, flags: Iterable[str] = ()
) -> float:
    """Compiles a code object. Returns the time in seconds.

    Raises:
        RuntimeError: The compiler reported an error or a warning.
        ToolMissingError: The compiler is not installed.
    """
    target = unit.at(architecture, build)
    target.parent.mkdir(parents=True, exist_ok=True)
    source = target.with_suffix(".hip")
    source.write_text(unit.source)
    begin = time.monotonic()
    command = (tool("clang++"), f"--offload-arch={architecture}", *FLAGS, *flags)
    output_of(*command, "-o", str(target), str(source))
    return time.monotonic() - begin


@dataclasses.dataclass(frozen=True)
class Resources:
    """The registers and memory that a kernel needs, as stated in its code object."""

    name: str
    vector_registers: int
    vector_spills: int  # registers that are kept in scratch memory at times
    scalar_spills: int  # scalar registers that are kept in vector registers at times
    shared_bytes: int
    scratch_bytes: int  # per thread: spilled vector registers, arrays, and frames of calls


def resources_of(code_object: pathlib.Path) -> dict[str, Resources]:
    """Reads what each kernel of a code object needs, keyed by the kernel's symbol."""
    notes = output_of(tool("llvm-readelf"), "--notes", str(code_object))
    found = {}
    for entry in re.split(r"\n  - (?=\.)", notes)[1:]:
        values = dict(re.findall(r"^ *(?:- )?\.(\w+): +(\S+)$", entry, re.MULTILINE))
        # Arguments have a name as well; the kernel's own is the one of its symbol.
        name = values["symbol"].strip("'").removesuffix(".kd")
        found[name] = Resources(
            name,
            vector_registers=int(values["vgpr_count"]),
            vector_spills=int(values["vgpr_spill_count"]),
            scalar_spills=int(values["sgpr_spill_count"]),
            shared_bytes=int(values["group_segment_fixed_size"]),
            scratch_bytes=int(values["private_segment_fixed_size"]),
        )
    return found


def compile_all(
    chosen: Iterable[Unit], architectures: Iterable[str], build: pathlib.Path = BUILD, jobs: int = 2
) -> Iterator[tuple[str, Unit, float]]:
    """Compiles code objects in parallel and yields each with its architecture and time."""
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        started = {
            pool.submit(compile_unit, unit, architecture, build): (architecture, unit)
            for architecture in architectures
            for unit in chosen
        }
        for done in concurrent.futures.as_completed(started):
            yield (*started[done], done.result())
