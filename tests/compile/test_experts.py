"""Tests sums over a token's experts before a reduction: sums of step 0, and sums nearly like it."""

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

from .helpers import Inputs, check_fused, gemma, llama, reduce, rstd

TOKENS, HIDDEN = 7, 136
bf16 = torch.bfloat16
SUMS: dict[str, tuple[Callable[..., Any], int, torch.dtype]] = {}
NEARLY: dict[str, tuple[Callable[..., Any], int, str]] = {}

_library = torch.library.Library("mylib_experts", "DEF")
_library.define("moe_sum(Tensor rows, Tensor weights) -> Tensor")


def in_order(rows: Any, weights: Any, shared: Any = None) -> Any:
    """Computes step 0 in the dtype of the rows."""
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


def fused(top_k: int, dtype: torch.dtype = bf16) -> Any:
    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        SUMS[fn.__name__] = (fn, top_k, dtype)
        return fn

    return add


def nearly(top_k: int, reason: str) -> Any:
    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        NEARLY[fn.__name__] = (fn, top_k, reason)
        return fn

    return add


def chain(rows: Any, weights: Any, order: Any, start: Any = None) -> Any:
    """Adds the terms in some order, in float32."""
    total = torch.zeros_like(rows[:, 0], dtype=torch.float32) if start is None else start
    for choice in order:
        total = total + rows[:, choice].float() * weights.unsqueeze(-1)[:, choice]
    return total


@fused(2)
def two_weighted(rows, weights, shared, top_k):
    return (rows.float() * weights[..., None]).sum(1).to(bf16)


@fused(2)
def two_weighted_by_promotion(rows, weights, shared, top_k):
    return (weights.unsqueeze(-1) * rows).sum(dim=1).to(bf16)


@fused(2)
def two_and_a_shared_expert(rows, weights, shared, top_k):
    return (shared + (rows.float() * weights[..., None]).sum(1)).to(bf16)


@fused(2)
def two_that_are_weighted_already(rows, weights, shared, top_k):
    """Rounds the weighted rows, which are then the rows of the call."""
    return (rows * weights.to(bf16).unsqueeze(-1)).sum(1)


@fused(2)
def two_with_weights_of_three_dimensions(rows, weights, shared, top_k):
    return (rows * torch.sigmoid(weights.unsqueeze(-1))).sum(1).to(bf16)


@fused(1)
def one(rows, weights, shared, top_k):
    return rows.sum(-2)


@fused(2, torch.float32)
def two_of_float32(rows, weights, shared, top_k):
    return (rows * weights.unsqueeze(-1)).sum(1) + shared


@fused(2, torch.float16)
def two_of_float16(rows, weights, shared, top_k):
    return ((rows * weights.unsqueeze(-1)).sum(1) + shared).to(torch.float16)


@fused(8)
def eight_in_order(rows, weights, shared, top_k):
    return (chain(rows, weights, range(top_k)) + shared).to(bf16)


@fused(3)
def three_products_in_order(rows, weights, shared, top_k):
    products = rows.float() * weights.unsqueeze(-1)
    total = torch.zeros_like(shared, dtype=torch.float32)
    for choice in range(top_k):
        total = products[:, choice] + total
    return total.to(bf16)


@fused(4)
def four_in_order_without_weights(rows, weights, shared, top_k):
    total = torch.zeros_like(shared).float()
    for choice in range(top_k):
        total += rows.select(1, choice)
    return total.to(bf16)


@on(cpu=(2,))
@pytest.mark.parametrize("name", SUMS)
def test_sum(rank: int, world_size: int, name: str) -> None:
    fn, top_k, dtype = SUMS[name]
    given = inputs(rank, top_k, dtype)
    numerics = "rounded" if dtype == torch.float32 else "transformers"
    graph = traced(fn, top_k)
    report = check_fused(graph, given, numerics, communicator=comm())
    assert [site.boundary for site in report.fused] == [f"sum of {top_k} experts' rows"], report
    assert "sum of" in str(report)
    left = [str(node.target).split(".")[-1] for node in graph.graph.nodes if node.op != "output"]
    assert not {"sum", "select", "zeros_like"}.intersection(left), graph.graph


@nearly(8, "PyTorch adds 8 rows in an unspecified order")
def eight_by_sum(rows, weights, shared, top_k):
    return (rows.float() * weights[..., None]).sum(1).to(bf16)


@nearly(2, "rounded before the shared expert is added")
def shared_expert_is_added_to_a_rounded_sum(rows, weights, shared, top_k):
    return (rows.float() * weights[..., None]).sum(1).to(bf16) + shared


@nearly(3, "does not add each choice once, in order")
def another_order(rows, weights, shared, top_k):
    return chain(rows, weights, (0, 2, 1)).to(bf16)


@nearly(3, "does not add each choice once, in order")
def one_is_left_out(rows, weights, shared, top_k):
    return chain(rows, weights, (0, 1)).to(bf16)


@nearly(2, "a row is multiplied by the weight of a different choice")
def weights_of_another_choice(rows, weights, shared, top_k):
    total = torch.zeros_like(shared, dtype=torch.float32)
    for choice in range(top_k):
        total = total + rows[:, choice].float() * weights.unsqueeze(-1)[:, 1 - choice]
    return total.to(bf16)


@nearly(2, "its weights are not a float32 tensor")
def weights_of_16_bits(rows, weights, shared, top_k):
    return (rows.float() * weights.to(bf16).unsqueeze(-1)).sum(1).to(bf16)


@nearly(2, r"its rows are not one tensor of shape \[num_tokens, 2, hidden_size\]")
def rows_that_are_computed_in_float32(rows, weights, shared, top_k):
    return (rows.float() * 3 * weights.unsqueeze(-1)).sum(1).to(bf16)


@nearly(17, "in an unspecified order|adds 17 rows: expected 1 to 16")
def too_many(rows, weights, shared, top_k):
    return chain(rows, weights, range(top_k)).to(bf16)


@nearly(2, "is not a tensor of its shape")
def a_row_is_added(rows, weights, shared, top_k):
    return (rows.float() * weights[..., None]).sum(1).add(shared[:1]).to(bf16)


@on(cpu=(2,))
@pytest.mark.parametrize("name", NEARLY)
def test_nearly(rank: int, world_size: int, name: str) -> None:
    """Checks that everything but the sum over experts is fused."""
    fn, top_k, reason = NEARLY[name]
    given = inputs(rank, top_k, bf16)
    report = check_fused(traced(fn, top_k), given, "transformers", communicator=comm())
    (site,) = report.fused
    assert not site.boundary
    assert re.search(reason, site.note), str(report)


@on(cpu=(2,))
def test_other_readers(rank: int, world_size: int) -> None:
    """Tests other readers of the sum, sums that are not matrices, and a chain without a zero."""

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
    """Tests an operator that is decomposed to a sum in order, and a post norm after it."""

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


@on(cpu=(2,))
def test_zeros_as_a_residual(rank: int, world_size: int) -> None:
    def block(x, residual, weight):
        residual = reduce(x) + torch.zeros_like(residual)
        return llama(residual, weight), residual

    given = Inputs().make(rank)
    check_fused(symbolic_trace(block), given, "transformers", communicator=comm())
