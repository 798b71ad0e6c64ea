"""Tests the printed table of a fusion report."""

from __future__ import annotations

import torch

from allnorm.compile import FusionReport, Site


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
