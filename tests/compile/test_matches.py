"""Tests graphs that must be fused: two ranks run each graph, unfused and fused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rank_helpers import comm, on
from torch.fx import symbolic_trace

from allnorm.compile import fuse
from allnorm.testing import assert_same_bits

from .helpers import (
    EPS,
    HIDDEN,
    Inputs,
    assert_close_norm,
    check_fused,
    fused_calls,
    gemma,
    llama,
    plain,
    reduce,
    rms_norm,
    rstd,
    summed,
    table,
)

bf16 = torch.bfloat16
aten = torch.ops.aten


@dataclasses.dataclass
class Expected:
    """The expected outcome of a fusion.

    Attributes:
        numerics: the rounding mode of each site.
        inputs: the graph's inputs.
        norms: how many of the first results come from a norm; the others must be bit-identical.
        boundary: the report's text for each site's boundary.
        close: compares the normed results.
    """

    numerics: str | Sequence[str]
    inputs: Inputs = dataclasses.field(default_factory=Inputs)
    norms: int = 1
    boundary: str = ""
    close: Callable[..., None] = assert_close_norm

    def check(self, fn: Callable[..., Any], rank: int) -> None:
        """Fuses the graph of `fn` and compares its results with those of the unfused graph."""
        inputs = self.inputs.make(rank)
        options = {"norms": self.norms, "close": self.close, "communicator": comm()}
        report = check_fused(symbolic_trace(fn), inputs, self.numerics, **options)
        assert self.boundary in str(report)
        for site in report.fused:
            assert site.nodes[0].startswith("all_reduce")
            assert len(site.nodes) >= 3
            assert (site.shape, site.dtype) == (tuple(inputs[0].shape), inputs[0].dtype)
            assert (site.group, site.reason, site.boundary) == ("0", None, self.boundary)
            assert not (self.boundary and site.note), str(report)
            assert "fused" in str(site)


def rounded(z, w, dtype=bf16):
    """Computes an RMSNorm that multiplies by the weight in float32."""
    z = z.float()
    return (z * rstd(z) * w).to(dtype)


def rounded_first(z, w, dtype=bf16):
    """Computes an RMSNorm that rounds before it multiplies by the weight."""
    z = z.float()
    return ((z * rstd(z)).to(dtype) * w).to(dtype)


# ---- rounding modes -----------------------------------------------------------------------------


def weight_changed_after_the_sum(x, r, w):
    total = reduce(x) + r
    w.mul_(2)
    return llama(total, w), total


def weight_changed_before_the_multiplication(x, r, w):
    z = (reduce(x) + r).float()
    torch.relu_(w)
    return (z * rstd(z) * w).to(bf16)


def residual_changed_after_the_reduction(x, r, w):
    reduced = reduce(x)
    r.mul_(2)
    return llama(reduced + r, w)


def input_changed_after_the_reduction(x, r, w):
    reduced = reduce(x)
    x.zero_()
    return llama(reduced + r, w)


FLOAT32, FLOAT16 = Inputs(dtype=torch.float32), Inputs(dtype=torch.float16)
FLOAT32_WEIGHT = Inputs(weight_dtype=torch.float32)
FLOAT32_RESIDUAL = Inputs(residual_dtype=torch.float32)
MATCHES = {
    **table(
        Expected("transformers"),
        weight_changed_after_the_sum,
        residual_changed_after_the_reduction,
        input_changed_after_the_reduction,
        plain,
        llama_style=summed(llama),
        gemma_weight_after_rounding=summed(lambda z, w: rounded_first(z, 1 + w)),
    ),
    **table(
        Expected("rounded"),
        weight_changed_before_the_multiplication,
        float32_sum_rounded_before_the_norm=summed(
            rounded, lambda x, r: (reduce(x).float() + r.float()).to(bf16)
        ),
        functional_rms_norm=summed(lambda z, w: rms_norm(z, w, 1e-6)),
        default_eps=summed(
            lambda z, w: rms_norm(z, w, None), lambda x, r: reduce(x * 1e-3) + r * 1e-3
        ),
        gemma_style=summed(gemma),
        # The rounded `1 + w` differs from the float32 one.
        gemma_weight_rounded_to_16_bits=summed(lambda z, w: rounded(z, 1 + w)),
        without_weight=summed(lambda z, w: rounded(z, 1.0)),
    ),
    **table(
        Expected("unrounded"),
        float32_sum=lambda x, r, w: (
            rounded(z := reduce(x).float() + r.float(), w),
            z.to(bf16),
        ),
        float32_sum_that_is_not_kept=lambda x, r, w: rounded(r + reduce(x).float(), w),
    ),
    **table(
        Expected("vllm"),
        float32_sum_rounded_before_the_weight=lambda x, r, w: (
            rounded_first(z := reduce(x).to(torch.float32) + r, w),
            z.to(bf16),
        ),
    ),
    **table(
        Expected("unrounded", FLOAT32_RESIDUAL),
        float32_residual=summed(rounded),
        float32_residual_first=lambda x, r, w: (rounded(z := r + reduce(x).float(), w), z),
        float32_residual_that_is_not_kept=lambda x, r, w: rounded(reduce(x) + r, w),
    ),
    "float32_residual_and_rounded_before_the_weight": (
        summed(rounded_first),
        Expected("vllm", FLOAT32_RESIDUAL),
    ),
    "residual_converted_to_float32": (
        lambda x, r, w: (rounded(z := r.float() + reduce(x), w), z),
        Expected("unrounded"),
    ),
    "float32_norm_that_is_used": (
        lambda x, r, w: (
            ((y := (z := reduce(x).float() + r.float()) * rstd(z)) * w).to(bf16),
            y * 2,
        ),
        Expected("unrounded"),
    ),
    "float32_weight": (summed(rounded), Expected("rounded", FLOAT32_WEIGHT)),
    "float32_weight_after_rounding": (
        summed(rounded_first),
        Expected("transformers", FLOAT32_WEIGHT),
    ),
    "float32_tensors": (summed(lambda z, w: z * rstd(z) * w), Expected("rounded", FLOAT32)),
    "float16_tensors": (
        summed(lambda z, w: rounded_first(z, w, torch.float16)),
        Expected("transformers", FLOAT16),
    ),
}

# ---- forms of the same norm ---------------------------------------------------------------------


def by_root(root):
    """Returns a graph whose norm multiplies a float32 tensor z by `root(z)`."""
    return summed(lambda h, w: ((z := h.float()) * root(z) * w).to(bf16))


def queried_sizes_and_dtypes(x, r, w):
    """Queries sizes and dtypes, which torch.fx records as nodes."""
    total = reduce(x) + r
    z = total.float()
    mean = z.pow(2).sum(-1, keepdim=True) / z.shape[-1]
    return w * (z * torch.rsqrt(mean + EPS)).to(x.dtype), total


def aten_operators(x, r, w):
    total = aten.add.Tensor(reduce(x), r)
    z = torch.ops.prims.convert_element_type.default(total, torch.float32)
    mean = aten.mean.dim(aten.pow.Tensor_Scalar(z, 2), [-1], True)
    normed = aten.mul.Tensor(z, aten.rsqrt.default(aten.add.Scalar(mean, EPS)))
    scaled = aten.mul.Tensor(normed, aten._to_copy.default(w, dtype=torch.float32))
    return aten._to_copy.default(scaled, dtype=bf16), total


def in_place_inside_the_norm(x, r, w):
    total = reduce(x) + r
    z = total.float()
    mean = z.pow(2).mean(-1, keepdim=True)
    mean.add_(EPS)
    z *= torch.rsqrt(mean)
    return (z * w).to(bf16), total


def norm_in_place(x, r, w):
    total = reduce(x) + r
    total.mul_(rstd(total.float()))
    total.mul_(w)
    return total


def square_and_sum(x, r, w):
    total = torch.add(reduce(x), r)
    z = total.type(torch.float32)
    mean = torch.sum(torch.square(z), dim=[-1], keepdim=True) / HIDDEN
    return (torch.mul(z, (mean + EPS) ** -0.5) * w).to(dtype=bf16), total


def root_returned_and_a_late_weight(x, r, w):
    total = reduce(x) + r
    z = total.float()
    root = rstd(z)
    return (z * root * (w + 1)).to(bf16), total, root


def asserts_on_metadata(x, r, w):
    check = aten._assert_tensor_metadata.default
    reduced = reduce(x)
    check(reduced, None, None, bf16)
    total = reduced + r
    check(total, None, None, bf16)
    z = total.float()
    check(z, None, None, torch.float32)
    return (z * rstd(z) * (w + 1)).to(bf16), total


MATCHES |= table(
    Expected("transformers"),
    queried_sizes_and_dtypes,
    norm_in_place,
)
MATCHES |= table(
    Expected("rounded"),
    aten_operators,
    in_place_inside_the_norm,
    square_and_sum,
    root_returned_and_a_late_weight,
    asserts_on_metadata,
    reciprocal_of_the_root=by_root(
        lambda z: torch.sqrt((z**2).sum(1, True) * (1 / HIDDEN) + EPS).reciprocal()
    ),
    one_over_the_root=by_root(lambda z: 1.0 / (z.square().mean(-1, True) + EPS).sqrt()),
    root_of_a_square_of_an_absolute=by_root(
        lambda z: torch.rsqrt(z.abs().pow(2).mean(-1, keepdim=True) + EPS)
    ),
    norm_over_a_queried_size=summed(lambda z, w: F.rms_norm(z, (z.size(-1),), w)),
    norm_over_the_shape_of_the_weight=summed(lambda z, w: F.rms_norm(z, w.shape, w, 1e-6)),
    mean_without_keepdim=summed(
        lambda h, w: (
            (z := h.float())
            * torch.rsqrt(z.pow(2).mean(-1) + EPS).unsqueeze(-1)
            * w.view(1, HIDDEN)
        ).to(bf16)
    ),
)

# ---- residual -----------------------------------------------------------------------------------


def residual_added_in_place(x, r, w):
    r = r.clone()
    r += reduce(x)
    return llama(r, w), r * 2


def residual_of_the_caller_in_place(x, r, w):
    r += reduce(x)
    return llama(r, w)


def added_in_place_to_the_reduced(x, r, w):
    x = reduce(x)
    x += r
    return llama(x, w), x


def sum_changed_afterwards(x, r, w):
    total = reduce(x) + r
    normed = llama(total, w)
    total.mul_(2)
    return normed, total, total + 1


def sum_changed_through_a_view_after_its_last_use(x, r, w):
    total = reduce(x) + r
    z = total.float()
    total[0].add_(1)
    return (z * rstd(z) * w).to(bf16), total


def two_sums_of_which_one_changes(x, r, w):
    """Computes the sum twice and changes one of the results: each result has its own memory."""
    reduced = reduce(x)
    one, two = reduced + r, reduced + r
    normed = llama(one, w)
    one.add_(1)
    return normed, one, two


def sum_normed_twice(x, r, w):
    total = reduce(x) + r
    return llama(total, w), gemma(total, w), total.float()


def normed_twice_with_two_weights(x, r, w):
    total = reduce(x) + r
    z = total.float()
    normed = (z * rstd(z)).to(bf16)
    return w * normed, (w * 2) * normed, total


def sum_overwritten_by_the_multiplication(x, r, w):
    total = reduce(x) + r
    total.mul_(rstd(total.float()))
    return w * total, total


def copies_of_the_sum(x, r, w):
    total = reduce(x) + r
    copy = total.clone()
    normed = llama(total, w)
    copy.add_(1)
    return normed, total, copy


def sum_in_place_and_a_late_weight(x, r, w):
    r = torch.relu(r)
    r.add_(reduce(x))
    z = r.float()
    return (z * rstd(z) * (w + 1)).to(bf16), r


def operators_that_return_their_input(x, r, w):
    """Calls `type_as` with the same dtype, and dropout with p=0."""
    total = reduce(x) + r
    normed = llama(total, w)
    same = F.dropout(total.type_as(normed), 0.0)
    total.mul_(2)
    return normed, total, same + 1


def three_layers(x, r, w):
    for _ in range(3):
        r = r + reduce(x)
        x = torch.relu(llama(r, w))
    return x, r


def sum_as_the_next_residual_in_place(x, r, w):
    r = r.clone()
    r += reduce(x)
    first = llama(r, w)
    r += reduce(x * 2)
    return llama(r, w), first, r


MATCHES |= table(
    Expected("transformers"),
    residual_added_in_place,
    residual_of_the_caller_in_place,
    added_in_place_to_the_reduced,
    sum_changed_afterwards,
    two_sums_of_which_one_changes,
    copies_of_the_sum,
    operators_that_return_their_input,
    without_residual=lambda x, r, w: (llama(reduced := reduce(x), w), reduced + r),
    without_residual_and_not_used_later=lambda x, r, w: llama(reduce(x), w),
    operands_in_the_other_order=summed(
        lambda h, w: (
            (torch.rsqrt(EPS + ((z := h.float()) * z).mean(dim=-1, keepdim=True)) * z).to(bf16) * w
        ),
        lambda x, r: r + reduce(x),
    ),
    x_is_the_residual=summed(llama, lambda x, r: reduce(x) + x),
    zeros_as_the_residual=summed(llama, lambda x, r: reduce(x) + torch.zeros_like(r)),
    residual_that_is_computed_late=summed(llama, lambda x, r: reduce(x) + torch.relu(r) * 2),
    dropout_that_is_off=summed(llama, lambda x, r: F.dropout(reduce(x), 0.1, False) + r),
    dropout_of_nothing=summed(llama, lambda x, r: F.dropout(reduce(x), 0.0, True) + r),
    shape_of_the_reduced=summed(llama, lambda x, r: (d := reduce(x)).view(-1, d.shape[-1]) + r),
    strided_input=summed(
        llama,
        lambda x, r: (
            reduce(x.t().contiguous().t()).contiguous() + r.t().contiguous().t().contiguous()
        ),
    ),
)
MATCHES |= table(
    Expected("rounded"),
    sum_changed_through_a_view_after_its_last_use,
    sum_in_place_and_a_late_weight,
)
MATCHES |= table(
    Expected("transformers", norms=2),
    sum_normed_twice,
    normed_twice_with_two_weights,
    sum_overwritten_by_the_multiplication,
)
MATCHES |= table(Expected(["transformers"] * 3), three_layers)
MATCHES |= table(Expected(["transformers"] * 2, norms=2), sum_as_the_next_residual_in_place)

# ---- views --------------------------------------------------------------------------------------

IN_3D = Inputs(shape=(4, 6, HIDDEN), residual_shape=(24, HIDDEN))


def views_everywhere(x, r, w):
    total = r + aten.view.default(reduce(x), [24, HIDDEN])
    normed = llama(total.unsqueeze(0), w)
    return normed.reshape(4, 6, HIDDEN), total.view(6, 4, HIDDEN)


def shape_changed_in_place(x, r, w):
    total = reduce(x) + r
    normed = llama(total, w)
    total.unsqueeze_(0)
    return normed, total


MATCHES |= table(
    Expected("transformers", IN_3D),
    views_everywhere,
    view_before_the_norm=summed(
        lambda total, w: llama(total.flatten(0, 1), w),
        lambda x, r: reduce(x) + r.view(4, 6, HIDDEN),
    ),
    view_before_the_add=summed(llama, lambda x, r: reduce(x).view(-1, HIDDEN) + r),
    # The strided rows are copied before the fused call.
    strided_rows_viewed=summed(
        llama,
        lambda x, r: reduce(torch.cat([x, x], -1)[..., :HIDDEN]).reshape(24, HIDDEN) + r,
    ),
)
MATCHES |= table(Expected("transformers"), shape_changed_in_place)
for name, inputs in {
    "one_dimension": Inputs(shape=(HIDDEN,)),
    "no_tokens": Inputs(shape=(0, HIDDEN)),
    "one_more_dimension_in_the_residual": Inputs(residual_shape=(1, 24, HIDDEN)),
    "one_more_dimension_in_the_reduced": Inputs(shape=(1, 24, HIDDEN), residual_shape=(24, HIDDEN)),
}.items():
    MATCHES[name] = (summed(llama), Expected("transformers", inputs))


@pytest.mark.sampled(2)
@on(cpu=(2,))
@pytest.mark.parametrize("name", MATCHES)
def test_match(rank: int, world_size: int, name: str) -> None:
    fn, expected = MATCHES[name]
    expected.check(fn, rank)


@on(cpu=(2,))
def test_sum_of_two_reductions(rank: int, world_size: int) -> None:
    """Tests that one of two added reductions is fused, with the other as its residual."""
    inputs = Inputs().make(rank)
    graph = symbolic_trace(summed(llama, lambda x, r: reduce(x) + reduce(r)))
    want = graph(*inputs)
    report = fuse(graph, inputs, comm())
    graph.graph.lint()
    assert [site.numerics for site in report.sites] == ["transformers", None]
    assert "it is the residual of all_reduce_default" in str(report.missed[0].reason)
    (call,) = (n for n in graph.graph.nodes if n.name in fused_calls(graph))
    assert "wait_tensor" in str(call.args[1])
    assert_same_bits(graph(*inputs)[1], want[1], "sum")
