"""The example of docs/compile.md runs as it stands there, and the report's form."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch

import allnorm
from allnorm.compile import FusionReport, Site

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "compile.md"


@pytest.mark.slow
@pytest.mark.timeout(660)  # Inductor calls a C++ compiler, which needs long on a busy machine
def test_example(tmp_path: pathlib.Path) -> None:
    text = PAGE.read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    (tmp_path / "example.py").write_text(example)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    # A file for each rank: on one terminal their lines may break each other.
    torchrun += ["--redirects", "3", "--log-dir", str(tmp_path / "logs")]
    result = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", "example.py"],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(
                pathlib.Path(allnorm.__file__).parent.parent
            ),  # installed, or the tree
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    said = {path: path.read_text() for path in sorted((tmp_path / "logs").rglob("std*.log"))}
    assert result.returncode == 0, (result.stderr, said)
    (shown,) = re.findall(r"torchrun .*?\n\n(    1 of 1 .*?)\n\n", text, flags=re.DOTALL)
    lines = [line.strip() for line in shown.splitlines()]
    outputs = [text for path, text in said.items() if path.name == "stdout.log"]
    assert len(outputs) == 2
    for output in outputs:
        printed = [line.strip() for line in output.splitlines()]
        assert [line for line in printed if line in lines] == lines, output


def test_report() -> None:
    shape = (4, 64)
    fused = Site(
        ("all_reduce", "add", "mul"), shape, torch.bfloat16, "0", "vllm", None, "per_token"
    )
    missed = Site(("all_reduce_1",), ("s0", 64), torch.float16, "tp", reason="it is not used")
    unknown = Site(("reduce_scatter",), None, None, "", reason="it is a reduce-scatter")
    report = FusionReport([fused, missed, unknown])
    assert report.sites == [fused, missed, unknown]
    assert report.fused == [fused]
    assert report.missed == [missed, unknown]
    assert (fused.fused, missed.fused) == (True, False)
    assert repr(report) == "<FusionReport: 1 of 3 reductions fused>"
    assert str(report).splitlines() == [
        "1 of 3 reductions fused",
        "site    shape          group  numerics         nodes",
        "fused   4x64 bfloat16  0      vllm, per_token  all_reduce ... mul",
        "missed  s0x64 float16  tp     -                all_reduce_1: it is not used",
        "missed  ?              ?      -                reduce_scatter: it is a reduce-scatter",
    ]
    assert str(FusionReport()) == "0 of 0 reductions fused"
