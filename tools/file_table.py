"""Prints a page that lists every source file with the first sentence of the file itself.

python tools/file_table.py [--check]
"""

from __future__ import annotations

import argparse
import ast
import itertools
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = ("src", "csrc", "tests", "benchmarks", "examples", "tools", "cmake", ".ci", ".github")
SUFFIXES = {".py", ".h", ".cuh", ".cu", ".cpp", ".cmake", ".yml"}
DESCRIBED_BY_HEADER = {".cu", ".cpp"}
MAX_CHARS = 240


def first_sentence(path: pathlib.Path) -> str:
    """Returns the first sentence of a file's docstring or leading comment; empty if it has none."""
    text = path.read_text()
    if path.suffix == ".py":
        paragraph = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0]
    else:
        mark = "//" if path.suffix in {".h", ".cuh", ".cu", ".cpp"} else "#"
        lines = (line for line in text.splitlines() if not line.startswith("#!"))
        comment = itertools.takewhile(lambda line: re.match(rf"{mark} ?\S", line), lines)
        paragraph = "\n".join(line.removeprefix(mark) for line in comment)
    words = " ".join(paragraph.split())
    found = re.match(r"(.+?[.!?])(?=\s+[A-Z`0-9(]|$)", words)
    return (found[1] if found else words).rstrip(".:").replace("|", r"\|")


def sentences() -> dict[pathlib.Path, str]:
    """Returns the first sentence of every source file that is not empty, sorted by path."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *FOLDERS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    paths = [ROOT / name for name in sorted(set(listed))]
    return {
        path.relative_to(ROOT): first_sentence(path)
        for path in paths
        if (path.suffix in SUFFIXES or path.parent.name == ".ci")
        and path.exists()
        and path.stat().st_size
    }


def page(described: dict[pathlib.Path, str]) -> str:
    """Returns the page in Markdown: one table per folder."""
    parts = ["# Files\n\nEvery source file, with its own first sentence.\n"]
    for folder, paths in itertools.groupby(
        sorted(described, key=lambda path: path.parent), key=lambda path: path.parent
    ):
        parts.append(f"\n## {folder}\n\n| file | |\n|---|---|\n")
        parts += [f"| `{path.name}` | {described[path]} |\n" for path in paths if described[path]]
    return "".join(parts)


def problems(described: dict[pathlib.Path, str]) -> list[str]:
    """Returns one line per file whose first sentence is missing or too long for a table."""
    return [
        f"{path}: expected a docstring or leading comment whose first sentence has at most "
        f"{MAX_CHARS} characters, but found {len(sentence)}"
        for path, sentence in described.items()
        if len(sentence) > MAX_CHARS or (not sentence and path.suffix not in DESCRIBED_BY_HEADER)
    ]


def main() -> int:
    """Prints the page, or only checks the first sentences."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="only check that every file has a usable sentence"
    )
    described = sentences()
    if not parser.parse_args().check:
        print(page(described), end="")
        return 0
    found = problems(described)
    print(*found, sep="\n", end="\n" if found else "", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
