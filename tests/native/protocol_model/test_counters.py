"""Tests the CUDA exchange as a state machine: numbers, phases, deadlines and deaths.

In every final state, all live ranks have finished. Every value that a rank accepted belongs to the
rank's operation, or is a failed rank's NaN in the bits that the reader expects. A rank that
accepted a NaN has failed by the next operation.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from .counters import explore
from .exchange import Exchange, exchange_of
from .kernels import WRAP, Setting
from .mutants import COUNTER_MUTANTS, LATE_MUTANTS, SEEN_IN_LONGER_HALVES

# Numbers of the first operation: the counter then passes 2^32, 2^31, or neither.
FIRST_OPS = (WRAP - 2, WRAP // 2 - 2, 0)
LARGE = ((), (0, 1, 2, 3), (0, 2, 3))
TRANSPORTS = ("one_shot", "two_shot", "owned_rows", "owned_quantized", "gather")
# NVFP4 rows have the same places as those of owned_quantized, but different words.
PAIRS = (
    *itertools.product(TRANSPORTS, TRANSPORTS),
    *(("owned_nvfp4", "owned_nvfp4"), ("two_shot", "owned_nvfp4"), ("owned_nvfp4", "two_shot")),
)


@pytest.fixture(scope="module")
def exchange() -> Exchange:
    return exchange_of()


@pytest.fixture(scope="module")
def exchange_of_four() -> Exchange:
    return exchange_of(half_units=4)


def explored(exchange: Exchange, setting: Setting) -> int:
    states, problem = explore(exchange, setting)
    assert problem is None, problem
    return states


@pytest.mark.sampled(2)
@pytest.mark.parametrize("first_op", FIRST_OPS)
@pytest.mark.parametrize("transport", ["one_shot", "two_shot"])
def test_every_rank_ends_correctly(exchange: Exchange, transport: str, first_op: int) -> None:
    for large in LARGE:
        setting = Setting(2, 6, first_op, transport, large)
        assert explored(exchange, setting) > 1000


def test_halves_of_several_operations(exchange_of_four: Exchange) -> None:
    """Tests halves in which most operations take a unit and return no slots; one can be large."""
    for small, large in ((tuple(range(10)), ()), ((0, 1, 2, 5, 6, 7), (3,))):
        setting = Setting(2, 10, WRAP - 5, small=small, large=large, eager=True)
        places = exchange_of_four.arithmetic.slot_places(10, large, small)
        assert sum(place.hands_back for place in places) in (3, 5)
        assert explored(exchange_of_four, setting) > 1000


@pytest.mark.parametrize("transport", ["one_shot", "two_shot"])
def test_three_ranks(exchange: Exchange, transport: str) -> None:
    assert explored(exchange, Setting(3, 2, transport=transport, eager=True)) > 500


@pytest.mark.sampled(2)
@pytest.mark.parametrize("large", [(), (0, 1, 2)])
@pytest.mark.parametrize("transport", ["one_shot", "two_shot"])
def test_deadlines_and_a_death_at_any_point(
    exchange: Exchange, transport: str, large: tuple[int, ...]
) -> None:
    setting = Setting(2, 3, transport=transport, large=large, deadlines=True, deaths=1, eager=True)
    assert explored(exchange, setting) > 1000


def late_peer(of: str, then: str, shift: int, **others: Any) -> Setting:
    """Returns one operation, then four with transport `then`; the last reuses the first slots."""
    kinds, shifts = (of, *[then] * 4), (0, *[shift] * 4)
    return Setting(2, 5, transport=kinds, shift=shifts, deadlines=True, eager=True, **others)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("shift", [0, 2])
@pytest.mark.parametrize(("of", "then"), PAIRS)
def test_a_late_peer_accepts_no_later_data(
    exchange: Exchange, of: str, then: str, shift: int
) -> None:
    """Tests all pairs of transports that use the same unit, with failures at any point."""
    assert explored(exchange, late_peer(of, then, shift)) > 500


@pytest.mark.parametrize("shift", [0, 2])
def test_transports_in_turn(exchange: Exchange, shift: int) -> None:
    """Tests slots of different layouts that share a unit, without failures."""
    kinds = (*TRANSPORTS, *TRANSPORTS[::-1])
    shifts = tuple(shift * (k // 4 % 2) for k in range(len(kinds)))
    for large in LARGE:
        setting = Setting(2, len(kinds), transport=kinds, shift=shifts, large=large, eager=True)
        assert explored(exchange, setting) > 500


@pytest.mark.parametrize("operation", [0, 1])
def test_every_rank_notices_a_different_call(exchange: Exchange, operation: int) -> None:
    """Tests calls that diverge on one rank, without deadlines."""
    explored(exchange, Setting(2, 3, diverging=(0, operation)))
    explored(exchange, Setting(3, 1, diverging=(1, 0), eager=True))


LONG = {
    **{
        f"2 ranks from {first_op}, large {large}": Setting(2, 8, first_op, large=large)
        for first_op, large in itertools.product(FIRST_OPS, LARGE)
    },
    "3 ranks": Setting(3, 4, eager=True),
    "3 ranks, large": Setting(3, 3, large=(0, 1, 2), eager=True),
    "3 ranks, different call": Setting(3, 2, diverging=(1, 1), eager=True),
    "3 ranks, deadlines": Setting(3, 1, deadlines=True, deaths=1, eager=True),
    "deadlines": Setting(2, 3, deadlines=True, deaths=1),
    "deadlines, more operations": Setting(2, 5, deadlines=True, deaths=1, eager=True),
}


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("transport", ["one_shot", "two_shot"])
@pytest.mark.parametrize("name", LONG)
def test_more_operations(exchange: Exchange, name: str, transport: str) -> None:
    explored(exchange, dataclasses.replace(LONG[name], transport=transport))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("bits", ["16", "32"])
@pytest.mark.parametrize("shift", [1, 3])
@pytest.mark.parametrize(("of", "then"), PAIRS)
def test_a_late_peer_with_other_shifts(
    exchange: Exchange, of: str, then: str, shift: int, bits: str
) -> None:
    explored(exchange, late_peer(of, then, shift, bits=(bits, *["16"] * 4)))
    explored(exchange, late_peer(of, then, shift, bits=("16", *[bits] * 4), large=(0, 4)))


@pytest.mark.parametrize("name", LATE_MUTANTS)
def test_a_store_after_a_failure_is_found(name: str) -> None:
    (of, then, shift), defect = LATE_MUTANTS[name]
    _, problem = explore(defect.exchange(), late_peer(of, then, shift))
    assert problem is not None
    assert "took Word" in problem


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", COUNTER_MUTANTS)
def test_a_defect_is_found(name: str) -> None:
    half_units, setting = 2, Setting(2, 6)
    if name in SEEN_IN_LONGER_HALVES:
        half_units, setting = 4, Setting(2, 6, small=tuple(range(6)))
    _, problem = explore(COUNTER_MUTANTS[name].exchange(half_units), setting)
    assert problem is not None


def test_without_deadlines_a_death_is_waited_for_for_ever(exchange: Exchange) -> None:
    _, problem = explore(exchange, Setting(2, 2, deaths=1))
    assert problem is not None
    assert "waits for ever" in problem
