"""Checks that the pictures of README and site equal those drawn from the stored rows."""

from __future__ import annotations

import importlib.metadata
import pathlib
import re
from types import ModuleType

import pytest
from script_helpers import ROOT, script

PINNED = re.search(r"^matplotlib==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    pytest.importorskip("matplotlib")
    return script("benchmarks/pictures.py")


def test_pictures_are_up_to_date(pictures: ModuleType, tmp_path: pathlib.Path) -> None:
    """If this fails, run `make pictures`: the rows or the script have changed."""
    assert PINNED
    drawn = {path.name: path.read_bytes() for path in pictures.draw(tmp_path)}
    assert drawn.keys() == {path.name for path in (ROOT / "docs" / "pictures").iterdir()}
    assert len(drawn) == 10
    assert len(set(drawn.values())) == 10
    if importlib.metadata.version("matplotlib") != PINNED[1]:
        pytest.skip(f"the stored ones are drawn by matplotlib {PINNED[1]}")
    for name, text in drawn.items():
        assert text == (ROOT / "docs" / "pictures" / name).read_bytes(), name


def test_charts_show_every_library(pictures: ModuleType) -> None:
    """Charts must name every library. project/test_figures.py checks their times."""
    for chart in pictures.CHARTS.values():
        rows = pictures.chart_rows(chart)
        assert rows.keys() == pictures.LIBRARIES.keys()
        assert len(rows["allnorm"]) == 13


def test_charts_of_both_modes_are_medians_of_processes(pictures: ModuleType) -> None:
    for source in pictures.PRODUCTS.values():
        chain, product = (pictures.mode_times(source, mode) for mode in pictures.PRODUCT_PANELS)
        assert product.keys() == {*chain, "local"}
        assert {"allnorm", "SGLang"} <= chain.keys()
        of_arm = [
            row["beyond_empty_us"]
            for row in pictures.of_commit(source)
            if (row["arm"], row["mode"], row["num_tokens"], row["hidden_size"])
            == ("allnorm", "product", 16, 4096)
        ]
        assert len(of_arm) == 5
        assert product["allnorm"][16] == sorted(of_arm)[2]


def test_bars_are_of_four_batches_each(pictures: ModuleType) -> None:
    for source, labels in pictures.ENGINES.values():
        times = pictures.engine_times(source)
        assert times.keys() >= {"allnorm", *labels}
        assert all(len(of) == 4 for of in times.values())


def test_bars_name_what_vllm_ran(pictures: ModuleType) -> None:
    for source, labels in pictures.ENGINES.values():
        for row in pictures.of_commit(source):
            if row["kind"] == "engine" and row["arm"] in labels:
                fused = row["facts"]["fuse_allreduce_rms"]
                assert fused == (labels[row["arm"]] == "vLLM as installed")


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/performance.md"])
def test_pages_show_pictures_for_both_backgrounds(page: str) -> None:
    text = (ROOT / page).read_text()
    shown = re.findall(r"(?:docs/)?(pictures/[\w-]+\.svg)", text)
    assert shown
    for name in shown:
        assert (ROOT / "docs" / name).exists()
        other = (
            name.replace(".svg", "-dark.svg") if "-dark" not in name else name.replace("-dark", "")
        )
        assert other in shown, f"{name} is shown for one background only"
