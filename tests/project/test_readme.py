"""Checks the README's length, figures and links, and the spelling on all pages."""

from __future__ import annotations

import json
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
RESULTS = ROOT / "benchmarks" / "results"


def test_it_is_short() -> None:
    words = [word for word in README.split() if re.search("[A-Za-z0-9]", word)]
    assert len(words) <= 700


def test_the_two_commands_are_named() -> None:
    assert "\nmake bench\nmake test\n" in README


def cells(heading: str) -> list[list[str]]:
    """Returns the rows of the table below a heading line, including its header row."""
    lines = README[README.index(heading) :].splitlines()
    table = [line for line, _ in zip(lines, iter(lambda: 0, 1), strict=False)]
    end = next(i for i, line in enumerate(table) if not line.startswith("|"))
    rows = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in table[:end]]
    return [row for row in rows if not set(row[0]) <= {"-"}]


def rounded(us: float) -> str:
    return f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 100 else f"{us:.0f}"


def test_each_time_is_in_a_row() -> None:
    heading, own, other = cells("| us per call, 2 H200s, 4096 columns")
    (commit,) = re.findall(r"timed \(commit ([0-9a-f]{7})", README)
    lines = (RESULTS / "h200x2-peers.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["commit"].startswith(commit)]
    for size, mine, best in zip(heading[1:], own[1:], other[1:], strict=True):
        tokens = int(size.split()[0])
        here = {
            row["arm"]: row["p50_us"]
            for row in rows
            if (row["num_tokens"], row["hidden_size"], row["world_size"]) == (tokens, 4096, 2)
            and not row["quant"]
            and not row["residual_sharded"]
            and row["correct"]
        }
        assert mine == rounded(here.pop("allnorm"))
        assert best == rounded(min(us for arm, us in here.items() if not arm.startswith("allnorm")))


def test_speedups_follow_from_the_times() -> None:
    _, own, other = cells("| us per call, 2 H200s, 4096 columns")
    ratios = [float(b) / float(a) for a, b in zip(own[1:], other[1:], strict=True)]
    least, most = map(float, re.findall(r"it is ([\d.]+) to ([\d.]+) times", README)[0])
    assert f"{min(ratios):.1f}" == f"{least:.1f}"
    assert f"{max(ratios):.1f}" == f"{most:.1f}"


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)]+)\)", README))
def test_links(link: str) -> None:
    assert (ROOT / link.partition("#")[0]).exists()


SUPPORT = {
    line.split("|")[1].strip(" []").split("]")[0]: line
    for line in (ROOT / "docs" / "support.md").read_text().splitlines()
    if line.startswith("| ")
}


@pytest.mark.parametrize("page", ["README.md", "docs/usage.md", "docs/vllm.md", "docs/sglang.md"])
@pytest.mark.parametrize(
    ("engine", "version"), [("vLLM", r"\b0\.\d\d\b(?!\.)"), ("SGLang", r"\b0\.5\.\d+")]
)
def test_pages_name_the_versions_that_are_supported(page: str, engine: str, version: str) -> None:
    supported = set(re.findall(version, SUPPORT[engine]))
    text = (ROOT / page).read_text()
    named = {
        found
        for sentence in re.findall(rf"^.*{engine}[^.|:\n]*\d.*$", text, re.MULTILINE)
        for found in re.findall(
            rf"{engine}\W*(?:{version})(?:\W+(?:and|or)?\W*{version})*", sentence
        )
        for found in re.findall(version, found)
    }
    assert named <= supported
    if page in ("README.md", "docs/usage.md"):
        assert named == supported


def test_the_readme_names_the_versions_of_torch_that_are_supported() -> None:
    supported = [
        tuple(map(int, each.split("."))) for each in re.findall(r"2\.\d+", SUPPORT["torch"])
    ]
    least, most = re.findall(r"torch (2\.\d+) to (2\.\d+)", README)[0]
    assert f"{min(supported)[0]}.{min(supported)[1]}" == least
    assert f"{max(supported)[0]}.{max(supported)[1]}" == most


GUIDES = (
    *("vllm", "sglang", "transformers", "compile", "fp8", "boundaries", "islands", "tuning"),
    *("trace", "e2e", "containers", "peer-access", "troubleshooting"),
)
BRITISH = re.compile(
    r"\b\w*(?:quantis|normalis|synchronis|serialis|specialis|optimis|recognis|colour|behaviour"
    r"|neighbour)\w*",
    re.IGNORECASE,
)
DOCS = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted({*(ROOT / "docs" / "reference").glob("*.md")} - {ROOT / "docs/reference/commands.md"}),
]


@pytest.mark.parametrize("guide", GUIDES)
def test_guides_are_short(guide: str) -> None:
    """Guides must be short; details belong in docs/reference."""
    words = (ROOT / "docs" / f"{guide}.md").read_text().split()
    assert len([word for word in words if re.search("[A-Za-z0-9]", word)]) <= 800


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_spelling_is_american(page: pathlib.Path) -> None:
    code = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)  # file and variable names are exempt
    assert BRITISH.findall(code.sub("", page.read_text())) == []
