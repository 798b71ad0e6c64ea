"""Tests that the CPU protocol has no races, stale reads or lost wake-ups."""

from __future__ import annotations

import pytest

from native.accesses import Table, read_table

from .cpu import Pull, pull_of, pull_program, sleep_program

z3 = pytest.importorskip("z3")

from .ptx import Executions  # noqa: E402

CALLS = {
    "one_shot": ("one_shot",) * 3,
    "two_shot": ("two_shot",) * 3,
    "all_gather": ("all_gather",) * 3,
    "mixed": ("one_shot", "two_shot", "all_gather", "one_shot"),
}


def problem(pull: Pull, calls: tuple[str, ...], world_size: int = 2) -> list[str] | None:
    executions = Executions(pull_program(pull, world_size, calls))
    return executions.find(z3.Or(executions.wrong(), executions.races(), executions.hangs()))


FOUR = pytest.param(4, marks=(pytest.mark.long, pytest.mark.timeout(1800)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("world_size", [2, 3, FOUR])
@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS)
def test_nothing_goes_wrong(calls: tuple[str, ...], world_size: int) -> None:
    assert problem(pull_of(), calls, world_size) is None


def _changed(table: Table, name: str, *steps: str) -> Pull:
    return pull_of(table.with_cpu_algorithm(name, *steps))


TABLE = read_table()
ONE_SHOT, TWO_SHOT = (TABLE.cpu_algorithms[name] for name in ("one_shot", "two_shot"))
MUTANTS = {
    "one phase": lambda: pull_of(faults=("one_pull_phase",)),
    "published relaxed": lambda: pull_of(TABLE.with_cpu_order("publish", "published", "relaxed")),
    "waited for relaxed": lambda: pull_of(TABLE.with_cpu_order("wait", "published", "relaxed")),
    "published before the rows": lambda: _changed(
        TABLE, "one_shot", "announce", "publish_1", "write_partial", "wait_1", "read_partial"
    ),
    "no wait for the first step": lambda: _changed(
        TABLE, "one_shot", *(step for step in ONE_SHOT if step != "wait_1")
    ),
    "sums not published": lambda: _changed(
        TABLE, "two_shot", *(step for step in TWO_SHOT if step != "publish_2")
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_defect_is_found(name: str) -> None:
    calls = CALLS["two_shot"] if name == "sums not published" else CALLS["one_shot"]
    assert problem(MUTANTS[name](), calls) is not None


# ---- sleep ------------------------------------------------------------------------------


def loses_a_wake_up(table: Table) -> bool:
    program, sees_sleeper, sees_number = sleep_program(pull_of(table))
    executions = Executions(program)
    missed = (executions.reads(sees_sleeper, 0), executions.reads(sees_number, 0))
    return executions.find(*missed) is not None


def test_no_wake_up_is_lost() -> None:
    assert not loses_a_wake_up(TABLE)


@pytest.mark.parametrize(
    ("part", "place", "order"),
    [
        ("publish", "published", "release"),
        ("publish", "sleepers", "acquire"),
        ("sleep", "published", "acquire"),
    ],
)
def test_a_wake_up_is_lost_without_seq_cst(part: str, place: str, order: str) -> None:
    assert loses_a_wake_up(TABLE.with_cpu_order(part, place, order))
