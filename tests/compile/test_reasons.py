"""Tests every reason of the graph pass, with a small graph that it applies to.

A case is a graph with the cause of a reason, and the same graph without it, which is fused. The
sentences of the pass are read from its sources: one without a case fails `test_every_sentence`.
"""

from __future__ import annotations

import ast
import contextlib
import pathlib
import re
from collections.abc import Callable, Iterator
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
from allnorm.compile import agreement, block_scaled, fuse
from allnorm.testing import RankPool

from . import test_boundaries as test_compile_boundaries
from . import test_experts as test_compile_experts
from . import test_quantized as test_compile_quantized
from . import test_refusals as test_compile_refusals
from .helpers import EPS, HIDDEN, Inputs, cast, llama, reduce, rstd

bf16 = torch.bfloat16
FUNCTIONAL = torch.ops._c10d_functional
HERE = pathlib.Path(__file__).parent

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
    "allnorm_reasons::mx", lambda y: (rows_in_another_shape(y), y.new_empty(4096))
)
torch.library.register_fake("allnorm_reasons::sum_", lambda x: x.new_empty(()))
OWN = torch.ops.allnorm_reasons

CASES: dict[str, tuple[Any, str, bool]] = {}
OPTIONS: dict[str, dict[str, Any]] = {}


def case(reason: str, *, fuses: bool = True, **options: Any) -> Any:
    """Marks a function of (x, residual, w, cause), or one that makes (graph, inputs) of (cause).

    Args:
        reason: a pattern of the reason or note, with the cause only.
        fuses: whether the graph is fused without the cause.
        options: of `fuse`.
    """

    def add(fn: Any) -> Any:
        CASES[fn.__name__] = (fn, reason, fuses)
        OPTIONS[fn.__name__] = options
        return fn

    return add


def graph_of(name: str, rank: int, cause: bool) -> tuple[GraphModule, Any]:
    fn = CASES[name][0]
    given = Inputs().make(rank)
    if fn.__code__.co_argcount == 2:
        made: tuple[GraphModule, Any] = fn(given, cause)
        return made
    return symbolic_trace(lambda x, residual, w: fn(x, residual, w, cause)), given


# ---- the reduction ------------------------------------------------------------------------------


@case("expected a last dimension of constant size")
def scalar(x, residual, w, cause):
    return llama(reduce(x.sum() if cause else x) + residual, w)


@case("last dimension is 0: expected 1 to")
def empty_rows(x, residual, w, cause):
    return llama(reduce(x[:, :0] if cause else x) + (residual[:, :0] if cause else residual), w)


@case("does not reduce a tensor")
def number_reduced(given, cause):
    return block(lambda g, x: g.call_function(FUNCTIONAL.all_reduce.default, (x, "sum", "0")))(
        given, cause, 3.0
    )


def block(call: Callable[[Graph, Any], Any]) -> Any:
    """Returns a function that makes a graph whose call reduces `x` or a different argument."""

    def make(given: Any, cause: bool, other: Any = None) -> tuple[GraphModule, Any]:
        graph = Graph()
        x, residual, w = (graph.placeholder(n) for n in ("x", "residual", "w"))
        reduced = call(graph, other if cause and other is not None else x)
        total = graph.call_function(torch.add, (reduced, residual))
        graph.output(graph.call_function(F.rms_norm, (total, (HIDDEN,), w, EPS)))
        return GraphModule(torch.nn.Module(), graph), given

    return make


@case("changes more than one argument", fuses=False, all_reduce_ops=[OWN.both_])
def two_arguments(given, cause):
    return block(lambda g, x: (g.call_function(OWN.both_.default, (x, x)), x)[1])(given, cause)


@case("no tensor argument", fuses=False, all_reduce_ops=[OWN.nothing])
def no_argument(given, cause):
    return block(lambda g, _: g.call_function(OWN.nothing.default, ("0",)))(given, cause)


@case("another result of auto_functionalized is used by", all_reduce_ops=[OWN.sum_])
def result_besides(given, cause):
    graph = Graph()
    x, residual, w = (graph.placeholder(n) for n in ("x", "residual", "w"))
    both = graph.call_function(auto_functionalized, (OWN.sum_.default,), {"x": x})
    graph.call_function(auto_functionalized, (OWN.sum_.default,), {"x": x})
    count, reduced = (graph.call_method("__getitem__", (both, i)) for i in (0, 1))
    total = graph.call_function(torch.add, (reduced, residual))
    normed = graph.call_function(F.rms_norm, (total, (HIDDEN,), w, EPS))
    graph.output((normed, count) if cause else normed)
    return GraphModule(torch.nn.Module(), graph), given


@case("its tensor is on meta, the communicator on cpu")
def on_another_device(given, cause):
    module = symbolic_trace(lambda x, residual, w: llama(reduce(x) + residual, w))
    return module, [t.to("meta") if cause else t for t in given]


@case("shape and dtype are unknown: pass example_inputs")
def no_examples(given, cause):
    module = symbolic_trace(lambda x, residual, w: llama(reduce(x) + residual, w))
    return module, None if cause else given


@case("name its process group as a constant: pass communicator=", communicator=None)
def group_given(given, cause):
    graph = Graph()
    x, residual, w, group = (graph.placeholder(n) for n in ("x", "residual", "w", "group"))
    reduced = graph.call_function(FUNCTIONAL.all_reduce.default, (x, "sum", group))
    reduced = reduced if cause else graph.call_function(reduce, (x,))
    if not cause:
        return symbolic_trace(lambda x, residual, w: llama(reduce(x) + residual, w)), given
    total = graph.call_function(torch.add, (reduced, residual))
    graph.output(graph.call_function(F.rms_norm, (total, (HIDDEN,), w, EPS)))
    return GraphModule(torch.nn.Module(), graph), [*given, "0"]


@case("does not name its process group as a constant$")
def group_given_with_a_communicator(given, cause):
    return group_given(given, cause)


@case("no process group named 'nowhere'", communicator=None)
def group_elsewhere(x, residual, w, cause):
    return llama(reduce(x, group="nowhere" if cause else "0") + residual, w)


@case("uses communicator allnorm:other:0: expected")
def communicator_elsewhere(x, residual, w, cause):
    name = "allnorm:other:0" if cause else comm().name
    return llama(torch.ops.allnorm.all_reduce(x, name) + residual, w)


@case("its sum with all_reduce_default is fused there")
def added_to_another(x, residual, w, cause):
    total = reduce(x) + (reduce(residual) if cause else residual)
    return llama(total + residual if cause else total, w)


@case("it is c10d's own operator", fuses=False)
def own_operator_of_c10d(given, cause):
    op = torch.ops.c10d.allreduce_.default
    return block(lambda g, x: g.call_function(op, ([x], None, None, None, False)))(given, cause)


# ---- what follows -------------------------------------------------------------------------------


@case("the result of .* is not used")
def norm_dropped(x, residual, w, cause):
    total = reduce(x) + residual
    normed = llama(total, w)
    return (total,) if cause else (normed, total)


@case("not an RMSNorm that allnorm computes")
def root_alone(x, residual, w, cause):
    z = (reduce(x) + residual).float()
    return rstd(z) if cause else (z * rstd(z) * w).to(bf16)


@case("to is torch.float64: expected float32")
def added_in_double(x, residual, w, cause):
    reduced = reduce(x).to(torch.float64) if cause else reduce(x)
    return llama((reduced + residual).to(bf16), w)


@case("computes with torch.int32")
def integer_added(x, residual, w, cause):
    return llama(reduce(x) + (residual.to(torch.int32) if cause else residual), w)


@case("computes with the scalar tensor")
def scaled_by_a_scalar_tensor(x, residual, w, cause):
    return llama(reduce(x) * (w.float().sum() if cause else 0.5) + residual, w)


@case(r"broadcasts getitem of shape \[12, 512\] to \[2, 12, 512\]")
def part_added(x, residual, w, cause):
    return llama(
        reduce(x).view(2, 12, -1) + (residual[:12] if cause else residual.view(2, 12, -1)), w
    )


@case("rounds the quotient to an integer")
def floor_division(x, residual, w, cause):
    reduced = reduce(x)
    return llama((torch.div(reduced, 2, rounding_mode="floor") if cause else reduced) + residual, w)


@case("clamps to a tensor")
def clamped_to_a_tensor(x, residual, w, cause):
    reduced = reduce(x)
    return llama((torch.clamp(reduced, min=residual) if cause else reduced) + residual, w)


@case("moves .* to meta")
def moved(x, residual, w, cause):
    return llama(reduce(x).to("meta" if cause else "cpu") + residual, w)


@case("drops elements at random")
def dropout(x, residual, w, cause):
    return llama(F.dropout(reduce(x), 0.5, training=cause) + residual, w)


@case("has an eps that is not a number")
def eps_of_a_tensor(x, residual, w, cause):
    return F.rms_norm(reduce(x) + residual, (HIDDEN,), w, w[0] if cause else EPS)


@case("computes with a number that float64 cannot represent")
def huge_eps(x, residual, w, cause):
    return F.rms_norm(reduce(x) + residual, (HIDDEN,), w, 10**400 if cause else EPS)


@case("norms over a dimension of unknown size")
def size_of_elements(x, residual, w, cause):
    size = w.sum().int().item() if cause else HIDDEN
    return F.rms_norm(reduce(x) + residual, (size,), w, EPS)


@case(r"no single view converts \(24, 512\) to \(4, 6, 512\)")
def two_views(x, residual, w, cause):
    viewed, shape = reduce(x).view(2, 12, HIDDEN), (2, 12, HIDDEN)
    if cause:
        viewed, shape = viewed.view(4, 6, HIDDEN), (4, 6, HIDDEN)
    return llama(viewed + residual.view(shape), w)


def changes(x, w):
    return llama(x.mul_(2), w)


def fails(x, w):
    raise ValueError("not today")


@case(
    "is decomposed by a function that cannot be traced: not today", decompositions={OWN.norm: fails}
)
def untraced(x, residual, w, cause):
    return (OWN.norm if cause else llama)(reduce(x) + residual, w)


@case("is decomposed by a function that changes its arguments", decompositions={OWN.norm: changes})
def traced_writing(x, residual, w, cause):
    return (OWN.norm if cause else llama)(reduce(x) + residual, w)


@case("the norm covers 64 of the 512 elements")
def norm_of_another_size(x, residual, w, cause):
    return F.rms_norm(reduce(x) + residual, (64 if cause else HIDDEN,))


@case("the shape of norm is unknown", decompositions={OWN.norm: lambda x, w: llama(x, w)})
def norm_without_a_fake(x, residual, w, cause):
    return (OWN.norm if cause else llama)(reduce(x) + residual, w)


@case(r"has strides \(2,\): expected a contiguous last dimension")
def strided_weight(x, residual, w, cause):
    weight = torch.cat([w, w])[::2]
    weight = weight if cause else weight.contiguous()
    return F.rms_norm(reduce(x) + residual, (HIDDEN,), weight, EPS)


@case("queries .*, which the fused call does not return")
def dtype_of_the_sum(x, residual, w, cause):
    z = reduce(x).float() + residual.float()
    like = z if cause else w
    return (z * rstd(z) * w).to(bf16), torch.zeros(4, dtype=like.dtype)


@case(r"has strides \(1, 24\): the results of the fused call are contiguous")
def transposed_sum(x, residual, w, cause):
    other = residual.t().contiguous().t() if cause else residual
    total = other + reduce(x)
    return llama(total, w), total


@case("needs a gradient, which the fused call does not compute")
def gradient(given, cause):
    module = symbolic_trace(lambda x, residual, w: llama(reduce(x) + residual, w))
    return module, [t.requires_grad_(cause) for t in given]


# ---- modules ------------------------------------------------------------------------------------


def norm_module(change: Callable[[Any], Any], *, in_place: bool = False) -> Any:
    def make(given: Any, cause: bool) -> tuple[GraphModule, Any]:
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


def hooked(norm: Any) -> None:
    norm.register_forward_hook(lambda *_: None)


@case("calls a module that has hooks")
def hooks(given, cause):
    return norm_module(hooked)(given, cause)


@case("in a graph that cannot be made functional: norm calls a module that has hooks")
def hooks_in_place(given, cause):
    return norm_module(hooked, in_place=True)(given, cause)


@case("a forward that replaces its class's")
def own_forward(given, cause):
    return norm_module(lambda norm: setattr(norm, "forward", norm.forward))(given, cause)


@case("has parametrized weights")
def parametrized(given, cause):
    def change(norm):
        parametrize = torch.nn.utils.parametrize
        parametrize.register_parametrization(norm, "weight", torch.nn.Identity())
        norm.__class__ = torch.nn.RMSNorm

    return norm_module(change)(given, cause)


@case("has a weight of torch.float64")
def double_weight(given, cause):
    return norm_module(lambda norm: norm.double())(given, cause)


@contextlib.contextmanager
def hooks_of_all_modules() -> Iterator[None]:
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        yield
    finally:
        handle.remove()


# ---- graphs that write --------------------------------------------------------------------------


def writes(x, residual, w):
    total = reduce(x)
    total.add_(residual)
    return llama(total, w)


def with_node(add: Callable[[Graph, dict[str, Any]], Any], more: Any = ()) -> Any:
    """Returns a function that makes a graph that writes in place; the cause adds a node."""

    def make(given: Any, cause: bool) -> tuple[GraphModule, Any]:
        module = symbolic_trace(writes)
        graph = module.graph
        nodes = {node.name: node for node in graph.nodes}
        if cause:
            with graph.inserting_before(graph.output_node()):
                add(graph, nodes)
        return module, [*given, *(more if cause else ())]

    return make


def own_function(x: Any) -> Any:
    return x


@case("calls a function that may have side effects")
def python_function(given, cause):
    return with_node(lambda g, n: g.call_function(own_function, (n["x"],)))(given, cause)


@case("does not compute a tensor")
def assertion(given, cause):
    return with_node(lambda g, n: g.call_function(torch._assert, (True, "")))(given, cause)


@case("a higher-order operator")
def higher_order(given, cause):
    def add(graph, nodes):
        op = torch.ops.higher_order.cond
        graph.call_function(op, (True, None, None, (nodes["x"],)))

    return with_node(add)(given, cause)


@case("one is not a tensor")
def attribute(given, cause):
    def add(graph, nodes):
        graph.owning_module.one = 1.0
        graph.get_attr("one")

    return with_node(add)(given, cause)


@case("its input factor is 3, not a tensor")
def number_given(given, cause):
    def fn(x, residual, w, factor):
        total = reduce(x)
        total.add_(residual)
        return llama(total, w), residual * (factor if cause else 3)

    return symbolic_trace(fn), [*given, 3]


@case("shares memory with another")
def shared_inputs(given, cause):
    def fn(x, residual, w):
        residual.add_(reduce(x))
        return llama(residual, w), residual, x + 1

    x, residual, w = given
    both = torch.cat([residual, residual])
    return symbolic_trace(fn), [both[1:25] if cause else x, both[:24], w]


@case("changes an input's shape in place")
def reshaped_input(x, residual, w, cause):
    total = reduce(x)
    total.add_(residual)
    if cause:
        w.unsqueeze_(0)
    return llama(total, w)


@case("it returns split, which is not a tensor")
def list_returned(x, residual, w, cause):
    total = reduce(x)
    total.add_(residual)
    return llama(total, w), residual.split(12) if cause else residual


@case("returns a view of its argument that the operator does not declare")
def untold_view(x, residual, w, cause):
    total = reduce(x)
    total.add_(residual)
    return llama(total, w), OWN.part(w) if cause else w[:1]


@case(r"empty_like has strides \(1, 24\), which PyTorch's functionalization loses")
def strided_result(x, residual, w, cause):
    other = torch.empty_like(residual.t().contiguous().t() if cause else residual)
    torch.add(residual, 1, out=other)
    total = reduce(x)
    total.add_(residual)
    return llama(total, w), other


@case("shares memory with residual in a way that no view can express")
def viewed_as_integers(x, residual, w, cause):
    residual.add_(reduce(x))
    return llama(residual, w), residual.view(torch.int16) if cause else residual


@case("its results need a gradient")
def gradient_in_place(given, cause):
    def fn(x, residual, w):
        x = x * 1
        FUNCTIONAL.all_reduce_.default(x, "sum", "0")
        return llama(x + residual, w)

    return symbolic_trace(fn), [t.requires_grad_(cause) for t in given]


@case("PyTorch cannot make it functional: Found a custom")
def several_in_place(x, residual, w, cause):
    other = x * 2
    if cause:
        FUNCTIONAL.all_reduce_coalesced_.default([other], "sum", "0")
    total = reduce(x)
    total.add_(residual)
    return llama(total, w), other


@case(
    "the reduction auto_functionalized is not an operator with one tensor argument",
    all_reduce_ops=[OWN.sum_],
)
def wrapped_reduction(given, cause):
    def add(graph, nodes):
        graph.call_function(auto_functionalized, (OWN.sum_.default,), {"x": nodes["x"]})

    return with_node(add)(given, cause)


@case("is a reduction, but it is asynchronous")
def asynchronous(given, cause):
    def add(graph, nodes):
        graph.call_function(dist.all_reduce, (nodes["w"],), {"async_op": True})

    return with_node(add)(given, cause)


@case("is a reduction, but it is a Python function", all_reduce_ops=[own_function])
def python_reduction(given, cause):
    return with_node(lambda g, n: g.call_function(own_function, (n["x"],)))(given, cause)


@case("does not name the reduce op or the process group of all_reduce")
def unnamed_operation(given, cause):
    def add(graph, nodes):
        graph.call_function(dist.all_reduce, (nodes["w"], dist.ReduceOp.BAND))

    return with_node(add)(given, cause)


# ---- quantization -------------------------------------------------------------------------------


@case("its quantization is not fused: .* static scale is computed from the reduced tensor")
def scale_from_the_reduced(x, residual, w, cause):
    total = reduce(x) + residual
    y = llama(total, w)
    scale = torch.relu(total if cause else x)[0, :1].float()
    return cast(y.float() / scale)


@case("static scale is not a float32 tensor of one element")
def scales_given(x, residual, w, cause):
    y = llama(reduce(x) + residual, w)
    return cast(y.float() / (residual[:, :1].float() if cause else residual[0, :1].float()))


@case("scale is computed in several shapes")
def two_scales(x, residual, w, cause):
    y = llama(reduce(x) + residual, w).float()
    scale = y.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448.0
    other = y.abs().amax(-1).clamp(min=1e-10) / 448.0 if cause else residual
    return cast(y / scale), scale, other


def with_free_sizes(given):
    """Returns fake tensors with symbolic sizes, except the last dimensions."""
    mode, fakes = FakeTensorMode(shape_env=ShapeEnv()), []
    for place, tensor in enumerate(given):
        dims = [DimDynamic.DUCK] * (tensor.dim() - 1) + [DimDynamic.STATIC]
        context = StatelessSymbolicContext(dynamic_sizes=dims)
        source = ConstantSource(f"input{place}")
        fakes.append(mode.from_tensor(tensor, symbolic_context=context, source=source))
    return fakes


@case("the scales have several dimensions of unknown size")
def dynamic_scales(given, cause):
    def fn(x, residual, w):
        y = llama(reduce(x) + residual, w).float()
        scale = y.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448.0
        return cast(y / scale), scale

    x, residual, w = given
    given = [x.view(4, 6, HIDDEN), residual.view(4, 6, HIDDEN), w]
    return symbolic_trace(fn), with_free_sizes(given) if cause else given


def rows_in_another_shape(y):
    return y.new_empty(2, 12, HIDDEN, dtype=torch.float8_e4m3fn)


def mx_in_another_shape(y):
    return block_scaled(y, allnorm.MxFp8(), rows_in_another_shape(y))


@case("the quantized rows have leading dimensions", decompositions={OWN.mx: mx_in_another_shape})
def quantized_in_another_shape(x, residual, w, cause):
    y = llama(reduce(x) + residual, w)
    both = OWN.mx(y) if cause else (y, y)
    return both[0], both[1]


# ---- the test of each, and of all ---------------------------------------------------------------


def texts_of(module: GraphModule, given: Any, options: dict[str, Any]) -> list[str]:
    report = fuse(module, given, **{"communicator": comm(), **options})
    return [text for site in report.sites for text in (site.reason, site.note) if text]


def run_case(rank: int, world_size: int, name: str) -> None:
    _, reason, fuses = CASES[name]
    texts = texts_of(*graph_of(name, rank, True), OPTIONS[name])
    assert any(re.search(reason, text) for text in texts), texts
    names = {node.name for node in graph_of(name, rank, True)[0].graph.nodes}
    for text in texts:  # texts use the names of nodes in the caller's graph
        assert {*re.findall(r"\b[a-z_]+_\d+\b", text)} <= {*names, "norm_weight"}, text
    if fuses:
        module, given = graph_of(name, rank, False)
        report = fuse(module, given, **{"communicator": comm(), **OPTIONS[name]})
        assert report.fused, str(report)
        assert not any(re.search(reason, str(site)) for site in report.sites), str(report)


@on(cpu=(1,))
@pytest.mark.parametrize("name", CASES)
def test_case(pool: RankPool, name: str) -> None:
    pool.run(run_case, name)


def all_texts(rank: int, world_size: int) -> list[str]:
    texts = []
    for name in CASES:
        texts += texts_of(*graph_of(name, rank, True), OPTIONS[name])
    given = Inputs().make(rank)
    functions = [fn for fn, *_ in test_compile_refusals.REFUSALS.values()]
    functions += [fn for fn, *_ in test_compile_boundaries.NEARLY.values()]
    functions += [fn for fn, *_ in test_compile_quantized.QUANTIZED.values()]
    for fn in functions:
        texts += texts_of(symbolic_trace(fn), [t.clone() for t in given], {})
    for fn, top_k, _ in test_compile_experts.NEARLY.values():
        module = test_compile_experts.traced(fn, top_k)
        texts += texts_of(module, test_compile_experts.inputs(rank, top_k, bf16), {})
    with hooks_of_all_modules():
        texts += texts_of(*norm_module(hooked)(given, False), {})
    return texts


class LostStore:
    group_name = "0"

    def settle(self, *_: Any) -> str:
        raise RuntimeError("connection reset")


def test_store_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    lost: Any = LostStore()
    monkeypatch.setattr(agreement, "verdicts_of", lambda *_: lost)
    monkeypatch.setattr(dist, "get_world_size", lambda _: 2)
    reason = agreement.settle(lost, None, [], [])
    assert reason == ("ranks cannot agree: the store of process group 0 fails (connection reset)")


NOT_REASONS = {"ValueError", "TypeError", "RuntimeError", "AllnormError", "CommunicatorClosedError"}
NOT_REASONS |= {"NotImplementedError", "define"}
FILES = ("report.py", "inductor.py", "generation.py", "vocabulary.py")


def sentences() -> dict[str, str]:
    """Returns the texts of the pass that are not docstrings or errors, by their patterns."""
    found = {}
    for path in sorted(pathlib.Path(allnorm.compile.__file__).parent.glob("*.py")):
        tree = ast.parse(path.read_text())
        others: set[ast.AST] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr):
                others.update(ast.walk(node) if isinstance(node.value, ast.Constant) else ())
            elif isinstance(node, ast.JoinedStr):
                others.update(part for part in node.values if isinstance(part, ast.Constant))
            elif isinstance(node, ast.Call):
                called = getattr(node.func, "id", getattr(node.func, "attr", ""))
                others.update(ast.walk(node) if called in NOT_REASONS else ())
        for node in ast.walk(tree):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            if node in others or not isinstance(node, ast.JoinedStr | ast.Constant):
                continue
            words = [p.value if isinstance(p, ast.Constant) else None for p in parts]
            if not all(word is None or isinstance(word, str) for word in words):
                continue
            text = "".join("{}" if word is None else str(word) for word in words)
            if len(re.findall("[a-z]{2,}", text)) > 2 and " " in text and path.name not in FILES:
                found[".*".join("" if w is None else re.escape(str(w)) for w in words)] = text
    return found


@on(cpu=(1,))
def test_every_sentence(pool: RankPool) -> None:
    (texts,) = pool.run(all_texts)
    missing = []
    for pattern, text in sentences().items():
        if any(re.search(pattern, each, re.DOTALL) for each in texts):
            assert text not in ELSEWHERE, "is in the table now"
            assert text not in GUARDS, "is no guard"
        elif text in ELSEWHERE:
            file, words = ELSEWHERE[text]
            assert words in text
            assert words in (HERE / file).read_text()
        elif text not in GUARDS:
            missing.append(text)
    assert not missing, "\n".join(missing)
    assert {*ELSEWHERE, *GUARDS} <= set(sentences().values())


CONTENTS, EXPERTS = "test_contents.py", "test_experts.py"
ELSEWHERE = {
    "ranks cannot agree: the store of process group {} fails ({})": (
        *("test_reasons.py", "the store of process group {} fails"),
    ),
    "a number that the tracer keeps symbolic, as torch.compile(dynamic=True) does with floats: "
    "the fused call takes constants. Set torch._dynamo.config.specialize_float = True": (
        *(CONTENTS, "keeps symbolic"),
    ),
    "the reduced tensor is not a matrix, or the residual has a different shape": (
        *(EXPERTS, "is not a matrix"),
    ),
    "{} reads the sum before it is reduced": (EXPERTS, "reads the sum before it is reduced"),
    "the scales have strides {}, a layout allnorm does not write": (
        *("test_decompositions.py", "a layout allnorm does not write"),
    ),
    "{} is a DTensor: pass its whole local tensor to the graph instead": (
        *("test_dtensors.py", "is a DTensor: pass its whole local tensor"),
    ),
    "torch.distributed is not initialized: call init_process_group() first, or pass "
    "communicator=": (*("test_refusals.py", "torch.distributed is not initialized"),),
    "it is the residual of {}: their sum is fused there": (
        *("test_matches.py", "it is the residual of"),
    ),
    "AOTAutograd orders it by an effect token: fuse the graph before AOTAutograd, or use "
    "inductor_pass for Inductor's graph": ("test_tracing.py", "effect token"),
    "it changes an argument other than its first tensor, which it should reduce": (
        *(CONTENTS, "changes an argument other than its first tensor"),
    ),
    "it reduces only a part of the tensor that it changes": (CONTENTS, "a part of the tensor"),
}
GUARDS = {
    "the shape of {} is computed from the reduced tensor": (
        "sizes are questions, which hold nothing of a tensor's elements"
    ),
    "the shapes and dtypes of its tensors are unknown": "a reduction without a shape is first",
    "it creates {}, a tensor that exists only while it is traced": (
        "constants are recorded as themselves"
    ),
    "{} would have different strides in a graph without in-place operations": (
        "results whose strides PyTorch does not keep are refused before"
    ),
    "{} reduces several tensors in place": "PyTorch refuses to record such an operator",
    "{} takes the {} over a dimension of unknown size": (
        "a row of unknown size is a reason of the reduction itself"
    ),
    # Not reasons: texts for fused sites, and a file name.
    "sum of {} experts' rows": "",
    "tensor added after the reduction": "",
    "no second norm": "",
    "<guards of a graph>": "",
}
