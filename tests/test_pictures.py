"""The pictures of README and site: what the script makes of the stored rows, nothing else."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import pathlib
import re
from types import ModuleType

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PINNED = re.search(r"^matplotlib==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "benchmarks" / "pictures.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_is_what_the_script_makes(pictures: ModuleType, tmp_path: pathlib.Path) -> None:
    """Byte for byte: `make pictures` after a change of rows or of the script."""
    assert PINNED
    drawn = {path.name: path.read_bytes() for path in pictures.draw(tmp_path)}
    assert drawn.keys() == {path.name for path in (ROOT / "docs" / "pictures").iterdir()}
    assert len(drawn) == 8
    assert len(set(drawn.values())) == 8
    if importlib.metadata.version("matplotlib") != PINNED[1]:
        pytest.skip(f"the stored ones are drawn by matplotlib {PINNED[1]}")
    for name, text in drawn.items():
        assert text == (ROOT / "docs" / "pictures" / name).read_bytes(), name


@pytest.mark.parametrize("name", ["h200x2", "h200x4"])
def test_charts_show_the_rows_of_the_tables(pictures: ModuleType, name: str) -> None:
    """Tables of the performance page name the same files and commits, and have the same times."""
    chart = pictures.CHARTS[name]
    rows = pictures.chart_rows(chart)
    assert rows.keys() == pictures.LIBRARIES.keys()
    page = (ROOT / "docs" / "performance.md").read_text()
    heading = {2: "## Two GPUs", 4: "## Four GPUs"}[chart.world_size]
    part = page[page.index(heading) :]
    part = part[: part.index("\n## ")]
    for source in chart.sources:
        assert source.file in part
        assert source.commit in part
    own = {int(t): us for t, us in re.findall(r"^\| (\d+)x4096 \| \*\*([\d.]+)\*\*", part, re.M)}
    assert len(own) == 13
    for tokens, us in own.items():
        here = rows["allnorm"][tokens]["p50_us"]
        assert f"{here:.2f}" == us or f"{here:.1f}" == us or f"{here:.0f}" == us


def test_bars_show_the_table_of_the_guide(pictures: ModuleType) -> None:
    page = (ROOT / "docs" / "vllm.md").read_text()
    for source in pictures.ENGINES.values():
        times = pictures.engine_times(source)
        for batch, ms in times["allnorm"].items():
            saved = 1 - ms / times["default"][batch]
            assert f"**{ms:.2f}** (-{100 * saved:.1f} %)" in page


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/performance.md"])
def test_pages_show_them_for_both_backgrounds(page: str) -> None:
    text = (ROOT / page).read_text()
    shown = re.findall(r"(?:docs/)?(pictures/[\w-]+\.svg)", text)
    assert shown
    for name in shown:
        assert (ROOT / "docs" / name).exists()
        other = (
            name.replace(".svg", "-dark.svg") if "-dark" not in name else name.replace("-dark", "")
        )
        assert other in shown, f"{name} is there for one background"
