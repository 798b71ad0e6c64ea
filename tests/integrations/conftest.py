"""Ranks are tidied after every test here: each model that is loaded makes process groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Pools


@pytest.fixture(autouse=True)
def tidy_ranks_often(pools: Pools) -> Iterator[None]:
    yield
    pools.tidy()
