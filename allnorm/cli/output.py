"""What commands write: progress, tables, JSON lines."""

from __future__ import annotations

import datetime
import json
import math
import shlex
import sys
import time
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from allnorm import __version__, topology
from allnorm.testing import OnMessage

_WIDTH_OF_A_FILE = 180  # columns when the output is no terminal
_SECONDS_BETWEEN_LINES = 5.0

Message = dict[str, Any]
"""What a rank reports while it works: `text`, `done` and `total`."""


def console() -> Console:
    """Standard output: colours on a terminal, plain and wide in a file."""
    if sys.stdout.isatty():
        return Console(highlight=False)
    return Console(highlight=False, width=_WIDTH_OF_A_FILE)


@contextmanager
def progress(title: str) -> Iterator[OnMessage]:
    """Shows how far something is: a bar on a terminal, else a line every few seconds.

    Yields a function that takes a rank and its message; rank 0 speaks for all.
    """
    stream = Console(file=sys.stderr, highlight=False)
    if not stream.is_terminal:
        yield _plain_progress(title)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=stream, transient=True) as bar:
        task = bar.add_task(escape(f"{title}: starting ranks"), total=None)

        def show(rank: int, message: Message) -> None:
            if rank == 0:
                text = escape(f"{title}: {message.get('text', '')}")
                done, total = message.get("done"), message.get("total")
                bar.update(task, description=text, completed=done, total=total)

        yield show


def _plain_progress(title: str) -> OnMessage:
    print(f"{title}: starting ranks", file=sys.stderr, flush=True)
    last = -math.inf

    def show(rank: int, message: Message) -> None:
        nonlocal last
        now = time.monotonic()
        if rank or now - last < _SECONDS_BETWEEN_LINES:
            return
        last = now
        count = f" ({message['done']} of {message['total']})" if "total" in message else ""
        print(f"{title}: {message.get('text', '')}{count}", file=sys.stderr, flush=True)

    return show


def table(
    title: str, columns: Iterable[str], rows: Iterable[Iterable[str]], words: Container[str] = ()
) -> Table:
    """A table of figures; cells may hold rich markup.

    Columns whose headings are in `words` are aligned to the left, as the first one is.
    """
    result = Table(title=title, title_justify="left", header_style="bold")
    for index, column in enumerate(columns):
        left = index == 0 or column in words
        result.add_column(column, justify="left" if left else "right", overflow="fold")
    for row in rows:
        result.add_row(*row)
    return result


def facts(title: str, pairs: Iterable[tuple[str, str]]) -> Table:
    """A table of names and values."""
    result = Table(title=title, title_justify="left", show_header=False)
    result.add_column(style="bold", no_wrap=True)
    result.add_column(overflow="fold")
    for name, value in pairs:
        result.add_row(name, value)
    return result


def ok(text: str) -> str:
    """Markup of something that holds."""
    return f"[green]{escape(text)}[/green]"


def bad(text: str) -> str:
    """Markup of something that does not."""
    return f"[bold red]{escape(text)}[/bold red]"


def fail(text: str) -> NoReturn:
    """Prints what is wrong, and ends the command with exit code 1."""
    console().print(bad(text))
    raise typer.Exit(1)


def ranks(count: int) -> str:
    """How many, in words: "1 rank", "2 ranks"."""
    return f"{count} rank{'s' if count != 1 else ''}"


def microseconds(value: float) -> str:
    """A time given in us, with three significant digits; long ones are shown in ms."""
    if not math.isfinite(value):
        return "-"
    if value >= 1e4:
        return f"{value / 1e3:,.1f} ms" if value < 1e5 else f"{value / 1e3:,.0f} ms"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def time_of(value: float) -> str:
    """A time given in us, with its unit."""
    text = microseconds(value)
    return text if text.endswith("ms") else f"{text} us"


def gibibytes(count: int | None) -> str:
    """A size in GiB; "unknown" for None."""
    return "unknown" if count is None else f"{count / 2**30:.1f} GiB"


def provenance() -> dict[str, Any]:
    """Where a result comes from: commit, versions, command, date."""
    commit = topology.source_commit()
    return {
        "commit": commit or f"release {__version__}",
        "versions": {"allnorm": __version__, **topology.versions()},
        "command": shlex.join(["allnorm", *map(_without_folder, sys.argv[1:])]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _without_folder(argument: str) -> str:
    """An argument as it is stored: of an absolute path the name alone."""
    return Path(argument).name if Path(argument).is_absolute() else argument


def conditions(device: str, **more: Any) -> dict[str, Any]:
    """What was measured, "cuda" or "cpu", where the result comes from, and `more`."""
    kind = "gpu" if device == "cuda" else "cpu"
    return {kind: topology.device_name(device), **provenance(), **more}


def append_json_lines(
    path: Path | None, rows: Iterable[Mapping[str, Any]], common: Mapping[str, Any] | None = None
) -> None:
    """Appends one JSON object per line, `common` before each; makes the file and its folder.

    Numbers that JSON does not have (NaN, infinity) become null. Without a path it does nothing.
    """
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(_finite({**(common or {}), **row}), allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
