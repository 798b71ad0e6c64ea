"""Compiles the kernels for AMD GPUs, prints what each needs, and checks their machine code.

python tests/native/amd/run.py [--arch gfx950]... [--only WORD]... [--jobs 2]
"""

from __future__ import annotations

import pathlib
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
from native.amd import compiler
from native.amd.disassembly import disassemble
from native.amd.rules import complaints, complaints_of_callee
from native.sass.kernels import traits, variant_of


def main(
    arch: Annotated[
        list[str] | None, typer.Option(help="architecture; several are allowed; default: all")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="dtype, kind, world size (x8, any), basic, plain, ...")
    ] = None,
    jobs: Annotated[int, typer.Option(help="compilers that run at once")] = 2,
) -> None:
    """Compiles kernels to build/amd/ARCH and checks them."""
    table = Table("arch", "kernel", "VGPRs", "spilled", "SGPRs spilled", "LDS", "scratch", "s")
    wrong: list[str] = []
    kernels = 0
    try:
        chosen = compiler.units(only or ())
        compiled = compiler.compile_all(chosen, arch or compiler.ARCHITECTURES, jobs=jobs)
        for architecture, unit, seconds in compiled:
            time = f"{seconds:.1f}"  # of the code object, in the line of its first kernel
            for function in disassemble(unit.at(architecture)):
                needs, variant = function.needs, variant_of(function.name)
                name = " ".join(traits(variant)) if variant else unit.name
                if variant is not None:
                    found = complaints(function, variant)
                else:
                    found = complaints_of_callee(function)
                wrong += [f"{architecture} {name}: {text}" for text in found]
                if needs is None:  # a function that kernels call
                    continue
                table.add_row(
                    *(architecture, name, str(needs.vector_registers), str(needs.vector_spills)),
                    *map(str, (needs.scalar_spills, needs.shared_bytes, needs.scratch_bytes)),
                    time,
                )
                time = ""
                kernels += 1
    except (compiler.ToolMissingError, ValueError) as error:
        sys.exit(str(error))
    Console(width=120).print(table)
    print(*wrong, sep="\n")
    print(f"{kernels} kernels, {len(wrong)} violations of the rules")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    typer.run(main)
