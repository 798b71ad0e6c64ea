"""Tests the table of faults: it passes, and it reports promises that do not hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli.helpers import unwrapped
from typer.testing import CliRunner

from allnorm.cli.app import app
from allnorm.testing import RankError
from allnorm.verify import faults

BRIEF = 0.7  # an absence lasts until this timeout
AMPLE = 10.0  # a peer's death ends a call earlier, unless a busy machine lets no survivor run


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allows more time than the table of faults, because machines that run tests are busy."""
    monkeypatch.setattr(faults, "SLACK_SECONDS", 10.0)


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize(
    ("words", "world_size", "island_size", "timeout_s"),
    [
        pytest.param(("op: ", "tokens", "eps", "own", "another"), 2, 0, BRIEF, id="divergences"),
        pytest.param(("comes", "SIGSTOP"), 3, 0, BRIEF, id="absences"),
        pytest.param(("killed",), 3, 0, AMPLE, id="kills"),
        pytest.param(("exits",), 3, 0, AMPLE, id="exits", marks=pytest.mark.slow),
        pytest.param(
            ("dtype", "no residual", "different al"), 4, 2, BRIEF, id="divergences, islands"
        ),
        pytest.param(("comes", "SIGSTOP"), 2, 1, BRIEF, id="absences, islands of one"),
        pytest.param(
            ("between", "exits"), 4, 2, AMPLE, id="deaths, islands", marks=pytest.mark.slow
        ),
    ],
)
def test_faults_are_noticed_and_named(
    words: tuple[str, ...], world_size: int, island_size: int, timeout_s: float
) -> None:
    rows = faults.run(world_size, "cpu", timeout_s, words, island_size=island_size)
    assert len(rows) >= (4 if island_size else 3)
    assert all(any(word in row["fault"] for row in rows) for word in words), "a word chose no fault"
    for row in rows:
        assert not row["problems"], (row["fault"], row["algorithm"], row["problems"])
        assert f"names rank {world_size - 1}" in row["saw"]
        survivors = [one["rank"] for one in row["ranks"] if one["rank"] != world_size - 1]
        assert survivors == list(range(world_size - 1))


@pytest.mark.gpu
@pytest.mark.world_size(2)
@pytest.mark.usefixtures("patience")
def test_faults_on_gpus() -> None:
    rows = faults.run(2, "cuda", 1.0, ("different", "others", "never", "killed"))
    assert len(rows) > 30
    for row in rows:
        assert not row["problems"], (row["fault"], row["algorithm"], row["problems"])


def saw(**changes: Any) -> dict[str, Any]:
    good = {"error": "PeerTimeoutError", "peer": 2, "seconds": 1.2, "problems": [], "seen": "x"}
    return good | changes


@pytest.mark.parametrize(
    ("seen", "complaint"),
    [
        ([saw(), saw(), None], ""),
        ([saw(), None, None], "rank 1 saw nothing"),
        ([saw(), saw(peer=0), None], "rank 1: names rank 0 instead of 2"),
        ([saw(seconds=2.5), saw(), None], "rank 0: took 2.50 s, more than 2"),
        ([saw(), saw(error=""), None], "rank 1: nothing instead of PeerTimeoutError"),
        ([saw(problems=["out is not NaN"]), saw(), None], "rank 0: out is not NaN"),
    ],
)
def test_problems_are_reported(seen: list[Any], complaint: str) -> None:
    assert faults._problems(seen, "never comes", 2, 2.0) == ([complaint] if complaint else [])


def test_a_divergence_must_raise_its_own_error() -> None:
    seen = [saw(), saw(error="PeerDivergedError", peer=0), saw(error="PeerDivergedError", peer=1)]
    problems = faults._problems(seen, "different dtype", 2, 2.0)
    assert problems == [
        "rank 0: PeerTimeoutError instead of PeerDivergedError",
        "rank 1: names rank 0 instead of 2",
    ]


def test_only_shared_memory_of_the_ranks_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "_SHARED_MEMORY", tmp_path)
    for name in ("allnorm-12-a", "allnorm-7-b", "allnorm-7-a", "allnorm-71-a", "other-7-a"):
        (tmp_path / name).touch()
    assert faults._left_by({7, 8}) == ["allnorm-7-a", "allnorm-7-b"]


def test_every_fault_applies_to_some_call() -> None:
    names = [*faults.DIVERGENCES, *faults.ABSENCES, *faults.DEATHS]
    for name in names:
        for calls in (faults.ALGORITHMS, faults.CALLS_BETWEEN_ISLANDS):
            assert any(faults.applies(name, call) for call in calls.values()), name
    elsewhere = {"groups of 64", "different scale_format", "not quantized", "own rows, others all"}
    elsewhere.add("different number of streams")
    for name in set(names) - elsewhere:
        assert faults.applies(name, faults.ALGORITHMS["two_shot"]), name


def test_every_kind_of_call_fails_in_some_way() -> None:
    names = [*faults.DIVERGENCES, *faults.ABSENCES, *faults.DEATHS]
    for calls in (faults.ALGORITHMS, faults.CALLS_BETWEEN_ISLANDS):
        for kind, call in calls.items():
            assert sum(faults.applies(name, call) for name in names) >= 9, kind
    waits = [*faults.ABSENCES, "killed between its calls"]
    for kind in ("own rows", "slices", "streams"):
        assert all(faults.applies(name, faults.ALGORITHMS[kind]) for name in waits)


def test_problems_set_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RankError({0: "no answer"})

    monkeypatch.setattr(faults.RankPool, "run", fail)
    path = tmp_path / "rows.jsonl"
    arguments = ("verify", "--faults", "--device", "cpu", "--tp", "2", "--only", "different dtype")
    done = CliRunner().invoke(app, (*arguments, "--json", str(path)))
    assert done.exit_code == 1
    assert "no answer" in unwrapped(done.output)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert {row["fault"] for row in rows} == {"different dtype"}
    assert all(row["problems"] and row["world_size"] == 2 for row in rows)


def test_faults_need_two_ranks() -> None:
    done = CliRunner().invoke(app, ("verify", "--faults", "--device", "cpu", "--tp", "1"))
    assert done.exit_code == 2
    assert "at least 2" in unwrapped(done.output)
