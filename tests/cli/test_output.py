"""Tests the commands' output: tables fit the console, and files are writable."""

from __future__ import annotations

import io
import itertools
from pathlib import Path

import pytest
from bench.samples import two_ranks
from rich.console import Console

from allnorm.cli import bench_table, output

COLUMNS = ("shape", "fused", "other\nway", "why", "verdict")
ROWS = (
    ("1x4096", "2.33", "3.22", "one hop is the fastest of all there are", "[green]PASS[/green]"),
    ("8192x4096", "188", "286", "the link decides", "[green]PASS[/green]"),
)


def lines(table: object, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", range(20, 121, 5))
def test_shown_figures_are_complete(width: int) -> None:
    """At any width, no shown figure is cut off, and the verdict is shown."""
    table = output.FittedTable("us", COLUMNS, ROWS, words=("why",), optional=("other\nway",))
    shown, dropped = table.fitting(Console(), width)
    assert sorted([*shown, *dropped]) == list(range(len(COLUMNS)))
    assert {0, len(COLUMNS) - 1} <= set(shown)
    text = lines(table, width)
    if dropped == [1, 2, 3]:
        return  # the first and the last column are always shown, even if they do not fit
    assert max(map(len, text)) <= width
    for row, index in itertools.product(ROWS, shown):
        if COLUMNS[index] not in ("why", "verdict"):
            assert any(row[index] in line.split() for line in text), (row[index], text)
    note = [line for line in text if line.startswith("not shown")]
    assert bool(note) == bool(dropped)


def test_optional_columns_are_dropped_first_and_named() -> None:
    table = output.FittedTable("us", COLUMNS, ROWS, optional=("other\nway",))
    width = max(map(len, lines(table, 200)))
    assert table.fitting(Console(), width) == ([0, 1, 2, 3, 4], [])
    assert table.fitting(Console(), width - 1)[1] == [2]
    assert any("not shown" in line and "other way" in line for line in lines(table, width - 1))


def test_the_table_of_a_benchmark_fits_80_columns() -> None:
    text = lines(bench_table.table(two_ranks(), 80), 80)
    assert max(map(len, text)) <= 80
    assert sum("PASS" in line for line in text) == 2


def test_checking_a_file_does_not_change_it(tmp_path: Path) -> None:
    new, old = tmp_path / "folder" / "new.jsonl", tmp_path / "old.jsonl"
    old.write_text("rows")
    with pytest.raises(ValueError, match="No such file"):
        output.check_writable(new)
    assert not new.parent.exists()
    output.check_writable(new, create_folder=True)
    output.check_writable(old)
    assert not new.exists()
    assert old.read_text() == "rows"
    for bad in (tmp_path, old / "below", Path("/dev/null/x")):
        with pytest.raises(ValueError, match="cannot be written"):
            output.check_writable(bad)
