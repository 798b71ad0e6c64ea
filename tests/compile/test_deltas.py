"""Tests tensors added before or after a reduction: LoRA, shared experts, biases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_helpers import comm, on
from torch import Tensor
from torch.fx import symbolic_trace

from allnorm.compile import fuse
from allnorm.testing import assert_same_bits, rank_input, shared_input

from .helpers import (
    HIDDEN,
    TOKENS,
    assert_close_norm,
    llama,
    nodes_calling,
    reduce,
    world_name,
)

bf16 = torch.bfloat16
# A function of (x, residual, weight, delta, down, up); the outcome of each reduction; the calls.
CASES: dict[str, tuple[Callable[..., Any], list[str], list[str]]] = {}
ADDED, FUSED = "tensor added after the reduction", ""
LOCAL_CALLS = ["allnorm.all_reduce.default", "allnorm.add_rms_norm.default"]
FUSED_CALL = "allnorm.all_reduce_add_rms_norm.default"


def case(sites: list[str], calls: list[str]) -> Any:
    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        CASES[fn.__name__] = (fn, sites, calls)
        return fn

    return add


@case([FUSED], [FUSED_CALL])
def partial_delta(x, r, w, d, down, up):
    """Adds this rank's delta to its partial sum: one call computes everything."""
    h = r + reduce(x + (d @ down) @ up)
    return llama(h, w), h


@case([FUSED], [FUSED_CALL])
def delta_in_the_residual(x, r, w, d, down, up):
    h = reduce(x) + (r + (d @ down) @ up)
    return llama(h, w), h


@case([ADDED], LOCAL_CALLS)
def delta(x, r, w, d, down, up):
    h = r + (reduce(x) + (d @ down) @ up)
    return llama(h, w), h


@case([ADDED], LOCAL_CALLS)
def scaled_delta(x, r, w, d, down, up):
    h = (reduce(x) + (d @ down) @ up * 0.5) + r
    return llama(h, w), h


@case([ADDED], LOCAL_CALLS)
def shared_expert(x, r, w, d, down, up):
    h = r + (d + reduce(x))
    return llama(h, w), h


@case([ADDED], LOCAL_CALLS)
def expanded_bias(x, r, w, d, down, up):
    h = r + (reduce(x) + w.expand(x.shape))
    return llama(h, w), h


@case([ADDED], LOCAL_CALLS)
def sum_needed_elsewhere(x, r, w, d, down, up):
    branch = reduce(x) + d
    h = r + branch
    return llama(h, w), h, branch


@case([ADDED], LOCAL_CALLS)
def reduced_needed_elsewhere(x, r, w, d, down, up):
    reduced = reduce(x)
    h = r + (reduced + d)
    return llama(h, w), h, reduced


@case([ADDED], LOCAL_CALLS)
def delta_of_the_reduced(x, r, w, d, down, up):
    reduced = reduce(x)
    h = r + (reduced + torch.relu(reduced))
    return llama(h, w), h


@case(["no RMSNorm follows", FUSED], [FUSED_CALL])
def two_reductions(x, r, w, d, down, up):
    h = r + reduce(x) + reduce(d)
    return llama(h, w), h


@case([ADDED, "sum with all_reduce_default is fused"], [*LOCAL_CALLS])
def sum_of_two_reductions(x, r, w, d, down, up):
    h = (reduce(x) + reduce(d)) + r
    return llama(h, w), h


@case(["is not used"], [])
def norm_that_is_not_used(x, r, w, d, down, up):
    h = r + (reduce(x) + d)
    llama(h, w)
    return (h,)


@case(["is not used"], [])
def norm_of_the_sum_without_the_delta_is_not_used(x, r, w, d, down, up):
    h = reduce(x) + r
    llama(h, w)
    return (h + d,)


@on(cpu=(2,))
@pytest.mark.parametrize("name", CASES)
def test_delta(rank: int, world_size: int, name: str) -> None:
    fn, sites, calls = CASES[name]
    module, expected = (symbolic_trace(fn) for _ in range(2))
    for graph in (module, expected):
        for node in graph.graph.nodes:
            node.args = tuple(world_name() if arg == "0" else arg for arg in node.args)
        graph.recompile()
    x = rank_input((TOKENS, HIDDEN), bf16, rank)
    shapes = {"r": (TOKENS, HIDDEN), "w": (HIDDEN,), "d": (TOKENS, HIDDEN)}
    shapes |= {"down": (HIDDEN, 8), "up": (8, HIDDEN)}
    inputs: list[Tensor] = [x, *(shared_input(shape, bf16, key) for key, shape in shapes.items())]
    theirs = expected(*inputs)
    report = fuse(module, inputs, comm())
    for site, words in zip(report.sites, sites, strict=True):
        assert site.boundary == words if site.fused else words in str(site.reason), str(report)
    assert sum(site.fused for site in report.sites) == sum(w in (ADDED, FUSED) for w in sites)
    made = [str(n.target) for n in module.graph.nodes if "allnorm" in str(n.target)]
    assert made == calls, "one norm, and no result that is not used"
    if calls:
        assert not nodes_calling(module, "rsqrt", "pow")
    for index, (mine, other) in enumerate(zip(module(*inputs), theirs, strict=True)):
        (assert_close_norm if calls and index == 0 else assert_same_bits)(mine, other, name)
