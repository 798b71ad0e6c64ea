"""Tests the pass and the start of workers with fakes of vLLM: all ranks decide alike."""

from __future__ import annotations

import pathlib
import time
from typing import Any

import pytest
import torch
from rank_helpers import on, same_on_every_rank

import allnorm.compile
from allnorm import reference
from allnorm.errors import AllnormError
from allnorm.integrations.vllm import engine
from allnorm.testing import assert_same_bits, gather, ulp_distance

from . import vllm_stand_in as stand_in


class Rank:
    """A worker of a fake engine."""

    def __init__(self, cache: pathlib.Path, patience_s: float = 60.0, **changes: Any) -> None:
        stand_in.put_in_place(str(cache))
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

    def is_close(self) -> bool:
        """Returns whether the last compiled graph's results are close to the original graph's."""
        rank = torch.distributed.get_rank()
        inputs = stand_in.inputs(rank)
        got, expected = self.module(*inputs), stand_in.graph(rank)(*inputs)
        pairs = zip(got, expected, strict=True)
        return all(torch.allclose(a.float(), b.float(), rtol=0.02, atol=0.02) for a, b in pairs)


@on(cpu=(2, 3))
@pytest.mark.parametrize("failing", [[1], [0, 1], []], ids=str)
def test_no_rank_fuses_a_graph_if_the_pass_fails_on_one(
    rank: int, world_size: int, tmp_path: pathlib.Path, failing: list[int]
) -> None:
    """Tests the fallback: the failing rank reduces with vLLM, so its peers must not fuse."""
    with Rank(tmp_path) as worker:
        assert worker.compile(fails=rank in failing) == (0 if failing else 1)
        assert worker.is_close()
        assert worker.compile() == 1
        assert worker.is_close()
        engine.ready()
        same_on_every_rank(engine.STATE.unfused)
    if rank:
        assert not worker.said.lines, "only rank 0 logs"
    elif failing:
        whose = "" if len(failing) == world_size else f" (rank {failing[0]} of the group)"
        (level, warning), (_, summary) = worker.said.lines
        assert level == "WARNING"
        assert warning.endswith(f" on all ranks: RuntimeError: half way{whose}")
        assert "1 of 1 reductions fused" in summary
        assert "a graph: RuntimeError: half way" in summary
    if rank == 0:  # later starts must not reuse compiled code after a failure
        assert len(stand_in.folder(tmp_path)) == (0 if failing else 1)


@on(cpu=(2, 3))
def test_ranks_wait_once_for_a_rank_that_uses_its_cache(
    rank: int, world_size: int, tmp_path: pathlib.Path
) -> None:
    """Tests that rank 0's peers wait once, and fuse: graphs in rank 0's cache are fused."""
    with Rank(tmp_path, patience_s=0.5) as worker:
        if rank:
            began = time.monotonic()
            assert (worker.compile(), worker.compile()) == (1, 1)
            seconds = time.monotonic() - began
            assert 0.5 <= seconds < 30.0, "the ranks waited for each graph, or not at all"


@on(cpu=(2,))
def test_error_if_a_peer_uses_cached_code_that_this_rank_cannot_make(
    rank: int, world_size: int, tmp_path: pathlib.Path
) -> None:
    with Rank(tmp_path, patience_s=0.5) as worker:
        if rank:
            error = worker.compile(fails=True)
            assert "half way" in error
            assert "compile cache (silent: [0])" in error
            assert "Start again" in error
            assert worker.compile() == 1


@on(cpu=(2,))
def test_only_code_of_complete_starts_is_reused(
    rank: int, world_size: int, tmp_path: pathlib.Path
) -> None:
    def start(get_ready: bool) -> str:
        with Rank(tmp_path):
            from allnorm.integrations.vllm.graph_pass import AllnormFusionPass

            uuid, word = AllnormFusionPass(None).uuid(), engine.STATE.word
            assert word in engine.key()
            assert engine.key() in uuid
            if get_ready:
                engine.ready()
            assert len(set(gather(uuid))) == 2, "a rank would load its peer's code, unasked"
            assert stand_in.folder(tmp_path) == ([word] if get_ready else [])
        return same_on_every_rank(word)

    first = start(get_ready=True)
    assert start(get_ready=False) == first
    after_an_interruption = start(get_ready=True)
    assert after_an_interruption != first
    assert start(get_ready=True) == after_an_interruption


@on(cpu=(2,))
@pytest.mark.parametrize(
    ("compiles", "level", "words"),
    [
        (True, "WARNING", "0 reductions found in the 1 graphs that vLLM compiled"),
        (False, "INFO", "came from vLLM's cache"),
    ],
)
def test_message_if_no_reduction_was_found(
    rank: int, world_size: int, tmp_path: pathlib.Path, compiles: bool, level: str, words: str
) -> None:
    with Rank(tmp_path) as worker:
        if compiles:
            worker.compile(norm=False)
        engine.ready()
    if rank == 0:
        ((logged, text),) = worker.said.lines
        assert logged == level
        assert words in text


class Broken:
    """A fake vLLM object without fields."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"no field {name}")


@on(cpu=(2,))
@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("switch", "AttributeError: no field fuse_allreduce_rms"),
        ("sizes of rank 1", "no field max_num_batched_tokens (rank 1 of the group)"),
        ("seam of rank 1", "a module could not be changed (rank 1 of the group)"),
    ],
)
def test_a_failed_start_does_not_change_the_engine(
    rank: int, world_size: int, tmp_path: pathlib.Path, broken: str, words: str
) -> None:
    stand_in.put_in_place(str(tmp_path))
    said = stand_in.Said(engine.STATE)
    config = stand_in.config(world_size)
    if broken == "switch":
        config.compilation_config.pass_config = Broken()
    elif rank and broken == "sizes of rank 1":
        config.scheduler_config = Broken()
    elif rank:
        engine.STATE.broken = "a module could not be changed"
    try:
        engine.start(config)
        assert engine.communicator() is None
        assert engine.communicator_for_eager() is None
        if broken != "switch":  # vLLM's own default is restored
            keeps = rank == 0 or broken != "seam of rank 1"
            assert config.compilation_config.pass_config.fuse_allreduce_rms is keeps
        assert engine.STATE.outcome is not None
        assert words in same_on_every_rank(engine.STATE.outcome.reason)
        if rank == 0:
            ((level, text),) = said.lines
            assert level == "WARNING"
            assert "nothing is fused" in text
            assert words in text
    finally:
        engine.STATE.broken = ""
        engine._stop()
        stand_in.remove()


@on(cpu=(2,))
def test_norms_of_q_and_k(rank: int, world_size: int, tmp_path: pathlib.Path) -> None:
    """vLLM's operator for MiniMax-M2 becomes one call, with the bits of the reference."""
    with Rank(tmp_path):
        from allnorm.integrations.vllm.graph_pass import AllnormFusionPass

        unfused, module = (stand_in.qk_graph(rank, world_size) for _ in range(2))
        AllnormFusionPass(None)(module.graph)
        module.recompile()
        module.graph.lint()
        ((site,),) = (report.sites for report in engine.STATE.reports)
        assert (site.numerics, site.boundary) == ("rounded", "rows over ranks of 2 tensors")
        assert "vllm" not in module.code
        given = stand_in.qk_inputs(rank)
        got, expected = module(*given), unfused(*given)
        for mine, theirs in zip(got, expected, strict=True):
            assert (mine.shape, mine.stride()) == (theirs.shape, theirs.stride())
            assert int(ulp_distance(mine, theirs).max()) <= 1
        sizes = (stand_in.HIDDEN, stand_in.HIDDEN // 2, stand_in.HIDDEN // 2)
        ranks = [stand_in.qk_inputs(other) for other in range(world_size)]
        wanted = reference.rms_norm_sharded(
            [qkv.split(sizes, -1)[:2] for qkv, *_ in ranks],
            [given[1:] for given in ranks],
            1e-6,
        )
        assert_same_bits(got[0], wanted[rank][0], "q")
        assert_same_bits(got[1], wanted[rank][1] + 1, "k")


@on(cpu=(2,))
def test_norms_of_q_and_k_that_stay(rank: int, world_size: int, tmp_path: pathlib.Path) -> None:
    with Rank(tmp_path) as worker:
        from allnorm.integrations.vllm.graph_pass import AllnormFusionPass

        module = stand_in.qk_graph(rank, world_size + 1)
        AllnormFusionPass(None)(module.graph)
        ((site,),) = (report.missed for report in engine.STATE.reports)
        assert site.reason == "it norms rows over 3 ranks, not 2"
        assert "minimax_qk_norm_fusion" in str(module.graph)
        engine.ready()
    assert rank or "missed: it norms rows over 3 ranks, not 2" in worker.said.lines[-1][1]
