"""Checks that tests' time limits only guard against hangs, and so suit slow machines."""

from __future__ import annotations

import ast
import pathlib

import pytest
from limits import HANG_SECONDS

TESTS = pathlib.Path(__file__).parent.parent
STARTERS = ("run_ranks", "RankPool", "communicate", "check_output")


def _starts_processes(function: ast.expr) -> bool:
    name = ast.unparse(function)
    return name == "subprocess.run" or name.split(".")[-1] in STARTERS


def short_limits(source: str) -> list[str]:
    """Returns the calls that wait less than HANG_SECONDS for processes."""
    return [
        f"line {node.lineno}: {ast.unparse(node)[:60]}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and _starts_processes(node.func)
        for keyword in node.keywords
        if keyword.arg == "timeout"
        and isinstance(keyword.value, ast.Constant)
        and keyword.value.value < HANG_SECONDS
    ]


@pytest.mark.parametrize("path", sorted(TESTS.rglob("*.py")), ids=lambda path: path.name)
def test_limits_allow_for_slow_machines(path: pathlib.Path) -> None:
    # Tests of RankPool's own time limits need short limits.
    if path.name != "test_spawn.py":
        assert not short_limits(path.read_text())


def test_short_limits_are_found() -> None:
    assert short_limits("subprocess.run(['x'], timeout=120)")
    assert short_limits("allnorm.testing.RankPool(2, 'cpu', timeout=60.0)")
    assert not short_limits(f"run_ranks(f, 2, timeout={HANG_SECONDS})")
