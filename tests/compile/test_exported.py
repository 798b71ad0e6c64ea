"""Tests exported programs: `module()` with and without guards, and structures of results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_helpers import comm, on
from torch import Tensor
from torch.utils._pytree import tree_leaves

from allnorm.compile import fuse
from allnorm.testing import assert_same_bits

from .helpers import EPS, HIDDEN, Inputs, fused_calls

STRUCTURES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "pair": lambda y, h: (y, h),
    "one": lambda y, h: y,
    "dict": lambda y, h: {"y": y, "h": h},
    "list": lambda y, h: [y, h],
    "nested": lambda y, h: {"all": (h, h), "y": [y]},
    "none": lambda y, h: (y, h, None),
    "repeated": lambda y, h: (y, h, h),
    "number": lambda y, h: (y, 3, h),
}


class Model(torch.nn.Module):
    """A model that writes in place and has a buffer."""

    def __init__(self, weight: Tensor, structure: str) -> None:
        super().__init__()
        self.structure = structure
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, residual: Tensor) -> Any:
        self.steps.add_(1)
        x = x * 1
        dist.all_reduce(x)
        h = residual + x
        return STRUCTURES[self.structure](F.rms_norm(h, (HIDDEN,), self.weight, EPS), h)


@on(cpu=(2,))
@pytest.mark.parametrize("structure", STRUCTURES)
def test_exported(rank: int, world_size: int, structure: str) -> None:
    x, residual, weight = Inputs().make(rank)
    expected = Model(weight, structure)(x, residual)
    for kind in ("guarded", "unguarded", "graph"):
        with torch.no_grad():
            program = torch.export.export(Model(weight, structure), (x, residual))
        inner = program.module(check_guards=kind == "guarded")
        module = program.graph_module if kind == "graph" else inner
        report = fuse(module, None, comm())
        assert [site.reason for site in report.sites] == [None]
        assert len(fused_calls(module)) == 1
        run = program.module() if kind == "graph" else inner
        with torch.no_grad():
            actual = [run(x.clone(), residual) for _ in range(2)][1]
        assert type(actual) is type(expected)
        mine, theirs = tree_leaves(actual), tree_leaves(expected)
        assert len(mine) == len(theirs)
        for a, b in zip(mine, theirs, strict=True):
            if isinstance(b, Tensor):
                assert_same_bits(a, b, kind)
            else:
                assert a == b
        assert int(run.steps) == 2
        if kind == "guarded":
            with pytest.raises(AssertionError, match="Guard failed"):
                run(x[:3], residual[:3])
