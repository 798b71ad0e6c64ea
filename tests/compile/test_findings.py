"""Tests that graphs the pass once fused wrongly now fuse correctly or are refused."""

from __future__ import annotations

import operator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_helpers import comm, message_of, on
from torch.fx import Graph, GraphModule, symbolic_trace

from allnorm.compile import fuse
from allnorm.testing import assert_same_bits

from .helpers import (
    EPS,
    HIDDEN,
    Inputs,
    assert_close_norm,
    cast,
    check_fused,
    check_missed,
    llama,
    made_by_hand,
    reduce,
    rstd,
    summed,
)

bf16 = torch.bfloat16
FUNCTIONAL = torch.ops._c10d_functional


@on(cpu=(2,))
def test_bias_before_the_residual(rank: int, world_size: int) -> None:
    """Tests a bias: after the reduction, a single local call adds the residual and norms."""

    def fn(x, r, w):
        total = (reduce(x) + w) + r
        return llama(total, w), total

    for dtype in (bf16, torch.float32):
        x, r, w = Inputs(dtype=dtype).make(rank)
        graph = symbolic_trace(fn)
        want = fn(x, r, w)
        report = fuse(graph, [x, r, w], comm())
        graph.graph.lint()
        (site,) = report.sites
        assert site.numerics == ("transformers" if dtype == bf16 else "rounded"), str(report)
        assert [n.name for n in graph.graph.nodes if "allnorm.add_rms_norm" in str(n.target)]
        got = graph(x, r, w)
        assert_close_norm(got[0], want[0], "normed")
        assert_same_bits(got[1], want[1], "sum")


def reduced(graph: Graph, x):
    functional = graph.call_function(FUNCTIONAL.all_reduce.default, (x, "sum", "0"))
    return graph.call_function(FUNCTIONAL.wait_tensor.default, (functional,))


def normed(graph: Graph, total, w):
    return graph.call_function(F.rms_norm, (total, (HIDDEN,), w, EPS))


@on(cpu=(2,))
def test_view_reduced_in_place(rank: int, world_size: int) -> None:
    graph = Graph()
    x, r, w = map(graph.placeholder, "xrw")
    a = graph.call_function(operator.mul, (r, 0.5))
    v = graph.call_method("view", (a, 4, 6, HIDDEN))
    graph.call_function(dist.all_reduce, (v,))
    back = graph.call_method("view", (v, 24, HIDDEN))
    first = normed(graph, back, w)
    total = graph.call_function(operator.add, (back, reduced(graph, x)))
    graph.output((normed(graph, total, w), first, total))
    inputs = Inputs().make(rank)
    inputs[1] = inputs[1] + rank
    module = GraphModule(torch.nn.Module(), graph)
    check_fused(module, inputs, ["rounded", "rounded"], norms=2, communicator=comm())


@on(cpu=(2,))
def test_tied_parameter(rank: int, world_size: int) -> None:
    root = torch.nn.Module()
    root.norm = torch.nn.RMSNorm(HIDDEN, dtype=bf16, eps=EPS).requires_grad_(False)
    root.tied = torch.nn.Module()
    root.tied.weight = root.norm.weight
    graph = Graph()
    x, r = map(graph.placeholder, "xr")
    d = reduced(graph, x)
    graph.call_method("mul_", (graph.get_attr("tied.weight"), 2))
    total = graph.call_function(operator.add, (d, r))
    graph.output((graph.call_module("norm", (total,)), total))
    module = GraphModule(root, graph)
    inputs = Inputs().make(rank)[:2]
    want = module(*inputs)
    weight = module.tied.weight.clone()
    root.norm.weight.fill_(1.0)
    fuse(module, inputs, comm())
    module.graph.lint()
    for mine, theirs in zip(module(*inputs), want, strict=True):
        assert_close_norm(mine, theirs, "tied")
    assert_same_bits(module.tied.weight, weight, "the parameter, afterwards")


@on(cpu=(2,))
def test_gradient_of_the_weight(rank: int, world_size: int) -> None:
    """Tests the weight's gradient: the multiplication by the weight stays in the graph."""
    x, r, w = Inputs().make(rank)
    gradients = []
    with torch.enable_grad():
        for fused in (False, True):
            weight = w.clone().requires_grad_()
            run = symbolic_trace(summed(llama))
            if fused:
                assert [s.numerics for s in fuse(run, [x, r, weight], comm()).sites] == ["rounded"]
            run(x, r, weight)[0].float().sum().backward()
            gradients.append(weight.grad)
    assert gradients[1] is not None
    torch.testing.assert_close(*gradients, rtol=5e-2, atol=5e-2)


@on(cpu=(2,))
def test_numbers(rank: int, world_size: int) -> None:
    """Tests constants created with keyword arguments, and an eps computed from the token count."""
    inputs = Inputs().make(rank)
    graph = Graph()
    x, r, w = map(graph.placeholder, "xrw")
    k = graph.call_function(torch.full, (), {"size": (), "fill_value": 2.0})
    s = graph.call_function(torch.ops.aten.scalar_tensor.default, (), {"s": 2.0})
    total = graph.call_function(operator.add, (reduced(graph, x), r))
    graph.output((normed(graph, total, w), total, k, s))
    check_fused(GraphModule(torch.nn.Module(), graph), inputs, "rounded", communicator=comm())

    def sized(x, r, w):
        z = (reduce(x) + r).float()
        return (z * rstd(z, x.shape[0]) * w).to(bf16)

    module = symbolic_trace(sized)
    assert len(fuse(module, inputs, comm()).fused) == 1
    module(*inputs)
    assert "Fuse the graph again" in message_of(
        ValueError, lambda: module(*Inputs(shape=(7, 512)).make(rank))
    )


LOG: list[float] = []


@torch.library.custom_op("allnorm_findings::dump", mutates_args=())
def dump(x: torch.Tensor) -> None:
    LOG.append(x.float().sum().item())


dump.register_fake(lambda x: None)


@on(cpu=(2,))
def test_operators_without_results(rank: int, world_size: int) -> None:
    """Tests that operators without results and calls to print stay in the graph."""
    inputs, op = Inputs().make(rank), torch.ops.allnorm_findings.dump.default
    for target in (op, print):

        def read(graph, x, target=target):
            total = reduced(graph, x)
            graph.call_function(target, (total,))
            return total

        check_missed(made_by_hand(read), inputs, "is also used by", communicator=comm())
    total = Graph()
    x, r, w = map(total.placeholder, "xrw")
    total.call_method("mul_", (r, 2))
    total.call_function(print, ("here",))
    total.output(normed(total, total.call_function(operator.add, (reduced(total, x), r)), w))
    module = GraphModule(torch.nn.Module(), total)
    fuse(module, inputs, comm())
    assert any(node.target is print for node in module.graph.nodes)


@on(cpu=(2,))
def test_missed_site_before_a_fused_one(rank: int, world_size: int) -> None:
    """Tests that a missed site does not prevent the fusion of other sites."""
    group = dist.new_group(list(range(world_size)))
    fn = summed(llama, lambda x, r: reduce(x, group=group.group_name) + reduce(r))
    report = fuse(symbolic_trace(fn), Inputs().make(rank), comm())
    assert [site.numerics for site in report.sites] == [None, "transformers"]
    dist.destroy_process_group(group)


@on(cpu=(2,))
def test_different_number_of_tokens(rank: int, world_size: int) -> None:
    """Tests graphs that are fused for 24 tokens and run with 7."""

    def quantized(x, r, w):
        total = reduce(x) + r
        y = llama(total, w).float().view(-1, 8, 64)
        s = y.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448.0
        return cast(y / s).view(-1, HIDDEN), s, total

    def in_place(x, r, w):
        total = reduce(x) + r
        total.view(-1, 8, 64).mul_(0.5)
        total.mul_(2)
        return llama(total + reduce(x * 2), w), total

    few, many = Inputs(shape=(7, HIDDEN)).make(rank), Inputs().make(rank)
    for fn in (quantized, in_place):
        module = symbolic_trace(fn)
        assert fuse(module, many, comm()).fused
        want, got = fn(*few), module(*few)
        assert [t.shape for t in got] == [t.shape for t in want]
        assert_same_bits(got[-1], want[-1], "sum")
        torch.testing.assert_close(got[0].float(), want[0].float(), rtol=0.1, atol=0.1)


@on(cpu=(2,))
def test_graphs_of_branches(rank: int, world_size: int) -> None:
    root = torch.nn.Module()
    root.yes, root.no = symbolic_trace(summed(llama)), symbolic_trace(lambda x, r, w: (x, r))
    graph = Graph()
    inputs = tuple(map(graph.placeholder, "xrw"))
    parts = (graph.get_attr("yes"), graph.get_attr("no"))
    graph.output(graph.call_function(torch.ops.higher_order.cond, (True, *parts, inputs)))
    (site,) = fuse(GraphModule(root, graph), Inputs().make(rank), comm()).sites
    assert site.reason is not None
    assert "pass example_inputs" in site.reason


@on(cpu=(2,))
def test_inputs_that_share_memory_later(rank: int, world_size: int) -> None:
    def fn(x, r, o, w):
        d = reduce(x)
        o.mul_(2)
        total = d + r
        return llama(total, w), total

    x, r, w = Inputs().make(rank)
    module = symbolic_trace(fn)
    assert len(fuse(module, [x, r, r.clone(), w], comm()).fused) == 1
    both = torch.cat([r, r])
    text = message_of(ValueError, lambda: module(x, both[:24], both[1:25], w))
    assert "shares memory with another" in text
    for mine, theirs in zip(module(x, both[:24], both[24:], w), fn(x, r, r * 1, w), strict=True):
        assert_close_norm(mine, theirs, "apart")


@on(cpu=(2,))
def test_memory_of_results(rank: int, world_size: int) -> None:
    """Tests that fusion does not change which results and inputs share memory."""

    def fn(x, r, w):
        r.add_(reduce(x))
        total = r + 1
        view = total.view(4, 6, HIDDEN)
        view.mul_(2)
        return llama(r, w), r, r[2:4], total, view

    x, r, w = Inputs().make(rank)
    module, want = symbolic_trace(fn), fn(x, r.clone(), w)
    assert len(fuse(module, [x, r, w], comm()).fused) == 1
    got = module(x, r, w)
    for mine, theirs in zip(got, want, strict=True):
        assert mine.stride() == theirs.stride()
        assert_close_norm(mine, theirs, "result")
    assert got[1].data_ptr() == r.data_ptr()
    assert got[2].data_ptr() == r[2:].data_ptr()
    assert got[3].data_ptr() == got[4].data_ptr()


@on(cpu=(2,))
def test_inputs_copied_before_they_are_written(rank: int, world_size: int) -> None:
    def fn(x, r, o, w):
        o.copy_(x)
        total = reduce(x * 0.5) + r
        x.add_(x)
        return llama(total, w), total

    x, r, w = Inputs().make(rank)
    graph = symbolic_trace(fn)
    check_fused(graph, [x, r, r.clone(), w], "transformers", communicator=comm())


@on(cpu=(2,))
def test_wait_returns_the_tensor_reduced_in_place(rank: int, world_size: int) -> None:
    graph = Graph()
    x, r, w = map(graph.placeholder, "xrw")
    pending = graph.call_function(FUNCTIONAL.all_reduce_.default, (x, "sum", "0"))
    waited = graph.call_function(FUNCTIONAL.wait_tensor.default, (pending,))
    graph.call_method("add_", (waited, r))
    graph.output((normed(graph, waited, w), x))
    module = GraphModule(torch.nn.Module(), graph)
    check_fused(module, Inputs().make(rank), "rounded", communicator=comm())
