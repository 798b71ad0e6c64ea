"""Runs the programs in examples/ on CPU ranks, as their docstrings say, and the notebook."""

from __future__ import annotations

import json
import os
import pathlib
import re
import runpy
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from limits import HANG_SECONDS

import allnorm
from allnorm.communicator import Communicator

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
RANKS = {
    "cuda_graph": 2,
    "device_mesh": 2,
    "eager": 2,
    "experts": 2,
    "fp8_linear": 2,
    "quickstart": 2,
    "torch_compile": 2,
    "two_hosts": 4,
}
"""Number of ranks per program."""
NEED_GPUS = {"dependent_product"}
ENVIRONMENT = {
    **os.environ,
    # The package under test, installed or from the tree.
    "PYTHONPATH": str(pathlib.Path(allnorm.__file__).parent.parent),
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
}


def run_python(
    arguments: list[str], folder: pathlib.Path, text: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs Python with these arguments and this standard input in a folder; it must succeed."""
    run = subprocess.run(
        [sys.executable, *arguments],
        input=text,
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run


def test_every_program_is_listed() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == RANKS.keys() | NEED_GPUS


@pytest.mark.parametrize("name", RANKS)
def test_the_command_is_in_the_docstring(name: str) -> None:
    command = f"torchrun --nproc-per-node {RANKS[name]} examples/{name}.py"
    assert f"\n    {command}\n" in (EXAMPLES / f"{name}.py").read_text()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", RANKS)
def test_program_is_right(name: str, tmp_path: pathlib.Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS[name]}"]
    run = run_python([*launcher, str(EXAMPLES / f"{name}.py")], tmp_path)
    assert re.fullmatch(rf"OK: .*\b{RANKS[name]} ranks on cpu.*\n", run.stdout, re.IGNORECASE)


@pytest.mark.parametrize("name", sorted(RANKS.keys() - {"two_hosts"}))  # two_hosts needs two ranks
def test_program_finds_a_wrong_result(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """Runs the program as a single rank in this process, with a wrong result."""
    right = Communicator.all_reduce_add_rms_norm

    def wrong(*args: object, **kwargs: object) -> object:
        results = right(*args, **kwargs)
        if not torch.compiler.is_compiling():  # otherwise torch_compile has two wrong results
            results[0][0, 0] += 1
        return results

    monkeypatch.setattr(Communicator, "all_reduce_add_rms_norm", wrong)
    one_rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for variable, value in one_rank.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    monkeypatch.setattr(dist, "init_process_group", lambda backend: None)
    try:
        with pytest.raises(AssertionError, match=r"elements differ|Mismatched elements"):
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    finally:
        dist.destroy_process_group()


# ---- the notebook --------------------------------------------------------------------------------

RUN_CELLS = """
import json, sys
names = {"__name__": "__main__"}
for number, source in enumerate(json.load(sys.stdin)):
    exec(compile(source, f"cell {number}", "exec"), names)
    print(end="\\0", flush=True)
"""
"""Runs code cells in one process, as Jupyter does, and prints a zero byte after each."""


def test_notebook_prints_what_it_stores(tmp_path: pathlib.Path) -> None:
    """Compares the outputs of all cells; ignores numbers in cells that measure times."""
    file = EXAMPLES / "tour.ipynb"
    assert file.stat().st_size < 40_000
    cells = [c for c in json.loads(file.read_text())["cells"] if c["cell_type"] == "code"]
    sources = json.dumps(["".join(cell["source"]) for cell in cells])
    run = run_python(["-c", RUN_CELLS], tmp_path, sources)
    *printed, rest = run.stdout.split("\0")
    assert rest == ""
    assert sum(map(bool, printed)) >= 7
    for cell, actual in zip(cells, printed, strict=True):
        stored = "".join(line for output in cell["outputs"] for line in output["text"])
        if "timing" in cell["metadata"].get("tags", []):
            stored, actual = (re.sub(r"[\d ]+", " ", text) for text in (stored, actual))
        assert actual == stored
