"""Tests graphs that quantize the normed tensor to FP8, which fuse only if bit-identical."""

from __future__ import annotations

import pytest
import torch
from rank_helpers import comm, on
from torch.fx import symbolic_trace

import allnorm
from allnorm import reference
from allnorm.compile import fuse
from allnorm.testing import assert_same_bits, ulp_distance

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
    rstd,
    table,
)


def quantizing(quantize, norm=llama, all_reduce=reduce):
    """Returns a graph that quantizes the normed tensor with `quantize(y, w)`; the sum is last."""

    def graph(x, r, w):
        total = all_reduce(x) + r
        return *quantize(norm(total, w), w), total

    return graph


def amax(y):
    return y.float().abs().amax(-1, keepdim=True)


def scale_of(y):
    return amax(y).clamp(min=1e-10) / 448.0


def by_scale(scale_of):
    """Returns a graph whose quantization divides by `scale_of(y)`; it does not return the scale."""
    return quantizing(lambda y, w: (cast(y.float() / scale_of(y)),))


def per_token(y, w):
    scale = scale_of(y)
    return cast(y.float() / scale), scale


def per_group(y, w):
    groups = y.float().view(-1, HIDDEN // 64, 64)
    scale = scale_of(groups)
    return cast(groups / scale).view(-1, HIDDEN), scale.squeeze(-1)


def per_tensor(y, w):
    return cast(y.float() / torch.sigmoid(w[:1].float())), w


def in_16_bits_where_that_is_exact(y, w):
    greatest = y.abs().max(dim=-1, keepdim=True)[0]
    scale = greatest.float().clamp_min(1e-10).div(448)
    return torch.clamp(y / scale, min=-448, max=448).to(FP8), scale


def by_other_operators(y, w):
    y = y.float()
    scale = y.abs().amax(-1).clamp_min(1e-10).unsqueeze(-1) / 448.0
    q = torch.ops.aten.clamp_max.default(torch.ops.aten.clamp_min.default(y / scale, -448), 448)
    return q.to(FP8), scale.squeeze(-1)


def per_group_of_the_16_bit_rows(y, w):
    groups = y.reshape(24, -1, 128)
    scale = scale_of(groups)
    return cast(groups / scale), scale


def groups_of_a_different_size(y, w):
    groups = y.float().view(24, -1, 8)
    return (cast(groups / scale_of(groups)).view(24, HIDDEN),)


def scale_of_the_unrounded_norm(x, r, w):
    z = (reduce(x) + r).float()
    normed = z * rstd(z)
    y = w * normed.to(torch.bfloat16)
    return cast(y.float() / scale_of(w.float() * normed))


# Maps a name to a graph, and to the expected quantization and rounding mode of its site.
QUANTIZED = {
    **table(
        ("per_token", "transformers"),
        per_token=quantizing(per_token),
        without_clamp=quantizing(
            lambda y, w: ((y.float() / (scale := scale_of(y))).to(FP8), scale)
        ),
        in_16_bits_where_that_is_exact=quantizing(in_16_bits_where_that_is_exact),
        by_other_operators=quantizing(by_other_operators),
    ),
    **table(
        ("per_token", "rounded"),
        with_the_16_bit_result=quantizing(lambda y, w: (*per_token(y, w), y), gemma),
    ),
    **table(("per_group 64", "transformers"), per_group=quantizing(per_group)),
    **table(
        ("per_group 128", "transformers"),
        per_group_of_the_16_bit_rows=quantizing(per_group_of_the_16_bit_rows),
    ),
    **table(("per_tensor", "transformers"), per_tensor=quantizing(per_tensor)),
    # These quantizations round differently, so they stay in the graph after the fused 16-bit call.
    **table(
        (None, "transformers"),
        scale_of_the_unrounded_norm,
        by_the_reciprocal=quantizing(lambda y, w: (cast(y.float() * scale_of(y).reciprocal()),)),
        least_scale_instead_of_least_amax=by_scale(lambda y: (amax(y) / 448.0).clamp(min=1e-10)),
        without_least=by_scale(lambda y: amax(y) / 448.0),
        different_least=by_scale(lambda y: amax(y).clamp(min=1e-12) / 448.0),
        different_range=quantizing(
            lambda y, w: (
                (y.float() / (amax(y).clamp(min=1e-10) / 240.0)).clamp(-240, 240).to(FP8),
            )
        ),
        static_without_clamp=quantizing(
            lambda y, w: ((y.float() / (w[:1].float().abs() + 1)).to(FP8),)
        ),
        groups_of_a_different_size=quantizing(groups_of_a_different_size),
    ),
}


@on(cpu=(2,))
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized(rank: int, world_size: int, name: str) -> None:
    fn, (quant, numerics) = QUANTIZED[name]
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
        if mine.dtype == FP8:  # the norm's last bit can change the rounding to FP8
            differs = (mine.float() != theirs.float()).float().mean()
            assert float(differs) < 0.005, f"result {i}"
        elif i == len(want) - 1 and len(want) > 1 and mine.dtype == torch.bfloat16:
            assert_same_bits(mine, theirs, f"result {i}")
        else:
            assert int(ulp_distance(mine, theirs).max()) <= 1 << 17, f"result {i}"


@on(cpu=(1, 3))
def test_bits(rank: int, world_size: int) -> None:
    """Tests that each fused quantization is bit-identical to the reference."""

    def all_reduce(x):
        return torch.ops.allnorm.all_reduce(x, comm().name)

    xs = [Inputs().make(r)[0] for r in range(world_size)]
    x, residual, w = Inputs().make(rank)
    static = allnorm.Fp8PerTensor(torch.sigmoid(w[:1].float()))
    for quantize, spec in (
        (per_token, allnorm.Fp8PerToken()),
        (per_group, allnorm.Fp8PerGroup(64)),
        (per_tensor, static),
    ):
        graph = symbolic_trace(quantizing(quantize, all_reduce=all_reduce))
        assert fuse(graph, [x, residual, w]).fused[0].quant
        quantized, scale, total = graph(x, residual, w)
        want = reference.all_reduce_add_rms_norm_quant(
            xs, residual, w, 1e-5, spec, numerics="transformers", weight_bias=-0.0
        )
        assert_same_bits(quantized, want.quantized, "quantized")
        assert_same_bits(total, want.residual, "residual")
        if spec is not static:
            assert_same_bits(scale, want.scale, "scale")


def of_constants(y, w):
    y = y.float()
    scale = torch.maximum(y.abs().amax(-1, True), torch.tensor(1e-10)) / torch.finfo(FP8).max
    return cast(y / scale), scale


@on(cpu=(1,))
def test_dynamo(rank: int, world_size: int) -> None:
    """Tests graphs captured by Dynamo with a symbolic number of tokens."""
    inputs = Inputs().make(rank)
    for tensor in inputs[:2]:
        torch._dynamo.mark_dynamic(tensor, 0)
    with torch.no_grad():
        for quantize, quant in (
            (per_token, "per_token"),
            (per_group, "per_group 64"),
            (of_constants, "per_token"),
        ):
            graph = captured(quantizing(quantize), inputs)
            report = fuse(graph, None, comm())
            graph.graph.lint()
            assert report.sites[0].quant == quant, str(report)
