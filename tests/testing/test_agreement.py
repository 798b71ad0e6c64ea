"""Tests the agreement of ranks: all ranks get equal results, even if one of them fails."""

from __future__ import annotations

import pytest
import torch
from rank_helpers import on

from allnorm.testing import RankFailedError, RankPool, agree, all_or_none, capture, gather


def step(rank: int, broken: int) -> int:
    if rank == broken:
        raise ValueError("no such kernel\nand more")
    return 10 + rank


def decide(rank: int, world_size: int) -> tuple[list[int], str, str, int, str]:
    try:
        all_or_none(step, rank, 1)
        failure = ""
    except RankFailedError as error:
        failure = str(error)
    said = agree("late" if rank else "")
    return gather(rank), agree(""), said, all_or_none(step, rank, -1), failure


@on(cpu=(3,))
def test_every_rank_gets_all_answers(pool: RankPool) -> None:
    for rank, found in enumerate(pool.run(decide)):
        failure = "rank 1: ValueError: no such kernel"
        assert found == ([0, 1, 2], "", "rank 1: late", 10 + rank, failure)


def test_one_rank_agrees_with_itself() -> None:
    assert gather("x") == ["x"]
    assert agree("") == ""
    assert agree("late") == "rank 0: late"


@pytest.mark.gpu
def test_a_graph_holds_what_the_block_runs() -> None:
    total = torch.zeros(4, device="cuda")
    total.add_(1)
    with capture() as graph:
        total.add_(1)
    for _ in range(3):
        graph.replay()
    assert total.tolist() == [4.0] * 4
