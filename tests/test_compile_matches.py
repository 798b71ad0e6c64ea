"""Hand-made graphs that must be fused, each run by two ranks before and after."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from compile_helpers import (
    EPS,
    HIDDEN,
    Inputs,
    captured,
    check_fused,
    fused_calls,
    gemma,
    llama,
    nodes_calling,
    reduce,
    rstd,
)
from rank_helpers import comm, on
from torch.fx import Graph, GraphModule, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

from allnorm import reference
from allnorm.compile import fuse
from allnorm.testing import RankPool, assert_same_bits

bf16 = torch.bfloat16
MATCHES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {}


def match(numerics: str | Sequence[str], inputs: Inputs | None = None, norms: int = 1) -> Any:
    """Marks a function of (x, residual, weight) as a graph that must be fused."""

    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        MATCHES[fn.__name__] = (fn, {"numerics": numerics, "inputs": inputs, "norms": norms})
        return fn

    return add


# ---- which rounding mode ------------------------------------------------------------------------


@match("transformers")
def llama_style(x, residual, w):
    residual = reduce(x) + residual
    return llama(residual, w), residual


@match("rounded")
def functional_rms_norm(x, residual, w):
    residual = reduce(x) + residual
    return F.rms_norm(residual, (HIDDEN,), w, 1e-6), residual


@match("rounded")
def default_eps(x, residual, w):
    residual = reduce(x * 1e-3) + residual * 1e-3
    return F.rms_norm(residual, (HIDDEN,), w), residual


@match("rounded", Inputs(weight_dtype=torch.float32))
def written_out_with_float32_weight(x, residual, w):
    residual = reduce(x) + residual
    z = residual.float()
    return (w * (z * rstd(z))).to(bf16), residual


@match("transformers", Inputs(weight_dtype=torch.float32))
def rounded_before_a_float32_weight(x, residual, w):
    residual = reduce(x) + residual
    z = residual.float()
    return ((z * rstd(z)).to(bf16) * w).to(bf16), residual


@match("unrounded")
def float32_sum(x, residual, w):
    z = reduce(x).float() + residual.float()
    return (z * rstd(z) * w.float()).to(bf16), z.to(bf16)


@match("vllm")
def float32_sum_rounded_before_the_weight(x, residual, w):
    z = reduce(x).to(torch.float32) + residual  # promoted
    return (z * rstd(z)).to(bf16) * w, z.to(bf16)


@match("unrounded")
def float32_sum_that_is_not_kept(x, residual, w):
    z = residual + reduce(x).float()
    return (z * rstd(z) * w).to(bf16)


@match("rounded")
def float32_sum_rounded_before_the_norm(x, residual, w):
    residual = (reduce(x).float() + residual.float()).to(bf16)
    z = residual.float()
    return (z * rstd(z) * w).to(bf16), residual


@match("rounded")
def gemma_style(x, residual, w):
    residual = reduce(x) + residual
    return gemma(residual, w), residual


@match("rounded")
def gemma_weight_rounded_to_16_bits(x, residual, w):
    """`1 + w` in bfloat16 is another weight than in float32."""
    residual = reduce(x) + residual
    z = residual.float()
    return (z * rstd(z) * (1 + w)).to(bf16), residual


@match("transformers")
def gemma_weight_after_rounding(x, residual, w):
    residual = reduce(x) + residual
    z = residual.float()
    return (z * rstd(z)).to(bf16) * (1 + w), residual


@match("rounded")
def without_weight(x, residual, w):
    residual = reduce(x) + residual
    z = residual.float()
    return (z * rstd(z)).to(bf16), residual


@match("rounded")
def weight_left_to_the_graph(x, residual, w):
    """This weight is another one after the reduction: only what comes before it is fused."""
    residual = reduce(x) + residual
    w.mul_(2)
    return llama(residual, w), residual


@match("rounded", Inputs(dtype=torch.float32))
def float32_tensors(x, residual, w):
    residual = reduce(x) + residual
    return residual * rstd(residual) * w, residual


@match("transformers", Inputs(dtype=torch.float16))
def float16_tensors(x, residual, w):
    residual = reduce(x) + residual
    z = residual.float()
    return w * (z * rstd(z)).to(torch.float16), residual


# ---- forms of the same thing --------------------------------------------------------------------


@match("transformers")
def operands_in_the_other_order(x, residual, w):
    residual = residual + reduce(x)
    z = residual.float()
    return (torch.rsqrt(EPS + (z * z).mean(dim=-1, keepdim=True)) * z).to(bf16) * w, residual


@match("transformers")
def sum_is_not_used_later(x, residual, w):
    return llama(reduce(x) + residual, w)


@match("rounded")
def square_and_sum(x, residual, w):
    residual = torch.add(reduce(x), residual)
    z = residual.type(torch.float32)
    mean = torch.sum(torch.square(z), dim=[-1], keepdim=True) / HIDDEN
    return (torch.mul(z, (mean + EPS) ** -0.5) * w).to(dtype=bf16), residual


@match("rounded")
def reciprocal_of_the_root(x, residual, w):
    residual = reduce(x) + residual
    z = residual.float()
    root = torch.sqrt((z**2).sum(1, True) * (1 / HIDDEN) + EPS)
    return (z * root.reciprocal() * w).to(bf16), residual


@match("rounded")
def one_over_the_root(x, residual, w):
    residual = reduce(x) + residual
    z = residual.float()
    return (z * (1.0 / (z.square().mean(-1, True) + EPS).sqrt()) * w).to(bf16), residual


@match("transformers")
def sizes_and_dtypes_asked_for(x, residual, w):
    """torch.fx records the questions as nodes."""
    residual = reduce(x) + residual
    z = residual.float()
    mean = z.pow(2).sum(-1, keepdim=True) / z.shape[-1]
    return w * (z * torch.rsqrt(mean + EPS)).to(x.dtype), residual


@match("rounded")
def norm_over_a_size_asked_for(x, residual, w):
    residual = reduce(x) + residual
    return F.rms_norm(residual, (x.size(-1),), w), residual


@match("rounded")
def norm_over_the_shape_of_the_weight(x, residual, w):
    residual = reduce(x) + residual
    return F.rms_norm(residual, w.shape, w, 1e-6), residual


@match("rounded")
def mean_without_keepdim(x, residual, w):
    residual = reduce(x) + residual
    z = residual.float()
    scale = torch.rsqrt(z.pow(2).mean(-1) + EPS)
    return (z * scale.unsqueeze(-1) * w.view(1, HIDDEN)).to(bf16), residual


@match("rounded")
def aten_operators(x, residual, w):
    aten, prims = torch.ops.aten, torch.ops.prims
    residual = aten.add.Tensor(reduce(x), residual)
    z = prims.convert_element_type.default(residual, torch.float32)
    mean = aten.mean.dim(aten.pow.Tensor_Scalar(z, 2), [-1], True)
    normed = aten.mul.Tensor(z, aten.rsqrt.default(aten.add.Scalar(mean, EPS)))
    scaled = aten.mul.Tensor(normed, aten._to_copy.default(w, dtype=torch.float32))
    return aten._to_copy.default(scaled, dtype=bf16), residual


@match("rounded")
def in_place_inside_the_norm(x, residual, w):
    residual = reduce(x) + residual
    z = residual.float()
    mean = z.pow(2).mean(-1, keepdim=True)
    mean.add_(EPS)
    z *= torch.rsqrt(mean)
    return (z * w).to(bf16), residual


# ---- residual -----------------------------------------------------------------------------------


@match("transformers")
def without_residual(x, residual, w):
    reduced = reduce(x)
    return llama(reduced, w), reduced + residual


@match("transformers")
def without_residual_and_not_used_later(x, residual, w):
    return llama(reduce(x), w)


@match("transformers")
def residual_added_in_place(x, residual, w):
    residual = residual.clone()
    residual += reduce(x)
    return llama(residual, w), residual * 2


@match("transformers")
def residual_of_the_caller_in_place(x, residual, w):
    residual += reduce(x)
    return llama(residual, w)


@match("transformers")
def added_in_place_to_the_reduced(x, residual, w):
    x = reduce(x)
    x += residual
    return llama(x, w), x


@match("transformers")
def sum_changed_afterwards(x, residual, w):
    residual = reduce(x) + residual
    normed = llama(residual, w)
    residual.mul_(2)
    return normed, residual, residual + 1


@match("transformers", norms=2)
def sum_normed_twice(x, residual, w):
    residual = reduce(x) + residual
    return llama(residual, w), gemma(residual, w), residual.float()


@match("transformers", norms=2)
def normed_twice_with_two_weights(x, residual, w):
    residual = reduce(x) + residual
    z = residual.float()
    normed = (z * rstd(z)).to(bf16)
    return w * normed, (w * 2) * normed, residual


@match("transformers")
def copies_of_the_sum(x, residual, w):
    total = reduce(x) + residual
    copy = total.clone()
    normed = llama(total, w)
    copy.add_(1)
    return normed, total, copy


@match("transformers")
def residual_that_is_computed_late(x, residual, w):
    reduced = reduce(x)
    residual = torch.relu(residual) * 2
    residual = reduced + residual
    return llama(residual, w), residual


@match(["transformers", "transformers", "transformers"], norms=1)
def three_layers(x, residual, w):
    for _ in range(3):
        residual = residual + reduce(x)
        x = torch.relu(llama(residual, w))
    return x, residual


@match(["transformers", "transformers"], norms=2)
def sum_as_the_next_residual_in_place(x, residual, w):
    residual = residual.clone()
    residual += reduce(x)
    first = llama(residual, w)
    residual += reduce(x * 2)
    return llama(residual, w), first, residual


def sum_of_two_reductions(rank: int, world_size: int) -> None:
    """One is fused; the other is its residual, and is waited for."""

    def block(x, residual, w):
        residual = reduce(x) + reduce(residual)
        return llama(residual, w), residual

    inputs = Inputs().make(rank)
    graph = symbolic_trace(block)
    want = graph(*inputs)
    report = fuse(graph, inputs, comm())
    graph.graph.lint()
    assert [site.numerics for site in report.sites] == ["transformers", None]
    assert "it is the residual of all_reduce_default" in str(report.missed[0].reason)
    (call,) = (n for n in graph.graph.nodes if n.name in fused_calls(graph))
    assert "wait_tensor" in str(call.args[1])
    assert_same_bits(graph(*inputs)[1], want[1], "sum")


@on(cpu=(2,))
def test_sum_of_two_reductions(pool: RankPool) -> None:
    pool.run(sum_of_two_reductions)


# ---- views --------------------------------------------------------------------------------------

IN_3D = Inputs(shape=(4, 6, HIDDEN), residual_shape=(24, HIDDEN))


@match("transformers", IN_3D)
def view_before_the_add(x, residual, w):
    residual = reduce(x).view(-1, HIDDEN) + residual
    return llama(residual, w), residual


@match("transformers", IN_3D)
def strided_rows_viewed(x, residual, w):
    """The fused call needs the view before the reduction; this one exists only of a copy."""
    x = torch.cat([x, x], -1)[..., :HIDDEN]
    residual = reduce(x).reshape(24, HIDDEN) + residual
    return llama(residual, w), residual


@match("transformers", IN_3D)
def view_before_the_norm(x, residual, w):
    residual = reduce(x) + residual.view(4, 6, HIDDEN)
    return llama(residual.flatten(0, 1), w), residual


@match("transformers", IN_3D)
def views_everywhere(x, residual, w):
    residual = residual + torch.ops.aten.view.default(reduce(x), [24, HIDDEN])
    normed = llama(residual.unsqueeze(0), w)
    return normed.reshape(4, 6, HIDDEN), residual.view(6, 4, HIDDEN)


@match("transformers")
def strided_input(x, residual, w):
    x, residual = x.t().contiguous().t(), residual.t().contiguous().t()
    residual = reduce(x).contiguous() + residual.contiguous()
    return llama(residual, w), residual


@match("transformers", Inputs(shape=(HIDDEN,)))
def one_dimension(x, residual, w):
    residual = reduce(x) + residual
    return llama(residual, w), residual


@match("transformers", Inputs(shape=(0, HIDDEN)))
def no_tokens(x, residual, w):
    residual = reduce(x) + residual
    return llama(residual, w), residual


@match("transformers")
def dropout_that_is_off(x, residual, w):
    residual = F.dropout(reduce(x), 0.1, False) + residual
    return llama(residual, w), residual


def run_match(rank: int, world_size: int, name: str) -> None:
    fn, case = MATCHES[name]
    inputs = (case["inputs"] or Inputs()).make(rank)
    if "no_tokens" in name:
        inputs[0], inputs[1] = inputs[0].reshape(0, HIDDEN), inputs[1].reshape(0, HIDDEN)
    report = check_fused(
        symbolic_trace(fn), inputs, case["numerics"], norms=case["norms"], communicator=comm()
    )
    for site in report.fused:
        assert site.nodes[0].startswith("all_reduce")
        assert len(site.nodes) >= 3
        assert site.shape == tuple(inputs[0].shape)
        assert site.dtype == inputs[0].dtype
        assert site.group == "0"
        assert site.reason is None
        assert "fused" in str(site)


@on(cpu=(2,))
@pytest.mark.parametrize("name", MATCHES)
def test_match(pool: RankPool, name: str) -> None:
    pool.run(run_match, name)


# ---- forms that need more than a function -------------------------------------------------------


class Block(torch.nn.Module):
    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, x, residual):
        residual = self.dropout(reduce(x)) + residual
        return self.norm(residual), residual


def modules(rank: int, world_size: int) -> None:
    """torch.nn.RMSNorm as a call of a module, with and without eps and weight."""
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
                norm.weight.mul_(2)  # still read, not copied
                assert_same_bits(graph(x, residual)[0], again * 2, "with another weight")


@on(cpu=(2,))
def test_modules(pool: RankPool) -> None:
    pool.run(modules)


def in_place_graph(target: Any, arguments: Sequence[Any], *, clone: bool) -> GraphModule:
    """`target(x, ...)` in place, then a residual and a norm."""
    graph = Graph()
    x, residual, w = (graph.placeholder(name) for name in ("x", "residual", "w"))
    x = graph.call_method("clone", (x,)) if clone else x
    reduced = graph.call_function(target, (x, *arguments))
    if arguments:
        graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (reduced,))
    total = graph.call_function(operator.add, (x, residual)) if clone else x
    normed = graph.call_function(F.rms_norm, (total, (HIDDEN,), w, EPS))
    graph.output((normed, total))
    return GraphModule(torch.nn.Module(), graph)


def in_place_reductions(rank: int, world_size: int) -> None:
    inputs = Inputs().make(rank)
    forms = [
        (torch.distributed.all_reduce, ()),
        (torch.ops._c10d_functional.all_reduce_.default, ("sum", "0")),
    ]
    for target, arguments in forms:
        for clone in (True, False):  # of a temporary, and of the caller's own tensor
            graph = in_place_graph(target, arguments, clone=clone)
            check_fused(graph, inputs, "rounded", communicator=comm())
            assert not nodes_calling(graph, "distributed")


@on(cpu=(2,))
def test_in_place_reductions(pool: RankPool) -> None:
    pool.run(in_place_reductions)


def functional_collectives(rank: int, world_size: int) -> None:
    """The Python function, with a group by name."""
    graph = Graph()
    x, residual, w = (graph.placeholder(name) for name in ("x", "residual", "w"))
    reduced = graph.call_function(funcol.all_reduce, (x, "SUM", "0"))
    total = graph.call_function(torch.add, (reduced, residual))
    graph.output((graph.call_function(F.rms_norm, (total, (HIDDEN,), w, EPS)), total))
    module = GraphModule(torch.nn.Module(), graph)
    check_fused(module, Inputs().make(rank), "rounded", communicator=comm())


@on(cpu=(2,))
def test_functional_collectives(pool: RankPool) -> None:
    pool.run(functional_collectives)


def as_dynamo_traces(rank: int, world_size: int) -> None:
    """dist.all_reduce becomes a functional collective and a copy into its argument."""
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
            # Its metadata is enough; the results are compared with the graph's own.
            check_fused(graph, ordered, modes, communicator=comm())


@on(cpu=(2,))
def test_as_dynamo_traces(pool: RankPool) -> None:
    pool.run(as_dynamo_traces)


@functools.cache
def mylib() -> torch.library.Library:
    """Custom reductions: functional, and in place."""
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


def custom_operators(rank: int, world_size: int) -> None:
    mylib()
    x, residual, w = Inputs().make(rank)

    def functional(x, residual, w):
        residual = torch.ops.mylib.all_reduce(x, "tp:0") + residual
        return llama(residual, w), residual

    def in_place(x, residual, w):
        x = x.clone()
        torch.ops.mylib.all_reduce_(x, "tp:0")
        residual = x + residual
        return llama(residual, w), residual

    for fn, name in ((functional, "all_reduce"), (in_place, "all_reduce_")):
        packet = getattr(torch.ops.mylib, name)
        for ops in ([f"mylib::{name}"], [f"mylib.{name}"], [packet], [packet.default]):
            graph = symbolic_trace(fn)
            check_fused(
                graph, [x, residual, w], "transformers", communicator=comm(), all_reduce_ops=ops
            )
    # As AOTAutograd writes the one in place.
    functionalised = torch.ops.higher_order.auto_functionalized

    def wrapped(x, residual, w):
        results = functionalised(torch.ops.mylib.all_reduce_.default, x=x, group_name="0")
        residual = results[1] + residual
        return llama(residual, w), residual

    graph = symbolic_trace(wrapped)
    check_fused(
        graph,
        [x, residual, w],
        "transformers",
        communicator=comm(),
        all_reduce_ops=["mylib::all_reduce_"],
    )


@on(cpu=(2,))
def test_custom_operators(pool: RankPool) -> None:
    pool.run(custom_operators)


def bits(rank: int, world_size: int) -> None:
    """Reductions by allnorm itself: the fused graph has the reference's bits, for any ranks."""
    c, case = comm(), Inputs(shape=(7, HIDDEN))
    xs = [case.make(r)[0] for r in range(world_size)]
    x, residual, w = case.make(rank)

    def block(x, residual, w):
        residual = torch.ops.allnorm.all_reduce(x, c.name) + residual
        return llama(residual, w, 1e-6), residual

    graph = symbolic_trace(block)
    report = check_fused(graph, [x, residual, w], "transformers")
    assert report.fused[0].group == c.name
    want = reference.all_reduce_add_rms_norm(xs, residual, w, 1e-6, numerics="transformers")
    for mine, theirs in zip(graph(x, residual, w), want, strict=True):
        assert_same_bits(mine, theirs, "fused graph")


@on(cpu=(1, 2, 3))
def test_bits(pool: RankPool) -> None:
    pool.run(bits)


def decomposed(rank: int, world_size: int) -> None:
    """F.rms_norm as make_fx takes it apart, with an addition in place."""
    inputs = Inputs().make(rank)

    def block(x, residual, w):
        residual = reduce(x) + residual
        return F.rms_norm(residual, (HIDDEN,), w, EPS), residual

    for mode in ("real", "fake"):
        graph = make_fx(block, tracing_mode=mode)(*inputs)
        assert nodes_calling(graph, "add_")
        check_fused(graph, inputs, "rounded", communicator=comm())


@on(cpu=(2,))
def test_decomposed(pool: RankPool) -> None:
    pool.run(decomposed)


def dynamic(rank: int, world_size: int) -> None:
    """A symbolic number of tokens; the report names it."""

    def block(x, residual, w):
        residual = reduce(x.unflatten(0, (-1, 2))).reshape(-1, HIDDEN) + residual
        return llama(residual, w), residual

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
def test_dynamic(pool: RankPool) -> None:
    pool.run(dynamic)


def nested(rank: int, world_size: int) -> None:
    """A graph inside a graph, as torch.fx.passes.split_module leaves them."""
    inputs = Inputs().make(rank)
    inner = captured(lambda x, residual, w: llama_style(x, residual, w), inputs)
    names = [n.name for n in inner.graph.nodes if n.op == "placeholder"]
    outer = Graph()
    values = {name: outer.placeholder(name) for name in ("l_x_", "l_residual_", "l_w_")}
    outer.output(outer.call_module("inner", tuple(values[name] for name in names)))
    root = torch.nn.Module()
    root.inner = inner
    with torch.no_grad():
        module = GraphModule(root, outer)
        want = module(*inputs)
        report = fuse(module, inputs, comm())
        assert [site.numerics for site in report.sites] == ["transformers"]
        assert fused_calls(module.inner)
        for mine, theirs in zip(module(*inputs), want, strict=True):
            assert_same_bits(mine, theirs, "nested")


@on(cpu=(2,))
def test_nested(pool: RankPool) -> None:
    pool.run(nested)
