"""Tests graphs that are fused with example inputs and run with inputs of different sizes.

A fused graph may refuse a size that it was not fused for, but must not return a wrong shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rank_helpers import comm, on
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

from allnorm.compile import fuse

from .helpers import llama, nodes_calling, reduce, summed
from .test_random_contents import HIDDEN, ints, one

REFUSE = {"first_part", "without_a_one"}  # some sizes need different nodes
ALWAYS = {"plain", "shape_of_another_tensor"}  # fused for all sizes, without checking the inputs


def rms_norm(z, w):
    return F.rms_norm(z, (HIDDEN,), w, 1e-5)


def views_of_another_tensor(x, residual, w):
    other = residual.view(-1, 2, HIDDEN)
    z = reduce(x) + residual
    return llama(z.view(2, -1, HIDDEN), w) * 2, other, z


def first_part(x, residual, w):
    """Splits the rows into parts of two rows."""
    z = reduce(x) + residual
    part = rms_norm(z, w).split(2)
    return part[0], part[1], z


GRAPHS = {
    "plain": summed(llama),
    # These views have the same shape only if there are 4 tokens.
    "views_of_fixed_sizes": summed(
        lambda z, w: llama(z.flatten(0, -2).view(2, -1, HIDDEN), w),
        lambda x, r: reduce(x.reshape(-1, 2, HIDDEN)) + r.view(-1, 2, HIDDEN),
    ),
    "views_of_another_tensor": views_of_another_tensor,
    "shape_of_another_tensor": summed(
        rms_norm, lambda x, r: reduce(x.view(2, -1, HIDDEN)).view(r.shape) + r
    ),
    "first_part": first_part,
    # Squeezing removes the first dimension only if there is one token.
    "without_a_one": lambda x, r, w: rms_norm((reduce(x) + r).squeeze(0), w),
}


class Of(nn.Module):
    """A module that calls a function with its own weight."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn
        self.register_buffer("weight", torch.full((HIDDEN,), 0.5, dtype=torch.bfloat16))

    def forward(self, x: Any, residual: Any) -> Any:
        return self.fn(x, residual, self.weight)


def answers(module: GraphModule, inputs: Sequence[Tensor]) -> list[Tensor] | str:
    """Runs the module; returns its results, or the error text."""
    try:
        results = module(*inputs)
    except (ValueError, RuntimeError, IndexError) as error:
        return str(error)
    return [results] if isinstance(results, Tensor) else list(results)


@on(cpu=(2,))
@pytest.mark.parametrize("tokens", [4, 6])
@pytest.mark.parametrize("name", GRAPHS)
def test_sizes(rank: int, world_size: int, name: str, tokens: int) -> None:
    given, module = symbolic_trace(Of(GRAPHS[name])), symbolic_trace(Of(GRAPHS[name]))
    refused = set()
    with torch.no_grad():
        report = fuse(module, ints(rank, 7, tokens)[:2], comm())
        assert len(report.fused) == (0 if name == "views_of_fixed_sizes" else 1), str(report)
        for count in (tokens, 4, 8, 2, 12, 1):
            inputs = ints(rank, count, count)[:2]
            got, want = answers(module, inputs), answers(given, inputs)
            what = f"{name}, {count} tokens: {report}\n{module.graph}"
            if isinstance(want, str):
                continue
            if isinstance(got, str):
                assert "Fuse the graph again" in got, f"{got}\n{what}"
                refused.add(count)
                continue
            assert [t.shape for t in got] == [t.shape for t in want], what
            for mine, theirs in zip(got, want, strict=True):
                assert torch.allclose(mine, theirs, rtol=0.02, atol=0.02), what
    assert tokens not in refused
    assert name not in REFUSE or refused
    checked = nodes_calling(module, "check_inputs")
    assert name not in ALWAYS or not (refused or checked), str(module.graph)


@pytest.mark.sampled(2)
@on(cpu=(2,))
@pytest.mark.parametrize("seed", [71999873758, 71999873776])
def test_programs(rank: int, world_size: int, seed: int) -> None:
    """Tests random programs with views that fit only the example inputs' sizes."""
    assert one(rank, seed) is not None


@on(cpu=(2,))
def test_sizes_that_the_tracer_assumes(rank: int, world_size: int) -> None:
    """Tests a graph from `make_fx`, which treats two views as equal if there are 4 tokens."""

    def layer(x: Tensor) -> Tensor:
        normed = F.rms_norm(reduce(x.view(-1, 2, HIDDEN)), (HIDDEN,), None, 1e-5)
        return F.rms_norm(normed.view(2, -1, HIDDEN), (HIDDEN,), None, 1e-5)

    given, module = (make_fx(layer, tracing_mode="symbolic")(ints(rank, 7, 4)[0]) for _ in range(2))
    report = fuse(module, ints(rank, 7, 4)[:1], comm())
    assert len(report.fused) == 1, str(report)
    same = module(ints(rank, 3, 4)[0])
    assert torch.equal(same, given(ints(rank, 3, 4)[0]))
    assert given(ints(rank, 3, 8)[0]).shape == (2, 4, HIDDEN)
    with pytest.raises(ValueError, match="Fuse the graph again"):
        module(ints(rank, 3, 8)[0])
