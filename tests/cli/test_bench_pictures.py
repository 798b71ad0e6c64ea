"""Tests the contents of bench's picture and HTML page, and that the page is self-contained."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import typer
from bench.samples import measurement, two_ranks

from allnorm.bench.modes import Mode, Shape
from allnorm.bench.report import Measurement
from allnorm.cli import bench_plot, bench_table
from allnorm.cli.bench_plot import Panel

pytest.importorskip("matplotlib", reason="pictures need matplotlib")

CONDITIONS = {"cpu": "a <processor>", "dtype": "bfloat16", "versions": {"torch": "2.11"}}
VOID = {"meta"}


def samples() -> list[Measurement]:
    """Returns measurements of two modes and hidden sizes, with a missing peer and a wrong arm."""
    wide = [measurement(arm, 20.0, shape=Shape(4, 8192)) for arm in ("allnorm", "vllm")]
    quant = Mode("per_group:128")
    return [
        *two_ranks(),
        *wide,
        measurement("sglang", float("nan"), reason="missing: rank 0: no <module>"),
        measurement("allnorm", 8.0, mode=quant, quant_cost_us=0.4, floor_us=4.0),
        measurement("nccl+torch+quant", float("nan"), mode=quant, error="rank 1: scale: 3 of 4"),
    ]


def elements(page: str) -> list[str]:
    """Returns the names of a page's elements; checks that every element is closed."""
    names, unclosed = [], []
    for end, name, itself in re.findall(r"<(/?)([a-zA-Z]+)[^>]*?(/?)>", page):
        if end:
            assert unclosed.pop() == name
            continue
        names.append(name)
        if not itself and name not in VOID:
            unclosed.append(name)
    assert unclosed == []
    return names


@pytest.mark.parametrize("name", ["bench.png", "bench.svg"])
def test_a_picture_has_a_panel_for_each_mode_and_hidden_size(tmp_path: Path, name: str) -> None:
    path = tmp_path / "new" / name
    bench_plot.save(samples(), path, "a processor, bfloat16")
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG" if name.endswith("png") else b"<?xml")
    assert len(bench_plot.panels(samples())) == 3


def test_a_panel_shows_every_arm_and_the_floor() -> None:
    text = bench_plot.svg(samples(), Panel(2, Mode(), 4096))
    for word in ("allnorm", "gloo+torch", "gloo+local", "wire floor", "tokens", "us per call"):
        assert f">{word}" in text
    assert "sglang" not in text  # SGLang did not run
    assert "currentColor" in text
    quantized = bench_plot.svg(samples(), Panel(2, Mode("per_group:128"), 4096))
    assert "per_group:128" in quantized


def test_times_after_a_gemm_have_a_separate_panel() -> None:
    after_gemm = {"product": 7168, "product_us": 20.0, "empty_us": 1.0}
    found = [
        *samples(),
        measurement("allnorm", 3.0, beyond_empty_us=2.0, **after_gemm),
        measurement("empty", 1.0, beyond_empty_us=0.0, **after_gemm),
        measurement("local", 1.5, beyond_empty_us=0.5, **after_gemm),
    ]
    assert len(bench_plot.panels(found)) == 4
    text = bench_plot.svg(found, Panel(2, Mode(), 4096, 7168))
    for word in ("allnorm", "local", "us in excess of"):
        assert f">{word}" in text
    assert "GEMM (K = 7168)" in text
    assert ">empty<" not in text
    assert "GEMM" not in bench_plot.svg(found, Panel(2, Mode(), 4096))


def test_a_page_is_complete_and_needs_no_network() -> None:
    text = bench_table.page(samples(), "A & B", "how it was done", CONDITIONS)
    found = elements(text)
    assert found.count("svg") == 3
    assert "script" not in found
    assert all(link.startswith("#") for link in re.findall(r'(?:href|src)="([^"]*)"', text))
    assert "http" not in text
    assert text.count("url(") == text.count("url(#")
    assert "prefers-color-scheme: dark" in text
    for word in ("A &amp; B", "how it was done", "a &lt;processor&gt;", "versions.torch"):
        assert word in text
    for word in ("WRONG", "rank 1: scale: 3 of 4", "no &lt;module&gt;", "16x4096", "+0.40", "50%"):
        assert word in text


def test_names_in_pictures_of_one_page_do_not_clash() -> None:
    first = bench_plot.svg(samples(), Panel(2, Mode(), 4096))
    second = bench_plot.svg(samples(), Panel(2, Mode(), 8192))

    def clips(text: str) -> set[str]:
        return {part.split('"')[0] for part in text.split('<clipPath id="')[1:]}

    assert clips(first)
    assert not clips(first) & clips(second)


def test_without_matplotlib_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    bench_plot.check_installed("--plot")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(typer.BadParameter, match=r"pip install allnorm\[plot\]"):
        bench_plot.check_installed("--plot")
