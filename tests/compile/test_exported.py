"""Tests exported programs: `module()` with and without guards, nested results, writes."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_helpers import comm, on
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves

from allnorm.compile import fuse
from allnorm.compile.aliasing import occurrences
from allnorm.testing import assert_same_bits

from .helpers import EPS, HIDDEN, Inputs, assert_close_norm, fused_calls, reduce

STRUCTURES: dict[str, Callable[[Any, Any], Any]] = {
    "tuple": lambda y, h: (y, h),
    "tensor": lambda y, h: y,
    "dict": lambda y, h: {"y": y, "h": h},
    "list": lambda y, h: [y, h],
    "nested": lambda y, h: {"p": (y, [h]), "q": {"h": h}},
    "none": lambda y, h: (y, {"h": h}, None),
    "repeated": lambda y, h: (y, h, h),
    "number": lambda y, h: (y, 3, h),
}


class Model(torch.nn.Module):
    """A site in a model that also writes buffers.

    Args:
        structure: makes the result from the normed tensor and the sum.
        writes: "steps" increments a buffer and reduces in place; "cache" stores a part of the
            normed tensor in a buffer; "weight" changes the weight after its use.
    """

    def __init__(self, structure: Callable[[Any, Any], Any], writes: str = "steps") -> None:
        super().__init__()
        self.structure = structure
        self.writes = writes
        self.register_buffer("w", torch.linspace(0.5, 1.5, HIDDEN).bfloat16())
        self.register_buffer("cache", torch.zeros(24, HIDDEN, dtype=torch.bfloat16))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, r: Tensor) -> Any:
        if self.writes == "steps":
            self.steps.add_(1)
            x = x * 1
            dist.all_reduce(x)
            h = r + x
        else:
            h = r + reduce(x)
        y = F.rms_norm(h, (HIDDEN,), self.w, EPS)
        if self.writes == "cache":
            self.cache[1:3] = y[1:3]
        elif self.writes == "weight":
            self.w.mul_(0.5)
        return self.structure(y, h)


@on(cpu=(2,))
@pytest.mark.parametrize("kind", ["guarded", "unguarded", "graph"])
@pytest.mark.parametrize(
    ("structure", "writes"),
    [(name, "steps") for name in STRUCTURES]
    + [(name, writes) for name in ("tuple", "nested", "none") for writes in ("cache", "weight")],
)
def test_exported(rank: int, world_size: int, structure: str, writes: str, kind: str) -> None:
    x, r, _ = Inputs().make(rank)
    stock, model = (Model(STRUCTURES[structure], writes) for _ in range(2))
    with torch.no_grad():
        program = torch.export.export(model, (x, r))
        module = program.module(check_guards=kind == "guarded")
        graph = program.graph_module if kind == "graph" else module
        report = fuse(graph, None, comm())
        assert [site.reason for site in report.sites] == [None]
        assert len(fused_calls(graph)) == 1
        run = program.module() if kind == "graph" else module
        for _ in range(3):
            want, tree = tree_flatten(stock(x.clone(), r.clone()))
            got, same = tree_flatten(run(x.clone(), r.clone()))
            assert tree == same
            buffers = dict(run.named_buffers())
            got += [buffers[name] for name, _ in stock.named_buffers()]
            for mine, theirs in zip(got, [*want, *stock.buffers()], strict=True):
                if isinstance(theirs, Tensor):
                    assert mine.stride() == theirs.stride()
                    assert_same_bits(mine, theirs, kind)
                else:
                    assert mine == theirs
    if kind == "guarded":
        with pytest.raises(AssertionError, match="Guard failed"):
            run(x[:3], r[:3])


@on(cpu=(2,))
def test_saved_programs(rank: int, world_size: int) -> None:
    """Tests that an exported program can be saved after its graph was fused."""
    x, r, _ = Inputs().make(rank)
    structures = {
        **{name: STRUCTURES[name] for name in ("tuple", "nested")},
        # Multiple results come from a single node of the fused graph.
        "views": lambda y, h: (h.detach(), y.view(y.shape), h, y, h.view(h.shape), h, y.detach()),
        "only views": lambda y, h: (h.detach(), h.view(h.shape), y.detach()),
        "computed again": lambda y, h: (y, h, h * 1, h.clone(), h + 0),
    }
    for name, structure in structures.items():
        stock = Model(structure, "nothing")
        with torch.no_grad():
            program = torch.export.export(stock, (x, r))
            before = [node.name for node in occurrences(program.graph)]
            assert len(fuse(program.graph_module, None, comm()).fused) == 1
            assert [node.name for node in occurrences(program.graph)] == before
            program.validate()
            file = io.BytesIO()
            torch.export.save(program, file)
            file.seek(0)
            got = torch.export.load(file).module()(x, r)
            for mine, theirs in zip(*map(tree_leaves, (got, stock(x, r))), strict=True):
                assert_close_norm(mine, theirs, name)
