"""Tests that the CUDA exchange has no wrong values, hangs or data races in PTX's memory model.

Wrong: a wait continues with a different operation's value. Hang: a wait never ends, for example
because a clear overwrites the push that it waits for. A race would be undefined behavior if the
accesses differ in width, as a push and the clear of an earlier push do (PTX 8.7.2).
"""

from __future__ import annotations

import dataclasses

import pytest

from . import mutants
from .exchange import Exchange, exchange_of
from .program import Scope
from .ptx_program import BOUNDARIES, DATA, HAND_BACK, Setting, exchange_program

z3 = pytest.importorskip("z3")

from .ptx import Executions  # noqa: E402

# The last operation starts the first half for the second time.
SMALL = Setting(world_size=2, operations=5)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Descriptions of forbidden executions that the model allows; None: there are none."""

    wrong: list[str] | None
    hang: list[str] | None
    race: list[str] | None

    @property
    def fine(self) -> bool:
        return self.wrong is None and self.hang is None and self.race is None


def verdict(exchange: Exchange, setting: Setting) -> Verdict:
    executions = Executions(exchange_program(exchange, setting))
    # A boundary made of flags also polls, but its polls are not part of the protocol.
    boundary = ("ended", "started")
    hangs = [v for e, v in executions.stuck.items() if e.location[0] not in boundary]
    return Verdict(
        wrong=executions.find(executions.wrong()),
        hang=executions.find(z3.Or(hangs)),
        race=executions.find(executions.races()),
    )


@pytest.fixture(scope="module")
def exchange() -> Exchange:
    return exchange_of()


TRANSPORTS = ("one_shot", "two_shot", "owned_rows", "owned_quantized")
LONG = (pytest.mark.long, pytest.mark.timeout(1800))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("world_size", "operations"),
    [(2, 7), (3, 5), pytest.param(3, 7, marks=LONG), pytest.param(4, 5, marks=LONG)],
)
def test_nothing_goes_wrong(
    exchange: Exchange, transport: str, world_size: int, operations: int
) -> None:
    found = verdict(exchange, Setting(world_size, operations, transport))
    assert found.fine, found


def test_halves_of_several_operations(exchange: Exchange) -> None:
    """Tests halves in which one operation returns slots and others, of one or two units, do not."""
    larger = exchange_of(half_units=4)
    for small in (tuple(range(9)), (0, 2, 3, 5, 6)):
        places = larger.arithmetic.slot_places(9, (), small)
        assert max(place.uses for place in places) == 1
        found = verdict(larger, Setting(operations=9, small=small))
        assert found.fine, found


# Large operations, consecutive or with small ones in between.
LARGE = ((0, 1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 2, 4), (1, 2, 3, 4))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("large", LARGE, ids=str)
@pytest.mark.parametrize(
    ("world_size", "operations", "transport"),
    [
        *((2, 5, "one_shot"), (2, 5, "two_shot")),
        *(
            pytest.param(n, operations, "one_shot", marks=LONG)
            for n, operations in ((3, 6), (4, 5))
        ),
    ],
)
def test_large_operations(
    exchange: Exchange, large: tuple[int, ...], world_size: int, operations: int, transport: str
) -> None:
    found = verdict(exchange, Setting(world_size, operations, transport, large=large))
    assert found.fine, found


def test_words_of_a_slot_arrive_separately(exchange: Exchange) -> None:
    found = verdict(exchange, dataclasses.replace(SMALL, words=(0, 1, 2, 3)))
    assert found.fine, found


# ---- defects -------------------------------------------------------------------------------------

DEFECTS = {
    **{name: (SMALL, defect) for name, defect in mutants.WEAKENED.items()},
    **{name: (SMALL, defect) for name, defect in mutants.EXCHANGE_MUTANTS.items()},
    **{
        name: (dataclasses.replace(SMALL, large=(0, 1, 2, 3)), defect)
        for name, defect in mutants.LARGE_MUTANTS.items()
    },
    **{
        name: (dataclasses.replace(SMALL, transport=transport), defect)
        for name, (transport, defect) in mutants.TRANSPORT_MUTANTS.items()
    },
    **{
        name: (dataclasses.replace(SMALL, words=(0, 1)), defect)
        for name, defect in mutants.WORD_MUTANTS.items()
    },
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_found(name: str) -> None:
    setting, defect = DEFECTS[name]
    found = verdict(defect.exchange(), setting)
    assert found.wrong is not None or found.hang is not None


# ---- kernel boundaries ----------------------------------

# Each of these boundaries must order memory. The others need not, if only one of them does not.
NEEDED = {(DATA, HAND_BACK), (HAND_BACK, DATA)}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kinds", BOUNDARIES, ids=" to ".join)
def test_boundaries(exchange: Exchange, kinds: tuple[str, str]) -> None:
    # With six operations, the last one reuses the slots of a half's last operation. Slots are
    # returned after it.
    setting = Setting(world_size=2, operations=6, unordered=frozenset({kinds}))
    found = verdict(exchange, setting)
    assert found.fine == (kinds not in NEEDED), found


@pytest.mark.parametrize(("scope", "enough"), [(Scope.GPU, True), (Scope.CTA, False)])
def test_a_boundary_needs_gpu_scope(exchange: Exchange, scope: Scope, enough: bool) -> None:
    found = verdict(exchange, dataclasses.replace(SMALL, boundary_scope=scope))
    assert found.fine == enough, found
