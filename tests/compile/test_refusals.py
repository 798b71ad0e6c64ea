"""Tests graphs that must not be fused, and the reasons in the report."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_helpers import comm, message_of, on
from torch.fx import symbolic_trace

import allnorm
from allnorm.compile import fuse

from .helpers import (
    EPS,
    HIDDEN,
    Inputs,
    captured,
    check_missed,
    fused_calls,
    gemma,
    llama,
    made_by_hand,
    open_names,
    plain,
    reduce,
    rstd,
)

bf16 = torch.bfloat16
FUNCTIONAL = torch.ops._c10d_functional
wait = FUNCTIONAL.wait_tensor.default


def norm(z, w):
    """Computes the RMSNorm of a float32 tensor, and rounds once."""
    return (z * rstd(z) * w).to(bf16)


def in_float32(normed):
    """Returns a graph that calls `normed(z, w)` with the float32 sum z, and rounds the result."""
    return lambda x, r, w: normed((reduce(x) + r).float(), w).to(bf16)


def by_root(root):
    """Returns a graph whose norm multiplies by `root(z)` instead of 1/rms."""
    return in_float32(lambda z, w: z * root(z) * w)


def also_returning(read):
    """Returns a graph that also returns `read(reduced)`."""

    def graph(x, r, w):
        reduced = reduce(x)
        total = reduced + r
        return llama(total, w), total, read(reduced)

    return graph


def mean_square(z):
    return z.pow(2).mean(-1, keepdim=True)


def mean_square_is_returned(x, r, w):
    z = reduce(x).float() + r  # no tensor of the graph is the float32 residual
    mean = mean_square(z)
    return (z * torch.rsqrt(mean + EPS) * w).to(bf16), mean


def weight_from_the_sum(x, r, w):
    reduced = reduce(x)
    z = (reduced + r).float()
    return (z * rstd(z) * torch.relu(reduced)[0]).to(bf16)


def reduced_into_the_callers_tensor(x, r, w):
    x.copy_(reduce(x))
    return llama(x + r, w)


def reduced_changed_between(x, r, w):
    reduced = reduce(x)
    reduced.exp_()
    return llama(reduced + r, w)


def view_of_what_is_reduced_in_place(x, r, w):
    x = x.clone()
    first = x[:1]
    FUNCTIONAL.all_reduce_.default(x, "sum", "0")
    return llama(x + r, w), first + 1


def sum_used_before_the_weight(x, r, w):
    total = reduce(x) + r
    early = torch.relu(total)
    return norm(total.float(), torch.sigmoid(w)), early


TRANSFORMED = "neither a residual add nor an RMSNorm follows it: {} comes first"
# Maps the reason why a graph is not fused to a function of (x, residual, weight).
REFUSALS = {
    # ---- the reduction ----
    "reduces by 'avg'": lambda x, r, w: llama(reduce(x, "avg") + r, w),
    "reduces by 'max'": lambda x, r, w: llama(reduce(x, "max") + r, w),
    "over group '1', the communicator over '0'": lambda x, r, w: llama(reduce(x, group="1") + r, w),
    "reduces a torch.bfloat16 tensor in float32": lambda x, r, w: llama(
        reduce(x.float()).to(bf16) + r, w
    ),
    "reduces torch.int32": lambda x, r, w: llama(reduce(x.to(torch.int32)).to(bf16) + r, w),
    "reduces torch.float64": lambda x, r, w: llama(reduce(x.double()).to(bf16) + r, w),
    "several tensors at once": lambda x, r, w: llama(
        wait(FUNCTIONAL.all_reduce_coalesced.default([x, x], "sum", "0")[0]) + r, w
    ),
    "reduce-scatters several tensors": lambda x, r, w: llama(
        wait(FUNCTIONAL.reduce_scatter_tensor_coalesced.default([x, x], "sum", 1, "0")[0]) + r, w
    ),
    # ---- other readers of tensors that the fused call does not return ----
    "the reduced tensor itself is also used by the output": also_returning(lambda reduced: reduced),
    "the reduced tensor itself is also used by relu": also_returning(torch.relu),
    "the output of the graph uses the unrounded": lambda x, r, w: (
        norm(z := reduce(x).float() + r, w),
        z,
    ),
    "also used by the output of the graph: the fused call returns only": mean_square_is_returned,
    "stores it in memory that is visible outside the graph": reduced_into_the_callers_tensor,
    "no RMSNorm follows it: its result is used by relu": lambda x, r, w: torch.relu(reduce(x) + r),
    "its result is not used": lambda x, r, w: (reduce(x), llama(r, w))[1],
    # ---- different norms ----
    "mean over dimension 0: expected the last": by_root(
        lambda z: torch.rsqrt(z.pow(2).mean(0, keepdim=True) + EPS)
    ),
    r"mean over dimensions \[0, 1\]": by_root(
        lambda z: torch.rsqrt(z.pow(2).mean([0, 1], keepdim=True) + EPS)
    ),
    "norms over 2 dimensions": lambda x, r, w: F.rms_norm(reduce(x) + r, (24, HIDDEN)),
    "layer norm": lambda x, r, w: F.layer_norm(reduce(x) + r, (HIDDEN,), w),
    "changes the last dimension": lambda x, r, w: F.rms_norm(
        (reduce(x) + r).view(24, 8, 64), (64,)
    ),
    "takes the mean of .*: expected squares": by_root(
        lambda z: torch.rsqrt(z.mean(-1, keepdim=True) + EPS)
    ),
    "takes the root of .*: expected a mean of squares": by_root(
        lambda z: torch.rsqrt(mean_square(z).clamp(min=EPS))
    ),
    "eps=-0.5 is not a finite number >= 0": by_root(lambda z: rstd(z, -0.5)),
    "not a finite number": by_root(lambda z: rstd(z, 1e39)),
    "squares are rounded to bfloat16": lambda x, r, w: (
        (z := reduce(x) + r) * torch.rsqrt(z.pow(2).float().mean(-1, keepdim=True) + EPS) * w
    ).to(bf16),
    "mean square is rounded to bfloat16": by_root(
        lambda z: torch.rsqrt(mean_square(z).to(bf16).float() + EPS)
    ),
    "1/rms is rounded to bfloat16": lambda x, r, w: (
        (z := reduce(x) + r) * rstd(z.float()).to(bf16) * w
    ),
    "divides by the root": in_float32(lambda z, w: z / torch.sqrt(mean_square(z) + EPS) * w),
    "1/rms is multiplied by .* first": in_float32(lambda z, w: z * (rstd(z) * w)),
    "different roundings": lambda x, r, w: (
        (z := reduce(x).float() + r.float()) * rstd(z.to(bf16).float()) * w
    ).to(bf16),
    "not rounded to bfloat16": lambda x, r, w: (z := (reduce(x) + r).float()) * rstd(z) * w,
    "something other than a weight: expected 512 elements": lambda x, r, w: norm(
        (reduce(x) + r).float(), r
    ),
    "the weight, getitem, is computed from the reduced tensor": weight_from_the_sum,
    # ---- different sums ----
    "is torch.float16: expected torch.bfloat16": lambda x, r, w: (
        norm(z := reduce(x) + r.half(), w),
        z.to(bf16),
    ),
    "computed from the reduced tensor": (
        lambda x, r, w: llama((d := reduce(x)) + torch.relu(d), w),
        lambda x, r, w: llama((d := reduce(x)) + d, w),
    ),
    "adds is not a tensor of the reduced tensor's shape": lambda x, r, w: llama(reduce(x) + w, w),
    "the scaled sum is not rounded to bfloat16": lambda x, r, w: norm(
        reduce(x).float() * 0.5 + r, w
    ),
    TRANSFORMED.format("mul"): (
        lambda x, r, w: llama(reduce(x) * w[:1] + r, w),
        lambda x, r, w: llama(reduce(x) * 1e39 + r, w),
        lambda x, r, w: llama(reduce(x) * 0.5 * 0.3 + r, w),
    ),
    TRANSFORMED.format("truediv"): lambda x, r, w: llama(reduce(x) / 3 + r, w),
    "no RMSNorm follows it": lambda x, r, w: reduce(x) * 0.5 + r,
    "number is added": lambda x, r, w: llama(reduce(x) + 1.0, w),
    "scales its second operand": lambda x, r, w: llama(torch.add(reduce(x), r, alpha=2), w),
    "takes a part of": lambda x, r, w: llama(reduce(x)[:4] + r[:4], w),
    "no RMSNorm follows it: its result is used by|norms over": lambda x, r, w: llama(
        reduce(x).transpose(0, 1).transpose(0, 1) + r, w
    ),
    # ---- writes, order ----
    "no RMSNorm follows|neither a residual|number is added": reduced_changed_between,
    "add_2 reads memory that all_reduce__default overwrites": view_of_what_is_reduced_in_place,
    "an input of the fused call, depends on the call's result through": sum_used_before_the_weight,
}


@pytest.mark.sampled(2)
@on(cpu=(1,))
@pytest.mark.parametrize("reason", REFUSALS)
def test_refusal(rank: int, world_size: int, reason: str) -> None:
    for fn in graphs_of(reason):
        check_missed(symbolic_trace(fn), Inputs().make(rank), reason, communicator=comm())


def graphs_of(reason):
    graphs = REFUSALS[reason]
    return graphs if isinstance(graphs, tuple) else (graphs,)


@on(cpu=(2,))
def test_two_communicators(rank: int, world_size: int) -> None:
    """Tests a graph with two groups: a communicator fuses only its own group's reductions."""
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
    report = fuse(graph, inputs)  # fuses the other reduction on a new communicator
    assert [site.numerics for site in report.sites] == ["rounded"]
    (made,) = set(open_names()) - set(before)
    assert made.partition("#")[0] == other.group_name
    assert made in str(graph.graph)
    with torch.no_grad():
        for mine, theirs in zip(graph(*inputs), block(*inputs), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)
    graph = symbolic_trace(block)
    assert len(fuse(graph, inputs).fused) == 2
    assert set(open_names()) == {*before, made}, "the communicator was not reused"
    dist.destroy_process_group(other)


@on(cpu=(1,))
def test_gradients(rank: int, world_size: int) -> None:
    """Tests that a graph whose results need a gradient is not fused."""
    x, residual, w = Inputs().make(rank)
    with torch.enable_grad():
        graph = captured(plain, [x.requires_grad_(), residual, w])
    check_missed(graph, None, "needs a gradient", communicator=comm())
    with torch.no_grad():
        graph = captured(plain, [x, residual, w])
    assert fuse(graph, None, comm()).fused


def own_reduction(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    dist.all_reduce(x)
    return x


@on(cpu=(1,))
def test_python_reductions(rank: int, world_size: int) -> None:
    """Tests an asynchronous reduction, and a function with unknown effects."""

    inputs = Inputs().make(rank)
    module = made_by_hand(
        lambda graph, x: (graph.call_function(dist.all_reduce, (x,), {"async_op": True}), x)[1]
    )
    check_missed(module, inputs, "asynchronous", communicator=comm())
    module = made_by_hand(lambda graph, x: graph.call_function(own_reduction, (x,)))
    assert not fuse(module, inputs, comm()).sites
    reason = "may work in place: register it"
    check_missed(module, inputs, reason, communicator=comm(), all_reduce_ops=[own_reduction])


@on(cpu=(1,))
def test_errors(rank: int, world_size: int) -> None:
    inputs = Inputs().make(rank)
    graph = symbolic_trace(plain)
    calls = [
        (TypeError, "expected a torch.fx.GraphModule", lambda: fuse(graph.graph)),
        (TypeError, "expected an allnorm.Communicator", lambda: fuse(graph, inputs, "0")),
        (ValueError, "has 1 entries: the graph has 3 inputs", lambda: fuse(graph, inputs[:1])),
    ]
    for error, text, call in calls:
        assert text in message_of(error, call)
    group = dist.new_group([0])  # the group has no communicator: fuse() would create one
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


def test_without_process_group() -> None:
    """Tests that fuse() works without a process group, and reports that there is none."""
    inputs = Inputs().make(0)
    graph = symbolic_trace(plain)
    check_missed(graph, inputs, "torch.distributed is not initialized")
