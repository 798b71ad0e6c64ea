"""Tests the warning of `allnorm doctor` about kernels compiled for an older GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from allnorm.cli import app, doctor
from allnorm.verify import doctor as ranks_doctor


def comm(device: str, max_row_bytes: int | None) -> Any:
    traits = SimpleNamespace(max_row_bytes=max_row_bytes)
    return SimpleNamespace(device=torch.device(device), traits=traits)


@pytest.mark.parametrize(
    ("device", "capability", "max_row_bytes", "old"),
    [
        ("cuda:0", (9, 0), 8 << 10, True),
        ("cuda:0", (10, 3), 8 << 10, True),
        ("cuda:0", (9, 0), 64 << 10, False),
        ("cuda:0", (8, 0), 8 << 10, False),
        ("cpu", (9, 0), None, False),
    ],
)
def test_old_code_is_detected_by_its_row_limit(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    capability: tuple[int, int],
    max_row_bytes: int | None,
    old: bool,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert ranks_doctor.has_old_code(comm(device, max_row_bytes)) == old


@pytest.mark.parametrize("old", [True, False])
def test_old_code_causes_a_warning_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, old: bool
) -> None:
    found = {"create_s": 0.1, "error": "", "plans": [], "old_code": old, "islands": [[0]]}
    found |= {"fused_us": 1.0, "flag_us": 1.0, "large_us": 1.0}
    monkeypatch.setattr(doctor, "run_ranks", lambda *args, **kwargs: [found])
    done = CliRunner(env={"COLUMNS": "180"}).invoke(app.app, ["doctor", "--device", "cpu"])
    assert done.exit_code == 0, done.output
    shown = " ".join(done.output.split())
    assert ("Slow: these GPUs" in shown) == old
    assert ("ALLNORM_CUDA_ARCHITECTURES=90" in shown) == old
