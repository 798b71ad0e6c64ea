"""Tests graphs that reduce-scatter: the fused call returns this rank's rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_helpers import comm, on
from torch import Tensor
from torch.fx import GraphModule, symbolic_trace

from allnorm import reference
from allnorm.compile import fuse
from allnorm.testing import assert_same_bits

from .helpers import (
    FP8,
    HIDDEN,
    TOKENS,
    Inputs,
    cast,
    check_missed,
    fused_calls,
    gemma,
    llama,
    rms_norm,
)

FUNCTIONAL = torch.ops._c10d_functional


def scatter(x: Any, ranks: int) -> Any:
    """Runs a functional reduce-scatter of rows and waits for it."""
    return FUNCTIONAL.wait_tensor.default(
        FUNCTIONAL.reduce_scatter_tensor.default(x, "sum", ranks, "0")
    )


def graph(ranks: int, after: Callable[..., Any]) -> GraphModule:
    """Returns the graph of `after(reduced rows, residual, weight)`."""

    def fn(x: Any, residual: Any, w: Any) -> Any:
        return after(scatter(x, ranks), residual, w)

    return symbolic_trace(fn)


def with_sum(norm: Callable[..., Any]) -> Callable[..., Any]:
    def after(rows: Any, residual: Any, w: Any) -> Any:
        total = rows + residual
        return norm(total, w), total

    return after


def per_token(rows: Any, residual: Any, w: Any) -> Any:
    total = rows + residual
    y = rms_norm(total, w).float()
    scale = y.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448.0
    return cast(y / scale), total, scale


def per_group(rows: Any, residual: Any, w: Any) -> Any:
    total = rows + residual
    groups = rms_norm(total, w).float().view(-1, HIDDEN // 64, 64)
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448.0
    return cast(groups / scale).view(-1, HIDDEN), total, scale.squeeze(-1)


def gathered_after(rows: Any, residual: Any, w: Any) -> Any:
    total = residual + rows
    normed = llama(total, w)
    return FUNCTIONAL.wait_tensor.default(
        FUNCTIONAL.all_gather_into_tensor.default(normed, 2, "0")
    ), total


def inputs(rank: int, ranks: int, **changes: Any) -> list[Tensor]:
    shape = (TOKENS, HIDDEN)
    return Inputs(shape=shape, residual_shape=(TOKENS // ranks, HIDDEN), **changes).make(rank)


def check(rank: int, world_size: int, after: Callable[..., Any], mode: str, **changes: Any) -> Any:
    given = inputs(rank, world_size, **changes)
    module = graph(world_size, after)
    expected = module(*given)
    report = fuse(module, given, communicator=comm())
    assert [site.numerics for site in report.sites] == [mode], str(report)
    assert "own rows" in report.sites[0].boundary
    assert len(fused_calls(module)) == 1
    assert "reduce_scatter" not in module.code
    assert "gather = False" in module.code
    actual = module(*given)
    for mine, theirs in zip(actual, expected, strict=True):
        assert (mine.shape, mine.stride(), mine.dtype) == (
            theirs.shape,
            theirs.stride(),
            theirs.dtype,
        )
    assert_same_bits(actual[1], expected[1], "sum")
    differ = (actual[0].float() != expected[0].float()).float().mean()
    assert float(differ) < 0.005
    return module


@on(cpu=(1, 2))
@pytest.mark.parametrize(
    ("norm", "mode"), [(llama, "transformers"), (rms_norm, "rounded"), (gemma, "rounded")]
)
def test_the_call_returns_this_ranks_rows(rank: int, world_size: int, norm: Any, mode: str) -> None:
    check(rank, world_size, with_sum(norm), mode)


@on(cpu=(2,))
def test_a_float32_residual(rank: int, world_size: int) -> None:
    def after(rows: Any, residual: Any, w: Any) -> Any:
        total = rows.float() + residual
        return gemma(total, w).to(torch.bfloat16), total

    check(rank, world_size, after, "unrounded", residual_dtype=torch.float32)


@on(cpu=(2,))
@pytest.mark.parametrize("after", [per_token, per_group])
def test_quantized_rows(rank: int, world_size: int, after: Any) -> None:
    module = check(rank, world_size, after, "rounded")
    assert "all_reduce_add_rms_norm_quant" in module.code
    assert module(*inputs(rank, world_size))[0].dtype == FP8


@on(cpu=(2,))
def test_an_all_gather_after_it_stays(rank: int, world_size: int) -> None:
    module = check(rank, world_size, gathered_after, "transformers")
    assert "all_gather_into_tensor" in module.code


@on(cpu=(2,))
def test_other_numbers_of_rows(rank: int, world_size: int) -> None:
    """A graph that was fused with one number of rows runs with another."""
    module = check(rank, world_size, with_sum(rms_norm), "rounded")
    shape = (4 * world_size, HIDDEN)
    given = Inputs(shape=shape, residual_shape=(4, HIDDEN)).make(rank)
    xs = [Inputs(shape=shape).make(other)[0] for other in range(world_size)]
    wanted, _ = reference.all_reduce_add_rms_norm(
        xs, given[1].repeat(world_size, 1), given[2], 1e-5
    )
    assert_same_bits(module(*given)[0], wanted[4 * rank : 4 * rank + 4], "normed")


MISSED = {
    "no residual add with an RMSNorm of its rows follows the reduce-scatter": lambda rows, r, w: (
        torch.relu(llama(rows, w)) + r
    ),
    "in a shape other than that of the rank's rows": lambda rows, r, w: llama(rows + r[None], w),
    "reduce-scatters a tensor of 3 dimensions": lambda rows, r, w: llama(rows + r, w),
    "the reduced tensor itself is also used": lambda rows, r, w: (llama(rows + r, w), rows),
}


@on(cpu=(1,))
@pytest.mark.parametrize("reason", MISSED)
def test_missed(rank: int, world_size: int, reason: str) -> None:
    given = inputs(rank, world_size)
    if "3 dim" in reason:
        given = [given[0].view(2, -1, HIDDEN), given[1].view(2, -1, HIDDEN), given[2]]
    check_missed(graph(world_size, MISSED[reason]), given, reason, communicator=comm())


@on(cpu=(1,))
def test_a_graph_that_works_in_place(rank: int, world_size: int) -> None:
    def after(rows: Any, residual: Any, w: Any) -> Any:
        return llama(residual.add_(rows), w)

    given = inputs(rank, world_size)
    check_missed(
        graph(world_size, after),
        given,
        "reduce-scatter in a graph that works in place",
        communicator=comm(),
    )
