"""Tests graphs that quantize the normed tensor to FP8: fused only if bit-identical."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_helpers import comm, on
from torch.fx import symbolic_trace

import allnorm
from allnorm import reference
from allnorm.compile import fuse
from allnorm.testing import RankPool, assert_same_bits, ulp_distance

from .helpers import (
    FP8,
    HIDDEN,
    Inputs,
    captured,
    cast,
    fused_calls,
    gemma,
    llama,
    nodes_calling,
    reduce,
)

QUANTIZED: dict[str, tuple[Callable[..., Any], str | None, str]] = {}


def quantized(quant: str | None, numerics: str = "transformers") -> Any:
    """Marks a function of (x, residual, weight) with the quantization that must be fused."""

    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        QUANTIZED[fn.__name__] = (fn, quant, numerics)
        return fn

    return add


def scale_of(y: Any) -> Any:
    return y.float().abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448.0


@quantized("per_token")
def per_token(x, residual, w):
    residual = reduce(x) + residual
    y = llama(residual, w)
    scale = scale_of(y)
    return cast(y.float() / scale), scale, residual


@quantized("per_token")
def per_token_in_16_bits_where_that_is_exact(x, residual, w):
    residual = reduce(x) + residual
    y = llama(residual, w)
    greatest = y.abs().max(dim=-1, keepdim=True)[0]
    scale = greatest.float().clamp_min(1e-10).div(448)
    return torch.clamp(y / scale, min=-448, max=448).to(FP8), scale, residual


@quantized("per_token")
def per_token_by_other_operators(x, residual, w):
    residual = reduce(x) + residual
    y = llama(residual, w).float()
    scale = y.abs().amax(-1).clamp_min(1e-10).unsqueeze(-1) / 448.0
    q = torch.ops.aten.clamp_max.default(torch.ops.aten.clamp_min.default(y / scale, -448), 448)
    return q.to(FP8), scale.squeeze(-1), residual


@quantized("per_token")
def per_token_without_clamp(x, residual, w):
    y = llama(reduce(x) + residual, w)
    scale = scale_of(y)
    return (y.float() / scale).to(FP8), scale


@quantized("per_token", "rounded")
def per_token_beside_the_16_bit_result(x, residual, w):
    residual = reduce(x) + residual
    y = gemma(residual, w)
    scale = scale_of(y)
    return cast(y.float() / scale), scale, y, residual


@quantized("per_group 64")
def per_group(x, residual, w):
    residual = reduce(x) + residual
    groups = llama(residual, w).float().view(-1, HIDDEN // 64, 64)
    scale = scale_of(groups)
    return cast(groups / scale).view(-1, HIDDEN), scale.squeeze(-1), residual


@quantized("per_group 128")
def per_group_of_the_16_bit_rows(x, residual, w):
    residual = reduce(x) + residual
    groups = llama(residual, w).reshape(24, -1, 128)
    scale = scale_of(groups)
    return cast(groups / scale), scale, residual


@quantized("per_tensor")
def per_tensor(x, residual, w):
    residual = reduce(x) + residual
    y = llama(residual, w)
    scale = torch.sigmoid(w[:1].float())
    return cast(y.float() / scale), residual


# Quantizations that round differently stay in the graph, after the fused 16-bit call.


@quantized(None)
def by_the_reciprocal(x, residual, w):
    y = llama(reduce(x) + residual, w)
    return cast(y.float() * scale_of(y).reciprocal())


@quantized(None)
def least_scale_instead_of_least_amax(x, residual, w):
    y = llama(reduce(x) + residual, w)
    scale = (y.float().abs().amax(-1, keepdim=True) / 448.0).clamp(min=1e-10)
    return cast(y.float() / scale)


@quantized(None)
def without_least(x, residual, w):
    y = llama(reduce(x) + residual, w)
    return cast(y.float() / (y.float().abs().amax(-1, keepdim=True) / 448.0))


@quantized(None)
def another_least(x, residual, w):
    y = llama(reduce(x) + residual, w)
    return cast(y.float() / (y.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448.0))


@quantized(None)
def another_range(x, residual, w):
    y = llama(reduce(x) + residual, w)
    scale = y.float().abs().amax(-1, keepdim=True).clamp(min=1e-10) / 240.0
    return (y.float() / scale).clamp(-240, 240).to(FP8)


@quantized(None)
def static_without_clamp(x, residual, w):
    y = llama(reduce(x) + residual, w)
    return (y.float() / (w[:1].float().abs() + 1)).to(FP8)


@quantized(None)
def groups_of_another_size(x, residual, w):
    groups = llama(reduce(x) + residual, w).float().view(24, -1, 8)
    return cast(groups / scale_of(groups)).view(24, HIDDEN)


@quantized(None)
def scale_of_the_unrounded_norm(x, residual, w):
    z = (reduce(x) + residual).float()
    normed = z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + 1e-5)
    y = w * normed.to(torch.bfloat16)
    return cast(y.float() / scale_of(w.float() * normed))


def run(rank: int, world_size: int, name: str) -> None:
    fn, quant, numerics = QUANTIZED[name]
    inputs = Inputs().make(rank)
    graph = symbolic_trace(fn)
    with torch.no_grad():
        want = graph(*inputs)
        report = fuse(graph, inputs, comm())
        graph.graph.lint()
        got = graph(*inputs)
    assert len(report.sites) == len(fused_calls(graph)) == 1
    (site,) = report.sites
    assert (site.numerics, site.quant) == (numerics, quant), str(report)
    if quant is None:
        assert "quantization" in site.note
        assert site.note in str(report)
        assert not nodes_calling(graph, "norm_quant")
    else:
        assert not site.note
        assert quant in str(report)
        assert nodes_calling(graph, "norm_quant")
        assert not nodes_calling(graph, "amax", "clamp", "max", "abs")
    got, want = (r if isinstance(r, tuple) else (r,) for r in (got, want))
    for i, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        if mine.dtype == FP8:  # the norm's last bit may cross a rounding boundary
            differs = (mine.float() != theirs.float()).float().mean()
            assert float(differs) < 0.005, f"result {i}"
        elif i == len(want) - 1 and len(want) > 1 and mine.dtype == torch.bfloat16:
            assert_same_bits(mine, theirs, f"result {i}")
        else:
            assert int(ulp_distance(mine, theirs).max()) <= 1 << 17, f"result {i}"


@on(cpu=(2,))
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized(pool: RankPool, name: str) -> None:
    pool.run(run, name)


@on(cpu=(1, 3))
def test_bits(rank: int, world_size: int) -> None:
    """Tests that each fused quantization has the bytes of the reference."""
    c = comm()
    xs = [Inputs().make(r)[0] for r in range(world_size)]
    x, residual, w = Inputs().make(rank)

    def block(quantize: Callable[..., Any]) -> Callable[..., Any]:
        def run(x, residual, w):
            residual = torch.ops.allnorm.all_reduce(x, c.name) + residual
            return *quantize(llama(residual, w), w), residual

        return run

    def token(y, w):
        scale = scale_of(y)
        return cast(y.float() / scale), scale

    def group(y, w):
        groups = y.view(24, -1, 64).float()
        scale = scale_of(groups)
        return cast(groups / scale).view(24, -1), scale.view(24, -1)

    def tensor(y, w):
        return cast(y.float() / w[:1].float().abs()), w

    static = allnorm.Fp8PerTensor(w[:1].float().abs())
    for quantize, spec in (
        (token, allnorm.Fp8PerToken()),
        (group, allnorm.Fp8PerGroup(64)),
        (tensor, static),
    ):
        graph = symbolic_trace(block(quantize))
        assert fuse(graph, [x, residual, w]).fused[0].quant
        quantized, scale, total = graph(x, residual, w)
        want = reference.all_reduce_add_rms_norm_quant(
            xs, residual, w, 1e-5, spec, numerics="transformers", weight_bias=-0.0
        )
        assert_same_bits(quantized, want.quantized, "quantized")
        assert_same_bits(total, want.residual, "residual")
        if spec is not static:
            assert_same_bits(scale, want.scale, "scale")


@on(cpu=(1,))
def test_dynamo(rank: int, world_size: int) -> None:
    """Tests graphs of Dynamo with a symbolic number of tokens."""
    inputs = Inputs().make(rank)
    for tensor in inputs[:2]:
        torch._dynamo.mark_dynamic(tensor, 0)

    def constants(x, residual, w):
        residual = reduce(x) + residual
        y = llama(residual, w).float()
        scale = torch.maximum(y.abs().amax(-1, True), torch.tensor(1e-10)) / torch.finfo(FP8).max
        return cast(y / scale), scale, residual

    with torch.no_grad():
        for fn, quant in (
            (per_token, "per_token"),
            (per_group, "per_group 64"),
            (constants, "per_token"),
        ):
            graph = captured(fn, inputs)
            report = fuse(graph, None, comm())
            graph.graph.lint()
            assert report.sites[0].quant == quant, str(report)
