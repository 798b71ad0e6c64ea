"""Tests the choice of the algorithm: a pure function, equal on all ranks, with a reason."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from rank_helpers import DTYPES, Case, comm, on, same_on_every_rank

from allnorm import islands as islands_
from allnorm import names, policy

PLENTY = {"one_shot": 10_000, "two_shot": 10_000}


def choose(
    traits: policy.Traits, tokens: int, hidden_size: int, requested: str = "auto"
) -> policy.Plan:
    return policy.choose(traits, tokens, hidden_size, 2, PLENTY, requested)


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
@pytest.mark.parametrize("world_size", range(1, 9))
def test_every_shape_has_a_plan(backend: str, world_size: int) -> None:
    traits = policy.Traits(backend, world_size)
    for tokens, hidden_size in itertools.product(
        (0, 1, 7, 128, 8192, 10**6), (1, 120, 4095, 4096, 16384, 10**6)
    ):
        plan = choose(traits, tokens, hidden_size)
        assert plan.algorithm in names.ALGORITHMS
        assert plan.reason
        assert "\n" not in plan.reason
        assert (plan.num_chunks == 0) == (tokens == 0)
        assert choose(traits, tokens, hidden_size) == plan
        fused = plan.algorithm != "unfused"
        assert fused == (world_size > 1 and (backend == "cpu" or hidden_size % 8 == 0))


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
@pytest.mark.parametrize("world_size", range(3, 9))
def test_one_shot_for_few_bytes_two_shot_for_many(backend: str, world_size: int) -> None:
    """The algorithm changes exactly once as the number of tokens grows."""
    traits = policy.Traits(backend, world_size)
    names = [choose(traits, tokens, 4096).algorithm for tokens in range(1, 2048)]
    assert names[0] == "one_shot"
    assert names[-1] == "two_shot"
    assert sum(a != b for a, b in itertools.pairwise(names)) == 1


@pytest.mark.parametrize(
    ("world_size", "hidden_size", "tokens", "algorithm"),
    [
        *((3, 4096, 40, "one_shot"), (3, 4096, 48, "two_shot")),
        *((3, 8192, 16, "one_shot"), (3, 8192, 24, "two_shot")),
        *((4, 4096, 16, "one_shot"), (4, 4096, 24, "two_shot")),
        *((4, 8192, 8, "one_shot"), (4, 8192, 16, "two_shot")),
    ],
)
def test_without_a_table_the_choice_is_what_was_faster_after_a_gemm_on_h100s(
    world_size: int, hidden_size: int, tokens: int, algorithm: str
) -> None:
    traits = policy.Traits("cuda", world_size)
    assert choose(traits, tokens, hidden_size).algorithm == algorithm


def test_a_pair_with_a_limit_of_blocks_takes_one_shot() -> None:
    """Tables do not apply: they are measured with full grids, where two_shot can be faster."""
    step = policy.Step(None, "two_shot", 40)
    table = policy.Table("measured", {("bfloat16", "norm"): [policy.Curve(4096, (step,))]})
    for backend, world_size, max_blocks, expected in (
        ("cuda", 2, 64, ("one_shot", 64, "default")),
        ("cuda", 2, 0, ("two_shot", 40, "measured")),
        ("cuda", 2, policy.MOST_BLOCKS, ("two_shot", 40, "measured")),
        ("cuda", 4, 64, ("two_shot", 40, "measured")),
        ("cpu", 2, 0, ("two_shot", 40, "measured")),
    ):
        traits = policy.Traits(backend, world_size, tables=(table,), max_blocks=max_blocks)
        for tokens in (1, 8192):
            plan = choose(traits, tokens, 4096)
            assert (plan.algorithm, plan.num_blocks, plan.source) == expected
            assert str(max_blocks) in plan.reason or plan.source == "measured"
    limited = policy.Traits("cuda", 2, max_blocks=64)
    assert choose(limited, 8192, 4096, "two_shot").algorithm == "two_shot"


def test_no_peer_access_means_unfused_and_says_why() -> None:
    plan = choose(policy.Traits("cuda", 4, "cuda:0 has no P2P access to cuda:1"), 1, 4096)
    assert plan.algorithm == "unfused"
    assert "P2P" in plan.reason


@pytest.mark.parametrize("algorithm", names.ALGORITHMS)
def test_a_request_is_followed(algorithm: str) -> None:
    for tokens in (1, 8192):
        plan = choose(policy.Traits("cuda", 8), tokens, 4096, algorithm)
        assert plan.algorithm == algorithm
        assert "caller" in plan.reason


def test_chunks_cover_the_rows() -> None:
    for tokens, rows in itertools.product((1, 9, 10, 11, 100), (1, 10)):
        plan = policy.choose(
            policy.Traits("cuda", 2), tokens, 64, 2, {"one_shot": rows, "two_shot": rows}
        )
        assert (plan.num_chunks - 1) * rows < tokens <= plan.num_chunks * rows


def test_a_row_that_does_not_fit_is_unfused() -> None:
    plan = policy.choose(policy.Traits("cuda", 2), 1, 64, 2, {"one_shot": 0, "two_shot": 5})
    assert plan.algorithm == "unfused"
    assert "too wide" in plan.reason


def test_a_row_that_the_kernels_do_not_hold_is_unfused() -> None:
    """GPUs without clusters limit the row size, because one block must hold a whole row."""
    traits = policy.Traits("cuda", 2, max_row_bytes=8 << 10)
    assert choose(traits, 1, 4096).algorithm == "one_shot"
    plan = choose(traits, 1, 4104)
    assert plan.algorithm == "unfused"
    assert "4096" in plan.reason


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_rows_with_owners_take_two_shot(backend: str) -> None:
    """Rows with owners always use two_shot, even if one_shot could run; one_shot is refused."""
    rows = {"one_shot": 0, "two_shot": 10}

    def owned(world_size: int, requested: str = "auto", two_shot: int = 10) -> policy.Plan:
        traits = policy.Traits(backend, world_size)
        return policy.choose(
            traits, 25, 4096, 2, {**rows, "two_shot": two_shot}, requested, owned_rows=True
        )

    for world_size in range(2, 9):
        plan = owned(world_size)
        assert (plan.algorithm, plan.num_chunks) == ("two_shot", 3)
        assert "owners" in plan.reason
        assert owned(world_size, "two_shot").algorithm == "two_shot"
        refused = owned(world_size, "one_shot")
        assert refused.algorithm == "unfused"
        assert "owners" in refused.reason
        assert "too wide" in owned(world_size, two_shot=0).reason
    assert owned(1).algorithm == "unfused"


@on(cpu=(1, 2, 3), gpu=(1, 2, 3, 8))
def test_plans_are_the_same_on_every_rank(rank: int, world_size: int) -> None:
    c = comm()
    plans = [
        c.plan(tokens, hidden_size, dtype)
        for tokens, hidden_size, dtype in itertools.product(
            (0, 1, 16, 64, 257, 8192), (7, 120, 2880, 4096, 16384), DTYPES
        )
    ]
    algorithms = {plan.algorithm for plan in same_on_every_rank(plans)}
    assert algorithms >= ({"unfused"} if world_size == 1 else {"one_shot"})


@on(cpu=(2,), gpu=(2,))
def test_plan_is_not_collective(rank: int, world_size: int) -> None:
    c = comm()
    if rank == 0:
        assert c.plan(3, 64, torch.bfloat16).algorithm == "one_shot"
    Case().check(c)


# ---- Multiple islands ----------------------------------------------------------------------------

PAIRS = ((0, 1), (2, 3))
ALONE = ((0,), (1,))
ROWS = {"one_shot": 1000, "two_shot": 1000, "hierarchical": 1000}


def between(islands: islands_.Islands, backend: str = "cuda", reason: str = "") -> policy.Traits:
    size = sum(map(len, islands))
    return policy.Traits(backend, size, "apart", islands=islands, between=reason)


def choose_between(traits: policy.Traits, tokens: int = 8, **more: Any) -> policy.Plan:
    return policy.choose(traits, tokens, 4096, 2, ROWS, **more)


def test_equal_islands_are_hierarchical() -> None:
    for traits in (between(PAIRS), between(PAIRS, "cpu"), between(ALONE)):
        for owned in (False, True):
            plan = choose_between(traits, owned_rows=owned)
            assert (plan.algorithm, plan.source) == ("hierarchical", "default")
            assert f"{len(traits.islands)} islands" in plan.reason
    asked = choose_between(between(PAIRS), requested="hierarchical")
    assert (asked.algorithm, asked.source) == ("hierarchical", "caller")
    for algorithm in ("one_shot", "two_shot"):
        assert choose_between(between(PAIRS), requested=algorithm).reason == "apart"
    assert choose_between(between(PAIRS), requested="unfused").algorithm == "unfused"


def test_plans_say_why_a_call_is_not_hierarchical() -> None:
    apart = between(((0, 2), (1, 3)))
    assert choose_between(apart).algorithm == "hierarchical"
    owned = choose_between(apart, owned_rows=True)
    assert owned.algorithm == "unfused"
    assert "do not follow each other" in owned.reason
    unequal = choose_between(between(((0, 1), (2,)), reason="2, 1 ranks"))
    assert (unequal.algorithm, unequal.reason) == ("unfused", "2, 1 ranks")
    narrow = policy.choose(between(PAIRS), 8, 4095, 2, ROWS)
    assert narrow.algorithm == "unfused"
    assert "4095" in narrow.reason
    alone = policy.choose(between(ALONE), 8, 4095, 2, dict.fromkeys(ROWS, 0))
    assert alone.algorithm == "hierarchical"
    flat = policy.choose(policy.Traits("cuda", 4), 8, 4096, 2, ROWS, "hierarchical")
    assert "one island" in flat.reason


def test_pieces_of_a_hierarchical_call() -> None:
    assert choose_between(between(PAIRS), 1).num_chunks == 1
    assert choose_between(between(PAIRS), 0).num_chunks == 0
    assert choose_between(between(PAIRS), 8192).num_chunks == 4
    assert choose_between(between(PAIRS), 8192, owned_rows=True).num_chunks == 2
    assert choose_between(between(ALONE), 4096).num_chunks == 1
    assert choose_between(between(ALONE), 8192).num_chunks == 2
    for backend, island_size, tokens in itertools.product(
        ("cpu", "cuda"), (1, 2), (1, 5, 777, 8192, 100_000)
    ):
        rows = policy.hierarchical_rows(backend, island_size, tokens, 4096)
        assert rows % 4 == 0
        assert 4 * rows * 4096 <= policy.HIERARCHICAL_SUM_BYTES


@pytest.mark.parametrize(
    ("num_islands", "sum_bytes", "row_bytes", "fewest"),
    [
        (3, 4, 2, 1 << 17),  # 8 or 4 bytes for each sum
        (4, 4, 2, 69906),  # 12 or 4.5
        (3, 4, 4, 196608),  # 8 or 5.33
        (3, 2, 2, 393216),  # islands of one rank: 4 or 2.67
    ],
)
def test_sums_cross_in_two_hops_from_half_a_megabyte_less_on(
    num_islands: int, sum_bytes: int, row_bytes: int, fewest: int
) -> None:
    for more, expected in ((-1, False), (0, True), (1 << 20, True)):
        for size in (1, 2, 3):  # ranks that share the sums
            num_sums = size * (fewest + more)
            got = policy.is_sooner_in_parts(num_islands, size, num_sums, sum_bytes, row_bytes)
            assert got == expected
