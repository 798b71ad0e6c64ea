"""Tests verdicts: arriving ranks decide alike, and missing ranks are waited for only once."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from allnorm.core.verdicts import Answer, Step, Verdicts
from allnorm.errors import AllnormError

DONE = Answer(result="two sites")


class Group:
    """Simulates the ranks of a group as threads."""

    def __init__(self, world_size: int, patience_s: float = 60.0) -> None:
        store = dist.HashStore()
        self.ranks = [Verdicts(store, rank, world_size, patience_s) for rank in range(world_size)]

    def ask(self, answers: dict[int, Answer], question: str = "graph") -> dict[int, Any]:
        """Returns the verdict of each rank that asks, or "raised ..." for an error."""

        def of(rank: int) -> str:
            try:
                return self.ranks[rank].decide(question, answers[rank])
            except AllnormError as error:
                return f"raised {error}"

        with ThreadPoolExecutor(len(answers)) as pool:
            return dict(zip(answers, pool.map(of, answers), strict=True))


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ([DONE, DONE, DONE], ""),
        ([DONE, Answer("no luck"), DONE], "no luck (rank 1 of the group)"),
        ([DONE, Answer("no luck"), Answer("none")], "no luck (rank 1 of the group)"),
        ([Answer("no luck")] * 3, "no luck"),
        ([DONE, DONE, Answer(result="one site")], "ranks would fuse it in different ways"),
    ],
)
def test_all_ranks_get_one_verdict(answers: list[Answer], reason: str) -> None:
    found = Group(3).ask(dict(enumerate(answers)))
    assert set(found.values()) == {reason}


def test_a_repeated_question_is_a_new_one() -> None:
    group = Group(2)
    assert set(group.ask({0: DONE, 1: Answer("no luck")}).values()) != {""}
    for _ in range(3):
        assert set(group.ask({0: DONE, 1: DONE}).values()) == {""}
    assert set(group.ask({0: Answer("other"), 1: DONE}, "another").values()) != {""}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(40))
def test_ranks_never_act_on_different_verdicts(seed: int) -> None:
    """Each rank has some fused graphs in its cache, and may fail to fuse others."""
    draw = random.Random(seed)
    world_size = draw.choice((2, 2, 3, 4))
    group = Group(world_size, patience_s=0.05)
    graphs = [f"graph {i}" for i in range(6)]
    cached = {(r, g) for r in range(world_size) for g in graphs if draw.random() < 0.2}
    fails = {(r, g) for r in range(world_size) for g in graphs if draw.random() < 0.1}
    said: dict[tuple[int, str], str] = dict.fromkeys(cached, "")

    ended = []

    def run(rank: int) -> None:
        for graph in graphs:
            time.sleep(0.01 * rank)
            if (rank, graph) not in cached:
                answer = Answer(f"no {graph}") if (rank, graph) in fails else DONE
                try:
                    said[rank, graph] = group.ranks[rank].decide(graph, answer)
                except AllnormError:
                    assert answer.obstacle, "a rank that can fuse must not raise"
                    ended.append(rank)
                    return

    with ThreadPoolExecutor(world_size) as pool:
        list(pool.map(run, range(world_size)))
    if ended:  # a rank that raises ends the engine
        return
    for graph in graphs:
        verdicts = {said[rank, graph] for rank in range(world_size) if (rank, graph) in said}
        assert len(verdicts) <= 1, graph
        for rank in range(world_size):
            if (rank, graph) in fails - cached and (rank, graph) in said:
                assert verdicts != {""}, graph


def test_a_missing_rank_is_waited_for_once() -> None:
    group = Group(3, patience_s=0.3)
    began = time.monotonic()
    for _ in range(20):
        assert group.ask({0: DONE, 2: DONE}) == {0: "", 2: ""}
    assert 0.3 <= time.monotonic() - began < 0.3 * 20
    # After the missing rank has arrived, the others wait for it again.
    group.ask({0: DONE, 1: DONE, 2: DONE}, "late")
    for verdicts in group.ranks:
        verdicts._patience_s = 60.0
    again = {0: DONE, 1: Answer("no luck"), 2: DONE}
    assert set(group.ask(again, "next").values()) == {"no luck (rank 1 of the group)"}


@pytest.mark.parametrize("mine", [Answer("no luck"), Answer(result="one site")])
def test_a_rank_that_cannot_fuse_what_peers_have_fused_raises(mine: Answer) -> None:
    """Rank 2 has cached the fused graph. Peers would wait forever for a rank that runs unfused."""
    found = Group(3, patience_s=0.2).ask({0: DONE, 1: mine})
    assert found[0] == ""
    assert found[1].startswith("raised ")
    assert (mine.obstacle or mine.result) in found[1]
    assert "silent: [2]" in found[1]
    assert "Start again" in found[1]


def test_a_verdict_holds_for_later_ranks() -> None:
    group = Group(2, patience_s=0.1)
    assert group.ask({0: DONE}) == {0: ""}
    assert group.ask({1: DONE}) == {1: ""}
    assert group.ask({0: DONE}) == {0: ""}
    (said,) = group.ask({1: Answer("no luck")}).values()
    assert said.startswith("raised no luck. But the other ranks fuse it")


# ---- settle --------------------------------------------------------------------------------------

CALL, OTHER, LEFT = Step("call"), Step("other call"), Step("", "no luck")


def settled(
    group: Group, graphs: dict[int, tuple[str, list[Step]]], pause: float = 0.0
) -> dict[int, str]:
    """Returns each rank's verdict on its graph, or "raised ..." for an error."""

    def of(rank: int) -> str:
        time.sleep(pause * rank)
        try:
            return group.ranks[rank].settle(*graphs[rank])
        except AllnormError as error:
            return f"raised {error}"

    with ThreadPoolExecutor(len(graphs)) as pool:
        return dict(zip(graphs, pool.map(of, graphs), strict=True))


@pytest.mark.parametrize("pause", [0.0, 0.05])
def test_equal_graphs(pause: float) -> None:
    group = Group(3)
    for _ in range(3):
        assert set(settled(group, dict.fromkeys(range(3), ("a", [CALL])), pause).values()) == {""}
    # A later rank gets the verdict without waiting.
    assert settled(group, {1: ("a", [CALL])}) == {1: ""}


@pytest.mark.parametrize("pause", [0.0, 0.05])
@pytest.mark.parametrize(
    ("theirs", "reason"),
    [
        (("a", [CALL, LEFT]), "rank 1 of the group cannot: no luck"),
        (("a", [LEFT, LEFT]), "rank 1 of the group cannot: no luck"),
        (("a", [CALL, OTHER]), "rank 1 of the group would fuse it differently"),
        (("b", [CALL]), "rank 1 of the group compiles a graph with different reductions"),
    ],
)
def test_graphs_that_differ(theirs: tuple[str, list[Step]], reason: str, pause: float) -> None:
    group, began = Group(2), time.monotonic()
    found = settled(group, {0: ("a", [CALL, CALL]), 1: theirs}, pause)
    assert found[0] == f"all ranks must fuse alike, and {reason}"
    assert found[1] or not any(step.action for step in theirs[1])
    assert time.monotonic() - began < 30, "two ranks must not wait for each other"


def test_silent_ranks_that_may_run_fused_code() -> None:
    group = Group(2, patience_s=0.2)
    both = {0: ("a", [CALL]), 1: ("a", [CALL])}
    assert set(settled(group, both).values()) == {""}
    for steps in ([LEFT], [OTHER]):
        assert settled(group, {0: ("a", steps)})[0].startswith("raised all ranks must fuse alike")
        # A later rank raises too.
        assert settled(group, {1: ("a", steps)})[1].startswith("raised all ranks must fuse alike")
    assert "did not compile" in settled(group, {0: ("b", [CALL])})[0]
    assert set(settled(group, both).values()) == {""}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", range(60))
def test_ranks_settle_alike(seed: int) -> None:
    """Ranks compile different graphs, in any order and at any time."""
    draw = random.Random(seed)
    world_size = draw.choice((2, 2, 3, 4))
    group = Group(world_size, patience_s=0.15)
    graphs = [(kind, [step]) for kind in "abc" for step in (CALL, OTHER, LEFT)]
    programs = {r: [draw.choice(graphs) for _ in range(6)] for r in range(world_size)}
    if draw.random() < 0.5:
        common = draw.sample(graphs, 6)
        programs = {r: [g for g in common if draw.random() < 0.8] for r in range(world_size)}
    pauses = {r: draw.choice((0.0, 0.01, 0.1)) for r in range(world_size)}
    said: list[tuple[int, str, Step, str]] = []

    def run(rank: int) -> None:
        for kind, steps in programs[rank]:
            time.sleep(pauses[rank])
            (verdict,) = settled(group, {rank: (kind, steps)}).values()
            said.append((rank, kind, steps[0], verdict))

    with ThreadPoolExecutor(world_size) as pool:
        list(pool.map(run, range(world_size)))
    for kind, (step,) in graphs:
        verdicts = {v for _, k, s, v in said if (k, s) == (kind, step) and s.action}
        assert len(verdicts) <= 1, "equal graphs have equal verdicts"
        if verdicts == {""}:
            assert {r for r, k, s, _ in said if (k, s) == (kind, step)} == set(range(world_size))


@pytest.mark.parametrize("words", [["w", "w"], ["w", "v"], ["w", ""], ["", ""]])
def test_ranks_agree_on_a_word(words: list[str]) -> None:
    group = Group(2)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda rank: group.ranks[rank].common(words[rank]), range(2)))
    assert len(set(found)) == 1
    assert found[0]
    assert (found[0] in words) == (words == ["w", "w"])
