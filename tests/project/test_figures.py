"""Checks every measured figure in the docs against the stored rows that its page cites."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from script_helpers import ROOT, script

RESULTS = ROOT / "benchmarks" / "results"
PAGE = (ROOT / "docs" / "performance.md").read_text()
FIELDS = (
    *("p50_us", "p99_us", "floor_us", "host_us", "tpot_ms", "beyond_empty_us", "empty_us"),
    "quant_cost_us",
)
NUMBER = re.compile(r"^(?:`[^`]*`: )?(\d[\d ]*(?:\.\d+)?)(x| %|)$")

Row = dict[str, Any]


class Section(NamedTuple):
    heading: str
    text: str

    def rows(self) -> list[Row]:
        """Returns the stored rows of the files and commits that the text names."""
        files = set(re.findall(r"([\w-]+\.jsonl)", self.text)) - {"bench.jsonl"}
        commits = tuple(re.findall(r"commit ([0-9a-f]{7})", self.text))
        stored = [
            json.loads(line) for f in files for line in (RESULTS / f).read_text().splitlines()
        ]
        return [row for row in stored if str(row.get("commit")).startswith(commits)]

    def tables(self) -> Iterator[list[list[str]]]:
        """Returns the cells of each table, starting with the header row."""
        for block in re.findall(r"(?:^\|.*\n)+", self.text, re.MULTILINE):
            lines = [line.strip().strip("|").split("|") for line in block.splitlines()]
            yield [[cell.strip(" *") for cell in line] for line in [lines[0], *lines[2:]]]


def sections() -> list[Section]:
    parts = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
    return [Section(part.partition("\n")[0], part) for part in parts]


def by_heading(start: str) -> Section:
    (found,) = [section for section in sections() if section.heading.startswith(start)]
    return found


def rounds_to(value: float | None, text: str) -> bool:
    """Returns whether a value rounds to the printed number."""
    if value is None or not math.isfinite(value):
        return False
    digits = len(text.partition(".")[2])
    # A value halfway between two numbers can be printed as either number.
    return abs(value - float(text)) <= 0.5 * 10**-digits * (1 + 1e-9) + 1e-9


def label_of(row: Row) -> str:
    if "call" in row:
        return row["call"]
    if "batch_size" in row:
        return f"{row['model']}, batch {row['batch_size']}"
    return f"{row['num_tokens']}x{row['hidden_size']}"


def values(rows: list[Row]) -> list[float]:
    """Returns the values that a cell about the given rows can have."""
    return [row[field] for row in rows for field in FIELDS if row.get(field) is not None]


def test_sections_with_tables_name_their_rows() -> None:
    with_tables = [section for section in sections() if any(section.tables())]
    assert len(with_tables) >= 8
    for section in with_tables:
        assert section.rows(), f"{section.heading}: no rows of the files and commits it names"


@pytest.mark.parametrize("section", sections(), ids=lambda section: section.heading)
def test_each_cell_is_in_a_row_of_its_shape(section: Section) -> None:
    rows = section.rows()
    for _, *lines in section.tables():
        for label, *cells in lines:
            of_shape = [row for row in rows if label_of(row) == label.strip("`").split(",")[0]
                        or label_of(row) == label.strip("`")]  # fmt: skip
            assert of_shape, f"{section.heading}: {label}"
            known = values(of_shape)
            for cell in filter(None, cells):
                match = NUMBER.match(cell)
                assert match or cell == "-", f"{section.heading}, {label}: {cell}"
                if match is None:
                    continue
                if match[2] == "":
                    found = any(rounds_to(value, match[1]) for value in known)
                else:
                    scale = 100 if match[2] == " %" else 1
                    found = any(
                        rounds_to(scale * a / b, match[1]) for a in known for b in known if b
                    )
                assert found, f"{section.heading}, {label}: {cell}"


@pytest.mark.parametrize(("start", "name"), [("Two GPUs", "h200x2"), ("Four GPUs", "h200x4")])
def test_columns_of_libraries(start: str, name: str) -> None:
    """Compares the libraries' columns with the rows of the picture above the table."""
    pictures = script("benchmarks/pictures.py")
    (table,) = by_heading(start).tables()
    heading, *lines = table
    assert len(lines) == 16
    for line in lines:
        cells = dict(zip(heading, line, strict=True))
        tokens, hidden_size = map(int, cells["tokens x hidden"].split("x"))
        chart = pictures.CHARTS[name]._replace(hidden_size=hidden_size)
        rows = {library: of[tokens] for library, of in pictures.chart_rows(chart).items()
                if tokens in of}  # fmt: skip
        own = rows.pop("allnorm")
        assert rounds_to(own["p50_us"], cells["allnorm"])
        assert rounds_to(own["p99_us"], cells["p99"])
        if cells["floor"]:
            assert rounds_to(own["floor_us"], cells["floor"])
        for column, library in (("symm", "symm. memory"), *((n, n) for n in rows if n in cells)):
            if cells[column] == "-":
                assert library not in rows
            else:
                assert rounds_to(rows[library]["p50_us"], cells[column]), (line, column)
        ratio = min(row["p50_us"] for row in rows.values()) / own["p50_us"]
        assert rounds_to(ratio, cells["best other"].rstrip("x")), line


@pytest.mark.parametrize(
    ("start", "source", "shapes"),
    [
        ("After a GEMM", *script("benchmarks/pictures.py").PRODUCTS.values(), 9),
        ("The same on four GPUs", ("h100x4-product.jsonl", "ff6b7a5"), 7),
    ],
)
def test_columns_of_calls_after_a_gemm(start: str, source: Any, shapes: int) -> None:
    pictures = script("benchmarks/pictures.py")
    source = pictures.Source(*source[:2])
    section = by_heading(start)
    assert source.file in section.text
    assert source.commit in section.text
    (table,) = section.tables()
    assert len(table) == 1 + shapes
    for line in table[1:]:
        cells = dict(zip(table[0], line, strict=True))
        tokens, hidden_size = map(int, cells["tokens x hidden"].split("x"))
        product, chain = (
            {library: of[tokens] for library, of in times.items()}
            for times in (
                pictures.mode_times(source, mode, hidden_size) for mode in ("product", "chain")
            )
        )
        columns = {
            **{name: product[name] for name in ("allnorm", "SGLang")},
            "the norm alone": product["local"],
            **{f"{name} in a chain": chain[name] for name in ("allnorm", "SGLang")},
        }
        for column, us in columns.items():
            assert rounds_to(us, cells[column]), (line, column)
        ratio = product["SGLang"] / product["allnorm"]
        assert rounds_to(ratio, cells["SGLang / allnorm"].rstrip("x")), line


@pytest.mark.parametrize("section", sections(), ids=lambda section: section.heading)
def test_times_in_sentences_are_in_rows(section: Section) -> None:
    known = values(section.rows())
    prose = re.sub(r"^\|.*$|`[^`]*`", "", section.text, flags=re.MULTILINE)
    for group in re.findall(r"((?:[\d.]+(?: / | and | to ))*[\d.]+) (?:us|ms)\b", prose):
        for number in re.findall(r"\d+(?:\.\d+)?", group):
            assert any(rounds_to(value, number) for value in known), f"{section.heading}: {number}"


INSTALLED = {"default": "as installed", "unfused": "without its fusion"}
# In these rows "default" is the engine without its own fusion.
ALONE = {"default": "without its fusion"}
# For each page, the stored rows of each group of table lines, and the end of the label of each arm;
# a group's last line is with allnorm.
GUIDES = {
    "vllm.md": (
        ("h200x2-vllm-8b-installed.jsonl", "f0f02a6", INSTALLED),
        ("h200x2-vllm-8b-installed-2.jsonl", "c5924b3", {"default": "as installed"}),
        ("h200x2-vllm-8b-installed-3.jsonl", "e51cae6", {"default": "as installed"}),
        ("h200x4-vllm-70b.jsonl", "790f543", ALONE),
    ),
    "sglang.md": (
        ("h200x2-sglang-qwen3-3.jsonl", "e51cae6", INSTALLED),
        ("h200x2-sglang-qwen3-3.jsonl", "88c0358", INSTALLED),
    ),
}


def engine_times(file: str, commit: str) -> dict[str, dict[int, float]]:
    """Returns the milliseconds per output token, keyed by arm and batch size."""
    pictures = script("benchmarks/pictures.py")
    return pictures.engine_times(pictures.Source(file, commit))


@pytest.mark.parametrize("page", GUIDES)
def test_times_of_engines_are_in_rows(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    (table,) = [t for t in Section("", text).tables() if "batch 1" in t[0]]
    batches = [int(cell.removeprefix("batch ")) for cell in table[0][1:]]
    lines = iter(table[1:])
    for file, commit, others in GUIDES[page]:
        assert file in text
        assert commit in text
        times = engine_times(file, commit)
        for arm, ending in others.items():
            label, *cells = next(lines)
            assert label.endswith(ending)
            for batch, cell in zip(batches, cells, strict=True):
                assert rounds_to(times[arm][batch], cell)
        for batch, after in zip(batches, next(lines)[1:], strict=True):
            ms, change = re.fullmatch(r"\**([\d.]+)\** \(([+-][\d.]+) %\)", after).groups()
            assert rounds_to(times["allnorm"][batch], ms)
            ratio = times["allnorm"][batch] / times["default"][batch]
            assert rounds_to(100 * (ratio - 1), change) or rounds_to(100 * (1 - ratio), change[1:])
    assert not list(lines)


def test_times_of_vllm_in_the_readme() -> None:
    """Compares the ranges with all processes whose commits the README names."""
    readme = (ROOT / "README.md").read_text()
    ((gpus, least, most, less, more, commits),) = re.findall(
        r"two (\w+)s: ([\d.]+) to ([\d.]+) % less time[^;]*;"
        r" ([\d.]+) to ([\d.]+) % less than without\s[^(]*\(commits ([\w, ]+)\)",
        readme,
    )
    saved: dict[str, list[float]] = {"default": [], "unfused": []}
    first = f"{gpus.lower()}x2-vllm-8b-installed"
    files = (f"{first}.jsonl", f"{first}-2.jsonl", f"{first}-3.jsonl")
    for commit, file in zip(commits.split(", "), files, strict=True):
        times = engine_times(file, commit)
        for arm in saved.keys() & times.keys():
            saved[arm] += [100 * (1 - times["allnorm"][b] / times[arm][b]) for b in (1, 8, 32, 64)]
    for arm, low, high in (("default", least, most), ("unfused", less, more)):
        assert rounds_to(min(saved[arm]), low)
        assert rounds_to(max(saved[arm]), high)
