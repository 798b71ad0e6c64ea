"""Reuses compiled code only from earlier runs in which all ranks agreed.

Each rank has its own compile cache. If a rank was interrupted in an earlier run, or the ranks did
not agree, the code in different ranks' caches may not match. Therefore the cache keys contain a
random word. A file in each rank's cache holds the word and the ranks' decisions. A rank that lost
part of its cache recompiles that part, without its peers, and must make the same decisions. The
file is empty while the ranks decide, and after the first graph without agreement. Ranks reuse a
word only if all of them read the same one.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from allnorm.core.verdicts import Verdicts

try:
    import fcntl
except ImportError:  # not available on every system
    fcntl = None  # type: ignore[assignment]


class Generation:
    """The random word in the cache keys, equal on all ranks, and this rank's file with it.

    Creating a Generation is collective among the ranks that compile.
    """

    def __init__(self, place: pathlib.Path, verdicts: Verdicts) -> None:
        self._file: Any = None
        self._agreed: dict[str, str] = {}
        with contextlib.suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            file = open(place, "a+", encoding="utf-8")  # noqa: SIM115 - stays open, because it is locked
            if fcntl is not None:
                os.set_inheritable(file.fileno(), False)
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held until this process ends
                self._file = file
        word, agreed = self._read()
        self.word = verdicts.common(word)
        if self.word == word:
            self._agreed = agreed
            verdicts.restore(agreed)
        self._write()

    @contextlib.contextmanager
    def deciding(self) -> Iterator[dict[str, str]]:
        """Yields an empty dictionary, in which the caller stores the ranks' decision.

        Keys and values are as for `Verdicts.restore`. If the dictionary stays empty, later runs do
        not reuse the word.
        """
        found: dict[str, str] = {}
        self._write(is_empty=True)
        yield found
        if not found:
            self._file = None
        self._agreed |= found
        self._write()

    def _read(self) -> tuple[str, dict[str, str]]:
        try:
            self._file.seek(0)
            word, agreed = json.loads(self._file.read())
            return str(word), dict(agreed)
        except (AttributeError, OSError, ValueError, TypeError):
            return "", {}

    def _write(self, is_empty: bool = False) -> None:
        if self._file is None:
            return
        try:
            self._file.truncate(0)
            if not is_empty:
                self._file.write(json.dumps([self.word, self._agreed]))
            self._file.flush()
        except OSError:
            self._file = None
