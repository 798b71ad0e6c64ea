"""The output of commands: progress, tables, JSON lines."""

from __future__ import annotations

import datetime
import json
import math
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Console, ConsoleOptions
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from allnorm import __version__, topology
from allnorm.testing import OnMessage

_WIDTH_OF_A_FILE = 180  # columns if the output is not a terminal
_SECONDS_BETWEEN_LINES = 5.0
_LONGEST_WORD = 24  # longer words in text columns are folded

Message = dict[str, Any]
"""A progress report of a rank: `text`, `done` and `total`."""


def console() -> Console:
    """Returns a console for standard output: colored on a terminal, plain and wide in a file."""
    if sys.stdout.isatty():
        return Console(highlight=False)
    return Console(highlight=False, width=_WIDTH_OF_A_FILE)


@contextmanager
def progress(title: str) -> Iterator[OnMessage]:
    """Shows progress: a bar on a terminal, otherwise a line every few seconds.

    Yields a function that takes a rank and its message. Only messages of rank 0 are shown.
    """
    stream = Console(file=sys.stderr, highlight=False)
    if not stream.is_terminal:
        yield _plain_progress(title)
        return
    columns: tuple[Any, ...] = (
        *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()),
        *(TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()),
    )
    with Progress(*columns, console=stream, transient=True) as bar:
        task = bar.add_task(escape(f"{title}: starting ranks"), total=None)

        def show(rank: int, message: Message) -> None:
            if rank == 0:
                text = escape(f"{title}: {message.get('text', '')}")
                done, total = message.get("done"), message.get("total")
                bar.update(task, description=text, completed=done, total=total)

        yield show


def _plain_progress(title: str) -> OnMessage:
    print(f"{title}: starting ranks", file=sys.stderr, flush=True)
    last, began = -math.inf, time.monotonic()

    def show(rank: int, message: Message) -> None:
        nonlocal last
        now = time.monotonic()
        if rank or now - last < _SECONDS_BETWEEN_LINES:
            return
        last = now
        count, done, total = "", message.get("done"), message.get("total")
        if total:
            left = (now - began) * (total - done) / done if done else math.nan
            about = f", about {left:.0f} s left" if math.isfinite(left) else ""
            count = f" ({done} of {total}{about})"
        print(f"{title}: {message.get('text', '')}{count}", file=sys.stderr, flush=True)

    return show


@dataclass(frozen=True)
class FittedTable:
    """A table that never splits a figure: on a narrow console it drops columns instead.

    Attributes:
        title: printed above the table.
        columns: headings.
        rows: cells, which may contain rich markup.
        words: headings of text columns. They are left-aligned, as the first column is, and wrap
            between words.
        optional: headings of the columns to drop first. After them the others are dropped from the
            right. The first and the last column are always shown.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Container[str]
    optional: Sequence[str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        """Renders the columns that fit, and names the dropped ones."""
        shown, dropped = self.fitting(options.max_width)
        widths = self._widths(shown, options.max_width)
        table = Table(title=self.title, title_justify="left", header_style="bold")
        for index, width in zip(shown, widths, strict=True):
            name = self.columns[index]
            left = index == 0 or name in self.words
            justify: Any = "left" if left else "right"
            table.add_column(name, justify=justify, overflow="fold", width=width)
        for row in self.rows:
            table.add_row(*(row[index] for index in shown))
        yield table
        if dropped:
            names = ", ".join(" ".join(self.columns[index].split()) for index in dropped)
            text = (
                f"not shown at a width of {options.max_width}: {names}; "
                "write to a file or use --json to see all"
            )
            yield Text(text, style="dim")

    def fitting(self, width: int) -> tuple[list[int], list[int]]:
        """Returns the indices of the columns that fit this width, and of the dropped ones."""
        middle = list(self.columns[1:-1])[::-1]
        order = [*(name for name in self.optional if name in self.columns), *middle]
        shown, dropped = list(range(len(self.columns))), []
        for name in dict.fromkeys(order):
            if 1 + sum(3 + self._width(index) for index in shown) <= width:
                break
            index = list(self.columns).index(name)
            shown.remove(index)
            dropped.append(index)
        return shown, sorted(dropped)

    def _widths(self, shown: Sequence[int], width: int) -> list[int]:
        """Returns the column widths; text columns share the width that is left over."""
        needed = [self._width(index) for index in shown]
        left = width - 1 - sum(3 + each for each in needed)
        wanted = {
            place: max(Text.from_markup(row[index]).cell_len for row in self.rows) - needed[place]
            for place, index in enumerate(shown)
            if self.columns[index] in self.words and self.rows
        }
        for count, place in enumerate(sorted(wanted, key=wanted.__getitem__)):
            more = min(max(0, wanted[place]), max(0, left) // (len(wanted) - count))
            needed[place] += more
            left -= more
        return needed

    def _width(self, index: int) -> int:
        """Returns the minimum width of a column: its longest line; of text, its longest word."""
        cells = [self.columns[index], *(row[index] for row in self.rows)]
        texts = [Text.from_markup(cell).plain for cell in cells]
        if self.columns[index] in self.words:
            longest = max((len(word) for text in texts for word in text.split()), default=0)
            return min(longest, _LONGEST_WORD)
        return max((len(line) for text in texts for line in text.splitlines()), default=0)


def table(
    title: str,
    columns: Iterable[str],
    rows: Iterable[Iterable[str]],
    words: Container[str] = (),
    optional: Sequence[str] = (),
) -> FittedTable:
    """Makes a `FittedTable`; the arguments are its attributes."""
    return FittedTable(title, list(columns), [list(row) for row in rows], words, optional)


def facts(title: str, pairs: Iterable[tuple[str, str]]) -> Table:
    """Returns a table of names and values."""
    result = Table(title=title, title_justify="left", show_header=False)
    result.add_column(style="bold", no_wrap=True)
    result.add_column(overflow="fold")
    for name, value in pairs:
        result.add_row(name, value)
    return result


def ok(text: str) -> str:
    """Marks text up as success."""
    return f"[green]{escape(text)}[/green]"


def bad(text: str) -> str:
    """Marks text up as failure."""
    return f"[bold red]{escape(text)}[/bold red]"


def fail(text: str) -> NoReturn:
    """Prints the error and ends the command with exit code 1."""
    console().print(bad(text))
    raise typer.Exit(1)


def ranks(count: int) -> str:
    """Returns "1 rank", "2 ranks", and so on."""
    return f"{count} rank{'s' if count != 1 else ''}"


def microseconds(value: float) -> str:
    """Formats a time in us with three significant digits; long times are shown in ms."""
    if not math.isfinite(value):
        return "-"
    if value >= 1e4:
        return f"{value / 1e3:,.1f} ms" if value < 1e5 else f"{value / 1e3:,.0f} ms"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def time_of(value: float) -> str:
    """Formats a time in us, with its unit."""
    text = microseconds(value)
    return text if text.endswith("ms") else f"{text} us"


def gibibytes(count: int | None) -> str:
    """Formats a size in GiB; "unknown" for None."""
    return "unknown" if count is None else f"{count / 2**30:.1f} GiB"


def provenance() -> dict[str, Any]:
    """Returns the provenance of a result: commit, versions, command, date."""
    commit = topology.source_commit()
    return {
        "commit": commit or f"release {__version__}",
        "versions": {"allnorm": __version__, **topology.versions()},
        "command": shlex.join(["allnorm", *map(_without_folder, sys.argv[1:])]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _without_folder(argument: str) -> str:
    """Returns the argument, or only the file name if it is an absolute path."""
    return Path(argument).name if Path(argument).is_absolute() else argument


def conditions(device: str, **more: Any) -> dict[str, Any]:
    """Returns the fields common to all rows: device name, provenance, and `more`."""
    kind = "gpu" if device == "cuda" else "cpu"
    return {kind: topology.device_name(device), **provenance(), **more}


def check_writable(path: Path) -> None:
    """Creates the folder of a results file and checks that the file can be written.

    Leaves the file as it was.

    Raises:
        ValueError: the file cannot be written.
    """
    exists = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
        if not exists:
            path.unlink()
    except OSError as error:
        raise ValueError(
            f"{path} cannot be written: {error.strerror}. Expected a file in a folder that exists "
            "or can be created"
        ) from None


# Maps files that could not be written to the files that hold the results instead.
_instead: dict[Path, Path] = {}


def all_written() -> bool:
    """Returns whether all results were written to the requested files."""
    return not _instead


def write_results(path: Path, write: Callable[[Path], None]) -> None:
    """Calls `write` with the file; if that fails, with a temporary file, and prints its name."""
    try:
        if path not in _instead:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path)
            return
    except OSError as error:
        handle, name = tempfile.mkstemp(prefix=f"allnorm-{path.stem}-", suffix=path.suffix)
        os.close(handle)
        _instead[path] = Path(name)
        text = f"{path} cannot be written ({error.strerror}): the results are in {name}"
        console().print(bad(text), soft_wrap=True)
    write(_instead[path])


def append_json_lines(
    path: Path | None, rows: Iterable[Mapping[str, Any]], common: Mapping[str, Any] | None = None
) -> None:
    """Appends one JSON object per line, each starting with `common`; creates file and folder.

    NaN and infinity, which JSON lacks, become null. Does nothing if `path` is None.
    """
    if path is None:
        return
    found = [_finite({**(common or {}), **row}) for row in rows]
    text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in found)

    def append(file: Path) -> None:
        with file.open("a", encoding="utf-8") as opened:
            opened.write(text)

    write_results(path, append)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
