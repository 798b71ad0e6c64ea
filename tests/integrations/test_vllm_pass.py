"""Tests the pass and the start of workers on ranks, with fakes of vLLM: all ranks decide alike."""

from __future__ import annotations

import pathlib
import time
from typing import Any

import pytest
import torch
from rank_helpers import on

import allnorm.compile
from allnorm.errors import AllnormError
from allnorm.integrations import engines
from allnorm.integrations.vllm import engine
from allnorm.testing import RankPool

from . import vllm_stand_in as stand_in


class Rank:
    """A worker of a stand-in engine."""

    def __init__(self, cache: str, patience_s: float = 60.0, **changes: Any) -> None:
        self.cache = cache
        stand_in.put_in_place(cache)
        self.said = stand_in.Said(engine.STATE)
        world_size = torch.distributed.get_world_size()
        engine.start(stand_in.config(world_size, **changes))
        if engine.STATE.verdicts is not None:
            engine.STATE.verdicts._patience_s = patience_s

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, *_: Any) -> None:
        engine._stop()
        stand_in.remove()

    def compile(self, fails: bool = False, norm: bool = True) -> Any:
        """Runs the pass on a graph; returns the number of fused calls, or the error text."""
        from allnorm.integrations.vllm.graph_pass import AllnormFusionPass

        rank = torch.distributed.get_rank()
        module = stand_in.graph(rank, norm)
        real = allnorm.compile.fuse

        def broken(*args: Any, **kwargs: Any) -> Any:
            real(*args, **kwargs)
            raise RuntimeError("half way")

        allnorm.compile.fuse = broken if fails else real
        try:
            AllnormFusionPass(None)(module.graph)
        except AllnormError as error:
            return str(error)
        finally:
            allnorm.compile.fuse = real
        module.recompile()
        module.graph.lint()
        self.module = module
        return sum("all_reduce_add_rms_norm" in str(node.target) for node in module.graph.nodes)

    def close(self) -> bool:
        """Runs the last compiled graph; returns whether its results are those of the original."""
        rank = torch.distributed.get_rank()
        inputs = stand_in.inputs(rank)
        got, expected = self.module(*inputs), stand_in.graph(rank)(*inputs)
        pairs = zip(got, expected, strict=True)
        return all(torch.allclose(a.float(), b.float(), rtol=0.02, atol=0.02) for a, b in pairs)


def fail_on_some(rank: int, world_size: int, cache: str, failing: list[int]) -> dict[str, Any]:
    with Rank(cache) as worker:
        fused = worker.compile(fails=rank in failing)
        close = worker.close()
        after = worker.compile()
        close &= worker.close()
        engine.ready()
        return {
            "fused": [fused, after],
            "close": close,
            "unfused": engine.STATE.unfused,
            "said": worker.said.lines,
            "words": stand_in.folder(cache),
        }


@on(cpu=[2, 3])
@pytest.mark.parametrize("failing", [[1], [0, 1], []], ids=str)
def test_a_rank_whose_pass_fails_keeps_all_from_fusing_that_graph(
    pool: RankPool, tmp_path: pathlib.Path, failing: list[int]
) -> None:
    """Otherwise that rank would reduce by vLLM, and its peers would wait in a fused call."""
    found = pool.run(fail_on_some, str(tmp_path), failing)
    for each in found:
        assert each["fused"] == [0 if failing else 1, 1]
        assert each["close"]
        assert each["unfused"] == found[0]["unfused"]
    assert not any(each["said"] for each in found[1:]), "one rank speaks for the group"
    if failing:
        whose = "" if len(failing) == pool.world_size else f" (rank {failing[0]} of the group)"
        (warned, summary) = found[0]["said"]
        assert warned[0] == "WARNING"
        assert warned[1].endswith(f" on all ranks: RuntimeError: half way{whose}")
        assert "1 of 1 reductions fused" in summary[1]
        assert "a graph: RuntimeError: half way" in summary[1]
        # Code of this start may not fit the code of a later start.
        assert not found[0]["words"]
    else:
        assert len(found[0]["words"]) == 1


def one_from_the_cache(
    rank: int, world_size: int, cache: str, fails: bool
) -> tuple[Any, Any, float]:
    """Runs in ranks: rank 0 has both graphs in its cache and never runs the pass."""
    with Rank(cache, patience_s=0.5) as worker:
        began = time.monotonic()
        if rank == 0:
            return None, None, 0.0
        first, second = worker.compile(fails=fails), worker.compile()
        return first, second, time.monotonic() - began


@on(cpu=[2, 3])
def test_a_rank_that_compiles_from_a_cache_is_not_waited_for_long(
    pool: RankPool, tmp_path: pathlib.Path
) -> None:
    """Cached graphs are fused: caches of unsuccessful starts are never reused."""
    _, *others = pool.run(one_from_the_cache, str(tmp_path), False)
    for first, second, seconds in others:
        assert (first, second) == (1, 1)
        assert 0.5 <= seconds < 30.0, "waited for once, not for each graph"


@on(cpu=[2])
def test_a_rank_that_cannot_do_what_a_cache_does_says_so(
    pool: RankPool, tmp_path: pathlib.Path
) -> None:
    _, (first, second, _) = pool.run(one_from_the_cache, str(tmp_path), True)
    assert "half way" in first
    assert "from a compile cache (silent: [0])" in first
    assert "Start again" in first
    assert second == 1


def start_and_look(rank: int, world_size: int, cache: str, get_ready: bool) -> tuple[str, str]:
    with Rank(cache):
        from allnorm.integrations.vllm.graph_pass import AllnormFusionPass

        uuid, word = AllnormFusionPass(None).uuid(), engine.STATE.word
        assert word in engine.key()
        assert engine.key() in uuid
        if get_ready:
            engine.ready()
        torch.distributed.barrier()
        assert stand_in.folder(cache) == ([word] if get_ready else [])
        return word, uuid


@on(cpu=[2])
def test_compiled_code_is_used_again_after_starts_that_got_ready(
    pool: RankPool, tmp_path: pathlib.Path
) -> None:
    def start(get_ready: bool) -> str:
        (word, uuid), (other, others) = pool.run(start_and_look, str(tmp_path), get_ready)
        assert word == other
        assert uuid != others, "no rank takes its peer's code, and misses the verdict"
        return word

    first = start(get_ready=True)
    assert start(get_ready=False) == first
    after_an_interruption = start(get_ready=True)
    assert after_an_interruption != first
    assert start(get_ready=True) == after_an_interruption


def look_for_reductions(rank: int, world_size: int, cache: str, compiles: bool) -> list[Any]:
    with Rank(cache) as worker:
        if compiles:
            worker.compile(norm=False)
        engine.ready()
        return worker.said.lines


@on(cpu=[2])
def test_no_reduction_found_is_told_from_code_of_the_cache(
    pool: RankPool, tmp_path: pathlib.Path
) -> None:
    ((level, text),), _ = pool.run(look_for_reductions, str(tmp_path), True)
    assert level == "WARNING"
    assert "0 reductions found in the 1 graphs that vLLM compiled" in text
    ((level, text),), _ = pool.run(look_for_reductions, str(tmp_path), False)
    assert level == "INFO"
    assert "came from vLLM's cache" in text


class Broken:
    """An object of vLLM without its fields."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"no field {name}")


def start_without(rank: int, world_size: int, cache: str, what: str) -> tuple[Any, list[Any]]:
    changes: dict[str, Any] = {}
    if what == "sizes of rank 1" and rank == 1:
        changes["scheduler_config"] = Broken()
    stand_in.put_in_place(cache)
    said = stand_in.Said(engine.STATE)
    made = stand_in.config(world_size)
    for name, value in changes.items():
        setattr(made, name, value)
    if what == "the switch":
        made.compilation_config.pass_config = Broken()
    engine.STATE.broken = "a module could not be changed" if what == "a seam" and rank else ""
    try:
        engine.start(made)
        assert engine.communicator() is None
        assert engine.communicator_for_eager() is None
        passes = made.compilation_config.pass_config
        still_on = what == "the switch" or passes.fuse_allreduce_rms
        return (engine.STATE.outcome or engines.Outcome(None)).reason, [still_on, *said.lines]
    finally:
        engine.STATE.broken = ""
        engine._stop()
        stand_in.remove()


@on(cpu=[2])
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("the switch", "AttributeError: no field fuse_allreduce_rms"),
        ("sizes of rank 1", "no field max_num_batched_tokens (rank 1 of the group)"),
        ("a seam", "a module could not be changed (rank 1 of the group)"),
    ],
)
def test_a_start_that_fails_leaves_the_engine_as_it_is(
    pool: RankPool, tmp_path: pathlib.Path, what: str, words: str
) -> None:
    (reason, (still_on, *said)), (other, (there, *_)) = pool.run(start_without, str(tmp_path), what)
    assert reason == other
    assert words in reason
    assert [level for level, _ in said] == ["WARNING"]
    assert "nothing is fused" in said[0][1]
    assert words in said[0][1]
    assert (still_on, there) == (True, what != "a seam"), "vLLM's own default is back"
