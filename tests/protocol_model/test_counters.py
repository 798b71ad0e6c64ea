"""Numbers, phases, deadlines and deaths of the CUDA exchange: every state of some operations.

In every state that nothing leads on from, every rank that lives has come to its end; whatever it
took was of its operation, or a NaN of a rank that had failed; and whoever took a NaN has failed by
the next operation.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from protocol_model.counters import ASSUMED, explore
from protocol_model.exchange import Exchange
from protocol_model.kernels import WRAP, Setting
from protocol_model.mutants import COUNTER_MUTANTS
from protocol_model.reader import read_exchange
from protocol_model.source import Sources

# Operations cross 2^32, 2^31, nothing.
FIRST_OPS = (WRAP - 2, WRAP // 2 - 2, 0)
LARGE = ((), (0, 1, 2, 3), (0, 2, 3))


@pytest.fixture(scope="module")
def exchange() -> Exchange:
    return read_exchange()


def explored(exchange: Exchange, setting: Setting) -> int:
    states, problem = explore(exchange, setting)
    assert problem is None, problem
    return states


@pytest.mark.parametrize(("path", "text"), ASSUMED)
def test_the_sources_say_what_is_assumed(path: str, text: str) -> None:
    assert text in Sources()[path]


@pytest.mark.parametrize("first_op", FIRST_OPS)
@pytest.mark.parametrize("transport", ["one_shot", "two_shot"])
def test_everyone_ends_with_what_is_right(
    exchange: Exchange, transport: str, first_op: int
) -> None:
    for large in LARGE:
        setting = Setting(2, 5, first_op, transport, large)
        assert explored(exchange, setting) > 1000


@pytest.mark.parametrize("transport", ["one_shot", "two_shot"])
def test_three_ranks(exchange: Exchange, transport: str) -> None:
    assert explored(exchange, Setting(3, 3, transport=transport, eager=True)) > 500


@pytest.mark.parametrize("large", [(), (0, 1, 2)])
@pytest.mark.parametrize("transport", ["one_shot", "two_shot"])
def test_deadlines_and_a_death_at_any_point(
    exchange: Exchange, transport: str, large: tuple[int, ...]
) -> None:
    setting = Setting(2, 3, transport=transport, large=large, deadlines=True, deaths=1, eager=True)
    assert explored(exchange, setting) > 1000


@pytest.mark.parametrize("operation", [0, 1])
def test_another_call_is_noticed_by_everyone(exchange: Exchange, operation: int) -> None:
    """Without the help of deadlines."""
    explored(exchange, Setting(2, 3, diverging=(0, operation)))
    explored(exchange, Setting(3, 1, diverging=(1, 0), eager=True))


LONG = {
    **{
        f"2 ranks from {first_op}, large {large}": Setting(2, 8, first_op, large=large)
        for first_op, large in itertools.product(FIRST_OPS, LARGE)
    },
    "3 ranks": Setting(3, 4, eager=True),
    "3 ranks, large": Setting(3, 3, large=(0, 1, 2), eager=True),
    "3 ranks, another call": Setting(3, 2, diverging=(1, 1), eager=True),
    "3 ranks, deadlines": Setting(3, 1, deadlines=True, deaths=1, eager=True),
    "deadlines": Setting(2, 3, deadlines=True, deaths=1),
    "deadlines, more operations": Setting(2, 5, deadlines=True, deaths=1, eager=True),
}


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("transport", ["one_shot", "two_shot"])
@pytest.mark.parametrize("name", LONG)
def test_more_of_everything(exchange: Exchange, name: str, transport: str) -> None:
    explored(exchange, dataclasses.replace(LONG[name], transport=transport))


@pytest.mark.parametrize("name", COUNTER_MUTANTS)
def test_a_defect_in_the_sources_is_found(name: str) -> None:
    exchange = read_exchange(Sources().edited(*COUNTER_MUTANTS[name]))
    _, problem = explore(exchange, Setting(2, 5))
    assert problem is not None


def test_without_deadlines_a_death_is_waited_for_in_vain(exchange: Exchange) -> None:
    _, problem = explore(exchange, Setting(2, 2, deaths=1))
    assert problem is not None
    assert "waits for ever" in problem
