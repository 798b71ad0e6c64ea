"""Helpers for the graph pass tests: graphs to fuse, and checks of fused graphs."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, GraphModule

import allnorm
from allnorm.compile import FusionReport, fuse
from allnorm.testing import RankPool, assert_same_bits, rank_input, shared_input, ulp_distance

TOKENS, HIDDEN = 24, 512
EPS = 1e-5
FP8 = torch.float8_e4m3fn


def reduce(x: Any, op: str = "sum", group: str = "0") -> Any:
    """Runs a functional all-reduce and waits for it; torch.fx can trace it."""
    reduced = torch.ops._c10d_functional.all_reduce.default(x, op, group)
    return torch.ops._c10d_functional.wait_tensor.default(reduced)


def rstd(z: Any, eps: float = EPS) -> Any:
    """Returns 1/rms of each row of a float32 tensor."""
    return torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + eps)


def llama(x: Any, weight: Any, eps: float = EPS) -> Any:
    """Computes the RMSNorm of transformers: rounds before multiplying by the weight."""
    z = x.to(torch.float32)
    return weight * (z * rstd(z, eps)).to(torch.bfloat16)


def gemma(x: Any, weight: Any) -> Any:
    """Computes Gemma's RMSNorm in transformers: multiplies by `1 + weight` in float32."""
    z = x.float()
    return (z * rstd(z) * (1.0 + weight.float())).type_as(x)


def rms_norm(x: Any, weight: Any, eps: float | None = EPS) -> Any:
    """Computes an RMSNorm with PyTorch's function."""
    return F.rms_norm(x, (HIDDEN,), weight, eps)


def cast(quotient: Any) -> Any:
    """Converts to FP8 with saturation."""
    return quotient.clamp(-448.0, 448.0).to(FP8)


def plain(x: Any, residual: Any, w: Any) -> Any:
    """Computes a reduction, a residual add and a norm: the simplest graph that can be fused."""
    return llama(reduce(x) + residual, w)


def added(x: Any, residual: Any) -> Any:
    return reduce(x) + residual


def summed(
    norm: Callable[[Any, Any], Any], add: Callable[[Any, Any], Any] = added
) -> Callable[..., Any]:
    """Returns a graph that returns `norm(total, weight)` and `total`.

    The total is `add(x, residual)`.
    """

    def graph(x: Any, residual: Any, w: Any) -> Any:
        total = add(x, residual)
        return norm(total, w), total

    return graph


def made_by_hand(all_reduce: Callable[..., Any], *more: str) -> GraphModule:
    """Builds a graph by hand that norms `all_reduce(graph, x, ...)` plus the residual.

    The graph's inputs are x, residual, w and `more`; `all_reduce` receives `more` after x.
    """
    graph = Graph()
    x, residual, w, *others = (graph.placeholder(name) for name in ("x", "residual", "w", *more))
    total = graph.call_function(torch.add, (all_reduce(graph, x, *others), residual))
    graph.output((graph.call_function(F.rms_norm, (total, (HIDDEN,), w, EPS)), total))
    return GraphModule(torch.nn.Module(), graph)


def table(expected: Any, *functions: Any, **named: Any) -> dict[str, tuple[Any, Any]]:
    """Returns a dict that maps each function's name to the function and the expected outcome."""
    return {
        name: (fn, expected) for name, fn in ({f.__name__: f for f in functions} | named).items()
    }


@dataclasses.dataclass
class Inputs:
    """A graph's arguments: partial sums that differ per rank, a common residual and weight."""

    dtype: torch.dtype = torch.bfloat16
    weight_dtype: torch.dtype | None = None
    shape: tuple[int, ...] = (TOKENS, HIDDEN)
    residual_shape: tuple[int, ...] | None = None
    residual_dtype: torch.dtype | None = None

    def make(self, rank: int) -> list[Tensor]:
        x = rank_input(self.shape, self.dtype, rank)
        shape, dtype = self.residual_shape or self.shape, self.residual_dtype or self.dtype
        residual = shared_input(shape, dtype, "residual") * 2
        weight = shared_input((self.shape[-1],), self.weight_dtype or self.dtype, "weight")
        return [x, residual, weight]


def nodes_calling(module: GraphModule, *names: str) -> list[str]:
    """Returns the nodes whose target contains one of these names."""
    return [n.name for n in module.graph.nodes if any(name in str(n.target) for name in names)]


def fused_calls(module: GraphModule) -> list[str]:
    return nodes_calling(module, "all_reduce_add_rms_norm")


def assert_close_norm(actual: Tensor, expected: Tensor, what: str) -> None:
    """Compares norms whose mean squares were summed in different orders.

    The order can change a float32 result by one ulp, and rarely a 16-bit result by one or two. A
    wrong rounding mode changes more than a tenth of the elements of a 16-bit result.
    """
    if actual.dtype == torch.float32:
        torch.testing.assert_close(actual, expected, rtol=2e-6, atol=1e-6)
    elif actual.numel():
        distance = ulp_distance(actual, expected)
        assert int(distance.max()) <= 2, what
        assert float((distance > 0).float().mean()) < 0.005, what


def assert_close_sandwich(actual: Tensor, expected: Tensor, what: str) -> None:
    """Compares results computed with a post norm; a few elements may differ slightly.

    Where the residual and the normed tensor nearly cancel, the difference can exceed one ulp of
    their sum.
    """
    assert actual.dtype == expected.dtype, what
    if actual.dtype == torch.float32:
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    else:
        torch.testing.assert_close(actual, expected, rtol=2.0**-6, atol=2.0**-6)
        assert float((actual != expected).float().mean()) < 0.005, what


def check_fused(
    module: GraphModule,
    inputs: Sequence[Tensor],
    numerics: str | Sequence[str],
    *,
    norms: int = 1,
    close: Callable[[Tensor, Tensor, str], None] = assert_close_norm,
    **arguments: Any,
) -> FusionReport:
    """Fuses a graph and compares its results with those of the unfused graph.

    Args:
        module: the graph.
        inputs: the graph's arguments; compared afterwards too, because the graph may write them.
        numerics: the rounding mode of each site, in order.
        norms: how many of the first results are normed; the others must be bit-identical.
        close: compares the normed results.
        arguments: keyword arguments of `fuse`.
    """
    expected_inputs, actual_inputs = ([t.clone() for t in inputs] for _ in range(2))
    with torch.no_grad():
        expected = module(*expected_inputs)
    report = fuse(module, inputs, **arguments)
    module.graph.lint()
    modes = [numerics] if isinstance(numerics, str) else list(numerics)
    assert [site.numerics for site in report.sites] == modes, str(report)
    assert report.fused == report.sites, str(report)
    assert not report.missed
    assert len(fused_calls(module)) == len(modes)
    assert not nodes_calling(module, "_c10d_functional", "mylib"), module.graph
    with torch.no_grad():
        actual = module(*actual_inputs)
    actual = actual if isinstance(actual, tuple) else (actual,)
    expected = expected if isinstance(expected, tuple) else (expected,)
    assert len(actual) == len(expected)
    for i, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
        assert mine.stride() == theirs.stride(), f"result {i}"
        if i < norms:
            close(mine, theirs, f"result {i}")
        else:
            assert_same_bits(mine, theirs, f"result {i}")
    for i, (mine, theirs) in enumerate(zip(actual_inputs, expected_inputs, strict=True)):
        assert_same_bits(mine, theirs, f"input {i}, afterwards")
    return report


def check_missed(
    module: GraphModule, inputs: Sequence[Tensor] | None, reason: str, **arguments: Any
) -> FusionReport:
    """Checks that nothing is fused or changed, and that the reason matches."""
    before, code = str(module.graph), module.code
    report = fuse(module, inputs, **arguments)
    assert [site.numerics for site in report.sites] == [None], str(report)
    assert report.missed == report.sites
    text = report.missed[0].reason
    assert text is not None
    assert re.search(reason, text), f"{text!r} does not match {reason!r}"
    assert text in str(report)
    assert str(module.graph) == before
    assert module.code == code
    return report


def captured(fn: Callable[..., Any], inputs: Sequence[Tensor]) -> GraphModule:
    """Returns the graph that Dynamo captures from a function, with its metadata."""
    graphs: list[GraphModule] = []

    def keep(module: GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(module)
        return module.forward

    torch._dynamo.reset()
    torch.compile(fn, backend=keep, fullgraph=True)(*inputs)
    torch._dynamo.reset()
    (module,) = graphs
    return module


def run_programs(rank: int, world_size: int, module: str, seeds: range) -> list[str]:
    """Compares random programs of a test module; returns the reports. Runs on each rank."""
    one = importlib.import_module(module).one
    return [str(report) for seed in seeds for report in one(rank, seed) or ()]


def check_programs(
    pool: RankPool, module: str, seeds: range, *, fused: int, missed: int = -1
) -> str:
    """Runs and compares random programs on all ranks; returns their reports.

    The reports must be equal on all ranks. They must show more than `fused` fused sites and more
    than `missed` missed sites.
    """
    first, *others = pool.run(run_programs, module, seeds)
    assert all(reports == first for reports in others), "the ranks fuse differently"
    text = "\n".join(first)
    assert text.count("\nfused ") > fused
    assert text.count("\nmissed ") > missed
    return text


def open_names() -> list[str]:
    return sorted(c.name for c in allnorm.core.registry.open_communicators())
