"""Tests `allnorm trace` on unmodified programs."""

from __future__ import annotations

import json
import pathlib
import sys

import pytest
from typer.testing import CliRunner, Result

from allnorm.cli.app import app

from .helpers import unwrapped

PROGRAM = """
import sys
import torch
import torch.distributed as dist
import allnorm

dist.init_process_group("gloo")
comm = allnorm.Communicator(device="cpu")
x, weight = torch.randn(2, 64), torch.ones(64)
for _ in range(3):
    comm.all_reduce_add_rms_norm(x, x, weight, 1e-6)
dist.all_reduce(x)
dist.destroy_process_group()
sys.exit(int(sys.argv[1]))
"""

# `abort` simulates a destructor that aborts.
ABORTS_AT_EXIT = """
import ctypes
import sys
import torch.distributed as dist

libc = ctypes.CDLL(None)
libc.__cxa_atexit(libc.abort, None, None)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
libc.puts(b"written by C")
sys.exit(7)
"""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["trace", *arguments])


@pytest.fixture
def torchrun(tmp_path: pathlib.Path) -> list[str]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    return ["--", *launcher, str(program)]


def test_counts_every_rank(torchrun: list[str], tmp_path: pathlib.Path) -> None:
    found = tmp_path / "trace.jsonl"
    result = run("--require", "0.75", "--json", str(found), *torchrun, "0")
    assert result.exit_code == 0, result.output
    assert "3 of 4 fused (75.0%)" in unwrapped(result.output)
    records = [json.loads(line) for line in found.read_text().splitlines()]
    assert [record["rank"] for record in records] == [0, 1]
    assert all((record["fused"], record["reductions"]) == (3, 4) for record in records)


def test_fails_below_the_required_fraction(torchrun: list[str]) -> None:
    result = run("--require", "0.95", *torchrun, "0")
    assert result.exit_code == 1
    assert "at least --require 0.95" in unwrapped(result.output)


def test_returns_the_exit_code_of_the_program() -> None:
    result = run("--", sys.executable, "-c", "import sys; sys.exit(7)")
    assert result.exit_code == 7
    assert "exit code 7" in unwrapped(result.output)


def test_a_rank_ends_before_static_destructors(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "program.py"
    program.write_text(ABORTS_AT_EXIT)
    result = run("--", str(program))
    assert result.exit_code == 7, result.output
    assert "written by C" in capfd.readouterr().out


def test_fails_without_a_rank(tmp_path: pathlib.Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import torch")
    result = run("--", str(program))  # a Python file is run by the current interpreter
    assert result.exit_code == 1
    assert "no rank was traced" in unwrapped(result.output)


def test_runs_the_sitecustomize_that_it_hides(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.exit_code = 9")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result = run("--", sys.executable, "-c", "import sys; sys.exit(sys.exit_code)")
    assert result.exit_code == 9
