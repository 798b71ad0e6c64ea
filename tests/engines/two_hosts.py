"""Makes ranks on one machine behave as if each were on its own host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import allnorm


@contextlib.contextmanager
def on_its_own_host(rank: int) -> Iterator[list[Any]]:
    """Makes this rank its own island; yields a list of each closed communicator's islands."""
    islands: list[Any] = []
    close = allnorm.Communicator.close

    def closed(self: allnorm.Communicator) -> None:
        islands.append(self.islands)
        close(self)

    with (
        mock.patch("allnorm.core.workspace._host_identity", return_value=f"host {rank}"),
        mock.patch.object(allnorm.Communicator, "close", closed),
    ):
        yield islands
