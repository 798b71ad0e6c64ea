"""The clock of the engines' latency benchmarks, without an engine."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

ENGINES = pathlib.Path(__file__).resolve().parents[1] / "benchmarks" / "engines"


@pytest.fixture(scope="module")
def latency() -> Iterator[ModuleType]:
    name = "engines_latency"
    spec = importlib.util.spec_from_file_location(name, ENGINES / "latency.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]


class Engine:
    """Prefills in 20, 60, 20, 60... ms, then 2 ms a token; tells the latter, or does not."""

    def __init__(self, latency: ModuleType, tells: bool) -> None:
        self._made, self._tells, self._calls = latency.Generation, tells, 0

    def __call__(self, prompts: list[list[int]], tokens: int) -> object:
        self._calls += 1
        decode = 2e-3 * (tokens - 1)
        prefill = 0.02 if self._calls % 2 else 0.06
        generated = [[len(prompt)] * tokens for prompt in prompts]
        return self._made(prefill + decode, generated, decode if self._tells else None)


def test_prefills_do_not_blur_what_the_engine_tells(latency: ModuleType) -> None:
    row = latency.latency(Engine(latency, tells=True), [[1, 2], [3]], 64, 5)
    assert row["tpot_ms"] == 2.0
    assert row["decode_ms"] == [126.0] * 5
    assert row["repeats_equal"]
    assert row["tokens"] == [[2] * 64, [1] * 64]


def test_without_it_the_time_to_the_first_token_is_taken_off(latency: ModuleType) -> None:
    row = latency.latency(Engine(latency, tells=False), [[1, 2], [3]], 64, 5)
    assert row["decode_ms"] is None
    # Of one token, 60 ms every time; with 64, 20 + 126.
    assert row["ttft_ms"] == 60.0
    assert row["tpot_ms"] == pytest.approx((146 - 60) / 63, abs=1e-4)
