"""Tests hand-made graphs that must be fused: two ranks run each, unfused and fused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rank_helpers import comm, on
from torch.fx import symbolic_trace

from allnorm.compile import fuse
from allnorm.testing import RankPool, assert_same_bits

from .helpers import (
    EPS,
    HIDDEN,
    Inputs,
    check_fused,
    fused_calls,
    gemma,
    llama,
    reduce,
    rstd,
)

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
    """Rounds `1 + w` to bfloat16, which gives a different weight than float32."""
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


@match("transformers")
def weight_changed_after_the_sum(x, residual, w):
    residual = reduce(x) + residual
    w.mul_(2)
    return llama(residual, w), residual


@match("rounded")
def weight_changed_before_the_product(x, residual, w):
    z = (reduce(x) + residual).float()
    torch.relu_(w)
    return (z * rstd(z) * w).to(torch.bfloat16)


@match("transformers")
def residual_changed_after_the_reduction(x, residual, w):
    reduced = reduce(x)
    residual.mul_(2)
    return llama(reduced + residual, w)


@match("transformers")
def input_changed_after_the_reduction(x, residual, w):
    reduced = reduce(x)
    x.zero_()
    return llama(reduced + residual, w)


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
    """Queries sizes and dtypes, which torch.fx records as nodes."""
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


@match("rounded")
def sum_changed_behind_its_last_use_through_a_view(x, residual, w):
    total = reduce(x) + residual
    z = total.float()
    total[0].add_(1)
    return (z * rstd(z) * w).to(bf16), total


@match("transformers")
def two_sums_of_which_one_changes(x, residual, w):
    """Computes the sum twice and changes one copy: each result keeps its own memory."""
    reduced = reduce(x)
    one, two = reduced + residual, reduced + residual
    normed = llama(one, w)
    one.add_(1)
    return normed, one, two


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
    """Tests a sum of two reductions: one is fused, and the other is its residual."""

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
    """Views strided rows: the call needs the view before the reduction, where it takes a copy."""
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
