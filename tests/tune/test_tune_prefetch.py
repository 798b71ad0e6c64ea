"""Tests how `allnorm tune` measures and switches prefetch of the next weight."""

from __future__ import annotations

import dataclasses
import math
import pathlib

import pytest
from bench.samples import chain

from allnorm import tuning
from allnorm.testing import run_ranks
from allnorm.tune import prefetch, table
from allnorm.tune import run as ranks_tune
from allnorm.tune.prefetch import PrefetchTimes, most_tokens

from .test_tune import JOB


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ({1: 0.7, 8: 0.9, 32: 0.8, 64: 0.7}, 64),
        ({1: 0.7, 8: 0.9, 32: 0.8, 64: -0.3}, 32),
        ({1: 0.7, 8: -0.5, 32: 0.8}, 1),  # a size beyond a loss is not considered
        ({1: -0.2, 8: 0.9}, 0),
        ({1: 0.05, 8: 0.05}, 0),  # noise is no gain
        ({1: math.nan, 8: 0.9}, 0),
    ],
)
def test_no_measured_size_loses(gains: dict[int, float], expected: int) -> None:
    assert most_tokens([chain(tokens, gain) for tokens, gain in gains.items()]) == expected


def test_no_model_loses() -> None:
    better = [chain(tokens, 1.0) for tokens in (1, 8)]
    other = [chain(1, 0.0, model="other"), chain(8, -0.2, model="other")]
    assert most_tokens([*better, *other]) == 1


def test_a_wrong_result_switches_prefetch_off() -> None:
    times = PrefetchTimes((chain(1, 1.0), chain(8, 1.0, "a wrong bit")))
    assert times.tokens == 0
    assert list(times.errors) == ["prefetch:on of tiny with 8 rows: a wrong bit"]


def tuned(rank: int, world_size: int, job: ranks_tune.Job) -> ranks_tune.Result:
    return ranks_tune.run(rank, world_size, job)


def stored(result: ranks_tune.Result, folder: pathlib.Path) -> int | None:
    path = table.store(result, folder, "cpu", 2, {"date": "2026-01-01"})
    return tuning.read(path, tuning.device_name("cpu"), 2).tuned.prefetch_tokens


def test_the_measurement_is_stored_and_kept(tmp_path: pathlib.Path) -> None:
    job = dataclasses.replace(JOB, tokens=(1,), layers=("tiny",))
    result, other = run_ranks(tuned, 2, args=(job,))
    assert result.prefetch == other.prefetch
    chains = result.prefetch.chains
    assert [each.num_tokens for each in chains] == list(prefetch.TOKENS)
    assert not list(result.prefetch.errors)
    rows = list(result.prefetch.rows(2))
    for off, on in zip(rows[::2], rows[1::2], strict=True):
        assert on["chosen"] is not off["chosen"]
    unmeasured = dataclasses.replace(result, prefetch=PrefetchTimes())
    assert stored(unmeasured, tmp_path) is None

    def with_gain(gain_us: float) -> ranks_tune.Result:
        times = PrefetchTimes((chain(1, gain_us),))
        return dataclasses.replace(result, prefetch=times)

    changes = table.changes(with_gain(-1.0), tmp_path, "cpu", 2)
    assert "prefetch: not measured -> off" in changes
    assert stored(with_gain(-1.0), tmp_path) == 0
    assert stored(unmeasured, tmp_path) == 0, "what was not measured again is kept"
    changes = table.changes(with_gain(1.0), tmp_path, "cpu", 2)
    assert "prefetch: off -> up to 1 rows" in changes
    assert stored(with_gain(1.0), tmp_path) == 1
