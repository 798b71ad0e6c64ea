"""Tests which weight a fused call prefetches: that of the next GEMM, if it is a graph's input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from rank_helpers import comm, device, on
from torch.fx import symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

from allnorm.compile import fuse
from allnorm.testing import assert_same_bits

from .helpers import EPS, HIDDEN, Inputs, cast, fused_calls, llama, reduce

aten = torch.ops.aten
SMALL = 64


def before(x: Any, residual: Any, w: Any) -> Any:
    return llama(reduce(x) + residual, w)


def linear(x: Any, residual: Any, w: Any, a: Any, b: Any) -> Any:
    return F.linear(before(x, residual, w), a)


def transposed(x: Any, residual: Any, w: Any, a: Any, b: Any) -> Any:
    return before(x, residual, w) @ a.t()


def first_of_several(x: Any, residual: Any, w: Any, a: Any, b: Any) -> Any:
    rows = before(x, residual, w)
    return F.linear(rows, a) + F.linear(rows, b)


def second_of_several(x: Any, residual: Any, w: Any, a: Any, b: Any) -> Any:
    rows = before(x, residual, w)
    return F.linear(rows, b) + F.linear(rows, a)


def with_bias(x: Any, residual: Any, w: Any, a: Any, b: Any) -> Any:
    return aten.addmm(b.view(-1)[:HIDDEN], before(x, residual, w), a)


def of_other_rows(x: Any, residual: Any, w: Any, a: Any, b: Any) -> Any:
    rows = before(x, residual, w)
    return F.linear(rows.view(2, -1, HIDDEN)[0], a)


def computed(x: Any, residual: Any, w: Any, a: Any, b: Any) -> Any:
    return F.linear(before(x, residual, w), a * 2)


def part_of_a(x: Any, residual: Any, w: Any, a: Any, b: Any) -> Any:
    return F.linear(before(x, residual, w), a[SMALL:])


def no_product(x: Any, residual: Any, w: Any, a: Any, b: Any) -> Any:
    return before(x, residual, w) * w


def added_to_the_residual(x: Any, residual: Any, w: Any, a: Any, b: Any) -> Any:
    total = reduce(x) + residual
    return llama(total, w), total + b[: total.shape[0]], total + residual


GRAPHS: dict[Callable[..., Any], str | None] = {
    linear: "a",
    transposed: "a",
    first_of_several: "a",
    second_of_several: "b",
    with_bias: "a",
    of_other_rows: "a",
    computed: None,
    part_of_a: None,
    no_product: None,
    added_to_the_residual: None,
}


def fuse_for_prefetch(module: Any, inputs: Any) -> Any:
    """Fuses a graph as where a table turns prefetch on."""
    with mock.patch("allnorm.policy._PREFETCH_TOKENS", 32):
        return fuse(module, inputs, communicator=comm())


@on(cpu=(2,))
def test_no_weight_is_passed_where_no_call_prefetches(rank: int, world_size: int) -> None:
    inputs = [*Inputs().make(rank), *(torch.randn(2, HIDDEN, HIDDEN).bfloat16().unbind())]
    module = symbolic_trace(linear)
    fuse(module, inputs, communicator=comm())
    (call,) = fused_calls(module)
    node = next(node for node in module.graph.nodes if node.name == call)
    assert "prefetch" not in node.kwargs


@on(cpu=(2,))
@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.__name__)
@pytest.mark.parametrize("trace", ["symbolic", "make_fx"])
def test_weight_of_the_next_gemm(
    rank: int, world_size: int, graph: Callable[..., Any], trace: str
) -> None:
    inputs = [*Inputs().make(rank), *(torch.randn(2, HIDDEN, HIDDEN).bfloat16().unbind())]
    module: Any = symbolic_trace(graph) if trace == "symbolic" else make_fx(graph)(*inputs)
    expected = module(*inputs)
    names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    report = fuse_for_prefetch(module, inputs)
    assert len(report.fused) == 1
    (call,) = fused_calls(module)
    node = next(node for node in module.graph.nodes if node.name == call)
    wanted = GRAPHS[graph]
    found = node.kwargs.get("prefetch")
    assert (None if found is None else found.name) == (
        None if wanted is None else names[("x", "residual", "w", "a", "b").index(wanted)]
    )
    torch.testing.assert_close(module(*inputs), expected, rtol=0.1, atol=1.0)
    stripped = torch.fx.GraphModule(module, module.graph.__class__())
    stripped.graph.output(stripped.graph.graph_copy(module.graph, {}))
    for each in stripped.graph.nodes:
        each.kwargs = {name: value for name, value in each.kwargs.items() if name != "prefetch"}
    stripped.recompile()
    for mine, theirs in zip(*map(_tuple, (module(*inputs), stripped(*inputs))), strict=True):
        assert_same_bits(mine, theirs, "the result without the hint")


def _tuple(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


# ---- weights that are not of the rows' dtype ----------------------------------------------------

FP8 = torch.float8_e4m3fn


@torch.library.custom_op("allnorm_tests::block_scaled_linear", mutates_args=())
def block_scaled_linear(
    q: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor
) -> torch.Tensor:
    """Multiplies FP8 rows by an FP8 weight, with scales like an engine's operator."""
    return ((q.float() * scale) @ weight.float().t() * weight_scale.mean()).bfloat16()


@block_scaled_linear.register_fake
def _(q: Any, scale: Any, weight: Any, weight_scale: Any) -> Any:
    return q.new_empty(q.shape[0], weight.shape[0], dtype=torch.bfloat16)


def per_token(rows: Any) -> tuple[Any, Any]:
    scale = rows.float().abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448.0
    return cast(rows.float() / scale), scale


def scaled(x: Any, residual: Any, w: Any, a: Any, scales: Any) -> Any:
    """Quantizes per token, as a fused call does, for PyTorch's scaled GEMM."""
    q, scale = per_token(before(x, residual, w))
    row = scales.view(-1)[:HIDDEN].view(1, -1)
    return aten._scaled_mm(q, a.t(), scale, row, None, None, torch.bfloat16)


def scaled_by_an_engine(x: Any, residual: Any, w: Any, a: Any, scales: Any) -> Any:
    q, scale = per_token(before(x, residual, w))
    return torch.ops.allnorm_tests.block_scaled_linear(q, scale, a, scales)


def scaled_and_16_bits(x: Any, residual: Any, w: Any, a: Any, scales: Any) -> Any:
    """Reads the rows twice: the GEMM reads FP8, and a norm's gate reads 16 bits."""
    rows = before(x, residual, w)
    q, scale = per_token(rows)
    return torch.ops.allnorm_tests.block_scaled_linear(q, scale, a, scales) * rows.sigmoid()


def of_int8(x: Any, residual: Any, w: Any, a: Any, scales: Any) -> Any:
    """Dequantizes the weight in the GEMM; the rows stay in 16 bits."""
    flat = scales.view(-1)[:HIDDEN].bfloat16()
    return aten._weight_int8pack_mm(before(x, residual, w), a, flat)


QUANTIZED = {
    scaled: (FP8, True),
    scaled_by_an_engine: (FP8, True),
    scaled_and_16_bits: (FP8, True),
    of_int8: (torch.int8, False),
}


@on(cpu=(2,))
@pytest.mark.parametrize("graph", QUANTIZED, ids=lambda graph: graph.__name__)
def test_weight_of_a_quantized_linear(
    rank: int, world_size: int, graph: Callable[..., Any]
) -> None:
    """The weight is found among its scales, and a call that quantizes passes it too."""
    dtype, quantizes = QUANTIZED[graph]
    torch.manual_seed(2)
    weight = (8 * torch.randn(HIDDEN, HIDDEN)).to(dtype)
    inputs = [*Inputs().make(rank), weight, 0.1 + torch.rand(HIDDEN // 16, HIDDEN // 16)]
    module: Any = symbolic_trace(graph)
    expected = module(*inputs)
    report = fuse_for_prefetch(module, inputs)
    assert len(report.fused) == 1
    (call,) = fused_calls(module)
    node = next(node for node in module.graph.nodes if node.name == call)
    assert ("quant" in str(node.target)) == quantizes
    hint: Any = node.kwargs["prefetch"]
    assert (hint.op, hint.target) == ("placeholder", "a")
    result = module(*inputs)
    torch.testing.assert_close(result, expected, rtol=0.1, atol=0.1 * float(expected.abs().max()))


class Model(torch.nn.Module):
    """Two layers whose second weight is a buffer of a nested module."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(HIDDEN).bfloat16(), requires_grad=False)
        self.inner = torch.nn.Module()
        self.inner.register_buffer("matrix", torch.randn(HIDDEN, HIDDEN).bfloat16())

    def forward(self, x: Any, residual: Any) -> Any:
        rows = F.rms_norm(reduce(x) + residual, (HIDDEN,), self.gain, EPS)
        return rows @ self.inner.matrix  # type: ignore[operator]


@on(cpu=(2,))
def test_weight_of_a_module(rank: int, world_size: int) -> None:
    torch.manual_seed(1)
    module = symbolic_trace(Model())
    x, residual, _ = Inputs().make(rank)
    expected = module(x, residual)
    fuse_for_prefetch(module, (x, residual))
    (call,) = fused_calls(module)
    node = next(node for node in module.graph.nodes if node.name == call)
    hint: Any = node.kwargs["prefetch"]
    assert hint.target == "inner.matrix"
    torch.testing.assert_close(module(x, residual), expected, rtol=0.1, atol=1.0)


@on(cpu=(2,), gpu=(2,))
def test_compiled_code_passes_the_weight(rank: int, world_size: int) -> None:
    """Inductor's code calls the operator with the weight that the model's input holds."""
    from torch._inductor import config

    from allnorm.compile import inductor_pass

    seen: list[Any] = []
    inputs = [t.to(device()) for t in Inputs().make(rank)]
    a = torch.randn(HIDDEN, HIDDEN, device=device()).bfloat16()
    comm()

    def look(graph: torch.fx.Graph) -> None:
        inductor_pass()(graph)
        seen.extend(
            node.kwargs.get("prefetch")
            for node in graph.nodes
            if "all_reduce_add_rms_norm" in str(node.target)
        )

    turned_on = mock.patch("allnorm.policy._PREFETCH_TOKENS", 32)
    with turned_on, config.patch(post_grad_custom_post_pass=look):
        compiled = torch.compile(linear, fullgraph=True)
        result = compiled(*inputs, a, a)
    assert [node is not None for node in seen] == [True]
    torch.testing.assert_close(result, linear(*inputs, a, a), rtol=0.1, atol=1.0)
