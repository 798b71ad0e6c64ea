"""Writes docs/files.md: every source file with the first sentence of the file itself.

python tools/file_table.py [--check]
"""

from __future__ import annotations

import argparse
import ast
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "files.md"
FOLDERS = (
    *("src", "csrc", "tests", "benchmarks", "examples", "tools", "cmake"),
    *(".ci", ".github"),
)
COMMENT = re.compile(r"(?://|#)\s?(.*)")
HEAD = (
    "# Files\n\nEvery source file, with its own first sentence. "
    "`python tools/file_table.py` writes this page; `make lint` compares it.\n"
)


def first_sentence(path: pathlib.Path) -> str:
    """Returns the first sentence of a file's docstring or leading comment; empty if it has none."""
    text = path.read_text()
    if path.suffix == ".py":
        said = ast.get_docstring(ast.parse(text)) or ""
        return _sentence(said.split("\n\n")[0])
    lines = []
    for line in text.removeprefix("\N{BYTE ORDER MARK}").splitlines():
        comment = COMMENT.fullmatch(line.strip())
        if line.startswith("#!"):
            continue
        if comment is None or (
            path.suffix not in {".sh", ".yml", ".cmake", ".txt", ""} and line.startswith("#")
        ):
            break
        if not comment[1]:
            break
        lines.append(comment[1])
    return _sentence("\n".join(lines))


def _sentence(text: str) -> str:
    words = " ".join(text.split())
    found = re.match(r"(.+?[.!?])(?=\s+[A-Z`0-9(]|$)", words)
    return (found[1] if found else words).rstrip(".:").replace("|", "\\|")


def page() -> str:
    """Returns the contents of the page."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *FOLDERS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    folders: dict[str, list[str]] = {}
    for name in sorted(set(listed)):
        path = ROOT / name
        kinds = {".py", ".h", ".cuh", ".cu", ".cpp", ".cmake", ".yml"}
        if not path.exists() or (path.suffix not in kinds and path.parent.name != ".ci"):
            continue
        sentence = first_sentence(path)
        if sentence:
            folders.setdefault(str(path.parent.relative_to(ROOT)), []).append(
                f"| `{path.name}` | {sentence} |"
            )
    parts = [HEAD]
    for folder, rows in sorted(folders.items()):
        parts.append("\n".join([f"\n## {folder}\n", "| file | |", "|---|---|", *rows]) + "\n")
    return "".join(parts)


def main() -> int:
    """Writes the page, or compares it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; status 1 if it differs"
    )
    options = parser.parse_args()
    wanted = page()
    if not options.check:
        PAGE.write_text(wanted)
        return 0
    if PAGE.exists() and PAGE.read_text() == wanted:
        return 0
    print("docs/files.md differs from the files: python tools/file_table.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
