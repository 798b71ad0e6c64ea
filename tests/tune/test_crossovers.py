"""Tests which sizes are measured and which steps result, for known costs."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable

import pytest

from allnorm.policy import Step
from allnorm.tune import crossovers
from allnorm.tune.crossovers import Candidate, Times

ONE, TWO, TWO_LIMITED = Candidate("one_shot"), Candidate("two_shot"), Candidate("two_shot", 132)
GRID = crossovers.token_grid(16384, 4)


class Clock:
    """A fake measurement: costs by a formula, and a record of the measured sizes."""

    def __init__(self, **costs: Callable[[int], float]) -> None:
        self.costs = {Candidate(name): cost for name, cost in costs.items()}
        self.asked: list[int] = []

    def __call__(self, tokens: int) -> Times:
        self.asked.append(tokens)
        return {candidate: cost(tokens) for candidate, cost in self.costs.items()}


@pytest.mark.parametrize("crossover", [1, 2, 3, 5, 17, 20, 64, 65, 100, 373, 1000, 9999, 15000])
def test_a_crossover_is_found(crossover: int) -> None:
    """one_shot costs 3 + t, two_shot about 3 + c + t / 4. They are equal after `crossover`."""
    clock = Clock(one_shot=lambda t: 3 + t, two_shot=lambda t: 3 + 0.75 * (crossover + 0.5) + t / 4)
    times = crossovers.search(clock, GRID)
    assert len(clock.asked) == len(set(clock.asked)), "no size is measured twice"
    assert len(clock.asked) <= len(GRID) + 8
    first, last = crossovers.steps(times)
    assert (first.algorithm, last) == ("one_shot", Step(None, "two_shot"))
    assert first.max_tokens is not None
    # Where the table makes the wrong choice, it loses almost no time.
    for tokens in range(1, 16385):
        taken = ONE if tokens <= first.max_tokens else TWO
        found = {c: cost(tokens) for c, cost in clock.costs.items()}
        assert found[taken] <= 1.05 * min(found.values()), tokens


def test_without_a_crossover_only_the_grid_is_measured() -> None:
    clock = Clock(one_shot=lambda t: 10 + t, two_shot=lambda t: 5 + t / 2)
    assert crossovers.steps(crossovers.search(clock, GRID)) == (Step(None, "two_shot"),)
    assert clock.asked == GRID


def test_several_crossovers() -> None:
    clock = Clock(
        one_shot=lambda t: 3 + t, two_shot=lambda t: 30 + t / 4, unfused=lambda t: 400 + t / 50
    )
    found = crossovers.steps(crossovers.search(clock, GRID))
    assert [step.algorithm for step in found] == ["one_shot", "two_shot", "unfused"]
    assert found[0].max_tokens == pytest.approx(36, rel=0.05)
    assert found[1].max_tokens == pytest.approx(1609, rel=0.05)


def test_noise_adds_no_steps() -> None:
    rng = random.Random(0)

    def cost(tokens: int) -> float:
        return (5 + tokens) * rng.uniform(0.995, 1.005)

    noisy = Clock(one_shot=cost, two_shot=cost)
    assert len(crossovers.steps(crossovers.search(noisy, GRID))) == 1


def test_search_ends_with_any_times() -> None:
    for seed in range(20):
        draw = random.Random(seed).uniform
        noise = functools.partial(lambda draw, t: draw(1, 2), draw)
        clock = Clock(one_shot=noise, two_shot=noise)
        found = crossovers.steps(crossovers.search(clock, GRID))
        assert len(clock.asked) < 50
        limits = [step.max_tokens for step in found]
        assert limits[-1] is None
        assert all(a < b for a, b in itertools.pairwise(limits[:-1]))  # type: ignore[operator]
        assert all(
            a != b for a, b in itertools.pairwise((s.algorithm, s.num_blocks) for s in found)
        )


def test_the_default_geometry_is_preferred() -> None:
    spread = Candidate("two_shot", 0, 2)
    times = {
        1: {ONE: 3.0, TWO: 4.0, spread: 4.1},
        32: {ONE: 5.0, TWO: 4.05, spread: 4.0},
        64: {ONE: 7.0, TWO: 6.0, spread: 5.0},
    }
    assert list(crossovers.winners(times).values()) == [ONE, TWO, spread]


def test_a_candidate_that_was_wrong_at_one_size_is_never_used() -> None:
    times = {1: {ONE: 1.0, TWO: 2.0}, 4: {ONE: 5.0, TWO: 4.0}, 16: {TWO: 9.0, TWO_LIMITED: 7.0}}
    names = [step.algorithm for step in crossovers.steps(times)]
    assert names == ["one_shot", "two_shot", "two_shot"]
    assert crossovers.steps(times, without=[ONE]) == (
        Step(4, "two_shot"),
        Step(None, "two_shot", 132),
    )
    assert crossovers.steps(times, without=[ONE, TWO, TWO_LIMITED]) == ()
    assert crossovers.steps({}) == ()


def test_a_limit_of_blocks_is_tried_for_many_rows() -> None:
    both = ("one_shot", "two_shot")
    assert crossovers.candidates(both, 512, 132) == [ONE, TWO]
    many = crossovers.candidates(both, 4096, 132)
    assert many == [ONE, TWO, TWO_LIMITED, Candidate("two_shot", 264)]
    assert crossovers.candidates(both, 4096, 0) == [ONE, TWO]
    assert crossovers.candidates(["one_shot"], 4096, 132) == [ONE]


def test_blocks_per_row_must_hold_the_row_and_fit_on_the_gpu() -> None:
    def sizes(tokens: int, row_bytes: int) -> list[int]:
        found = crossovers.candidates(("one_shot", "unfused"), tokens, 132, row_bytes)
        assert found[:2] == [ONE, Candidate("unfused")]
        assert {candidate.algorithm for candidate in found[2:]} <= {"one_shot"}
        return [candidate.cluster_size for candidate in found[2:]]

    assert sizes(1, 8192) == [1, 2, 4, 8]
    assert sizes(1, 16384) == [2, 4, 8], "one block does not hold the row"
    assert sizes(1, 5760) == [1, 2, 4]
    assert sizes(1, 240) == []
    assert sizes(34, 8192) == [1, 2], "an SM for each block"
    assert sizes(66, 8192) == [1, 2]
    assert sizes(67, 16384) == []
    assert Candidate.of(Candidate("two_shot", 0, 4).step(7)) == Candidate("two_shot", 0, 4)
    assert str(Candidate("two_shot", 132, 4)) == "two_shot, 132 blocks, 4 per row"


def test_grid() -> None:
    assert crossovers.token_grid(16384, 4) == [1, 4, 16, 64, 256, 1024, 4096, 16384]
    assert crossovers.token_grid(100, 4) == [1, 4, 16, 64, 100]
    assert crossovers.token_grid(16384, 2) == [1 << power for power in range(15)]
    assert crossovers.token_grid(1, 4) == [1]


def test_a_link_rate_must_gain_more_than_noise() -> None:
    assert crossovers.link_rate({}) == 0.0
    assert crossovers.link_rate({0.0: 196.0}) == 0.0
    assert crossovers.link_rate({0.0: 196.0, 342.0: 201.0, 369.0: 188.0, 376.0: 190.0}) == 369.0
    assert crossovers.link_rate({0.0: 196.0, 342.0: 201.0, 369.0: 193.0}) == 0.0
    assert crossovers.link_rate({342.0: 200.0, 369.0: 188.0}) == 369.0, "right only with a rate"
    assert crossovers.link_rate({0.0: 9.0, 342.0: 8.0, 350.0: 8.0}) == 342.0
