"""Tests defects found by an audit of the graph pass: correct now, or refused with the reason."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from rank_helpers import comm, message_of, on
from torch.fx import Graph, GraphModule, symbolic_trace

from allnorm.compile import fuse, inductor_pass
from allnorm.testing import RankPool, assert_same_bits

from .helpers import (
    EPS,
    FP8,
    HIDDEN,
    Inputs,
    assert_close_norm,
    check_fused,
    check_missed,
    fused_calls,
    llama,
    reduce,
    rstd,
)

bf16 = torch.bfloat16
RIGHT: dict[str, tuple[Callable[..., Any], str, Inputs, int]] = {}


def right(numerics: str, norms: int = 1, inputs: Inputs | None = None) -> Any:
    """Marks a function of (x, residual, weight) that must be fused with the same results."""

    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        RIGHT[fn.__name__] = (fn, numerics, inputs or Inputs(), norms)
        return fn

    return add


@right("transformers")
def norm_in_place(x, r, w):
    total = reduce(x) + r
    total.mul_(rstd(total.float()))
    total.mul_(w)
    return total


@right("transformers", norms=2)
def sum_overwritten_by_the_product(x, r, w):
    total = reduce(x) + r
    total.mul_(rstd(total.float()))
    return w * total, total


@right("rounded")
def sum_in_place_and_a_late_weight(x, r, w):
    r = torch.relu(r)
    r.add_(reduce(x))
    z = r.float()
    return (z * rstd(z) * (w + 1)).to(bf16), r


@right("rounded")
def root_kept_and_a_late_weight(x, r, w):
    total = reduce(x) + r
    z = total.float()
    root = rstd(z)
    return (z * root * (w + 1)).to(bf16), total, root


@right("transformers")
def x_is_the_residual(x, r, w):
    total = reduce(x) + x
    return llama(total, w), total


@right("transformers")
def shape_changed_in_place(x, r, w):
    total = reduce(x) + r
    normed = llama(total, w)
    total.unsqueeze_(0)
    return normed, total


@right("rounded")
def root_of_a_square_of_an_absolute(x, r, w):
    total = reduce(x) + r
    z = total.float()
    root = torch.rsqrt(z.abs().pow(2).mean(-1, keepdim=True) + EPS)
    return (z * root * w).to(bf16), total


@right("transformers")
def shape_of_the_reduced(x, r, w):
    reduced = reduce(x)
    total = reduced.view(-1, reduced.shape[-1]) + r
    return llama(total, w), total


@right("transformers", inputs=Inputs(residual_shape=(1, 24, HIDDEN)))
def one_more_dimension_in_the_residual(x, r, w):
    total = reduce(x) + r
    return llama(total, w), total


@right("transformers", inputs=Inputs(shape=(1, 24, HIDDEN), residual_shape=(24, HIDDEN)))
def one_more_dimension_in_the_reduced(x, r, w):
    total = r + reduce(x)
    return llama(total, w), total


@right("transformers")
def dropout_of_nothing(x, r, w):
    total = F.dropout(reduce(x), 0.0, True) + r
    return llama(total, w), total


@right("rounded")
def asserts_on_metadata(x, r, w):
    check = torch.ops.aten._assert_tensor_metadata.default
    reduced = reduce(x)
    check(reduced, None, None, bf16)
    total = reduced + r
    check(total, None, None, bf16)
    z = total.float()
    check(z, None, None, torch.float32)
    return (z * rstd(z) * (w + 1)).to(bf16), total


def run_right(rank: int, world_size: int, name: str) -> None:
    fn, numerics, inputs, norms = RIGHT[name]
    given = inputs.make(rank)
    check_fused(symbolic_trace(fn), given, numerics, norms=norms, communicator=comm())


@on(cpu=(2,))
@pytest.mark.parametrize("name", RIGHT)
def test_right(pool: RankPool, name: str) -> None:
    pool.run(run_right, name)


# ---- a bias between the reduction and the residual -----------------------------------------------


def biased(rank: int, world_size: int) -> None:
    """Tests a bias: the reduction runs alone, and one local call adds and norms after rounding."""

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


@on(cpu=(2,))
def test_bias_before_the_residual(pool: RankPool) -> None:
    pool.run(biased)


# ---- graphs with side effects --------------------------------------------------------------------


def reduced(graph: Graph, x: Any) -> Any:
    functional = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "0"))
    return graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (functional,))


def normed(graph: Graph, total: Any, w: Any) -> Any:
    return graph.call_function(F.rms_norm, (total, (HIDDEN,), w, EPS))


def view_reduced_in_place(rank: int, world_size: int) -> None:
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


def tied_parameter(rank: int, world_size: int) -> None:
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


def forward_replaced(rank: int, world_size: int) -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.RMSNorm(HIDDEN, dtype=bf16, eps=EPS).requires_grad_(False)

        def forward(self, x, r):
            total = reduce(x) + r
            return self.norm(total), total

    block, inputs = Block(), Inputs().make(rank)[:2]
    stock = block.norm.forward
    block.norm.forward = lambda x: stock(x) * 2
    check_missed(symbolic_trace(block), inputs, "a forward that replaces", communicator=comm())
    block = Block()
    block.norm.register_forward_hook(lambda module, args, result: result * 2)
    check_missed(symbolic_trace(block), inputs, "has hooks", communicator=comm())


def gradient(rank: int, world_size: int) -> None:
    def fn(x, r, w):
        total = reduce(x) + r
        return llama(total, w), total

    x, r, w = Inputs().make(rank)
    with torch.enable_grad():
        given = [x, r.clone().requires_grad_(), w]
        check_missed(symbolic_trace(fn), given, "needs a gradient", communicator=comm())
        # The weight's gradient is that of the multiplication, which stays in the graph.
        gradients = []
        for run in (fn, symbolic_trace(fn)):
            weight = w.clone().requires_grad_()
            if run is not fn:
                assert [s.numerics for s in fuse(run, [x, r, weight], comm()).sites] == ["rounded"]
            run(x, r, weight)[0].float().sum().backward()
            gradients.append(weight.grad)
    assert gradients[1] is not None
    torch.testing.assert_close(*gradients, rtol=5e-2, atol=5e-2)


def numbers(rank: int, world_size: int) -> None:
    """Tests an eps beyond float32, constants by keyword, and numbers that a run computes."""
    inputs = Inputs().make(rank)

    def huge(x, r, w):
        total = reduce(x) + r
        return llama(total, w, 1e39), total

    check_missed(symbolic_trace(huge), inputs, "not a finite number", communicator=comm())

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


def side_effects(rank: int, world_size: int) -> None:
    """Tests that operators without results, and prints, run as often as before."""
    inputs, op = Inputs().make(rank), torch.ops.allnorm_findings.dump.default
    for target in (op, print):
        graph = Graph()
        x, r, w = map(graph.placeholder, "xrw")
        d = reduced(graph, x)
        graph.call_function(target, (d,))
        total = graph.call_function(operator.add, (d, r))
        graph.output((normed(graph, total, w), total))
        module = GraphModule(torch.nn.Module(), graph)
        check_missed(module, inputs, "is also used by", communicator=comm())
    total = Graph()
    x, r, w = map(total.placeholder, "xrw")
    total.call_method("mul_", (r, 2))
    total.call_function(print, ("here",))
    total.output(normed(total, total.call_function(operator.add, (reduced(total, x), r)), w))
    module = GraphModule(torch.nn.Module(), total)
    fuse(module, inputs, comm())
    assert any(node.target is print for node in module.graph.nodes)


def claims(rank: int, world_size: int) -> None:
    """Tests that a missed site does not prevent the fusion of other sites."""
    group = dist.new_group(list(range(world_size)))

    def fn(x, r, w):
        total = reduce(x, group=group.group_name) + reduce(r)
        return llama(total, w), total

    report = fuse(symbolic_trace(fn), Inputs().make(rank), comm())
    assert [site.numerics for site in report.sites] == [None, "transformers"]
    dist.destroy_process_group(group)


def sizes(rank: int, world_size: int) -> None:
    """Tests graphs fused at 24 tokens and run at 7, functional and made functional."""

    def quantized(x, r, w):
        total = reduce(x) + r
        y = llama(total, w).float().view(-1, 8, 64)
        s = y.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448.0
        return (y / s).clamp(-448, 448).to(FP8).view(-1, HIDDEN), s, total

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


def everywhere(rank: int, world_size: int) -> None:
    """Tests graphs in lists of modules, and in modules that are not graphs."""

    def fn(x, r, w):
        total = reduce(x) + r
        return llama(total, w), total

    root = torch.nn.Module()
    root.layers = torch.nn.ModuleList([symbolic_trace(fn)])
    graph = Graph()
    inputs = tuple(map(graph.placeholder, "xrw"))
    graph.output(graph.call_module("layers.0", inputs))
    module, given = GraphModule(root, graph), Inputs().make(rank)
    want = module(*given)
    assert [site.numerics for site in fuse(module, given, comm()).sites] == ["transformers"]
    assert fused_calls(module.get_submodule("layers.0"))
    for mine, theirs in zip(module(*given), want, strict=True):
        assert_close_norm(mine, theirs, "inside")

    branch = symbolic_trace(fn)
    root = torch.nn.Module()
    root.yes, root.no = branch, symbolic_trace(lambda x, r, w: (x, r))
    graph = Graph()
    inputs = tuple(map(graph.placeholder, "xrw"))
    parts = (graph.get_attr("yes"), graph.get_attr("no"))
    graph.output(graph.call_function(torch.ops.higher_order.cond, (True, *parts, inputs)))
    (site,) = fuse(GraphModule(root, graph), given, comm()).sites
    assert site.reason is not None
    assert "pass example_inputs" in site.reason


def reasons(rank: int, world_size: int) -> None:
    def scaled(x, r, w):
        total = r + reduce(x) / 4.5
        return llama(total, w), total

    given = Inputs().make(rank)
    check_missed(symbolic_trace(scaled), given, "truediv comes first", communicator=comm())


def inputs_that_alias_later(rank: int, world_size: int) -> None:
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


def returned_memory(rank: int, world_size: int) -> None:
    """Tests that results share memory with inputs and each other as before."""

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


def inputs_copied_before_they_are_written(rank: int, world_size: int) -> None:
    def fn(x, r, o, w):
        o.copy_(x)
        total = reduce(x * 0.5) + r
        x.add_(x)
        return llama(total, w), total

    x, r, w = Inputs().make(rank)
    graph = symbolic_trace(fn)
    check_fused(graph, [x, r, r.clone(), w], "transformers", communicator=comm())


def wait_returns_what_is_reduced_in_place(rank: int, world_size: int) -> None:
    graph = Graph()
    x, r, w = map(graph.placeholder, "xrw")
    pending = graph.call_function(torch.ops._c10d_functional.all_reduce_.default, (x, "sum", "0"))
    waited = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (pending,))
    graph.call_method("add_", (waited, r))
    graph.output((normed(graph, waited, w), x))
    module = GraphModule(torch.nn.Module(), graph)
    check_fused(module, Inputs().make(rank), "rounded", communicator=comm())


def operators_that_return_their_input(rank: int, world_size: int) -> None:
    """Tests operators that return their input: `type_as` of the same dtype, dropout with p=0."""

    def fn(x, r, w):
        total = reduce(x) + r
        normed = llama(total, w)
        same = F.dropout(total.type_as(normed), 0.0)
        total.mul_(2)
        return normed, total, same + 1

    check_fused(symbolic_trace(fn), Inputs().make(rank), "transformers", communicator=comm())


def training(rank: int, world_size: int) -> None:
    def fn(x, r, w):
        total = funcol.all_reduce(x, "sum", dist.group.WORLD) + r
        z = total.float()
        return (z * rstd(z) * (w + 1)).to(bf16), total

    x, r, w = Inputs().make(rank)
    fusion = inductor_pass(comm())
    gradients = []
    for run in (fn, torch.compile(fn, options={"post_grad_custom_post_pass": fusion})):
        mine = [r.clone().requires_grad_(), w.clone().requires_grad_()]
        run(x, *mine)[0].float().sum().backward()
        gradients.append([t.grad for t in mine])
    assert sum(len(report.fused) for report in fusion.reports) == 1
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=5e-2, atol=5e-2)


@on(cpu=(2,))
@pytest.mark.parametrize(
    "case",
    [
        *(view_reduced_in_place, tied_parameter, forward_replaced, gradient, numbers),
        *(side_effects, claims, sizes, everywhere, reasons, inputs_that_alias_later),
        *(returned_memory, inputs_copied_before_they_are_written),
        *(wait_returns_what_is_reduced_in_place, operators_that_return_their_input),
        pytest.param(training, marks=pytest.mark.slow),
    ],
    ids=lambda case: case.__name__,
)
def test_finding(pool: RankPool, case: Callable[..., None]) -> None:
    pool.run(case, timeout=120.0)
