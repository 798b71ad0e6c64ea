"""Tests tensors added before or after a reduction: LoRA, shared experts, biases."""

from __future__ import annotations

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
    table,
)

bf16 = torch.bfloat16
ADDED, FUSED = "tensor added after the reduction", ""
LOCAL_CALLS = ["allnorm.all_reduce.default", "allnorm.add_rms_norm.default"]
FUSED_CALL = "allnorm.all_reduce_add_rms_norm.default"


def norming(add):
    """Returns a graph that norms `add(x, residual, w, d, delta)`; delta is a LoRA correction."""

    def graph(x, r, w, d, down, up):
        total = add(x, r, w, d, (d @ down) @ up)
        return llama(total, w), total

    return graph


def sum_needed_elsewhere(x, r, w, d, down, up):
    branch = reduce(x) + d
    h = r + branch
    return llama(h, w), h, branch


def reduced_needed_elsewhere(x, r, w, d, down, up):
    reduced = reduce(x)
    h = r + (reduced + d)
    return llama(h, w), h, reduced


def norm_that_is_not_used(x, r, w, d, down, up):
    h = r + (reduce(x) + d)
    llama(h, w)
    return (h,)


def norm_of_the_sum_without_the_delta_is_not_used(x, r, w, d, down, up):
    h = reduce(x) + r
    llama(h, w)
    return (h + d,)


# Maps a name to a function of (x, residual, weight, d, down, up), the boundary or reason of each
# reduction, and the allnorm operators in the fused graph.
CASES = {
    **table(
        ([FUSED], [FUSED_CALL]),
        partial_delta=norming(lambda x, r, w, d, delta: r + reduce(x + delta)),
        delta_in_the_residual=norming(lambda x, r, w, d, delta: reduce(x) + (r + delta)),
    ),
    **table(
        ([ADDED], LOCAL_CALLS),
        sum_needed_elsewhere,
        reduced_needed_elsewhere,
        delta=norming(lambda x, r, w, d, delta: r + (reduce(x) + delta)),
        scaled_delta=norming(lambda x, r, w, d, delta: (reduce(x) + delta * 0.5) + r),
        shared_expert=norming(lambda x, r, w, d, delta: r + (d + reduce(x))),
        expanded_bias=norming(lambda x, r, w, d, delta: r + (reduce(x) + w.expand(x.shape))),
        delta_of_the_reduced=norming(
            lambda x, r, w, d, delta: r + ((reduced := reduce(x)) + torch.relu(reduced))
        ),
    ),
    **table(
        (["no RMSNorm follows", FUSED], [FUSED_CALL]),
        two_reductions=norming(lambda x, r, w, d, delta: r + reduce(x) + reduce(d)),
    ),
    **table(
        ([ADDED, "sum with all_reduce_default is fused"], LOCAL_CALLS),
        sum_of_two_reductions=norming(lambda x, r, w, d, delta: (reduce(x) + reduce(d)) + r),
    ),
    **table(
        (["is not used"], []),
        norm_that_is_not_used,
        norm_of_the_sum_without_the_delta_is_not_used,
    ),
}


@on(cpu=(2,))
@pytest.mark.parametrize("name", CASES)
def test_delta(rank: int, world_size: int, name: str) -> None:
    fn, (sites, calls) = CASES[name]
    module, expected = (symbolic_trace(fn) for _ in range(2))
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
    assert made == calls, "the graph has unexpected calls of allnorm"
    if calls:
        assert not nodes_calling(module, "rsqrt", "pow")
    for index, (mine, other) in enumerate(zip(module(*inputs), theirs, strict=True)):
        (assert_close_norm if calls and index == 0 else assert_same_bits)(mine, other, name)
