"""Tests sums over a token's experts before a reduction, which fuse only in step 0's order."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_helpers import comm, on
from torch import Tensor
from torch.fx import GraphModule, symbolic_trace

from allnorm.compile import fuse
from allnorm.testing import rank_input

from .helpers import Inputs, check_fused, gemma, llama, reduce, rstd, table

TOKENS, HIDDEN = 7, 136
bf16 = torch.bfloat16
_library = torch.library.Library("mylib_experts", "DEF")
_library.define("moe_sum(Tensor rows, Tensor weights) -> Tensor")


def in_order(rows: Any, weights: Any, shared: Any = None) -> Any:
    """Sums over experts as in step 0 of the numerics page; the sum has the dtype of the rows."""
    total = torch.zeros_like(rows[:, 0], dtype=torch.float32)
    for choice in range(rows.shape[1]):
        total = total + rows[:, choice].float() * weights.unsqueeze(-1)[:, choice]
    return (total if shared is None else total + shared.float()).to(rows.dtype)


_library.impl("moe_sum", in_order, "CompositeExplicitAutograd")
torch.library.register_fake("mylib_experts::moe_sum", lambda r, w: r.new_empty(r[:, 0].shape))


def inputs(rank: int, top_k: int, dtype: torch.dtype) -> list[Tensor]:
    """Returns rows, weights and the shared expert's output, different on each rank."""
    _, residual, weight = Inputs(dtype, shape=(TOKENS, HIDDEN)).make(rank)
    rows = rank_input((TOKENS, top_k, HIDDEN), dtype, rank)
    weights = rank_input((TOKENS, top_k), torch.float32, rank, call=1).sigmoid()
    shared = rank_input((TOKENS, HIDDEN), dtype, rank, call=2)
    return [rows, weights, shared, residual, weight]


def traced(fn: Callable[..., Any], top_k: int) -> GraphModule:
    """Returns the graph of `llama(reduce(fn(rows, weights, shared)) + residual, weight)`."""

    def block(rows, weights, shared, residual, weight):
        residual = reduce(fn(rows, weights, shared, top_k)) + residual
        z = residual.float()
        return weight * (z * rstd(z)).to(residual.dtype), residual

    return symbolic_trace(block)


def chain(rows, weights, order, start=None):
    """Adds the weighted rows in float32, in the given order."""
    total = torch.zeros_like(rows[:, 0], dtype=torch.float32) if start is None else start
    for choice in order:
        total = total + rows[:, choice].float() * weights.unsqueeze(-1)[:, choice]
    return total


def weighted(rows, weights):
    """Adds the weighted rows in float32, in PyTorch's order."""
    return (rows.float() * weights[..., None]).sum(1)


def three_products_in_order(rows, weights, shared, top_k):
    products = rows.float() * weights.unsqueeze(-1)
    total = torch.zeros_like(shared, dtype=torch.float32)
    for choice in range(top_k):
        total = products[:, choice] + total
    return total.to(bf16)


def four_in_order_without_weights(rows, weights, shared, top_k):
    total = torch.zeros_like(shared).float()
    for choice in range(top_k):
        total += rows.select(1, choice)
    return total.to(bf16)


# Maps a name to a function of (rows, weights, shared, top_k), and to top_k and the dtype.
SUMS = {
    **table((3, bf16), three_products_in_order),
    **table((4, bf16), four_in_order_without_weights),
    **table((1, bf16), one=lambda rows, weights, shared, k: rows.sum(-2)),
    **table(
        (8, bf16),
        eight_in_order=lambda rows, weights, shared, k: (
            chain(rows, weights, range(k)) + shared
        ).to(bf16),
    ),
    **table(
        (2, torch.float32),
        of_float32=lambda rows, weights, shared, k: (rows * weights.unsqueeze(-1)).sum(1) + shared,
    ),
    **table(
        (2, torch.float16),
        of_float16=lambda rows, weights, shared, k: (
            (rows * weights.unsqueeze(-1)).sum(1) + shared
        ).to(torch.float16),
    ),
    **table(
        (2, bf16),
        two_weighted=lambda rows, weights, shared, k: weighted(rows, weights).to(bf16),
        weighted_by_promotion=lambda rows, weights, shared, k: (
            (weights.unsqueeze(-1) * rows).sum(dim=1).to(bf16)
        ),
        two_and_a_shared_expert=lambda rows, weights, shared, k: (
            shared + weighted(rows, weights)
        ).to(bf16),
        # The fused call receives the rounded weighted rows.
        weighted_already=lambda rows, weights, shared, k: (
            rows * weights.to(bf16).unsqueeze(-1)
        ).sum(1),
        weights_of_three_dimensions=lambda rows, weights, shared, k: (
            (rows * torch.sigmoid(weights.unsqueeze(-1))).sum(1).to(bf16)
        ),
    ),
}


@on(cpu=(2,))
@pytest.mark.parametrize("name", SUMS)
def test_sum(rank: int, world_size: int, name: str) -> None:
    fn, (top_k, dtype) = SUMS[name]
    given = inputs(rank, top_k, dtype)
    numerics = "rounded" if dtype == torch.float32 else "transformers"
    graph = traced(fn, top_k)
    report = check_fused(graph, given, numerics, communicator=comm())
    assert [site.boundary for site in report.fused] == [f"sum of {top_k} experts' rows"], report
    assert "sum of" in str(report)
    left = [str(node.target).split(".")[-1] for node in graph.graph.nodes if node.op != "output"]
    assert not {"sum", "select", "zeros_like"}.intersection(left), graph.graph


def weights_of_a_different_choice(rows, weights, shared, top_k):
    total = torch.zeros_like(shared, dtype=torch.float32)
    for choice in range(top_k):
        total = total + rows[:, choice].float() * weights.unsqueeze(-1)[:, 1 - choice]
    return total.to(bf16)


# Functions whose sum over experts is not fused, keyed by top_k and the reason.
NEARLY = {
    (8, "PyTorch adds 8 rows in an unspecified order"): lambda rows, weights, shared, k: weighted(
        rows, weights
    ).to(bf16),
    (2, "rounded before the shared expert is added"): lambda rows, weights, shared, k: (
        weighted(rows, weights).to(bf16) + shared
    ),
    (3, "does not add each choice once, in order"): lambda rows, weights, shared, k: chain(
        rows, weights, (0, 2, 1)
    ).to(bf16),
    (3, "does not add each choice once"): lambda rows, weights, shared, k: chain(
        rows, weights, (0, 1)
    ).to(bf16),
    (2, "a row is multiplied by the weight of a different choice"): weights_of_a_different_choice,
    (2, "its weights are not a float32 tensor"): lambda rows, weights, shared, k: weighted(
        rows, weights.to(bf16)
    ).to(bf16),
    (
        2,
        r"its rows are not one tensor of shape \[num_tokens, 2, hidden_size\]",
    ): lambda rows, weights, shared, k: weighted(rows.float() * 3, weights).to(bf16),
    (
        17,
        "in an unspecified order|adds 17 rows: expected 1 to 16",
    ): lambda rows, weights, shared, k: chain(rows, weights, range(k)).to(bf16),
    (2, "is not a tensor of its shape"): lambda rows, weights, shared, k: (
        weighted(rows, weights).add(shared[:1]).to(bf16)
    ),
}


@on(cpu=(2,))
@pytest.mark.parametrize(("top_k", "reason"), NEARLY)
def test_nearly(rank: int, world_size: int, top_k: int, reason: str) -> None:
    """Tests that everything but the sum over experts is fused."""
    fn = NEARLY[top_k, reason]
    given = inputs(rank, top_k, bf16)
    report = check_fused(traced(fn, top_k), given, "transformers", communicator=comm())
    (site,) = report.fused
    assert not site.boundary
    assert re.search(reason, site.note), str(report)


@on(cpu=(2,))
def test_other_readers(rank: int, world_size: int) -> None:
    """Tests sums that are read elsewhere too, have three dimensions, or start without zeros."""

    def needed(rows, weights, shared, residual, weight):
        x = (rows.float() * weights[..., None]).sum(1).to(bf16)
        residual = reduce(x) + residual
        return llama(residual, weight), residual, x * 2

    def three_dimensions(rows, weights, shared, residual, weight):
        x = (rows.float() * weights[..., None]).sum(1).to(bf16).view(1, TOKENS, HIDDEN)
        residual = reduce(x) + residual
        return llama(residual, weight), residual

    def no_start(rows, weights, shared, residual, weight):
        first = rows[:, 0].float() * weights.unsqueeze(-1)[:, 0]
        residual = reduce(chain(rows, weights, (1,), first).to(bf16)) + residual
        return gemma(residual, weight), residual

    given = inputs(rank, 2, bf16)
    for fn, note in (
        (needed, "reads the sum before it is reduced"),
        (three_dimensions, "is not a matrix"),
    ):
        report = check_fused(symbolic_trace(fn), given, "transformers", communicator=comm())
        assert note in report.fused[0].note, str(report)
    report = check_fused(symbolic_trace(no_start), given, "rounded", communicator=comm())
    assert not report.fused[0].boundary


@on(cpu=(2,))
def test_operator_of_the_caller(rank: int, world_size: int) -> None:
    """Tests a custom operator that decomposes to a sum in order, with a post norm after it."""

    def block(rows, weights, shared, residual, weight):
        x = torch.ops.mylib_experts.moe_sum(rows, weights)
        residual = llama(reduce(x), weight) * 0.5 + residual
        return llama(residual, weight), residual

    given = inputs(rank, 8, bf16)
    graph = symbolic_trace(block)
    with torch.no_grad():
        want = graph(*given)
    table = {"mylib_experts::moe_sum": in_order}
    report = fuse(graph, given, comm(), decompositions=table)
    words = "sum of 8 experts' rows, post norm, scale 0.5"
    assert [site.boundary for site in report.fused] == [words], str(report)
    assert not any("moe_sum" in str(node.target) for node in graph.graph.nodes)
    with torch.no_grad():
        for mine, theirs in zip(graph(*given), want, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=2**-6, atol=2**-6)
