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
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from allnorm import __version__, topology
from allnorm.core import _native
from allnorm.testing import OnMessage

_WIDTH_OF_A_FILE = 180  # columns if the output is not a terminal
_SECONDS_BETWEEN_LINES = 5.0
_LONGEST_WORD = 24  # longer words in text columns are folded

Message = dict[str, Any]
"""A rank's progress report: `text`, `done` and `total`."""


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
    times = (TimeElapsedColumn(), "left", TimeRemainingColumn())
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), *times)
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
        words: headings of text columns. Like the first column, they are left-aligned; they wrap
            between words.
        optional: headings of the columns to drop first. After them the others are dropped from the
            right. The first and the last column are always shown.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Container[str] = ()
    optional: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        """Renders the columns that fit, and names the dropped ones."""
        shown, dropped = self.fitting(console, options.max_width)
        yield self._table(shown)
        if dropped:
            names = ", ".join(" ".join(self.columns[index].split()) for index in dropped)
            text = (
                f"not shown at a width of {options.max_width}: {names}; "
                "write to a file or use --json to see all"
            )
            yield Text(text, style="dim")

    def fitting(self, console: Console, width: int) -> tuple[list[int], list[int]]:
        """Returns the indices of the columns that fit this width, and of the dropped ones."""
        unlimited = console.options.update_width(1 << 20)
        shown, dropped = list(range(len(self.columns))), []
        for name in dict.fromkeys([*self.optional, *self.columns[-2:0:-1]]):
            table = self._table(shown, longest_word=_LONGEST_WORD)
            if Measurement.get(console, unlimited, table).minimum <= width:
                break
            if name in self.columns:
                index = list(self.columns).index(name)
                shown.remove(index)
                dropped.append(index)
        return shown, sorted(dropped)

    def _table(self, shown: Sequence[int], longest_word: int | None = None) -> Table:
        table = Table(title=self.title, title_justify="left", header_style="bold")
        for index in shown:
            name = self.columns[index]
            if name in self.words:
                table.add_column(name, overflow="fold", max_width=longest_word)
                continue
            cells = [Text.from_markup(cell) for cell in (name, *(row[index] for row in self.rows))]
            width = max((line.cell_len for cell in cells for line in cell.split()), default=0)
            justify: Any = "right" if index else "left"
            table.add_column(name, justify=justify, overflow="fold", no_wrap=True, min_width=width)
        for row in self.rows:
            table.add_row(*(row[index] for index in shown))
        return table


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
    """Formats a time in us, including the unit."""
    text = microseconds(value)
    return text if text.endswith("ms") else f"{text} us"


def gibibytes(count: int | None) -> str:
    """Formats a size in GiB; "unknown" for None."""
    return "unknown" if count is None else f"{count / 2**30:.1f} GiB"


def provenance() -> dict[str, Any]:
    """Returns the provenance of a result: commit, versions, command, date."""
    commit = _native.built_commit()
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


def check_writable(path: Path, create_folder: bool = False) -> None:
    """Checks that a results file can be written, and leaves it as it was.

    Args:
        path: the file.
        create_folder: creates the folder of the file if it does not exist.

    Raises:
        ValueError: the file cannot be written, or its folder does not exist.
    """
    exists = path.exists()
    try:
        if create_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
        if not exists:
            path.unlink()
    except OSError as error:
        raise ValueError(
            f"{path} cannot be written: {error.strerror}. Expected a file in a folder that exists"
        ) from None


# Maps each file that could not be written to the file that holds its results instead.
_instead: dict[Path, Path] = {}


def all_written() -> bool:
    """Returns whether all results were written to the requested files."""
    return not _instead


def write_results(path: Path, write: Callable[[Path], object]) -> None:
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
    """Appends one JSON object per line, each starting with `common`; creates the file if missing.

    NaN and infinity, which JSON lacks, become null. Does nothing if `path` is None.
    """
    if path is None:
        return
    text = "".join(_json_line({**(common or {}), **row}) for row in rows)

    def append(file: Path) -> None:
        with file.open("a", encoding="utf-8") as opened:
            opened.write(text)

    write_results(path, append)


def _json_line(row: Mapping[str, Any]) -> str:
    finite = json.loads(json.dumps(row), parse_constant=lambda _: None)
    return json.dumps(finite, allow_nan=False) + "\n"
