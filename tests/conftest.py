"""Fixtures: rank pools that live for the whole session, and visible skips without GPUs."""

from __future__ import annotations

import collections
import math
import os
import pathlib
import random
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from limits import HANG_SECONDS
from rank_helpers import destroy_groups

from allnorm.testing import RankPool, spawn


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Defines pytest-timeout's option if the plugin is missing, as pyproject.toml sets it."""
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "without effect: pytest-timeout is not installed")
    parser.addoption(
        "--share-gpus",
        action="store_true",
        help="run tests of more ranks than there are GPUs too: ranks take turns on a GPU",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Hides this machine's tuning tables and compiler caches from tests and ranks."""
    os.environ["ALLNORM_TUNING_DIR"] = os.path.join(tempfile.gettempdir(), "allnorm-no-tables")
    # The Inductor cache must be empty, because passes do not run on cached code. pytest-xdist
    # workers use the folder of the process that started them.
    if not hasattr(config, "workerinput"):
        folder = tempfile.TemporaryDirectory(prefix="allnorm-inductor-", ignore_cleanup_errors=True)
        config.add_cleanup(folder.cleanup)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder.name
        _keep_compiled(folder.name)
    # Ranks are forked from a process that has imported these modules, which the tests need.
    spawn.PRELOADED += ["pytest", "torch._dynamo", "torch._inductor.compile_fx"]
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): without effect")


def _keep_compiled(folder: str) -> None:
    """Caches the C++ compiler's results, because Inductor compiles half of the code repeatedly."""
    if "CXX" in os.environ or not all(map(shutil.which, ("bash", "g++", "flock", "sha256sum"))):
        return
    os.environ["COMPILED_IN_TESTS"] = folder
    os.environ["CXX"] = str(pathlib.Path(__file__).parent / "cached_compiler" / "g++")


@pytest.hookimpl(tryfirst=True)  # before `-m` selects tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks all but an n-th of the variants of each test with the marker `sampled(n)` as `long`.

    The choice is random, but the same in every run, as it depends only on the test and on the
    number of its variants. Variants for GPUs, and those that are `long` anyway, do not count.
    """
    variants: dict[tuple[str, int], list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        marker = item.get_closest_marker("sampled")
        others = item.get_closest_marker("gpu") or item.get_closest_marker("long")
        if marker is not None and others is None:
            variants[item.nodeid.partition("[")[0], marker.args[0]].append(item)
    for (name, n), found in variants.items():
        left_out = len(found) - math.ceil(len(found) / n)
        for item in random.Random(name).sample(found, left_out):
            item.add_marker(pytest.mark.long)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    marker = item.get_closest_marker("world_size")
    needed = marker.args[0] if marker else 1
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < needed and not (found and _shares_gpus(item)):
        pytest.skip(f"needs {needed} CUDA GPU(s), found {found}")


def _shares_gpus(item: pytest.Item) -> bool:
    """Returns whether a test can run with more ranks than GPUs.

    Rank pools support sharing. The marker `own_gpus` is for tests that need NCCL or a GPU per rank.
    """
    wanted = item.config.getoption("--share-gpus") and "pool" in getattr(item, "fixturenames", ())
    return bool(wanted) and item.get_closest_marker("own_gpus") is None


class PatientPool(RankPool):
    """A pool that waits long enough for slow machines, regardless of a test's time limit."""

    def run(self, *args: Any, timeout: float | None = None, **kwargs: Any) -> list[Any]:
        return super().run(*args, timeout=max(timeout or 0.0, HANG_SECONDS), **kwargs)


class Pools:
    """Rank pools, each created once per device and world size."""

    def __init__(self, share_gpus: bool) -> None:
        self._share_gpus = share_gpus
        self._pools: dict[tuple[str, int], RankPool] = {}
        self._untidy: set[tuple[str, int]] = set()

    def get(self, device: str, world_size: int) -> RankPool:
        key = (device, world_size)
        if key not in self._pools:
            self._pools[key] = PatientPool(world_size, device, share_gpus=self._share_gpus)
        self._untidy.add(key)
        return self._pools[key]

    def tidy(self) -> None:
        """Destroys the process groups that tests left in the ranks they used."""
        for key in self._untidy:
            if self._pools[key].is_running:
                self._pools[key].run(destroy_groups)
        self._untidy.clear()

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


@pytest.fixture(scope="session")
def pools(request: pytest.FixtureRequest) -> Iterator[Pools]:
    all_pools = Pools(request.config.getoption("--share-gpus"))
    yield all_pools
    all_pools.close()


@pytest.fixture(scope="module", autouse=True)
def tidy_ranks(pools: Pools) -> Iterator[None]:
    yield
    pools.tidy()


@pytest.fixture(autouse=True)
def tidy_models(request: pytest.FixtureRequest, pools: Pools) -> Iterator[None]:
    yield
    if request.path.parent.name == "integrations":
        pools.tidy()


@pytest.fixture
def pool(request: pytest.FixtureRequest, pools: Pools) -> RankPool:
    """Returns the rank pool for the parameters that `rank_helpers.on` sets."""
    device, world_size = request.param
    return pools.get(device, world_size)
