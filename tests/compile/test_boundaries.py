"""Tests graphs with norms before the residual add, scaled sums, or no second norm."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from rank_helpers import comm, on
from torch.fx import symbolic_trace

from allnorm.compile import fuse

from .helpers import (
    HIDDEN,
    Inputs,
    assert_close_sandwich,
    check_fused,
    gemma,
    llama,
    reduce,
    rms_norm,
    rstd,
)
from .test_matches import (
    FLOAT16,
    FLOAT32,
    FLOAT32_WEIGHT,
    Expected,
    rounded,
    rounded_first,
)

bf16 = torch.bfloat16
expect = functools.partial(Expected, close=assert_close_sandwich)
post_norm = functools.partial(expect, boundary="post norm", norms=2)


def sandwich(post, norm):
    """Returns a graph with `post` before the residual add and `norm` after it."""

    def graph(x, r, w):
        total = post(reduce(x), w) + r
        return norm(total, w), total

    return graph


def scaled(norm, scale):
    """Returns a graph that adds `scale(reduced)` to the residual and norms the sum."""

    def graph(x, r, w):
        total = r + scale(reduce(x))
        return norm(total, w), total

    return graph


def half(norm):
    return lambda z, w: norm(z, w * 0.5)


def in_dtype(dtype, gain=lambda w: w):
    return lambda z, w: rounded(z, gain(w), dtype)


def without_weight(z, w):
    return rms_norm(z, None)


# ---- two norms ----------------------------------------------------------------------------------


def float32_sum(x, r, w):
    z = gemma(reduce(x), w).float() + r.float()
    return (z * rstd(z) * w).to(bf16), z.to(bf16)


def float32_sum_rounded_before_weights(x, r, w):
    z = llama(reduce(x), w).float() + r
    return (z * rstd(z)).to(bf16) * w, z.to(bf16)


def viewed_before_the_residual(x, r, w):
    total = llama(reduce(x), w).view(24, HIDDEN) + r
    return llama(total, w).view(4, 6, HIDDEN), total


def in_place(x, r, w):
    x = reduce(x)
    x.copy_(gemma(x, w))
    x += r
    return gemma(x, w), x


def sum_normed_twice(x, r, w):
    total = llama(reduce(x), w) + r
    return llama(total, w), llama(total, w * 2), total


def layers(x, r, w):
    for _ in range(3):
        r = r + gemma(reduce(x), w)
        x = torch.relu(gemma(r, w))
    return x, r


def norm_of_the_norm(x, r, w):
    normed = llama(reduce(x), w)
    return llama(normed, w * 2), normed


BOUNDARIES = {
    "norm_of_the_norm": (norm_of_the_norm, post_norm("transformers")),
    "llama_sandwich": (
        sandwich(lambda z, w: llama(z, w, 1e-6), half(llama)),
        post_norm("transformers"),
    ),
    "gemma_sandwich": (
        sandwich(gemma, half(gemma)),
        post_norm("rounded", Inputs(shape=(7, 2304))),
    ),
    "post_norm_without_weight": (sandwich(without_weight, llama), post_norm("transformers")),
    "second_norm_without_weight": (sandwich(llama, without_weight), post_norm("transformers")),
    "both_without_weight": (sandwich(without_weight, without_weight), post_norm("rounded")),
    "in_place": (in_place, post_norm("rounded")),
    "float32_sum": (float32_sum, post_norm("unrounded")),
    "float32_sum_rounded_before_weights": (
        float32_sum_rounded_before_weights,
        post_norm("vllm"),
    ),
    "sum_that_is_not_kept": (
        lambda x, r, w: rms_norm(rms_norm(reduce(x), w) + r, w, 1e-6),
        expect("rounded", boundary="post norm"),
    ),
    "float32_sandwich": (
        sandwich(in_dtype(torch.float32), in_dtype(torch.float32, lambda w: w * 2)),
        post_norm("rounded", Inputs(dtype=torch.float32, shape=(5, 264))),
    ),
    "float16_sandwich": (
        sandwich(in_dtype(torch.float16), in_dtype(torch.float16, lambda w: 1 + w)),
        post_norm("rounded", FLOAT16),
    ),
    "float32_weights": (
        sandwich(rounded_first, half(rounded_first)),
        post_norm("transformers", FLOAT32_WEIGHT),
    ),
    "viewed_before_the_residual": (
        viewed_before_the_residual,
        post_norm("transformers", Inputs(shape=(4, 6, HIDDEN), residual_shape=(24, HIDDEN))),
    ),
    "sum_normed_twice": (
        sum_normed_twice,
        expect("transformers", boundary="post norm", norms=3),
    ),
    "layers": (layers, post_norm(["rounded"] * 3)),
}

# ---- no second norm, and scaled sums ------------------------------------------------------------


def layers_without_second_norms(x, r, w):
    for _ in range(2):
        r = r + llama(reduce(x), w)
        x = torch.relu(r)
    return r


def sum_changed_by_a_buffer(x, r, w):
    """Multiplies the sum by a tensor, as Gemma 4's layers do."""
    total = r + gemma(reduce(x), w)
    total *= w[:1]
    return gemma(total, w)


def scaled_and_added_in_float32(x, r, w):
    z = (0.22 * reduce(x)).float() + r
    return (z * rstd(z) * w).to(bf16), z.to(bf16)


def scaled_in_place(x, r, w):
    x = reduce(x)
    x *= 0.1
    r += x
    return llama(r, w)


def through_float32(y):
    return (y.float() * 0.3).to(torch.float16)


def scaled_without_a_residual(x, r, w):
    scaled = reduce(x) * 0.25
    return llama(scaled, w), scaled


only_post_norm = functools.partial(expect, boundary="post norm, no second norm")
BOUNDARIES |= {
    "post_norm_only": (lambda x, r, w: r + llama(reduce(x), w), only_post_norm("transformers")),
    "post_norm_only_in_float32": (
        lambda x, r, w: (r.float() + gemma(reduce(x), w)).to(bf16),
        only_post_norm("rounded"),
    ),
    "sum_changed_by_a_buffer": (sum_changed_by_a_buffer, only_post_norm("rounded")),
    "layers_without_second_norms": (
        layers_without_second_norms,
        only_post_norm(["transformers", "transformers"]),
    ),
    "scaled_post_norm_only": (
        lambda x, r, w: r + 0.5 * gemma(reduce(x), w),
        expect("rounded", boundary="post norm, scale 0.5, no second norm"),
    ),
    "scaled_post_norm": (
        sandwich(lambda z, w: llama(z, w) * 0.7, llama),
        expect("transformers", boundary="post norm, scale 0.7", norms=2),
    ),
}
for graph, numerics, scale, *inputs in (
    (scaled_in_place, "transformers", "0.1"),
    (scaled_without_a_residual, "transformers", "0.25"),
    (scaled_and_added_in_float32, "unrounded", "0.22"),
    (scaled(llama, lambda y: y * 0.22), "transformers", "0.22"),
    (scaled(llama, lambda y: y * 0.0), "transformers", "0"),
    (scaled(in_dtype(torch.float32), lambda y: y * -2), "rounded", "-2", FLOAT32),
    (scaled(in_dtype(torch.float16), through_float32), "rounded", "0.3", FLOAT16),
):
    name = f"{graph.__name__}_by_{scale}"
    BOUNDARIES[name] = (graph, expect(numerics, *inputs, boundary=f"scale {scale}"))


@on(cpu=(2,))
@pytest.mark.parametrize("name", BOUNDARIES)
def test_boundary(rank: int, world_size: int, name: str) -> None:
    fn, expected = BOUNDARIES[name]
    expected.check(fn, rank)


# ---- graphs that are fused in part --------------------------------------------------------------


def post_norm_is_returned(x, r, w):
    normed = rms_norm(reduce(x), w)
    total = normed + r
    return rms_norm(total, w), total, normed


def reduced_is_returned(x, r, w):
    reduced = reduce(x)
    total = gemma(reduced, w) + r
    return gemma(total, w), total, reduced


def residual_from_a_later_reduction(x, r, w):
    normed = gemma(reduce(x), w)
    late = torch.relu(reduce(normed))
    return gemma(normed + late, w), late


ROUNDS_FIRST = "one of its norms rounds before the weight"
# Maps a name to a graph, and to the expected rounding mode, boundary and note of its site.
NEARLY = {
    # The graph keeps the multiplication by the second weight.
    "second_norm_rounds_first": (sandwich(gemma, llama), ("rounded", "post norm", ROUNDS_FIRST)),
    "post_norm_rounds_first": (
        sandwich(llama, gemma),
        ("transformers", "post norm, no second norm", ROUNDS_FIRST),
    ),
    "post_norm_is_returned": (
        post_norm_is_returned,
        ("rounded", "", "rms_norm, computed from the reduced tensor, is also used by the output"),
    ),
    "reduced_is_returned": (
        reduced_is_returned,
        ("rounded", "", "the reduced tensor itself is also used"),
    ),
    "post_norm_plus_itself": (
        lambda x, r, w: (gemma(total := (y := gemma(reduce(x), w)) + torch.relu(y), w), total),
        ("rounded", "", "itself computed from the reduced tensor"),
    ),
    "residual_from_a_later_reduction": (
        residual_from_a_later_reduction,
        ("rounded", "", "itself computed from the reduced tensor"),
    ),
}


@on(cpu=(2,))
@pytest.mark.parametrize("name", NEARLY)
def test_nearly(rank: int, world_size: int, name: str) -> None:
    fn, (numerics, boundary, note) = NEARLY[name]
    inputs = Inputs().make(rank)
    graph = symbolic_trace(fn)
    with torch.no_grad():
        expected = graph(*[t.clone() for t in inputs])
        report = fuse(graph, inputs, comm())
        actual = graph(*inputs)
    site = report.fused[0]
    assert (site.numerics, site.boundary) == (numerics, boundary), str(report)
    assert re.search(note, site.note), str(report)
    for mine, theirs in zip(actual, expected, strict=True):
        assert_close_sandwich(mine, theirs, name)


@on(cpu=(2,))
def test_two_branches(rank: int, world_size: int) -> None:
    """Tests a sum of two post norms: Gemma 4 has one after its MLP and one after its experts."""

    def block(x, residual, w):
        normed = gemma(reduce(x), w) + gemma(reduce(x * 2), w * 0.5)
        return residual + gemma(normed, w), normed

    graph = symbolic_trace(block)
    close = {"norms": 2, "close": assert_close_sandwich, "communicator": comm()}
    report = check_fused(graph, Inputs().make(rank), ["rounded", "rounded"], **close)
    assert [site.boundary for site in report.fused] == ["post norm", ""], str(report)
    assert "it is the residual of all_reduce_default" in report.fused[1].note
