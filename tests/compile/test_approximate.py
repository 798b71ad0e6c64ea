"""Tests common kernels' quantizations: fused only if allowed, with bounded differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_helpers import comm, on
from torch import Tensor
from torch.fx import symbolic_trace

import allnorm
from allnorm import reference
from allnorm.compile import fuse
from allnorm.testing import assert_same_bits

from .helpers import (
    FP8,
    HIDDEN,
    Inputs,
    captured,
    cast,
    fused_calls,
    gemma,
    nodes_calling,
    reduce,
    table,
)

LEAST_SCALE = 1 / (448.0 * 512.0)
# 41 * fl(1/41) is not 1: some quotients are ties where products with the reciprocal are not.
STATIC = 41 / 2048


def over_rows(y: Any) -> Any:
    return y.abs().max(dim=-1)[0].unsqueeze(-1).to(torch.float32)


# ---- quantizations: functions of (y, scale) that return (quantized, scale) -----------------------


def static(y, scale):
    return cast(y.to(torch.float32) * scale.to(torch.float32).reciprocal()), scale


def static_by_one_over_the_scale(y, scale):
    return cast(y.float() * (1.0 / scale)), scale


def by_token(scale_of, quotient=lambda y, scale: y.float() * scale.reciprocal(), store=cast):
    """Returns a per-token quantization; each row's scale is `scale_of(amax)`."""

    def quantize(y, _):
        scale = scale_of(over_rows(y))
        return store(quotient(y, scale)), scale

    return quantize


def token_by_amax(y, _):
    scale = (y.abs().amax(dim=-1).unsqueeze(-1).float() / 448.0).clamp(min=LEAST_SCALE)
    return cast(scale.reciprocal() * y.float()), scale


def group(y, _):
    groups = y.view(-1, HIDDEN // 128, 128)
    greatest = groups.abs().max(dim=-1, keepdim=True)[0].float()
    scale = (greatest / 448.0).clamp(min=LEAST_SCALE)
    return cast(groups / scale).view(-1, HIDDEN), scale.squeeze(-1).reshape(24, HIDDEN // 128)


token = by_token(lambda amax: (amax / 448.0).clamp(min=LEAST_SCALE))
TAKEN = {
    **table("per_tensor", static, static_by_one_over_the_scale),
    **table(
        "per_token",
        token_by_amax,
        token=token,
        token_with_least_amax=by_token(lambda amax: amax.clamp(min=1e-10) / 448.0),
        token_divided=by_token(
            lambda amax: torch.clamp_min(amax / 448.0, LEAST_SCALE), lambda y, scale: y / scale
        ),
        token_with_a_different_least_amax=by_token(
            lambda amax: amax.clamp(min=1 / 512) / 448.0, lambda y, scale: y.float() / scale
        ),
        token_without_clamp=by_token(
            lambda amax: (amax / 448.0).clamp(min=1e-10), store=lambda quotient: quotient.to(FP8)
        ),
    ),
    **table("per_group 128", group),
}


def one_scale_for_all(y, _):
    scale = (y.abs().max().unsqueeze(-1).float() / 448.0).clamp(min=LEAST_SCALE)
    return cast(y.float() * scale.reciprocal()), scale


# Quantizations that are never fused.
LEFT = {
    "least_scale_too_large": by_token(lambda amax: (amax / 448.0).clamp(min=LEAST_SCALE * 1.001)),
    "least_amax_too_large": by_token(lambda amax: amax.clamp(min=1 / 511) / 448.0),
    "no_least": by_token(lambda amax: amax / 448.0),
    "negative_least": by_token(lambda amax: (amax / 448.0).clamp(min=-1.0)),
    "bounded_above": by_token(lambda amax: (amax / 448.0).clamp(min=LEAST_SCALE, max=1.0)),
    "by_the_reciprocal_of_448": by_token(lambda amax: (amax * (1 / 448.0)).clamp(min=LEAST_SCALE)),
    "reciprocal_as_an_input": lambda y, scale: (cast(y.float() * scale), scale),
    "reciprocal_in_16_bits": by_token(
        lambda amax: (amax / 448.0).clamp(min=LEAST_SCALE),
        lambda y, scale: y.float() * scale.reciprocal().half(),
    ),
    "static_without_clamp": lambda y, scale: ((y.float() * scale.reciprocal()).to(FP8), scale),
    "one_scale_for_all": one_scale_for_all,
}


# ---- the graph -----------------------------------------------------------------------------------


def block(form: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a graph that reduces, norms and quantizes; it also returns the normed tensor."""

    def run(x, residual, w, scale):
        total = reduce(x) + residual
        y = gemma(total, w)
        return *form(y, scale), y, total

    return run


def arguments(rank: int, scale_shape: tuple[int, ...] = (1,)) -> list[Tensor]:
    """Returns the graph's inputs. Row magnitudes vary, so eps makes some normed rows small."""
    x, residual, w = Inputs(torch.float16).make(rank)
    sizes = torch.exp2(-torch.arange(24.0)).unsqueeze(-1)
    sizes[-1] = 0
    scaled = [(rows * sizes).half() for rows in (x, residual)]
    return [*scaled, w, torch.full(scale_shape, STATIC)]


def fused(form: Callable[..., Any], inputs: list[Tensor], quant: str | None) -> Any:
    """Returns the fused graph after checking its report."""
    graph = symbolic_trace(block(form))
    report = fuse(graph, inputs, comm(), approximate_quant=True)
    graph.graph.lint()
    (site,) = report.sites
    assert (site.numerics, site.quant) == ("rounded", quant), str(report)
    assert len(fused_calls(graph)) == 1
    assert bool(site.note) == (quant is None)
    if quant is not None:
        assert nodes_calling(graph, "norm_quant")
        assert not nodes_calling(graph, "amax", "clamp", "max", "abs", "reciprocal", "truediv")
    return graph


@on(cpu=(2,))
@pytest.mark.parametrize("name", TAKEN)
def test_taken(rank: int, world_size: int, name: str) -> None:
    """Compares with the reference bit for bit, and with the unfused quantization within a bound."""
    form, quant = TAKEN[name]
    inputs = arguments(rank)
    got, scale, y, total = fused(form, inputs, quant)(*inputs)
    xs = [arguments(peer)[0] for peer in range(world_size)]
    spec = {
        "per_tensor": allnorm.Fp8PerTensor(torch.tensor([STATIC])),
        "per_token": allnorm.Fp8PerToken(),
        "per_group 128": allnorm.Fp8PerGroup(128),
    }[quant]
    want = reference.all_reduce_add_rms_norm_quant(xs, *inputs[1:3], 1e-5, spec, weight_bias=1.0)
    assert_same_bits(got, want.quantized, "quantized")
    assert_same_bits(total, want.residual, "residual")
    written, written_scale = form(y, inputs[3])
    assert (got.shape, got.dtype) == (written.shape, written.dtype)
    assert (scale.shape, scale.dtype) == (written_scale.shape, written_scale.dtype)
    if quant != "per_tensor":
        assert_same_bits(scale.flatten(), want.scale.flatten(), "scale")
    # The scales of large rows are bit-identical.
    rows = y.float().view(-1, 128 if quant == "per_group 128" else HIDDEN)
    large = rows.abs().amax(-1) >= 1 / 512
    if quant == "per_tensor":
        large[:] = True
    else:
        assert 0 < int(large.sum()) < large.numel(), "small rows or large rows are missing"
        assert_same_bits(scale.flatten()[large], written_scale.flatten()[large], "large scales")
        assert bool((scale.flatten() <= written_scale.flatten()).all())
    # With the same scale, each byte is the quotient or an adjacent float32 number, cast to FP8.
    column = scale.reshape(-1, 1) if quant != "per_tensor" else scale.reshape(1, 1)
    quotient = rows / column
    infinity = torch.tensor(torch.inf)
    near = [quotient, *(torch.nextafter(quotient, to) for to in (infinity, -infinity))]
    bytes_of = [cast(each).view(torch.uint8) for each in near]
    theirs = written.view(rows.shape).view(torch.uint8)
    close = torch.stack([theirs == each for each in bytes_of]).any(0)
    assert bool(close[large].all())
    if name == "static" and rank == 0:
        assert (theirs != bytes_of[0])[large].any(), (
            "no quotient is a tie, so the bound is not tested"
        )


@on(cpu=(1,))
@pytest.mark.parametrize("name", TAKEN)
def test_not_by_default(rank: int, world_size: int, name: str) -> None:
    graph = symbolic_trace(block(TAKEN[name][0]))
    (site,) = fuse(graph, arguments(rank), comm()).sites
    assert site.fused
    assert nodes_calling(graph, "clamp", "to")
    assert site.quant is None
    assert "approximate_quant=True" in site.note


@on(cpu=(1,))
@pytest.mark.parametrize("name", LEFT)
def test_left(rank: int, world_size: int, name: str) -> None:
    inputs = arguments(rank)
    graph = fused(LEFT[name], inputs, None)
    got, scale, y, _ = graph(*inputs)
    for mine, theirs in zip((got, scale), LEFT[name](y, inputs[3]), strict=True):
        assert_same_bits(mine, theirs, name)


@on(cpu=(1,))
def test_static_shapes(rank: int, world_size: int) -> None:
    """Tests static scales of different shapes, and one scale that two sites share."""
    want = None
    for shape in ((1,), (), (1, 1)):
        inputs = arguments(rank, shape)
        got, *_ = fused(static, inputs, "per_tensor")(*inputs)
        want = got if want is None else want
        assert_same_bits(got, want, f"scale of shape {shape}")

    def twice(x, residual, w, scale):
        inverse = scale.reciprocal()
        first = reduce(x) + residual
        q = cast(gemma(first, w).float() * inverse)
        second = reduce(q.to(torch.float16)) + first
        return q, cast(gemma(second, w).float() * inverse), second

    graph = symbolic_trace(twice)
    inputs = arguments(rank)
    report = fuse(graph, inputs, comm(), approximate_quant=True)
    assert [site.quant for site in report.sites] == ["per_tensor"] * 2, str(report)
    assert not nodes_calling(graph, "reciprocal")
    assert_same_bits(graph(*inputs)[0], want, "first of two")


@on(cpu=(1,))
def test_dynamo(rank: int, world_size: int) -> None:
    """Tests graphs captured by Dynamo with a symbolic number of tokens."""
    inputs = arguments(rank)
    for tensor in inputs[:2]:
        torch._dynamo.mark_dynamic(tensor, 0)
    with torch.no_grad():
        for form, quant in ((static, "per_tensor"), (token, "per_token")):
            graph = captured(block(form), inputs)
            report = fuse(graph, None, comm(), approximate_quant=True)
            graph.graph.lint()
            assert report.sites[0].quant == quant, str(report)
