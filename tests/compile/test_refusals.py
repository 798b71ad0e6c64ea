"""Tests hand-made graphs that must not be fused, and the reasons in the report."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_helpers import comm, message_of, on
from torch.fx import Graph, GraphModule, symbolic_trace

import allnorm
from allnorm.compile import fuse
from allnorm.testing import RankPool

from .helpers import (
    EPS,
    HIDDEN,
    Inputs,
    captured,
    check_missed,
    fused_calls,
    gemma,
    llama,
    open_names,
    reduce,
    rstd,
)

bf16 = torch.bfloat16
REFUSALS: dict[str, tuple[Callable[..., Any], str, Inputs]] = {}


def refusal(reason: str, inputs: Inputs | None = None) -> Any:
    """Marks a function of (x, residual, weight) as a graph that must not be fused."""

    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        REFUSALS[fn.__name__] = (fn, reason, inputs or Inputs())
        return fn

    return add


def norm(z: Any, w: Any) -> Any:
    """Norms a float32 tensor and rounds once."""
    return (z * rstd(z) * w).to(bf16)


# ---- the reduction ------------------------------------------------------------------------------


@refusal("reduces by 'avg'")
def mean_over_ranks(x, residual, w):
    return llama(reduce(x, "avg") + residual, w)


@refusal("reduces by 'max'")
def maximum_over_ranks(x, residual, w):
    return llama(reduce(x, "max") + residual, w)


@refusal("over group '1', the communicator over '0'")
def another_group(x, residual, w):
    return llama(reduce(x, group="1") + residual, w)


@refusal("reduces a torch.bfloat16 tensor in float32")
def reduced_in_float32(x, residual, w):
    return llama(reduce(x.float()).to(bf16) + residual, w)


@refusal("reduces torch.int32")
def integers(x, residual, w):
    return llama(reduce(x.to(torch.int32)).to(bf16) + residual, w)


@refusal("reduces torch.float64")
def float64(x, residual, w):
    return llama(reduce(x.double()).to(bf16) + residual, w)


@refusal("several tensors at once")
def coalesced(x, residual, w):
    several = torch.ops._c10d_functional.all_reduce_coalesced.default([x, x], "sum", "0")
    return llama(torch.ops._c10d_functional.wait_tensor.default(several[0]) + residual, w)


@refusal("reduce-scatter")
def scattered(x, residual, w):
    shard = torch.ops._c10d_functional.reduce_scatter_tensor.default(x, "sum", 1, "0")
    return llama(torch.ops._c10d_functional.wait_tensor.default(shard) + residual, w)


# ---- other readers of tensors that the fused call does not return --------------------------------


@refusal("the reduced tensor itself is also used by the output")
def reduced_is_returned(x, residual, w):
    reduced = reduce(x)
    residual = reduced + residual
    return llama(residual, w), residual, reduced


@refusal("the reduced tensor itself is also used by relu")
def reduced_is_used(x, residual, w):
    reduced = reduce(x)
    residual = reduced + residual
    return llama(residual, w), torch.relu(reduced)


@refusal("the output of the graph uses the unrounded")
def float32_sum_is_returned(x, residual, w):
    z = reduce(x).float() + residual.float()
    return norm(z, w), z


@refusal("mul.* uses the unrounded")
def float32_norm_is_used(x, residual, w):
    z = reduce(x).float() + residual.float()
    normed = z * rstd(z)
    return (normed * w).to(bf16), normed * 2


@refusal("also used by the output of the graph: the fused call returns only")
def mean_square_of_the_float32_sum_is_returned(x, residual, w):
    z = reduce(x).float() + residual.float()
    mean = z.pow(2).mean(-1, keepdim=True)
    return (z * torch.rsqrt(mean + EPS) * w).to(bf16), mean


@refusal("stores it in memory that is visible outside the graph")
def reduced_into_the_callers_tensor(x, residual, w):
    x.copy_(reduce(x))
    return llama(x + residual, w)


@refusal("no RMSNorm follows it: its result is used by relu")
def no_norm(x, residual, w):
    return torch.relu(reduce(x) + residual)


@refusal("its result is not used")
def unused(x, residual, w):
    reduce(x)
    return llama(residual, w)


# ---- different norms----------------------------------------------------------------------------


@refusal("mean over dimension 0: expected the last")
def mean_over_tokens(x, residual, w):
    z = (reduce(x) + residual).float()
    return (z * torch.rsqrt(z.pow(2).mean(0, keepdim=True) + EPS) * w).to(bf16)


@refusal(r"mean over dimensions \[0, 1\]")
def mean_over_everything(x, residual, w):
    z = (reduce(x) + residual).float()
    return (z * torch.rsqrt(z.pow(2).mean([0, 1], keepdim=True) + EPS) * w).to(bf16)


@refusal("norms over 2 dimensions")
def norm_over_two_dimensions(x, residual, w):
    return F.rms_norm(reduce(x) + residual, (24, HIDDEN))


@refusal("layer norm")
def layer_norm(x, residual, w):
    return F.layer_norm(reduce(x) + residual, (HIDDEN,), w)


@refusal("changes the last dimension")
def norm_over_heads(x, residual, w):
    return F.rms_norm((reduce(x) + residual).view(24, 8, 64), (64,))


@refusal("takes the mean of .*: expected squares")
def mean_of_values(x, residual, w):
    z = (reduce(x) + residual).float()
    return (z * torch.rsqrt(z.mean(-1, keepdim=True) + EPS) * w).to(bf16)


@refusal("takes the root of .*: expected a mean of squares")
def clamped_mean_square(x, residual, w):
    z = (reduce(x) + residual).float()
    return (z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True).clamp(min=EPS)) * w).to(bf16)


@refusal("eps=-0.5 is not a finite number >= 0")
def negative_eps(x, residual, w):
    z = (reduce(x) + residual).float()
    return (z * rstd(z, -0.5) * w).to(bf16)


@refusal("squares are rounded to bfloat16")
def squares_in_16_bits(x, residual, w):
    z = reduce(x) + residual
    mean = z.pow(2).float().mean(-1, keepdim=True)
    return (z * torch.rsqrt(mean + EPS) * w).to(bf16)


@refusal("mean square is rounded to bfloat16")
def mean_in_16_bits(x, residual, w):
    z = (reduce(x) + residual).float()
    mean = z.pow(2).mean(-1, keepdim=True).to(bf16)
    return (z * torch.rsqrt(mean.float() + EPS) * w).to(bf16)


@refusal("1/rms is rounded to bfloat16")
def root_in_16_bits(x, residual, w):
    residual = reduce(x) + residual
    return residual * rstd(residual.float()).to(bf16) * w


@refusal("divides by the root")
def division_by_the_root(x, residual, w):
    z = (reduce(x) + residual).float()
    return (z / torch.sqrt(z.pow(2).mean(-1, keepdim=True) + EPS) * w).to(bf16)


@refusal("1/rms is multiplied by .* first")
def weight_multiplied_first(x, residual, w):
    z = (reduce(x) + residual).float()
    return (z * (rstd(z) * w)).to(bf16)


@refusal("different roundings")
def mean_square_of_another_rounding(x, residual, w):
    z = reduce(x).float() + residual.float()
    return (z * rstd(z.to(bf16).float()) * w).to(bf16)


@refusal("not rounded to bfloat16")
def normed_in_float32(x, residual, w):
    z = (reduce(x) + residual).float()
    return z * rstd(z) * w


@refusal("something other than a weight: expected 512 elements")
def weight_for_every_row(x, residual, w):
    z = (reduce(x) + residual).float()
    return (z * rstd(z) * residual).to(bf16)


@refusal("the weight, getitem, is computed from the reduced tensor")
def weight_from_the_sum(x, residual, w):
    reduced = reduce(x)
    z = (reduced + residual).float()
    return (z * rstd(z) * torch.relu(reduced)[0]).to(bf16)


# ---- different sums-----------------------------------------------------------------------------


@refusal("is torch.float32: expected torch.bfloat16")
def float32_residual(x, residual, w):
    z = reduce(x) + residual.float() * 2
    return norm(z, w), z.to(bf16)


@refusal("computed from the reduced tensor")
def residual_from_the_reduced(x, residual, w):
    reduced = reduce(x)
    return llama(reduced + torch.relu(reduced), w)


@refusal("computed from the reduced tensor")
def doubled(x, residual, w):
    reduced = reduce(x)
    return llama(reduced + reduced, w)


@refusal("adds is not a tensor of the reduced tensor's shape")
def bias_as_residual(x, residual, w):
    return llama(reduce(x) + w, w)


@refusal("the scaled sum is not rounded to bfloat16")
def scaled_without_rounding(x, residual, w):
    return norm(reduce(x).float() * 0.5 + residual, w)


@refusal("neither a residual add nor an RMSNorm follows it: mul comes first")
def scaled_by_a_tensor(x, residual, w):
    return llama(reduce(x) * w[:1] + residual, w)


@refusal("neither a residual add nor an RMSNorm follows it: truediv comes first")
def divided(x, residual, w):
    return llama(reduce(x) / 3 + residual, w)


@refusal("neither a residual add nor an RMSNorm follows it: mul comes first")
def scaled_to_infinity(x, residual, w):
    return llama(reduce(x) * 1e39 + residual, w)


@refusal("no RMSNorm follows it")
def scaled_without_a_norm(x, residual, w):
    return reduce(x) * 0.5 + residual


@refusal("neither a residual add nor an RMSNorm follows it: mul comes first")
def scaled_twice(x, residual, w):
    return llama(reduce(x) * 0.5 * 0.3 + residual, w)


@refusal("number is added")
def number_added(x, residual, w):
    return llama(reduce(x) + 1.0, w)


@refusal("scales its second operand")
def scaled_residual(x, residual, w):
    return llama(torch.add(reduce(x), residual, alpha=2), w)


@refusal("takes a part of")
def slice_between(x, residual, w):
    return llama(reduce(x)[:4] + residual[:4], w)


@refusal("no RMSNorm follows it: its result is used by|norms over")
def transposed_between(x, residual, w):
    return llama(reduce(x).transpose(0, 1).transpose(0, 1) + residual, w)


# ---- writes -------------------------------------------------------------------------------------


@refusal("no RMSNorm follows|neither a residual|number is added")
def reduced_changed_between(x, residual, w):
    reduced = reduce(x)
    reduced.exp_()
    return llama(reduced + residual, w)


@refusal("add_2 reads memory that all_reduce__default overwrites")
def view_of_what_is_reduced_in_place(x, residual, w):
    x = x.clone()
    first = x[:1]
    torch.ops._c10d_functional.all_reduce_.default(x, "sum", "0")
    return llama(x + residual, w), first + 1


# ---- order --------------------------------------------------------------------------------------


@refusal("an input of the fused call, depends on the call's result through")
def sum_used_before_the_weight_is_there(x, residual, w):
    residual = reduce(x) + residual
    early = torch.relu(residual)
    weight = torch.sigmoid(w)
    return norm(residual.float(), weight), early


def run_refusal(rank: int, world_size: int, name: str) -> None:
    fn, reason, inputs = REFUSALS[name]
    check_missed(symbolic_trace(fn), inputs.make(rank), reason, communicator=comm())


@on(cpu=(1,))
@pytest.mark.parametrize("name", REFUSALS)
def test_refusal(pool: RankPool, name: str) -> None:
    pool.run(run_refusal, name)


def two_communicators(rank: int, world_size: int) -> None:
    """Tests a graph with two groups: a given communicator fuses only its own group's."""
    other = dist.new_group([0, 1])

    def block(x, residual, w):
        residual = reduce(x) + residual
        x = llama(residual, w)
        residual = reduce(x, group=other.group_name) + residual
        return gemma(residual, w), residual

    inputs = Inputs().make(rank)
    graph = symbolic_trace(block)
    report = fuse(graph, inputs, comm())
    assert [site.numerics for site in report.sites] == ["transformers", None]
    assert report.sites[1].group == other.group_name
    assert "communicator over '0'" in str(report.missed[0].reason)
    assert len(fused_calls(graph)) == 1
    before = open_names()
    report = fuse(graph, inputs)  # fuses the rest on a new communicator
    assert [site.numerics for site in report.sites] == ["rounded"]
    (made,) = set(open_names()) - set(before)
    assert made.partition("#")[0] == other.group_name
    assert made in str(graph.graph)
    with torch.no_grad():
        for mine, theirs in zip(graph(*inputs), block(*inputs), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)
    graph = symbolic_trace(block)
    assert len(fuse(graph, inputs).fused) == 2
    assert set(open_names()) == {*before, made}, "found again"
    dist.destroy_process_group(other)


@on(cpu=(2,))
def test_two_communicators(pool: RankPool) -> None:
    pool.run(two_communicators)


def communicators(rank: int, world_size: int) -> None:
    def block(x, residual, w):
        return llama(torch.ops.allnorm.all_reduce(x, "allnorm:nobody:0") + residual, w)

    def nowhere(x, residual, w):
        return llama(reduce(x, group="nowhere") + residual, w)

    inputs = Inputs().make(rank)
    check_missed(
        symbolic_trace(block), inputs, "uses communicator allnorm:nobody:0", communicator=comm()
    )
    with pytest.raises(RuntimeError):
        nowhere(*inputs)
    reason = "over group 'nowhere', the communicator over '0'"
    check_missed(symbolic_trace(nowhere), inputs, reason, communicator=comm())
    check_missed(symbolic_trace(nowhere), inputs, "no process group named 'nowhere'")


@on(cpu=(1,))
def test_communicators(pool: RankPool) -> None:
    pool.run(communicators)


def gradients(rank: int, world_size: int) -> None:
    """Tests that graphs whose results need a gradient stay unfused."""
    x, residual, w = Inputs().make(rank)

    def block(x, residual, w):
        return llama(reduce(x) + residual, w)

    with torch.enable_grad():
        graph = captured(block, [x.requires_grad_(), residual, w])
    check_missed(graph, None, "needs a gradient", communicator=comm())
    with torch.no_grad():
        graph = captured(block, [x, residual, w])
    assert fuse(graph, None, comm()).fused


@on(cpu=(1,))
def test_gradients(pool: RankPool) -> None:
    pool.run(gradients)


def unknown(rank: int, world_size: int) -> None:
    """Tests graphs without metadata, and functions with unknown effects."""
    inputs = Inputs().make(rank)

    def block(x, residual, w):
        return llama(reduce(x) + residual, w)

    check_missed(symbolic_trace(block), None, "pass example_inputs", communicator=comm())

    graph = Graph()
    x, residual, w, group = (graph.placeholder(n) for n in ("x", "residual", "w", "group"))
    functional = torch.ops._c10d_functional.all_reduce.default
    reduced = graph.call_function(functional, (x, "sum", group))
    total = graph.call_function(operator.add, (reduced, residual))
    graph.output(graph.call_function(F.rms_norm, (total, (HIDDEN,), w, EPS)))
    module = GraphModule(torch.nn.Module(), graph)
    check_missed(
        module, [*inputs, "0"], "name its process group as a constant", communicator=comm()
    )
    check_missed(module, [*inputs, "0"], "name its process group as a constant")

    graph = Graph()
    x, residual, w = (graph.placeholder(n) for n in ("x", "residual", "w"))
    graph.call_function(dist.all_reduce, (x,), {"async_op": True})
    total = graph.call_function(operator.add, (x, residual))
    graph.output(graph.call_function(F.rms_norm, (total, (HIDDEN,), w, EPS)))
    module = GraphModule(torch.nn.Module(), graph)
    check_missed(module, inputs, "asynchronous", communicator=comm())

    graph = Graph()
    x, residual, w = (graph.placeholder(n) for n in ("x", "residual", "w"))
    reduced = graph.call_function(own_reduction, (x,))
    total = graph.call_function(operator.add, (reduced, residual))
    graph.output(graph.call_function(F.rms_norm, (total, (HIDDEN,), w, EPS)))
    module = GraphModule(torch.nn.Module(), graph)
    assert not fuse(module, inputs, comm()).sites
    reason = "may work in place: register it"
    check_missed(module, inputs, reason, communicator=comm(), all_reduce_ops=[own_reduction])


def own_reduction(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    dist.all_reduce(x)
    return x


@on(cpu=(1,))
def test_unknown(pool: RankPool) -> None:
    pool.run(unknown)


def errors(rank: int, world_size: int) -> None:
    inputs = Inputs().make(rank)
    graph = symbolic_trace(lambda x, residual, w: llama(reduce(x) + residual, w))
    calls = [
        (TypeError, "expected a torch.fx.GraphModule", lambda: fuse(graph.graph)),
        (TypeError, "expected an allnorm.Communicator", lambda: fuse(graph, inputs, "0")),
        (ValueError, "has 1 entries: the graph has 3 inputs", lambda: fuse(graph, inputs[:1])),
    ]
    for error, text, call in calls:
        assert text in message_of(error, call)
    group = dist.new_group([0])  # without a communicator, fuse() would make one
    other = symbolic_trace(lambda x, residual, w: llama(reduce(x, group=group.group_name), w))
    os.environ["ALLNORM_TIMEOUT"] = "1"  # misspelled
    try:
        assert "ALLNORM_TIMEOUT" in message_of(allnorm.AllnormError, lambda: fuse(other, inputs))
    finally:
        del os.environ["ALLNORM_TIMEOUT"]
    with allnorm.Communicator() as closed:
        pass
    for call in (
        lambda: fuse(graph, inputs, closed),
        lambda: allnorm.compile.inductor_pass(closed),
    ):
        assert "is closed" in message_of(allnorm.CommunicatorClosedError, call)
    expected = "expected an allnorm.Communicator"
    assert expected in message_of(TypeError, lambda: allnorm.compile.inductor_pass("0"))


@on(cpu=(1,))
def test_errors(pool: RankPool) -> None:
    pool.run(errors)


def test_without_process_group() -> None:
    """Tests that fuse() works without a process group and names what is missing."""
    inputs = Inputs().make(0)
    graph = symbolic_trace(lambda x, residual, w: llama(reduce(x) + residual, w))
    check_missed(graph, inputs, "torch.distributed is not initialized")
