"""The names and summaries of the commands, for `allnorm --help`, without importing torch.

The commands themselves are in `allnorm.cli`, which imports torch. Their summaries are read from the
source.
"""

from __future__ import annotations

import ast
import importlib.util
import pathlib
from typing import Annotated, Any

import typer

COMMANDS = ("doctor", "verify", "bench", "tune", "e2e", "trace")
SETTINGS: dict[str, Any] = {
    "name": "allnorm",
    "help": "Checks and benchmarks fused all-reduce + residual add + RMSNorm on this machine.",
    "no_args_is_help": True,
    "pretty_exceptions_enable": False,
}
VERSION: dict[str, Any] = {"is_eager": True, "help": "Show the version."}


def program() -> typer.Typer:
    """Returns a program that shows the same overview as `allnorm.cli.app`, but runs nothing."""
    made = typer.Typer(**SETTINGS)
    for name in COMMANDS:
        made.command(name, help=_docstring(name))(_nothing)

    @made.callback()
    def before(version: Annotated[bool, typer.Option("--version", **VERSION)] = False) -> None:
        pass

    return made


def _docstring(command: str) -> str:
    """Returns the docstring of a command's function."""
    spec = importlib.util.find_spec("allnorm")  # does not import the package
    assert spec is not None
    folder = pathlib.Path((spec.submodule_search_locations or [""])[0])
    tree = ast.parse((folder / "cli" / f"{command}.py").read_text(encoding="utf-8"))
    found = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    return ast.get_docstring(found[command]) or ""


def _nothing() -> None:
    """Stands in for a command."""
