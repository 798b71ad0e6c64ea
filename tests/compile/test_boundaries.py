"""Tests graphs with norms before the residual add, scaled sums, or no second norm."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rank_helpers import comm, on
from torch.fx import symbolic_trace

from allnorm.compile import fuse
from allnorm.testing import RankPool

from .helpers import (
    EPS,
    HIDDEN,
    Inputs,
    assert_close_sandwich,
    check_fused,
    gemma,
    llama,
    reduce,
    rstd,
)

bf16 = torch.bfloat16
BOUNDARIES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {}


def boundary(
    words: str, numerics: str | Sequence[str], inputs: Inputs | None = None, norms: int = 2
) -> Any:
    """Marks a function of (x, residual, weight) as a graph that must be fused.

    Args:
        words: the report's text for the boundary.
        numerics: the mode of each site.
        inputs: of the graph.
        norms: number of results computed from a norm; the others must be bit-identical.
    """

    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        case = {"numerics": numerics, "inputs": inputs or Inputs(), "norms": norms}
        BOUNDARIES[fn.__name__] = (fn, {"words": words, **case})
        return fn

    return add


def rounded(z: Any, w: Any, dtype: Any = bf16) -> Any:
    """Returns a norm that multiplies by the weight in float32."""
    z = z.float()
    return (z * rstd(z) * w.float()).to(dtype)


# ---- two norms ----------------------------------------------------------------------------------


@boundary("post norm", "rounded", Inputs(shape=(7, 2304)))
def gemma_sandwich(x, residual, w):
    residual = residual + gemma(reduce(x), w)
    return gemma(residual, w * 0.5), residual


@boundary("post norm", "transformers")
def llama_sandwich(x, residual, w):
    residual = llama(reduce(x), w, 1e-6) + residual
    return llama(residual, w * 0.5), residual


@boundary("post norm", "unrounded")
def float32_sum_behind_a_post_norm(x, residual, w):
    z = gemma(reduce(x), w).float() + residual.float()
    return (z * rstd(z) * w).to(bf16), z.to(bf16)


@boundary("post norm", "vllm")
def float32_sum_rounded_before_both_weights(x, residual, w):
    z = llama(reduce(x), w).float() + residual
    return (z * rstd(z)).to(bf16) * w, z.to(bf16)


@boundary("post norm", "rounded", norms=1)
def sum_that_is_not_kept(x, residual, w):
    return F.rms_norm(F.rms_norm(reduce(x), (HIDDEN,), w, EPS) + residual, (HIDDEN,), w, 1e-6)


@boundary("post norm", "transformers")
def post_norm_without_weight(x, residual, w):
    residual = F.rms_norm(reduce(x), (HIDDEN,), None, EPS) + residual
    return llama(residual, w), residual


@boundary("post norm", "transformers")
def second_norm_without_weight(x, residual, w):
    residual = llama(reduce(x), w) + residual
    return F.rms_norm(residual, (HIDDEN,), None, EPS), residual


@boundary("post norm", "rounded")
def both_without_weight(x, residual, w):
    residual = F.rms_norm(reduce(x), (HIDDEN,), None, EPS) + residual
    return F.rms_norm(residual, (HIDDEN,), None, EPS), residual


@boundary("post norm", "rounded", Inputs(dtype=torch.float32, shape=(5, 264)))
def float32_sandwich(x, residual, w):
    residual = rounded(reduce(x), w, torch.float32) + residual
    return rounded(residual, w * 2, torch.float32), residual


@boundary("post norm", "rounded", Inputs(dtype=torch.float16))
def float16_sandwich(x, residual, w):
    residual = residual + rounded(reduce(x), w, torch.float16)
    return rounded(residual, 1 + w, torch.float16), residual


@boundary("post norm", "transformers", Inputs(weight_dtype=torch.float32))
def float32_weights(x, residual, w):
    def norm(z, weight):
        z = z.float()
        return ((z * rstd(z)).to(bf16) * weight).to(bf16)

    residual = norm(reduce(x), w) + residual
    return norm(residual, w * 2), residual


@boundary("post norm", "transformers", Inputs(shape=(4, 6, HIDDEN), residual_shape=(24, HIDDEN)))
def viewed_before_the_residual(x, residual, w):
    residual = llama(reduce(x), w).view(24, HIDDEN) + residual
    return llama(residual, w).view(4, 6, HIDDEN), residual


@boundary("post norm", "rounded")
def in_place(x, residual, w):
    x = reduce(x)
    x.copy_(gemma(x, w))
    x += residual
    return gemma(x, w), x


@boundary("post norm", "transformers", norms=3)
def sum_normed_twice(x, residual, w):
    residual = llama(reduce(x), w) + residual
    return llama(residual, w), llama(residual, w * 2), residual


@boundary("post norm", ["rounded", "rounded", "rounded"])
def layers(x, residual, w):
    for _ in range(3):
        residual = residual + gemma(reduce(x), w)
        x = torch.relu(gemma(residual, w))
    return x, residual


@boundary("post norm", "transformers")
def norm_of_the_norm(x, residual, w):
    normed = llama(reduce(x), w)
    return llama(normed, w * 2), normed


# ---- no second norm -----------------------------------------------------------------------------


@boundary("post norm, no second norm", "transformers", norms=1)
def post_norm_only(x, residual, w):
    return residual + llama(reduce(x), w)


@boundary("post norm, no second norm", "rounded", norms=1)
def post_norm_only_in_float32(x, residual, w):
    return (residual.float() + gemma(reduce(x), w)).to(bf16)


@boundary("post norm, no second norm", ["transformers", "transformers"], norms=1)
def layers_without_second_norms(x, residual, w):
    for _ in range(2):
        residual = residual + llama(reduce(x), w)
        x = torch.relu(residual)
    return residual


@boundary("post norm, scale 0.5, no second norm", "rounded", norms=1)
def scaled_post_norm_only(x, residual, w):
    return residual + 0.5 * gemma(reduce(x), w)


@boundary("post norm, no second norm", "rounded", norms=1)
def sum_changed_by_a_buffer(x, residual, w):
    """Multiplies the sum by a tensor, as layers of Gemma 4 do."""
    residual = residual + gemma(reduce(x), w)
    residual *= w[:1]
    return gemma(residual, w)


# ---- scaled -------------------------------------------------------------------------------------


@boundary("scale 0.22", "transformers", norms=1)
def granite(x, residual, w):
    residual = residual + reduce(x) * 0.22
    return llama(residual, w), residual


@boundary("scale 0.22", "unrounded", norms=1)
def scaled_and_added_in_float32(x, residual, w):
    z = (0.22 * reduce(x)).float() + residual
    return (z * rstd(z) * w).to(bf16), z.to(bf16)


@boundary("scale -2", "rounded", Inputs(dtype=torch.float32), norms=1)
def scaled_in_float32(x, residual, w):
    residual = residual + reduce(x) * -2
    return rounded(residual, w, torch.float32), residual


@boundary("scale 0.3", "rounded", Inputs(dtype=torch.float16), norms=1)
def scaled_through_float32(x, residual, w):
    residual = (reduce(x).float() * 0.3).to(torch.float16) + residual
    return rounded(residual, w, torch.float16), residual


@boundary("scale 0.1", "transformers", norms=1)
def scaled_in_place(x, residual, w):
    x = reduce(x)
    x *= 0.1
    residual += x
    return llama(residual, w)


@boundary("scale 0.25", "transformers", norms=1)
def scaled_without_a_residual(x, residual, w):
    scaled = reduce(x) * 0.25
    return llama(scaled, w), scaled


@boundary("post norm, scale 0.7", "transformers")
def scaled_post_norm(x, residual, w):
    residual = residual + llama(reduce(x), w) * 0.7
    return llama(residual, w), residual


@boundary("scale 0", "transformers", norms=1)
def scaled_by_nothing(x, residual, w):
    residual = residual + reduce(x) * 0.0
    return llama(residual, w), residual


def run_boundary(rank: int, world_size: int, name: str) -> None:
    fn, case = BOUNDARIES[name]
    inputs = case["inputs"].make(rank)
    graph = symbolic_trace(fn)
    close = assert_close_sandwich
    arguments = {"norms": case["norms"], "close": close, "communicator": comm()}
    report = check_fused(graph, inputs, case["numerics"], **arguments)
    assert {site.boundary for site in report.fused} == {case["words"]}, str(report)
    assert case["words"] in str(report)
    assert not any(site.note for site in report.fused), str(report)


@on(cpu=(2,))
@pytest.mark.parametrize("name", BOUNDARIES)
def test_boundary(pool: RankPool, name: str) -> None:
    pool.run(run_boundary, name)


# ---- nearly -------------------------------------------------------------------------------------

NEARLY: dict[str, tuple[Callable[..., Any], str, str, str]] = {}


def nearly(numerics: str, words: str, note: str) -> Any:
    """Marks a graph that is fused only in part; the note has the reason."""

    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        NEARLY[fn.__name__] = (fn, numerics, words, note)
        return fn

    return add


@nearly("rounded", "post norm", "one of its norms rounds before the weight")
def second_norm_rounds_first(x, residual, w):
    """Rounds before the weight in the second norm only; the graph keeps that multiplication."""
    residual = gemma(reduce(x), w) + residual
    return llama(residual, w), residual


@nearly("transformers", "post norm, no second norm", "one of its norms rounds before the weight")
def post_norm_rounds_first(x, residual, w):
    residual = llama(reduce(x), w) + residual
    return gemma(residual, w), residual


@nearly("rounded", "", "rms_norm, computed from the reduced tensor, is also used by the output")
def post_norm_is_returned(x, residual, w):
    normed = F.rms_norm(reduce(x), (HIDDEN,), w, EPS)
    residual = normed + residual
    return F.rms_norm(residual, (HIDDEN,), w, EPS), residual, normed


@nearly("rounded", "", "the reduced tensor itself is also used")
def reduced_is_returned(x, residual, w):
    reduced = reduce(x)
    residual = gemma(reduced, w) + residual
    return gemma(residual, w), residual, reduced


@nearly("rounded", "", "itself computed from the reduced tensor")
def post_norm_plus_itself(x, residual, w):
    normed = gemma(reduce(x), w)
    residual = normed + torch.relu(normed)
    return gemma(residual, w), residual


@nearly("rounded", "", "itself computed from the reduced tensor")
def residual_from_another_reduction_of_it(x, residual, w):
    normed = gemma(reduce(x), w)
    late = torch.relu(reduce(normed))
    return gemma(normed + late, w), late


def run_nearly(rank: int, world_size: int, name: str) -> None:
    fn, numerics, words, note = NEARLY[name]
    inputs = Inputs().make(rank)
    graph = symbolic_trace(fn)
    with torch.no_grad():
        expected = graph(*[t.clone() for t in inputs])
    report = fuse(graph, inputs, comm())
    site = report.fused[0]
    assert (site.numerics, site.boundary) == (numerics, words), str(report)
    assert re.search(note, site.note), str(report)
    with torch.no_grad():
        actual = graph(*inputs)
    for mine, theirs in zip(actual, expected, strict=True):
        assert_close_sandwich(mine, theirs, name)


@on(cpu=(2,))
@pytest.mark.parametrize("name", NEARLY)
def test_nearly(pool: RankPool, name: str) -> None:
    pool.run(run_nearly, name)


def two_branches(rank: int, world_size: int) -> None:
    """Adds two post norms, as Gemma 4 does for MLP and experts: one is the other's residual."""

    def block(x, residual, w):
        normed = gemma(reduce(x), w) + gemma(reduce(x * 2), w * 0.5)
        return residual + gemma(normed, w), normed

    graph = symbolic_trace(block)
    close = {"norms": 2, "close": assert_close_sandwich, "communicator": comm()}
    report = check_fused(graph, Inputs().make(rank), ["rounded", "rounded"], **close)
    assert [site.boundary for site in report.fused] == ["post norm", ""], str(report)
    assert "it is the residual of all_reduce_default" in report.fused[1].note


@on(cpu=(2,))
def test_two_branches(pool: RankPool) -> None:
    pool.run(two_branches)
