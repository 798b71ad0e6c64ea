"""Tests that all ranks fuse the same sites, even if their graphs or caches differ."""

from __future__ import annotations

import functools
import os
import pathlib
import shutil
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from rank_helpers import on
from torch import Tensor
from torch.fx import GraphModule, symbolic_trace

import allnorm
from allnorm import reference
from allnorm.compile import agreement, groups
from allnorm.testing import assert_same_bits, run_ranks, shared_input

from .helpers import HIDDEN, Inputs, llama, open_names, reduce
from .test_inductor import arguments, compiled, inductor_caches

bf16 = torch.bfloat16


def fusable(x: Any, residual: Any, w: Any) -> Any:
    total = reduce(x) + residual
    return llama(total, w), total


def looked_at(x: Any, residual: Any, w: Any) -> Any:
    """Reads the reduced tensor, which the fused call does not return."""
    reduced = reduce(x)
    residual = reduced + residual
    return llama(residual, w), residual, reduced.abs().max()


def twice(x: Any, residual: Any, w: Any) -> Any:
    """Runs two sites, so that the graph's reductions differ from those of `fusable`."""
    normed, residual = fusable(x, residual, w)
    return fusable(normed, residual, w)


class Rank:
    """A rank with its own groups, with or without a communicator."""

    def __init__(self, given: bool, patience_s: float = 60.0) -> None:
        self.rank, world_size = dist.get_rank(), dist.get_world_size()
        self.group = dist.new_group(list(range(world_size)))
        self.comm = allnorm.Communicator(self.group, device="cpu", timeout=60) if given else None
        agreement.verdicts_of(self.group, self.comm)._patience_s = patience_s

    def fuse(self, fn: Callable[..., Any], tokens: int = 24) -> str:
        """Fuses a graph; returns the reason of its first site, or "" if it was fused."""
        module = self.graph(fn)
        inputs = Inputs(shape=(tokens, HIDDEN)).make(self.rank)
        expected = self.graph(fn)
        report = allnorm.compile.fuse(module, inputs, self.comm)
        self.ready = (module, expected, inputs)
        assert len({site.reason for site in report.sites}) == 1
        return report.sites[0].reason or ""

    def run(self) -> None:
        module, expected, inputs = self.ready
        mine, theirs = module(*inputs)[1], expected(*inputs)[1]
        if dist.get_world_size() == 2:
            assert_same_bits(mine, theirs, "sum")
        else:  # gloo adds in a different order
            torch.testing.assert_close(mine, theirs, rtol=0.05, atol=0.05)

    def graph(self, fn: Callable[..., Any]) -> GraphModule:
        patched = functools.partial(reduce, group=self.group.group_name)
        scope = fn.__globals__
        before, scope["reduce"] = scope["reduce"], patched
        try:
            return symbolic_trace(fn)
        finally:
            scope["reduce"] = before

    def end(self) -> None:
        if self.comm is not None:
            self.comm.close()
        for made in [c for c in groups._named if c.group == self.group]:
            made.close()
        dist.destroy_process_group(self.group)


@pytest.mark.sampled(2)
@on(cpu=(2, 3))
@pytest.mark.parametrize("given", [True, False], ids=["given", "made"])
@pytest.mark.parametrize("odd", [0, 1])
def test_one_rank_reads_the_reduced_tensor(
    rank: int, world_size: int, given: bool, odd: int
) -> None:
    """Tests a graph that reads the reduced tensor on one rank: no rank fuses."""
    me = Rank(given)
    for _ in range(2):
        reason = me.fuse(looked_at if rank == odd else fusable)
        assert "the reduced tensor itself is also used" in reason
        assert (f"rank {odd} of the group cannot" in reason) == (rank != odd)
        me.run()
    # Each later graph gets its own verdict.
    assert me.fuse(twice) == ""
    me.run()
    me.end()


@on(cpu=(2,))
def test_graphs_with_different_reductions(rank: int, world_size: int) -> None:
    me = Rank(True)
    reason = me.fuse(twice if rank else fusable)
    assert f"rank {1 if rank == 0 else 0} of the group compiles a graph with different" in reason
    me.end()


@on(cpu=(2,))
@pytest.mark.parametrize("given", [True, False], ids=["given", "made"])
def test_one_rank_compiles(rank: int, world_size: int, given: bool) -> None:
    """Tests graphs that rank 1 runs unfused, without compiling them."""
    me = Rank(given, patience_s=0.5)
    before = open_names()
    if rank == 0:
        began = time.monotonic()
        reason = me.fuse(fusable)
        assert "rank 1 of the group did not compile such a graph within 0.5 s" in reason
        assert time.monotonic() - began < 30
    else:
        me.ready = (me.graph(fusable), me.graph(fusable), Inputs().make(rank))
    me.run()
    dist.barrier()
    assert open_names() == before
    # Rank 1 compiles the graph later, and gets rank 0's verdict.
    if rank == 1:
        assert "rank 1 of the group did not compile" in me.fuse(fusable)
    me.end()


@on(cpu=(2,))
def test_graphs_in_different_orders(rank: int, world_size: int) -> None:
    me = Rank(True)
    began = time.monotonic()
    fns = [fusable, twice] if rank == 0 else [twice, fusable]
    reasons = {fn.__name__: me.fuse(fn) for fn in fns}
    assert time.monotonic() - began < 50, "a rank waited until its timeout"
    answers: list[Any] = [None] * world_size
    dist.all_gather_object(answers, {name: not reason for name, reason in reasons.items()})
    assert answers[0] == answers[1]
    for fn in (fusable, twice):
        me.fuse(fn)
        me.run()
    me.end()


@on(cpu=(2,))
def test_one_rank_compiles_again(rank: int, world_size: int) -> None:
    """Tests a rank that compiles a graph again, alone: it must fuse the same sites as before."""
    me = Rank(True, patience_s=30.0)
    assert me.fuse(fusable) == ""
    me.run()
    dist.barrier()
    if rank == 0:
        began = time.monotonic()
        assert me.fuse(fusable, tokens=7) == ""
        assert time.monotonic() - began < 15
        agreement.verdicts_of(me.group, me.comm)._patience_s = 0.5
        for _ in range(2):
            with pytest.raises(allnorm.AllnormError, match="may be waiting in a fused call"):
                me.fuse(looked_at)
    dist.barrier()
    assert me.fuse(fusable) == ""
    me.run()
    if rank:  # the verdict is the same on all ranks
        with pytest.raises(allnorm.AllnormError, match="may be waiting in a fused call"):
            me.fuse(looked_at)
    me.end()


class Block(torch.nn.Module):
    def __init__(self, looks: bool) -> None:
        super().__init__()
        self.looks = looks
        self.register_buffer("amax", torch.zeros(()))

    def forward(self, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        reduced = funcol.all_reduce(x, "sum", dist.group.WORLD)
        if self.looks:
            self.amax.copy_(reduced.abs().max().float())
        residual = residual + reduced
        return llama(residual, weight), residual


def in_inductor(
    rank: int, world_size: int, folder: str, given: bool, looks: int | None
) -> tuple[int, int]:
    """Compiles a graph in a new process; its caches may contain an earlier process's code.

    Returns how many graphs the pass received, and how many sites it fused.
    """
    c = allnorm.Communicator() if given else None
    x, residual = arguments(rank)
    weight = shared_input((HIDDEN,), bf16, "weight")
    expected = reference.all_reduce_add_rms_norm(
        [arguments(r)[0] for r in range(world_size)],
        *(residual, weight, 1e-5),
        numerics="transformers",
        weight_bias=-0.0,
    )
    with inductor_caches(os.path.join(folder, str(rank))), torch.no_grad():
        fusion = allnorm.compile.inductor_pass(c)
        block = compiled(Block(rank == looks), fusion)
        for _ in range(2):
            normed, summed = block(x, residual, weight)
            assert_same_bits(summed, expected[1], "sum")
            if looks is None:  # Inductor's unfused code rounds less often
                assert_same_bits(normed, expected[0], "normed")
    if not given and looks is None:
        assert open_names() == ["0"]
    return len(fusion.reports), sum(len(report.fused) for report in fusion.reports)


@pytest.mark.parametrize("given", [True, False], ids=["given", "made"])
def test_other_processes(tmp_path: pathlib.Path, given: bool) -> None:
    """Tests that compiled code is reused only if the communicator is certain to exist."""
    run = functools.partial(run_ranks, in_inductor, 2, args=(str(tmp_path), given, None))
    assert run() == [(1, 1), (1, 1)]
    assert run() == ([(0, 0), (0, 0)] if given else [(1, 1), (1, 1)])


@pytest.mark.long
@pytest.mark.parametrize("given", [True, False], ids=["given", "made"])
@pytest.mark.parametrize("looks", [0, 1])
def test_one_rank_reads_the_reduced_tensor_under_inductor(
    tmp_path: pathlib.Path, given: bool, looks: int
) -> None:
    """Tests that a later run reuses compiled code only if both ranks have it."""
    runs = [run_ranks(in_inductor, 2, args=(str(tmp_path), given, looks)) for _ in range(2)]
    assert runs == [[(1, 0), (1, 0)]] * 2
    assert run_ranks(in_inductor, 2, args=(str(tmp_path), given, None)) == [(1, 1), (1, 1)]


PARTS = ("code", "word")


@pytest.mark.parametrize("lost", ["all", *(pytest.param(x, marks=pytest.mark.long) for x in PARTS)])
def test_one_rank_has_lost_its_cache(tmp_path: pathlib.Path, lost: str) -> None:
    run = functools.partial(run_ranks, in_inductor, 2, args=(str(tmp_path), True, None))
    assert run() == [(1, 1), (1, 1)]
    assert run() == [(0, 0), (0, 0)]
    own = tmp_path / "1"
    kept = [] if lost == "all" else ["allnorm"]
    for path in own.iterdir():
        if path.name not in kept and lost != "word":
            shutil.rmtree(path)
    if lost == "word":  # as if the rank was killed during the decision
        (file,) = (own / "allnorm").glob("*/1")
        file.write_text("")
    # Rank 0 either has the fused code in its cache or also compiles again.
    assert run() == ([(0, 0), (1, 1)] if lost == "code" else [(1, 1), (1, 1)])
    assert run() == [(0, 0), (0, 0)]
