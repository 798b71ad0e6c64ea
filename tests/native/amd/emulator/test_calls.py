"""Tests that the kernels for AMD GPUs, executed by the emulator, return every bit as specified."""

from __future__ import annotations

import pytest

from native.sass.kernels import all_variants, traits

from .calls import Call, Group
from .cases import GFX942, SHORT, Case, all_kernels, slices, streams
from .machine import Settings

TIMEOUT, DIVERGED, PEER_DIED = 3, 4, 7  # AllnormStatus
SEEDS = (1, 2)
DEADLINE_NS = 400_000
# A call of each epilogue.
CALLS = (
    pytest.param(Call(3, 512), id="norm"),
    pytest.param(slices(3, 1024, 128), id="slices"),
    pytest.param(streams(3, 512, 4), id="streams"),
)


@pytest.mark.sampled(6)
@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in SHORT])
def test_short_calls(case: Case) -> None:
    for seed in SEEDS:
        outcome = case.run(Settings(seed=seed))
        assert outcome.is_right, (seed, outcome)


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_a_peer_that_does_not_come_is_reported(call: Call) -> None:
    group = Group(2, GFX942, 1, timeout_ns=DEADLINE_NS, first_op=7)
    group.add(call)
    group.add(call)  # does not wait again
    outcome = group.run(Settings(), absent=[1])
    fault = outcome.faults[0]
    assert (fault.status, fault.rank, fault.peer, fault.expected_op) == (TIMEOUT, 0, 1, 7)
    assert outcome.wrong == [0, 0]  # each element is right or NaN


@pytest.mark.slow
def test_a_peer_whose_process_has_ended_is_reported() -> None:
    group = Group(2, GFX942, 1, timeout_ns=4 * DEADLINE_NS, first_op=7)
    group.add(Call(3, 512))
    group.set_died(0, 1 << 1)
    outcome = group.run(Settings(), absent=[1])
    fault = outcome.faults[0]
    assert (fault.status, fault.peer, fault.expected_op) == (PEER_DIED, 1, 7)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [0, 1])
@pytest.mark.parametrize("fewer_rows", [0, 1])
def test_a_different_call_is_reported(algorithm: int, fewer_rows: int) -> None:
    group = Group(2, GFX942, 1, first_op=7)
    for _ in range(2):
        group.add(Call(4, 512, algorithm=algorithm))
    group.set_different(1, rank=1, fewer_rows=fewer_rows)
    outcome = group.run(Settings())
    for rank, fault in enumerate(outcome.faults):
        found = (fault.status, fault.rank, fault.peer, fault.expected_op, fault.seen_op)
        assert found == (DIVERGED, rank, 1 - rank, 8, 8)
        assert fault.seen_tokens == fault.expected_tokens + (fewer_rows if rank else -fewer_rows)
    assert outcome.wrong[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS[1:])
def test_a_different_call_of_slices_or_streams_is_reported(call: Call) -> None:
    group = Group(2, GFX942, 1, first_op=7)
    for _ in range(2):
        group.add(call)
    group.set_different(1, rank=1, fewer_rows=1)
    outcome = group.run(Settings())
    # The first call has two launches.
    found = [(fault.status, fault.peer, fault.expected_op) for fault in outcome.faults]
    assert found == [(DIVERGED, 1, 10), (DIVERGED, 0, 10)]
    assert outcome.wrong[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["local_rows", "local_aligned", "local_any"])
def test_local_kernels(kind: str) -> None:
    (case,) = (
        case for case in all_kernels(GFX942) if case.name == f"bfloat16-{kind}-x1-basic-plain"
    )
    outcome = case.run(Settings(seed=1))
    assert outcome.is_right, outcome


@pytest.mark.slow
def test_equal_seeds_give_equal_runs() -> None:
    counts = [SHORT[0].run(Settings(seed=5)).instructions for _ in range(2)]
    assert counts[0] == counts[1]


def test_every_kernel_has_a_case() -> None:
    cases = list(all_kernels(GFX942))
    names = {"-".join(traits(variant)) for variant in all_variants(clusters=False)}
    assert {case.name for case in cases} == names
