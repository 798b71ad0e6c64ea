"""Tests graphs from all tracers, with modules, every form of reduction, and nested graphs."""

from __future__ import annotations

import functools
import operator

import pytest
import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from rank_helpers import comm, on
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.fx import Graph, GraphModule, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

from allnorm import reference
from allnorm.compile import fuse
from allnorm.testing import assert_same_bits

from .helpers import (
    EPS,
    HIDDEN,
    Inputs,
    captured,
    check_fused,
    fused_calls,
    gemma,
    llama,
    made_by_hand,
    nodes_calling,
    reduce,
    rms_norm,
    summed,
)

bf16 = torch.bfloat16
FUNCTIONAL = torch.ops._c10d_functional


class Block(torch.nn.Module):
    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, x, residual):
        residual = self.dropout(reduce(x)) + residual
        return self.norm(residual), residual


@on(cpu=(2,))
def test_modules(rank: int, world_size: int) -> None:
    """Tests torch.nn.RMSNorm as a module call, with and without eps and weight."""
    x, residual, _ = Inputs().make(rank)
    for arguments in ({}, {"eps": 1e-3}, {"elementwise_affine": False}, {"dtype": torch.float32}):
        norm = torch.nn.RMSNorm(HIDDEN, **{"dtype": bf16, **arguments})
        if norm.weight is not None:
            torch.nn.init.normal_(norm.weight)
        graph = symbolic_trace(Block(norm).eval())
        assert nodes_calling(graph, "norm")
        check_fused(graph, [x, residual], "rounded", communicator=comm())
        assert not [node for node in graph.graph.nodes if node.op == "call_module"]
        with torch.no_grad():
            again = graph(x, residual)[0]
            if norm.weight is not None:
                norm.weight.mul_(2)  # the graph reads the module's current weight
                assert_same_bits(graph(x, residual)[0], again * 2, "with a different weight")


@on(cpu=(2,))
@pytest.mark.parametrize("clone", [True, False])  # a temporary tensor, and the caller's tensor
@pytest.mark.parametrize("functional", [True, False])
def test_in_place_reductions(rank: int, world_size: int, functional: bool, clone: bool) -> None:
    graph = Graph()
    x, residual, w = (graph.placeholder(name) for name in ("x", "residual", "w"))
    x = graph.call_method("clone", (x,)) if clone else x
    if functional:
        reduced = graph.call_function(FUNCTIONAL.all_reduce_.default, (x, "sum", "0"))
        graph.call_function(FUNCTIONAL.wait_tensor.default, (reduced,))
    else:
        graph.call_function(torch.distributed.all_reduce, (x,))
    total = graph.call_function(operator.add, (x, residual)) if clone else x
    graph.output((graph.call_function(F.rms_norm, (total, (HIDDEN,), w, EPS)), total))
    module = GraphModule(torch.nn.Module(), graph)
    check_fused(module, Inputs().make(rank), "rounded", communicator=comm())
    assert not nodes_calling(module, "distributed")


@on(cpu=(2,))
def test_functional_collectives(rank: int, world_size: int) -> None:
    """Tests the functional collective's Python function, called with a group name."""
    module = made_by_hand(lambda graph, x: graph.call_function(funcol.all_reduce, (x, "SUM", "0")))
    check_fused(module, Inputs().make(rank), "rounded", communicator=comm())


@on(cpu=(2,))
def test_as_dynamo_traces(rank: int, world_size: int) -> None:
    """Tests Dynamo's form of dist.all_reduce: a functional collective and a copy."""
    x, residual, w = Inputs().make(rank)

    def temporary(x, residual, w):
        x = x * 1
        torch.distributed.all_reduce(x)
        residual = residual + x
        return llama(residual, w), residual

    def viewed(x, residual, w):
        x = x * 1
        torch.distributed.all_reduce(x.view(4, -1, HIDDEN))
        residual = residual + x
        return gemma(residual, w), residual

    def of_the_caller(x, residual, w):
        torch.distributed.all_reduce(x)
        return llama(x, w), x + residual

    def chain(x, residual, w):
        for _ in range(2):
            x = x * 0.5
            torch.distributed.all_reduce(x)
            residual += x
            x = F.rms_norm(residual, (HIDDEN,), w)
        return x, residual

    with torch.no_grad():
        for fn, modes in (
            (temporary, ["transformers"]),
            (viewed, ["rounded"]),
            (of_the_caller, ["transformers"]),
            (chain, ["rounded", "rounded"]),
        ):
            graph = captured(fn, [x, residual, w])
            assert nodes_calling(graph, "copy_")
            inputs = [t.clone() for t in (x, residual, w)]
            by_name = {"l_x_": inputs[0], "l_residual_": inputs[1], "l_w_": inputs[2]}
            ordered = [by_name[n.name] for n in graph.graph.nodes if n.op == "placeholder"]
            # Also compares the results with the unfused graph's.
            check_fused(graph, ordered, modes, communicator=comm())


@functools.cache
def mylib() -> torch.library.Library:
    """Defines custom reductions, functional and in place."""
    library = torch.library.Library("mylib", "DEF")
    library.define("all_reduce(Tensor x, str group_name) -> Tensor")
    library.define("all_reduce_(Tensor(a!) x, str group_name) -> ()")

    def functional(x: torch.Tensor, group_name: str) -> torch.Tensor:
        x = x.clone()
        torch.distributed.all_reduce(x)
        return x

    def in_place(x: torch.Tensor, group_name: str) -> None:
        torch.distributed.all_reduce(x)

    library.impl("all_reduce", functional, "CPU")
    library.impl("all_reduce_", in_place, "CPU")
    torch.library.register_fake("mylib::all_reduce", lambda x, group_name: torch.empty_like(x))
    torch.library.register_fake("mylib::all_reduce_", lambda x, group_name: None)
    return library


@on(cpu=(2,))
def test_custom_operators(rank: int, world_size: int) -> None:
    mylib()
    inputs = Inputs().make(rank)

    def in_place(x, residual):
        x = x.clone()
        torch.ops.mylib.all_reduce_(x, "tp:0")
        return x + residual

    def wrapped(x, residual):  # as AOTAutograd does
        functionalized = torch.ops.higher_order.auto_functionalized
        reduce_ = torch.ops.mylib.all_reduce_.default
        return functionalized(reduce_, x=x, group_name="0")[1] + residual

    for add, name in (
        (lambda x, residual: torch.ops.mylib.all_reduce(x, "tp:0") + residual, "all_reduce"),
        (in_place, "all_reduce_"),
        (wrapped, "all_reduce_"),
    ):
        packet = getattr(torch.ops.mylib, name)
        for op in (f"mylib::{name}", f"mylib.{name}", packet, packet.default):
            options = {"communicator": comm(), "all_reduce_ops": [op]}
            check_fused(symbolic_trace(summed(llama, add)), inputs, "transformers", **options)


@on(cpu=(1, 2, 3))
def test_bits(rank: int, world_size: int) -> None:
    """Tests that allnorm's reductions are bit-identical to the reference."""
    c, case = comm(), Inputs(shape=(7, HIDDEN))
    xs = [case.make(r)[0] for r in range(world_size)]
    x, residual, w = case.make(rank)
    graph = symbolic_trace(
        summed(
            lambda total, w: llama(total, w, 1e-6),
            lambda x, residual: torch.ops.allnorm.all_reduce(x, c.name) + residual,
        )
    )
    report = check_fused(graph, [x, residual, w], "transformers")
    assert report.fused[0].group == c.name
    want = reference.all_reduce_add_rms_norm(xs, residual, w, 1e-6, numerics="transformers")
    for mine, theirs in zip(graph(x, residual, w), want, strict=True):
        assert_same_bits(mine, theirs, "fused graph")


@on(cpu=(2,))
def test_decomposed(rank: int, world_size: int) -> None:
    """Tests F.rms_norm as decomposed by make_fx, with an in-place addition."""
    inputs = Inputs().make(rank)
    for mode in ("real", "fake"):
        graph = make_fx(summed(rms_norm), tracing_mode=mode)(*inputs)
        assert nodes_calling(graph, "add_")
        check_fused(graph, inputs, "rounded", communicator=comm())


@on(cpu=(2,))
def test_dynamic(rank: int, world_size: int) -> None:
    """Tests a symbolic number of tokens: the report must show the symbol."""
    block = summed(llama, lambda x, r: reduce(x.unflatten(0, (-1, 2))).reshape(-1, HIDDEN) + r)
    inputs = Inputs().make(rank)
    with torch.no_grad():
        for tensor in inputs[:2]:
            torch._dynamo.mark_dynamic(tensor, 0)
        graph = captured(block, inputs)
        placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
        by_name = dict(zip(("l_x_", "l_residual_", "l_w_"), range(3), strict=True))
        for tokens in (24, 6):
            x, residual, w = inputs
            values = [x[:tokens], residual[:tokens], w]
            arguments = [
                values[by_name[n.name]] if n.name in by_name else tokens for n in placeholders
            ]
            want = graph(*arguments)
            if not fused_calls(graph):
                report = fuse(graph, None, comm())
                graph.graph.lint()
                assert [site.numerics for site in report.sites] == ["transformers"], str(report)
                assert isinstance(report.sites[0].shape[0], str)
                assert report.sites[0].shape[-1] == HIDDEN
            for mine, theirs in zip(graph(*arguments), want, strict=True):
                assert_same_bits(mine, theirs, "fused")


@on(cpu=(2,))
def test_nested(rank: int, world_size: int) -> None:
    """Tests nested graphs from torch.fx.passes.split_module, in a list of modules."""
    inputs = Inputs().make(rank)
    inner = captured(summed(llama), inputs)
    names = [n.name for n in inner.graph.nodes if n.op == "placeholder"]
    outer = Graph()
    values = {name: outer.placeholder(name) for name in ("l_x_", "l_residual_", "l_w_")}
    outer.output(outer.call_module("layers.0", tuple(values[name] for name in names)))
    root = torch.nn.Module()
    root.layers = torch.nn.ModuleList([inner])
    with torch.no_grad():
        module = GraphModule(root, outer)
        want = module(*inputs)
        report = fuse(module, inputs, comm())
        assert [site.numerics for site in report.sites] == ["transformers"]
        assert fused_calls(module.get_submodule("layers.0"))
        for mine, theirs in zip(module(*inputs), want, strict=True):
            assert_same_bits(mine, theirs, "nested")


@on(cpu=(2,))
def test_effect_tokens(rank: int, world_size: int) -> None:
    """Tests that a reduction with an AOTAutograd effect token is not fused."""
    reports = []

    def compiler(module, given):
        reports.append(fuse(module, None, comm()))
        return make_boxed_func(module.forward)

    name = comm().name
    fn = summed(llama, lambda x, r: torch.ops.allnorm.all_reduce(x, name) + r)
    inputs = Inputs().make(rank)
    torch._dynamo.reset()
    torch.compile(fn, backend=aot_autograd(fw_compiler=compiler))(*inputs)
    ((site,),) = [report.sites for report in reports]
    assert "effect token" in str(site.reason)
