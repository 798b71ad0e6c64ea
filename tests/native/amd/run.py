"""Compiles the kernels for AMD GPUs and prints what each needs.

python tests/native/amd/run.py [--arch gfx950] [--only WORD]... [--jobs 2]
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
    """Compiles kernels to build/amd/ARCH and prints registers, spills and memory of each."""
    try:
        chosen = compiler.units(only or ())
        table = Table("arch", "kernel", "VGPRs", "spilled", "SGPRs spilled", "LDS", "scratch", "s")
        for architecture, unit, seconds in compiler.compile_all(
            chosen, arch or compiler.ARCHITECTURES, jobs=jobs
        ):
            for name, needs in compiler.resources_of(unit.at(architecture)).items():
                variant = variant_of(name)
                table.add_row(
                    architecture,
                    " ".join(traits(variant)) if variant else unit.name,
                    *map(str, (needs.vector_registers, needs.vector_spills, needs.scalar_spills)),
                    *map(str, (needs.shared_bytes, needs.scratch_bytes, f"{seconds:.1f}")),
                )
                seconds = 0.0  # of the code object, so only in the line of its first kernel
    except (compiler.ToolMissingError, ValueError) as error:
        sys.exit(str(error))
    Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)
