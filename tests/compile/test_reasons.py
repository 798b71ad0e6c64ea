"""Tests every reason why the graph pass does not fuse a site, each with a small graph.

A case is a graph with the cause of a reason, and the same graph without it, which is fused.
test_sentences.py fails if a reason has no case.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_helpers import comm, on
from torch._dynamo.source import ConstantSource
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, symbolic_trace
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

import allnorm
import allnorm.compile
from allnorm.compile import block_scaled, fuse

from .helpers import EPS, HIDDEN, Inputs, cast, llama, made_by_hand, plain, reduce, rstd

bf16 = torch.bfloat16
FUNCTIONAL = torch.ops._c10d_functional

_library = torch.library.Library("allnorm_reasons", "DEF")
_library.define("both_(Tensor(a!) x, Tensor(b!) y) -> ()")
_library.define("sum_(Tensor(a!) x) -> Tensor")
_library.define("nothing(str group) -> Tensor")
_library.define("mx(Tensor y) -> (Tensor, Tensor)")
_library.define("norm(Tensor x, Tensor w) -> Tensor")
_library.define("part(Tensor x) -> Tensor")
_library.impl("part", lambda x: x[:1], "CompositeExplicitAutograd")
torch.library.register_fake("allnorm_reasons::part", lambda x: x[:1])
torch.library.register_fake(
    "allnorm_reasons::mx", lambda y: (rows_in_a_different_shape(y), y.new_empty(4096))
)
torch.library.register_fake("allnorm_reasons::sum_", lambda x: x.new_empty(()))
OWN = torch.ops.allnorm_reasons


class Case:
    """A graph that a reason applies to.

    Args:
        graph: a function of (x, residual, w, cause) to trace, or a function of (inputs, cause)
            that returns a graph and its inputs.
        fuses: whether the graph is fused without the cause.
        options: keyword arguments of `fuse`.
    """

    def __init__(self, graph: Callable[..., Any], *, fuses: bool = True, **options: Any) -> None:
        self.graph, self.fuses = graph, fuses
        self.options = options

    def make(self, rank: int, cause: bool) -> tuple[GraphModule, Any]:
        given = Inputs().make(rank)
        if self.graph.__code__.co_argcount == 2:
            return self.graph(given, cause)
        return symbolic_trace(lambda x, residual, w: self.graph(x, residual, w, cause)), given

    def fuse(self, module: GraphModule, given: Any) -> Any:
        return fuse(module, given, **({"communicator": comm()} | self.options))


# ---- the reduction ------------------------------------------------------------------------------


def reducing(call, different=None):
    """Returns a case whose graph reduces x with `call(graph, x)`; the cause passes `different`."""
    return lambda given, cause: (
        made_by_hand(lambda graph, x: call(graph, different if cause and different else x)),
        given,
    )


def reduced_in_a_wrapper(given, cause):
    """Builds a graph whose reduction also returns a number; the cause is a read of the number."""
    graph = Graph()
    x, residual, w = (graph.placeholder(n) for n in ("x", "residual", "w"))
    both = graph.call_function(auto_functionalized, (OWN.sum_.default,), {"x": x})
    graph.call_function(auto_functionalized, (OWN.sum_.default,), {"x": x})
    count, reduced = (graph.call_method("__getitem__", (both, i)) for i in (0, 1))
    total = graph.call_function(torch.add, (reduced, residual))
    normed = graph.call_function(F.rms_norm, (total, (HIDDEN,), w, EPS))
    graph.output((normed, count) if cause else normed)
    return GraphModule(torch.nn.Module(), graph), given


def group_as_an_input(given, cause):
    def all_reduce(graph, x, group):
        return graph.call_function(FUNCTIONAL.all_reduce.default, (x, "sum", group))

    return (
        (made_by_hand(all_reduce, "group"), [*given, "0"])
        if cause
        else (symbolic_trace(plain), given)
    )


def added_to_a_second_reduction(x, r, w, cause):
    total = reduce(x) + (reduce(r) if cause else r)
    return llama(total + r if cause else total, w)


REDUCTIONS = {
    "expected a last dimension of constant size": lambda x, r, w, cause: plain(
        x.sum() if cause else x, r, w
    ),
    "last dimension is 0: expected 1 to": lambda x, r, w, cause: llama(
        reduce(x[:, :0] if cause else x) + (r[:, :0] if cause else r), w
    ),
    "does not reduce a tensor": reducing(
        lambda g, x: g.call_function(FUNCTIONAL.all_reduce.default, (x, "sum", "0")), 3.0
    ),
    "changes more than one argument": Case(
        reducing(lambda g, x: (g.call_function(OWN.both_.default, (x, x)), x)[1]),
        fuses=False,
        all_reduce_ops=[OWN.both_],
    ),
    "no tensor argument": Case(
        reducing(lambda g, _: g.call_function(OWN.nothing.default, ("0",))),
        fuses=False,
        all_reduce_ops=[OWN.nothing],
    ),
    "another result of auto_functionalized is used by": Case(
        reduced_in_a_wrapper, all_reduce_ops=[OWN.sum_]
    ),
    "its tensor is on meta, the communicator on cpu": lambda given, cause: (
        symbolic_trace(plain),
        [t.to("meta") if cause else t for t in given],
    ),
    "shape and dtype are unknown: pass example_inputs": lambda given, cause: (
        symbolic_trace(plain),
        None if cause else given,
    ),
    "name its process group as a constant: pass communicator=": Case(
        group_as_an_input, communicator=None
    ),
    "does not name its process group as a constant$": group_as_an_input,
    "no process group named 'nowhere'": Case(
        lambda x, r, w, cause: llama(reduce(x, group="nowhere" if cause else "0") + r, w),
        communicator=None,
    ),
    "uses communicator allnorm:other:0: expected": lambda x, r, w, cause: llama(
        torch.ops.allnorm.all_reduce(x, "allnorm:other:0" if cause else comm().name) + r, w
    ),
    "its sum with all_reduce_default is fused there": added_to_a_second_reduction,
    "it is c10d's own operator": Case(
        reducing(
            lambda g, x: g.call_function(
                torch.ops.c10d.allreduce_.default, ([x], None, None, None, False)
            )
        ),
        fuses=False,
    ),
}

# ---- operations after the reduction -------------------------------------------------------------


def norm_dropped(x, r, w, cause):
    total = reduce(x) + r
    normed = llama(total, w)
    return (total,) if cause else (normed, total)


def root_alone(x, r, w, cause):
    z = (reduce(x) + r).float()
    return rstd(z) if cause else (z * rstd(z) * w).to(bf16)


def two_views(x, r, w, cause):
    viewed, shape = reduce(x).view(2, 12, HIDDEN), (2, 12, HIDDEN)
    if cause:
        viewed, shape = viewed.view(4, 6, HIDDEN), (4, 6, HIDDEN)
    return llama(viewed + r.view(shape), w)


def strided_weight(x, r, w, cause):
    weight = torch.cat([w, w])[::2]
    return F.rms_norm(reduce(x) + r, (HIDDEN,), weight if cause else weight.contiguous(), EPS)


def dtype_of_the_sum(x, r, w, cause):
    z = reduce(x).float() + r.float()
    return (z * rstd(z) * w).to(bf16), torch.zeros(4, dtype=(z if cause else w).dtype)


def transposed_sum(x, r, w, cause):
    total = (r.t().contiguous().t() if cause else r) + reduce(x)
    return llama(total, w), total


def decomposed(by):
    """Returns a case in which the cause replaces the norm with an operator that `by` decomposes."""
    return Case(
        lambda x, r, w, cause: (OWN.norm if cause else llama)(reduce(x) + r, w),
        decompositions={OWN.norm: by},
    )


def changes(x, w):
    return llama(x.mul_(2), w)


def fails(x, w):
    raise ValueError("not today")


FOLLOWING = {
    "the result of .* is not used": norm_dropped,
    "not an RMSNorm that allnorm computes": root_alone,
    "to is torch.float64: expected float32": lambda x, r, w, cause: llama(
        ((reduce(x).to(torch.float64) if cause else reduce(x)) + r).to(bf16), w
    ),
    "computes with torch.int32": lambda x, r, w, cause: plain(
        x, r.to(torch.int32) if cause else r, w
    ),
    "computes with the scalar tensor": lambda x, r, w, cause: llama(
        reduce(x) * (w.float().sum() if cause else 0.5) + r, w
    ),
    r"broadcasts getitem of shape \[12, 512\] to \[2, 12, 512\]": lambda x, r, w, cause: llama(
        reduce(x).view(2, 12, -1) + (r[:12] if cause else r.view(2, 12, -1)), w
    ),
    "rounds the quotient to an integer": lambda x, r, w, cause: llama(
        (torch.div(reduce(x), 2, rounding_mode="floor") if cause else reduce(x)) + r, w
    ),
    "clamps to a tensor": lambda x, r, w, cause: llama(
        (torch.clamp(reduce(x), min=r) if cause else reduce(x)) + r, w
    ),
    "moves .* to meta": lambda x, r, w, cause: llama(
        reduce(x).to("meta" if cause else "cpu") + r, w
    ),
    "drops elements at random": lambda x, r, w, cause: llama(
        F.dropout(reduce(x), 0.5, training=cause) + r, w
    ),
    "has an eps that is not a number": lambda x, r, w, cause: F.rms_norm(
        reduce(x) + r, (HIDDEN,), w, w[0] if cause else EPS
    ),
    "computes with a number that float64 cannot represent": lambda x, r, w, cause: F.rms_norm(
        reduce(x) + r, (HIDDEN,), w, 10**400 if cause else EPS
    ),
    "norms over a dimension of unknown size": lambda x, r, w, cause: F.rms_norm(
        reduce(x) + r, (w.sum().int().item() if cause else HIDDEN,), w, EPS
    ),
    r"no single view converts \(24, 512\) to \(4, 6, 512\)": two_views,
    "is decomposed by a function that cannot be traced: not today": decomposed(fails),
    "is decomposed by a function that changes its arguments": decomposed(changes),
    "the shape of norm is unknown": decomposed(lambda x, w: llama(x, w)),
    "the norm covers 64 of the 512 elements": lambda x, r, w, cause: F.rms_norm(
        reduce(x) + r, (64 if cause else HIDDEN,)
    ),
    r"has strides \(2,\): expected a contiguous last dimension": strided_weight,
    "queries .*, which the fused call does not return": dtype_of_the_sum,
    r"has strides \(1, 24\): the results of the fused call are contiguous": transposed_sum,
    "needs a gradient, which the fused call does not compute": lambda given, cause: (
        symbolic_trace(plain),
        [t.requires_grad_(cause) for t in given],
    ),
}

# ---- modules ------------------------------------------------------------------------------------


def norm_module(change, *, in_place=False):
    """Returns a case whose norm is a module; the cause changes it with `change(module)`."""

    def make(given, cause):
        class Layer(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm = torch.nn.RMSNorm(HIDDEN, EPS, dtype=bf16).requires_grad_(False)

            def forward(self, x, residual):
                total = reduce(x)
                total = total.add_(residual) if in_place else total + residual
                return self.norm(total), total

        module = symbolic_trace(Layer())
        if cause:
            change(module.norm)
        return module, given[:2]

    return make


def hooked(norm):
    norm.register_forward_hook(lambda *_: None)


def parametrize(norm):
    torch.nn.utils.parametrize.register_parametrization(norm, "weight", torch.nn.Identity())
    norm.__class__ = torch.nn.RMSNorm


MODULES = {
    "calls a module that has hooks": norm_module(hooked),
    "in a graph that cannot be made functional: norm calls a module that has hooks": norm_module(
        hooked, in_place=True
    ),
    "a forward that replaces its class's": norm_module(
        lambda norm: setattr(norm, "forward", norm.forward)
    ),
    "has parametrized weights": norm_module(parametrize),
    "has a weight of torch.float64": norm_module(lambda norm: norm.double()),
}

# ---- graphs that write --------------------------------------------------------------------------


def writes(x, residual, w):
    total = reduce(x)
    total.add_(residual)
    return llama(total, w)


def with_node(add):
    """Returns a case whose graph writes in place; the cause adds a node with `add(graph, nodes)`.

    `nodes` maps names to the graph's nodes.
    """

    def make(given, cause):
        module = symbolic_trace(writes)
        graph = module.graph
        nodes = {node.name: node for node in graph.nodes}
        if cause:
            with graph.inserting_before(graph.output_node()):
                add(graph, nodes)
        return module, given

    return make


def with_call(target, arguments=lambda nodes: (nodes["x"],), options=None):
    """Returns a case in which the cause adds a call to `target`, by default with the argument x."""
    return with_node(lambda graph, nodes: graph.call_function(target, arguments(nodes), options))


def returning(value):
    """Returns a graph that writes in place and also returns `value(r, w, cause)`."""
    return lambda x, r, w, cause: (writes(x, r, w), value(r, w, cause))


def own_function(x: Any) -> Any:
    return x


def attribute(graph, nodes):
    graph.owning_module.one = 1.0
    graph.get_attr("one")


def number_given(given, cause):
    def fn(x, residual, w, factor):
        return writes(x, residual, w), residual * (factor if cause else 3)

    return symbolic_trace(fn), [*given, 3]


def shared_inputs(given, cause):
    def fn(x, residual, w):
        residual.add_(reduce(x))
        return llama(residual, w), residual, x + 1

    x, residual, w = given
    both = torch.cat([residual, residual])
    return symbolic_trace(fn), [both[1:25] if cause else x, both[:24], w]


def reshaped_input(x, r, w, cause):
    total = reduce(x)
    total.add_(r)
    if cause:
        w.unsqueeze_(0)
    return llama(total, w)


def strided_result(x, r, w, cause):
    other = torch.empty_like(r.t().contiguous().t() if cause else r)
    torch.add(r, 1, out=other)
    return writes(x, r, w), other


def viewed_as_integers(x, residual, w, cause):
    residual.add_(reduce(x))
    return llama(residual, w), residual.view(torch.int16) if cause else residual


def gradient_in_place(given, cause):
    def fn(x, residual, w):
        x = x * 1
        FUNCTIONAL.all_reduce_.default(x, "sum", "0")
        return llama(x + residual, w)

    return symbolic_trace(fn), [t.requires_grad_(cause) for t in given]


def several_in_place(x, r, w, cause):
    other = x * 2
    if cause:
        FUNCTIONAL.all_reduce_coalesced_.default([other], "sum", "0")
    return writes(x, r, w), other


WRITING = {
    "calls a function that may have side effects": with_call(own_function),
    "does not compute a tensor": with_call(torch._assert, lambda nodes: (True, "")),
    "a higher-order operator": with_call(
        torch.ops.higher_order.cond, lambda nodes: (True, None, None, (nodes["x"],))
    ),
    "one is not a tensor": with_node(attribute),
    "its input factor is 3, not a tensor": number_given,
    "shares memory with another": shared_inputs,
    "changes an input's shape in place": reshaped_input,
    "it returns split, which is not a tensor": returning(
        lambda r, w, cause: r.split(12) if cause else r
    ),
    "returns a view of its argument that the operator does not declare": returning(
        lambda r, w, cause: OWN.part(w) if cause else w[:1]
    ),
    r"empty_like has strides \(1, 24\), which PyTorch's functionalization loses": strided_result,
    "shares memory with residual in a way that no view can express": viewed_as_integers,
    "its results need a gradient": gradient_in_place,
    "PyTorch cannot make it functional: Found a custom": several_in_place,
    "the reduction auto_functionalized is not an operator with one tensor argument": Case(
        with_node(
            lambda graph, nodes: graph.call_function(
                auto_functionalized, (OWN.sum_.default,), {"x": nodes["x"]}
            )
        ),
        all_reduce_ops=[OWN.sum_],
    ),
    "is a reduction, but it is asynchronous": with_call(
        dist.all_reduce, lambda nodes: (nodes["w"],), {"async_op": True}
    ),
    "is a reduction, but it is a Python function": Case(
        with_call(own_function), all_reduce_ops=[own_function]
    ),
    "does not name the reduce op or the process group of all_reduce": with_call(
        dist.all_reduce, lambda nodes: (nodes["w"], dist.ReduceOp.BAND)
    ),
}

# ---- quantization -------------------------------------------------------------------------------


def scale_from_the_reduced(x, r, w, cause):
    total = reduce(x) + r
    y = llama(total, w)
    return cast(y.float() / torch.relu(total if cause else x)[0, :1].float())


def scale_per_token(y):
    return y.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448.0


def two_scales(x, r, w, cause):
    y = plain(x, r, w).float()
    scale = scale_per_token(y)
    return cast(y / scale), scale, scale_per_token(y.unsqueeze(0))[0, :, 0] if cause else r


def with_free_sizes(given):
    """Returns fake tensors whose sizes are symbolic, except the last dimension's."""
    mode, fakes = FakeTensorMode(shape_env=ShapeEnv()), []
    for place, tensor in enumerate(given):
        dims = [DimDynamic.DUCK] * (tensor.dim() - 1) + [DimDynamic.STATIC]
        context = StatelessSymbolicContext(dynamic_sizes=dims)
        source = ConstantSource(f"input{place}")
        fakes.append(mode.from_tensor(tensor, symbolic_context=context, source=source))
    return fakes


def scales_of_unknown_sizes(given, cause):
    def fn(x, residual, w):
        y = plain(x, residual, w).float()
        scale = scale_per_token(y)
        return cast(y / scale), scale

    x, residual, w = given
    given = [x.view(4, 6, HIDDEN), residual.view(4, 6, HIDDEN), w]
    return symbolic_trace(fn), with_free_sizes(given) if cause else given


def rows_in_a_different_shape(y):
    return y.new_empty(2, 12, HIDDEN, dtype=torch.float8_e4m3fn)


def quantized_in_a_different_shape(x, r, w, cause):
    y = plain(x, r, w)
    both = OWN.mx(y) if cause else (y, y)
    return both[0], both[1]


QUANTIZED = {
    "its quantization is not fused: .* static scale is computed from the reduced tensor": (
        scale_from_the_reduced
    ),
    "static scale is not a float32 tensor of one element": lambda x, r, w, cause: cast(
        plain(x, r, w).float() / (r[:, :1] if cause else r[0, :1]).float()
    ),
    "scale is computed in several shapes": two_scales,
    "the scales have several dimensions of unknown size": scales_of_unknown_sizes,
    "the quantized rows have leading dimensions": Case(
        quantized_in_a_different_shape,
        decompositions={
            OWN.mx: lambda y: block_scaled(y, allnorm.MxFp8(), rows_in_a_different_shape(y))
        },
    ),
}

# ---- tests of each case and of all cases --------------------------------------------------------

CASES = {
    reason: graph if isinstance(graph, Case) else Case(graph)
    for reason, graph in (REDUCTIONS | FOLLOWING | MODULES | WRITING | QUANTIZED).items()
}


def texts_of(report: Any) -> list[str]:
    return [text for site in report.sites for text in (site.reason, site.note) if text]


@pytest.mark.sampled(2)
@on(cpu=(1,))
@pytest.mark.parametrize("reason", CASES)
def test_case(rank: int, world_size: int, reason: str) -> None:
    case = CASES[reason]
    texts = texts_of(case.fuse(*case.make(rank, True)))
    assert any(re.search(reason, text) for text in texts), texts
    names = {node.name for node in case.make(rank, True)[0].graph.nodes}
    for text in texts:  # these texts name nodes of the caller's graph
        assert {*re.findall(r"\b[a-z_]+_\d+\b", text)} <= {*names, "norm_weight"}, text
    if case.fuses:
        report = case.fuse(*case.make(rank, False))
        assert report.fused, str(report)
        assert not any(re.search(reason, str(site)) for site in report.sites), str(report)
