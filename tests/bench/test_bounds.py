"""Tests the error bounds for other arms: they accept correct rounding and reject mistakes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from allnorm import reference
from allnorm.bench import bounds
from allnorm.bench.case import Case, Outcome, make_case
from allnorm.bench.modes import Mode, Shape, quant_of
from allnorm.quant import Quant
from allnorm.testing import DTYPES, Batch, make_batch

CPU = torch.device("cpu")
HIDDEN = 2880
QUANTS = (
    "per_group:64",
    "per_group:32:column_major",
    "per_group:64:column_major_tma:ue8m0",
    "per_group:64:column_major_tma:ue8m0_packed",
    "per_token",
    "per_tensor",
)
BLOCK_SCALED = ("mxfp8", "nvfp4", "nvfp4:row_major")


def case_of(dtype: str, numerics: str = "rounded", weight_bias: float = 0.0) -> Case:
    shape = Shape(8, HIDDEN, 1e-5, weight_bias)
    return make_case(shape, dtype, numerics, CPU, rank=0, world_size=4, seed=1)


def ring(case: Case, xs: tuple[torch.Tensor, ...] | None = None, eps: float = 1e-5) -> Outcome:
    """Returns PyTorch's norm after an all-reduce in reverse rank order that rounds each hop."""
    batch = case.batches[0]
    xs = batch.xs if xs is None else xs
    total = xs[-1]
    for x in xs[-2::-1]:
        total = total + x
    summed = total + batch.residual
    weight = batch.weight + case.shape.weight_bias
    return Outcome(normed=F.rms_norm(summed, (HIDDEN,), weight, eps), residual=summed)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("numerics", ["rounded", "unrounded", "transformers", "vllm"])
def test_correct_rounding_passes(dtype: str, numerics: str) -> None:
    case = case_of(dtype, numerics, weight_bias=1.0)
    assert bounds.describe_error(ring(case), case, 0, "") == ""


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("mistake", ["a rank lost", "no residual", "nan", "zeros", "other eps"])
def test_mistakes_fail(dtype: str, mistake: str) -> None:
    case = case_of(dtype)
    got = ring(case)
    assert got.normed is not None
    if mistake == "a rank lost":
        got = ring(case, case.batches[0].xs[1:])
    elif mistake == "no residual":
        got = Outcome(normed=got.normed, residual=got.residual - case.batches[0].residual)
    elif mistake == "nan":
        got.normed[3, 5] = torch.nan
    elif mistake == "zeros":
        got.normed[7] = 0
    else:
        got = ring(case, eps=1.0)
    assert bounds.describe_error(got, case, 0, "") != ""


def in_two_steps(case: Case, wrong: str = "") -> Outcome:
    """Returns PyTorch's results with a post norm or experts, and optionally with a mistake."""
    batch, norm = case.batches[0], case.post_norm
    xs = list(batch.xs)
    if case.experts:
        xs = []
        for given in case.experts[0]:
            assert given.weights is not None
            rows = given.rows[given.index] * given.weights.unsqueeze(-1)
            if wrong == "an expert lost":
                rows = rows[:, 1:]
            xs.append((rows.sum(1) + given.shared).to(case.dtype))
    total = torch.stack(xs).sum(0)
    if norm is not None:
        eps = 1.0 if wrong == "eps of the post norm" else norm.eps
        total = F.rms_norm(total, (HIDDEN,), norm.weight + norm.weight_bias, eps)
    summed = total + batch.residual
    weight = batch.weight + case.shape.weight_bias
    return Outcome(normed=F.rms_norm(summed, (HIDDEN,), weight, case.shape.eps), residual=summed)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize(
    ("mode", "mistake"),
    [(Mode(post_norm=True), "eps of the post norm"), (Mode(experts=4), "an expert lost")],
    ids=["post norm", "experts"],
)
def test_post_norms_and_experts_are_bounded(dtype: str, mode: Mode, mistake: str) -> None:
    case = case_of(dtype, weight_bias=1.0).of(mode)
    assert bounds.describe_error(in_two_steps(case), case, 0, "") == ""
    assert "error bound" in bounds.describe_error(in_two_steps(case, mistake), case, 0, "")


def test_a_sharded_residual_is_compared_with_its_rows() -> None:
    case = case_of("bfloat16")
    got = ring(case)
    shard = Outcome(normed=got.normed, residual=got.residual[2:4], rows=(2, 4))
    assert bounds.describe_error(shard, case, 0, "") == ""
    moved = Outcome(normed=got.normed, residual=got.residual[2:4], rows=(4, 6))
    assert "residual_out" in bounds.describe_error(moved, case, 0, "")


def spec_of(quant: str) -> Quant:
    spec = quant_of(quant)
    assert spec is not None
    return spec


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("quant", [*QUANTS, *BLOCK_SCALED])
def test_correct_quantization_passes_and_a_wrong_row_or_scale_fails(dtype: str, quant: str) -> None:
    case = case_of(dtype)
    plain = ring(case)
    assert plain.normed is not None
    quantized, scale = reference.quantize(plain.normed, spec_of(quant))
    got = Outcome(plain.residual, None, quantized, scale)
    assert bounds.describe_error(got, case, 0, quant) == ""
    quantized[5] = quantized[4].clone()
    assert "dequantized" in bounds.describe_error(got, case, 0, quant)
    if quant in BLOCK_SCALED:
        scale.view(torch.uint8)[0] += 8
        assert "scale" in bounds.describe_error(got, case, 0, quant)


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("mistake", ["a value", "a scale", "truncated", "missing"])
def test_mistakes_in_quantization_fail(quant: str, mistake: str) -> None:
    case, spec = case_of("float32"), spec_of(quant)
    quantized, scale = (t.clone() for t in case.quantized(quant)[0])
    if mistake == "a value":
        quantized.view(torch.uint8)[3, 7] ^= 0x08
    elif mistake == "a scale":
        if quant == "per_tensor":
            pytest.skip("its scale is given")
        scale[2, 0] = scale[2, 0] * 2 if scale.dtype == torch.float32 else scale[2, 0] + 1
    elif mistake == "truncated":  # rounds toward zero instead of to nearest
        scales = bounds.scale_of_elements(scale, spec, 8, HIDDEN)
        exact = case.expected[0][0].float() / scales
        too_far = quantized.float().abs() > exact.abs()
        quantized = (quantized.view(torch.uint8) - too_far.to(torch.uint8)).view(quantized.dtype)
    got = Outcome(case.expected[0][1], None, quantized, None if mistake == "missing" else scale)
    assert bounds.describe_error(got, case, 0, quant) != ""


@pytest.mark.parametrize("quant", QUANTS)
def test_scales_of_elements_undo_layouts_and_formats(quant: str) -> None:
    spec = spec_of(quant)
    rows = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    quantized, scale = reference.quantize(rows, spec)
    scales = bounds.scale_of_elements(scale, spec, *rows.shape)
    assert scales.shape == rows.shape
    assert torch.allclose(quantized.float() * scales, rows.float(), rtol=2**-4, atol=2**-9)


def test_inputs_depend_only_on_rank_and_seed() -> None:
    def make(world_size: int, seed: int) -> Batch:
        return make_batch(2, 64, torch.float32, CPU, world_size, seed=seed)

    two, four, other = make(2, 3), make(4, 3), make(2, 4)
    assert torch.equal(two.xs[1], four.xs[1])
    assert torch.equal(two.residual, four.residual)
    assert not torch.equal(four.xs[0], four.xs[1])
    assert not torch.equal(two.xs[0], other.xs[0])
