"""Tests that the pass tracks tensor contents: result shapes, slices, weights, cache keys.

Each case is a former bug: a wrong result or an unexpected error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_helpers import comm, on
from torch.fx.experimental.proxy_tensor import make_fx

from allnorm.compile import fuse, inductor_pass

from .helpers import (
    EPS,
    HIDDEN,
    Inputs,
    assert_close_norm,
    captured,
    check_fused,
    check_missed,
    reduce,
    rms_norm,
    summed,
)

bf16 = torch.bfloat16

# ---- shapes of results --------------------------------------------------------------------------


def embedding_used_inside(x, r, w):
    total = reduce(x).view(2, -1, HIDDEN) * 2.0
    return rms_norm(total, w), total[:, -1] + 1, total.sum(1), total.mean(0)


def scaled_in_two_shapes(x, r, w):
    """Returns the same values in two shapes: both are results of one call."""
    reduced = reduce(x)
    flat, total = reduced * 2.0, reduced.view(2, -1, HIDDEN) * 2.0
    return rms_norm(total, w), total, flat


def normed_in_two_shapes(x, r, w):
    total = reduce(x) + r
    first = rms_norm(total.view(2, -1, HIDDEN), w)
    return first, rms_norm(total, w), total


def embedded(x, r):
    """Computes a vocabulary-parallel embedding, scaled and reshaped."""
    return reduce(x).view(2, -1, HIDDEN) * 2.0


SHAPES = {
    "embedding": summed(rms_norm, embedded),
    "embedding_used_inside": embedding_used_inside,
    "normed_in_a_third_shape": summed(
        lambda total, w: rms_norm(total.view(-1, HIDDEN), w), embedded
    ),
    "scaled_in_two_shapes": scaled_in_two_shapes,
    "normed_in_two_shapes": normed_in_two_shapes,
    "rounded_in_a_different_shape": summed(
        rms_norm, lambda x, r: (reduce(x).float() + r).view(2, -1, HIDDEN).to(bf16)
    ),
}


@on(cpu=(2,))
@pytest.mark.parametrize("name", SHAPES)
def test_results_have_the_shapes_of_the_graph(rank: int, world_size: int, name: str) -> None:
    fn, inputs = SHAPES[name], Inputs().make(rank)
    norms = 2 if name == "normed_in_two_shapes" else 1
    for module in (torch.fx.symbolic_trace(fn), captured(fn, inputs)):
        given = inputs if len(module.graph.find_nodes(op="placeholder")) == 3 else inputs[::2]
        check_fused(module, given, "rounded", norms=norms, communicator=comm())


# ---- parts of tensors ---------------------------------------------------------------------------


@torch.library.custom_op("allnorm_contents::sum_", mutates_args=("x",))
def sum_in_place(x: torch.Tensor, group: str) -> None:
    whole = x.contiguous()
    dist.all_reduce(whole)
    x.copy_(whole)


@torch.library.custom_op("allnorm_contents::sum_into", mutates_args=("out",))
def sum_into(x: torch.Tensor, out: torch.Tensor, group: str) -> None:
    out.copy_(x)
    dist.all_reduce(out)


OPS = ["allnorm_contents::sum_", "allnorm_contents::sum_into"]
PARTS: dict[str, Callable[[Any], Any]] = {
    "whole": lambda x: x,
    "rows": lambda x: x[:8],
    "columns": lambda x: x[:, :64],
    "every_second": lambda x: x[::2],
    "last_column": lambda x: x[:, -1],
}


def reduces(part: Callable[[Any], Any]) -> Any:
    """Returns a graph that reduces a part of a tensor in place, then adds and norms all of it."""

    def fn(x, r, w):
        mine = x * 1
        torch.ops.allnorm_contents.sum_(part(mine), "tp")
        total = mine + r
        return rms_norm(total, w), total

    return fn


@on(cpu=(2,))
def test_sums_stored_in_a_different_tensor(rank: int, world_size: int) -> None:
    """Tests a reduction operator that stores its result in its second argument."""

    def fn(x, r, w):
        out = torch.empty_like(x)
        torch.ops.allnorm_contents.sum_into(x, out, "tp")
        total = out + r
        return rms_norm(total, w), total

    inputs = Inputs().make(rank)
    reason = "changes an argument other than its first tensor"
    options = {"communicator": comm(), "all_reduce_ops": OPS}
    check_missed(captured(fn, inputs), inputs, reason, **options)


@on(cpu=(2,))
@pytest.mark.parametrize("v2", [True, False])
@pytest.mark.parametrize("name", PARTS)
def test_reductions_of_a_part_of_a_tensor(rank: int, world_size: int, name: str, v2: bool) -> None:
    from torch._dynamo.backends.common import aot_autograd

    inputs, graphs = Inputs().make(rank), []
    keep = aot_autograd(fw_compiler=lambda module, _: graphs.append(module) or module.forward)
    torch._dynamo.reset()
    with (
        torch.no_grad(),
        torch._inductor.config.patch(enable_auto_functionalized_v2=v2),
    ):
        torch.compile(reduces(PARTS[name]), backend=keep)(*inputs)
    (module,) = graphs
    assert "auto_functionalized" in str(module.graph)
    options = {"communicator": comm(), "all_reduce_ops": OPS}
    if name == "whole":
        check_fused(module, inputs, "rounded", **options)
        return
    reason = "a part of the tensor" if v2 else "is used by|also used by|not a tensor of the"
    check_missed(module, inputs, reason, **options)


# ---- residuals, weights and numbers --------------------------------------------------------------


@on(cpu=(2,))
def test_x_as_its_own_residual(rank: int, world_size: int) -> None:
    """Tests x as its own residual: viewing x in the reduced tensor's shape makes no cycle."""

    def fn(x, w):
        reduced = reduce(x).flatten(0, -2)
        total = x.view(reduced.shape) + reduced
        return rms_norm(total, w), total

    inputs = Inputs(shape=(4, 6, HIDDEN)).make(rank)[::2]
    for mode in ("symbolic", "fake", "real"):
        module = make_fx(fn, tracing_mode=mode)(*inputs)
        want = fn(*inputs)
        (site,) = fuse(module, inputs, comm()).sites
        assert site.fused or "queries" in str(site.reason), str(site)
        for mine, theirs in zip(module(*inputs), want, strict=True):
            assert_close_norm(mine, theirs, mode)


class OwnParameter(torch.nn.Parameter):
    """A Parameter subclass without special behavior, as in vLLM."""


@on(cpu=(2,))
def test_weights(rank: int, world_size: int) -> None:
    """Tests weights that are fused, and the reasons why others are not."""
    x, r, w = Inputs().make(rank)
    wide = torch.stack([w, w], 1)
    given = {
        "subclass": (OwnParameter(w, requires_grad=False), ""),
        "subclass of Tensor": (w.as_subclass(type("Mine", (torch.Tensor,), {})), ""),
        "column": (wide[:, 0], r"has strides \(2,\): expected a contiguous"),
        "expanded": (w[:1].expand(HIDDEN), r"has strides \(0,\): expected a contiguous"),
        "row": (w[None], ""),
        "offset": (torch.cat([w, w])[1 : HIDDEN + 1], ""),
    }
    fn = summed(lambda total, w: rms_norm(total, w.view(HIDDEN)))
    for name, (weight, reason) in given.items():
        module = torch.fx.symbolic_trace(fn)
        if reason:
            check_missed(module, [x, r, weight], reason, communicator=comm())
            continue
        want = fn(x, r, weight)
        assert len(fuse(module, [x, r, weight], comm()).fused) == 1, name
        for mine, theirs in zip(module(x, r, weight), want, strict=True):
            assert_close_norm(mine, theirs, name)


@on(cpu=(2,))
def test_strided_parameter(rank: int, world_size: int) -> None:
    """Tests a module call whose module has a strided parameter."""
    norm = torch.nn.RMSNorm(HIDDEN, EPS, dtype=bf16).requires_grad_(False)
    norm.weight = torch.nn.Parameter(torch.ones(HIDDEN, 2, dtype=bf16)[:, 0], requires_grad=False)
    graph = torch.fx.Graph()
    x, r = map(graph.placeholder, "xr")
    functional = torch.ops._c10d_functional
    pending = graph.call_function(functional.all_reduce.default, (x, "sum", "0"))
    reduced = graph.call_function(functional.wait_tensor.default, (pending,))
    total = graph.call_method("add", (reduced, r))
    graph.output((graph.call_module("norm", (total,)), total))
    root = torch.nn.Module()
    root.norm = norm
    inputs = Inputs().make(rank)[:2]
    reason = r"norm.weight, has strides \(2,\)"
    check_missed(torch.fx.GraphModule(root, graph), inputs, reason, communicator=comm())


class Symbolic(torch.nn.Module):
    """A module with a scale and an eps that torch.compile(dynamic=True) makes symbolic."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale, self.eps = scale, EPS

    def forward(self, x, r, w):
        total = r + (reduce(x) if self.scale == 1.0 else reduce(x) * self.scale)
        return F.rms_norm(total, (HIDDEN,), w, self.eps), total


@on(cpu=(2,))
def test_symbolic_numbers(rank: int, world_size: int) -> None:
    inputs = Inputs().make(rank)
    for scale in (1.0, 0.3):
        for special in (False, True):
            reports = []

            def fused(module, examples, reports=reports):
                reports.append(fuse(module, examples, comm()))
                return module.forward

            torch._dynamo.reset()
            with torch.no_grad(), torch._dynamo.config.patch(specialize_float=special):
                torch.compile(Symbolic(scale), backend=fused, dynamic=True)(*inputs)
            ((site,),) = [report.sites for report in reports]
            assert site.fused == special, str(site)
            assert special or "keeps symbolic" in str(site.reason)
            assert special or "specialize_float" in str(site.reason)


# ---- cache keys of functions for Inductor --------------------------------------------------------

FACTOR = 2.0
MUTABLE = [1.0]


def norm_by(eps: Any) -> Callable[..., Any]:
    return lambda x, w: F.rms_norm(x, (HIDDEN,), w, eps)


def default(x, w, eps=EPS):
    return F.rms_norm(x, (HIDDEN,), w, eps)


def helped(x, w):
    return default(x, w) * FACTOR


def inside(x, w):
    return next(default(y, w) * FACTOR for y in (x,))


class Norm:
    eps = EPS

    def __call__(self, x, w):
        return F.rms_norm(x, (HIDDEN,), w, self.eps)

    def bound(self, x, w):
        return self(x, w)


def key(function: Callable[..., Any]) -> Any:
    return inductor_pass(decompositions={"mine::norm": function}).uuid()


def test_cache_keys_of_decompositions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert key(norm_by(1e-6)) == key(norm_by(1e-6)) is not None
    assert key(norm_by(1e-6)) != key(norm_by(1e-5))
    assert key(norm_by(0.0)) != key(norm_by(-0.0))
    assert key(norm_by(1)) != key(norm_by(1.0))
    assert key(functools.partial(default, eps=1.0)) != key(functools.partial(default, eps=2.0))
    for function in (helped, inside):
        before = key(function)
        assert before is not None
        with monkeypatch.context() as changed:
            changed.setitem(globals(), "FACTOR", 3.0)
            assert key(function) != before
        with monkeypatch.context() as changed:
            changed.setattr(default, "__defaults__", (1.0,))
            assert key(function) != before
        assert key(function) == before


@pytest.mark.parametrize(
    "function",
    [
        Norm(),
        Norm().bound,
        norm_by([1.0]),
        norm_by(torch.ones(())),
        lambda x, w: x * MUTABLE[0],
        lambda x, w: x * Norm.eps,
        functools.lru_cache(default),
    ],
)
def test_functions_that_may_change_have_no_cache_key(function: Callable[..., Any]) -> None:
    assert key(function) is None
