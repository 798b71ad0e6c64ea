"""The CPU protocol: no race, nothing read that is not of its operation, no wake-up lost."""

from __future__ import annotations

import pytest

from .cpu import COMM, LAYOUT, TRANSPORTS, pull_program, read_pull, sleep_program
from .source import Sources

z3 = pytest.importorskip("z3")

from .ptx import Executions  # noqa: E402

CALLS = {
    "one_shot": ("one_shot",) * 3,
    "two_shot": ("two_shot",) * 3,
    "all_gather": ("all_gather",) * 3,
    "mixed": ("one_shot", "two_shot", "all_gather", "one_shot"),
}


def problem(sources: Sources, calls: tuple[str, ...], world_size: int = 2) -> list[str] | None:
    executions = Executions(pull_program(read_pull(sources), world_size, calls))
    return executions.find(z3.Or(executions.wrong(), executions.races(), executions.hangs()))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS)
def test_nothing_goes_wrong(calls: tuple[str, ...], world_size: int) -> None:
    assert problem(Sources(), calls, world_size) is None


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS)
def test_four_ranks(calls: tuple[str, ...]) -> None:
    assert problem(Sources(), calls, 4) is None


_PUBLISH = "store_seq_cst(published(config_.rank), publication(step));"
_LOAD = "has_reached(load_acquire(word), expected)"
_COPY = "  copy_in(chunk, chunk.begin, 0, chunk.layout.rows);\n"
_WAIT = "    if (rank != config_.rank && !wait(rank, 1, chunk.tag)) return false;\n"

MUTANTS = {
    "one phase": (LAYOUT, "kPullPhases = 2", "kPullPhases = 1"),
    "published relaxed": (COMM, _PUBLISH, _PUBLISH.replace("seq_cst", "relaxed")),
    "waited for relaxed": (COMM, _LOAD, _LOAD.replace("acquire", "relaxed")),
    "published before the rows": (
        TRANSPORTS,
        _COPY + "  publish(1);\n",
        "  publish(1);\n" + _COPY,
    ),
    "no wait for the first step": (TRANSPORTS, _WAIT, ""),
    "sums not published": (TRANSPORTS, "  publish(2);\n", ""),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_defect_in_the_sources_is_found(name: str) -> None:
    calls = CALLS["two_shot"] if name == "sums not published" else CALLS["one_shot"]
    assert problem(Sources().edited(MUTANTS[name]), calls) is not None


# ---- going to sleep ------------------------------------------------------------------------------


def loses_a_wake_up(sources: Sources) -> bool:
    program, sees_sleeper, sees_number = sleep_program(read_pull(sources))
    executions = Executions(program)
    missed = (executions.reads(sees_sleeper, 0), executions.reads(sees_number, 0))
    return executions.find(*missed) is not None


def test_no_wake_up_is_lost() -> None:
    assert not loses_a_wake_up(Sources())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (_PUBLISH, _PUBLISH.replace("seq_cst", "release")),
        ("load_seq_cst(sleepers", "load_acquire(sleepers"),
        ("seen = load_seq_cst(word)", "seen = load_acquire(word)"),
    ],
)
def test_a_wake_up_is_lost_without_seq_cst(old: str, new: str) -> None:
    assert loses_a_wake_up(Sources().edited((COMM, old, new)))
