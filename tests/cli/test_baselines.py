"""The error bound of the baselines: wide enough for honest roundings, too narrow for mistakes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from allnorm import reference
from allnorm.cli.ranks import baselines
from allnorm.cli.ranks.data import DTYPES, Batch, make_batch

EPS = 1e-5


def batch_of(dtype: torch.dtype, world_size: int = 4, weight_bias: float = 0.0) -> Batch:
    device = torch.device("cpu")
    return make_batch(8, 2880, dtype, device, world_size, seed=1, weight_bias=weight_bias)


def expected_of(batch: Batch, numerics: str, weight_bias: float = 0.0) -> baselines.Result:
    return reference.all_reduce_add_rms_norm(
        batch.xs, batch.residual, batch.weight, EPS, weight_bias=weight_bias, numerics=numerics
    )


def ring(batch: Batch, weight_bias: float = 0.0) -> baselines.Result:
    """What an all-reduce that rounds at every hop, backwards, and PyTorch's norm give."""
    total = batch.xs[-1]
    for x in batch.xs[-2::-1]:
        total = total + x
    summed = total + batch.residual
    return F.rms_norm(summed, (2880,), batch.weight + weight_bias, EPS), summed


@pytest.mark.parametrize("name", list(DTYPES))
@pytest.mark.parametrize("numerics", ["rounded", "unrounded", "transformers", "vllm"])
def test_honest_roundings_pass(name: str, numerics: str) -> None:
    batch = batch_of(DTYPES[name], weight_bias=1.0)
    expected = expected_of(batch, numerics, weight_bias=1.0)
    assert baselines.describe_error(ring(batch, 1.0), expected, batch, EPS, 1.0) == ""


@pytest.mark.parametrize("name", list(DTYPES))
@pytest.mark.parametrize("mistake", ["a rank lost", "no residual", "nan", "zeros", "other eps"])
def test_mistakes_do_not(name: str, mistake: str) -> None:
    batch = batch_of(DTYPES[name])
    expected = expected_of(batch, "rounded")
    normed, summed = ring(batch)
    if mistake == "a rank lost":
        normed, summed = ring(Batch(batch.xs[1:], batch.residual, batch.weight))
    elif mistake == "no residual":
        normed, summed = ring(Batch(batch.xs, torch.zeros_like(summed), batch.weight))
    elif mistake == "nan":
        normed[3, 5] = torch.nan
    elif mistake == "zeros":
        normed[7] = 0
    else:
        normed = F.rms_norm(summed, (2880,), batch.weight, 1.0)
    assert baselines.describe_error((normed, summed), expected, batch, EPS, 0.0) != ""


def test_inputs_depend_on_rank_and_seed_alone() -> None:
    device = torch.device("cpu")
    two, four = (make_batch(2, 64, torch.float32, device, n, seed=3) for n in (2, 4))
    assert torch.equal(two.xs[1], four.xs[1])
    assert torch.equal(two.residual, four.residual)
    assert not torch.equal(four.xs[0], four.xs[1])
    other = make_batch(2, 64, torch.float32, device, 2, seed=4)
    assert not torch.equal(two.xs[0], other.xs[0])
