"""Error bounds for other libraries' results.

Another library sums in a different order and precision, so its bits differ from the reference's.
The bound is derived: N ranks cause at most N - 1 roundings of partial sums in the library and one
in the reference; each later step adds at most one rounding on either side. A quantized result is
compared with the reference's rows before quantization, and its bound has an additional half unit in
the last place of the FP8 number.
"""

from __future__ import annotations

import torch
from torch import Tensor

import allnorm
from allnorm import reference
from allnorm.bench.case import Case, Outcome
from allnorm.names import TOP_K
from allnorm.quant import DTYPE, E2M1_SIZES, NVFP4_GROUP_SIZE, Quant, is_swizzled, swizzled_rows

Result = tuple[Tensor, Tensor]
"""A pair (normed, residual_out)."""

_SECOND_ORDER = 1.05  # allows for products of roundings, which the first-order bound omits
_FP8_MAX = 448.0
_MIN_AMAX = 1e-10


def describe_error(got: Outcome, case: Case, index: int, quant: str) -> str:
    """Describes the first part of an arm's result that exceeds its bound; "" if all are within.

    `quant` is the name of the mode's quantization spec.
    """
    expected = case.expected[index]
    limits = bounds(case, index)
    rows = slice(*got.rows) if got.rows else slice(None)
    error = compare("residual_out", got.residual, expected[1][rows], limits[1][rows])
    normed, limit = (
        part[slice(None) if got.gathered else rows] for part in (expected[0], limits[0])
    )
    if not error and got.normed is not None:
        error = compare("normed", got.normed, normed, limit)
    spec = case.spec(quant)
    if error or spec is None:
        return error
    if got.quantized is None or got.scale is None:
        return "the quantized rows or their scales are missing"
    return describe_quantized(got.quantized, got.scale, normed, limit, spec)


def describe_quantized(
    quantized: Tensor, scale: Tensor, normed: Tensor, limit: Tensor, spec: Quant
) -> str:
    """Describes the scales or values that exceed their bounds; "" if none do.

    `normed` holds the reference's rows before quantization. `limit` is the error bound of each of
    its elements, in float32.
    """
    wanted, size = normed.float(), _group_size(spec, normed.shape[-1])
    scales = scale_of_elements(scale, spec, *normed.shape)
    is_fp4 = isinstance(spec, allnorm.NvFp4)
    if not isinstance(spec, allnorm.Fp8PerTensor):
        largest = wanted.unflatten(-1, (-1, size)).abs().amax(-1)
        # The slack allows for a quotient on the other side of a power of two.
        slack = limit.unflatten(-1, (-1, size)).amax(-1) * _SECOND_ORDER + 1e-6 * largest
        low, high = (_scale(largest + sign * slack, spec) for sign in (-1, 1))
        got = scales.unflatten(-1, (-1, size))[..., 0]
        tolerance = 0.0 if is_fp4 else 2 * torch.finfo(torch.float32).eps
        outside = ~((got >= low * (1 - tolerance)) & (got <= high * (1 + tolerance)))
        if bool(outside.any()):
            return f"scale: {int(outside.sum())} of {outside.numel()} beyond the bound"
    if isinstance(spec, allnorm.NvFp4):
        units, elements, largest_element = scales / spec.global_scale, _decode(quantized), 6.0
    else:
        units, elements, largest_element = scales, quantized.float(), _FP8_MAX
    magnitude = (wanted.abs() + limit) / units
    near = limit + _half_unit(magnitude, is_fp4) * units
    # If a given scale is too small for a value, both the library and the reference clamp it.
    wanted = wanted.clamp(-largest_element * units, largest_element * units)
    return compare("dequantized", elements * units, wanted, _SECOND_ORDER * near)


def _decode(quantized: Tensor) -> Tensor:
    """Returns the values of packed e2m1 elements, two per byte, in float32."""
    sizes = torch.tensor(E2M1_SIZES, device=quantized.device)
    codes = torch.stack((quantized & 15, quantized >> 4), -1).flatten(-2).long()
    return sizes[codes & 7] * torch.where(codes & 8 != 0, -1.0, 1.0)


def scale_of_elements(scale: Tensor, spec: Quant, num_tokens: int, hidden_size: int) -> Tensor:
    """Expands scales of any layout and format to one scale per element: float32 [rows, columns]."""
    if isinstance(spec, allnorm.Fp8PerTensor):
        return scale.reshape(1, 1).expand(num_tokens, hidden_size)
    size = _group_size(spec, hidden_size)
    if is_swizzled(spec):
        groups = hidden_size // size
        rows = swizzled_rows(scale, -(-groups // 4))[:num_tokens, :groups]
        is_fp4 = isinstance(spec, allnorm.NvFp4)
        scale = rows.view(DTYPE) if is_fp4 else (rows.int() << 23).view(torch.float32)
    if scale.dtype == torch.int32:  # four exponents per word, the first in the lowest byte
        shifts = torch.arange(0, 32, 8, device=scale.device, dtype=torch.int32)
        exponents = (scale.unsqueeze(-1) >> shifts & 0xFF).flatten(-2)
        scale = (exponents << 23).view(torch.float32)[:, : hidden_size // size]
    return scale.float().repeat_interleave(size, dim=-1)


def bounds(case: Case, index: int) -> Result:
    """Returns the largest allowed error of each element of (normed, residual_out), in float32."""
    batch, shape, info = case.batches[index], case.shape, torch.finfo(case.dtype)
    unit = info.eps / 2
    partials = list(batch.xs)
    delta = torch.zeros_like(batch.residual, dtype=torch.float32)
    if case.experts:
        partials = [reference.expert_sum(experts) for experts in case.experts[index]]
        # Sums over experts in a different order, in float32, each rounded to the dtype.
        for experts, partial in zip(case.experts[index], partials, strict=True):
            delta = delta + _sum_error(experts) + unit * partial.float().abs()
    magnitude = torch.stack([x.float().abs() for x in partials]).sum(0)
    # N roundings of partial sums.
    delta = delta + len(partials) * unit * magnitude
    if case.post_norm is not None:
        post, reduced = case.post_norm, reference.all_reduce(partials)
        gain = post.weight.float() + post.weight_bias
        delta = _after_norm(reduced.float(), delta, gain, post.eps, unit)
    summed = case.expected[index][1].float()
    # Two roundings of the residual sum, and a third one if the norm reads the unrounded sum.
    delta = delta + 3 * unit * (summed.abs() + unit * magnitude)
    delta = _SECOND_ORDER * delta + info.smallest_normal * info.eps * 4
    gain = batch.weight.float() + shape.weight_bias
    normed = _after_norm(summed, delta, gain, shape.eps, unit)
    return normed + info.smallest_normal * info.eps * 4, delta


def _sum_error(experts: allnorm.ExpertSum) -> Tensor:
    """Returns the error bound of float32 sums of experts' rows, for any order of summation."""
    rows, weights, shared = experts.rows, experts.weights, experts.shared
    sizes = allnorm.ExpertSum(
        *(rows.abs(), None if weights is None else weights.abs(), experts.index),
        None if shared is None else shared.abs(),
    )
    # Each row adds two roundings: one of its multiplication and one of its addition.
    return (
        2 * (TOP_K[-1] + 1) * torch.finfo(torch.float32).eps * reference.expert_sum(sizes).float()
    )


def _after_norm(summed: Tensor, delta: Tensor, gain: Tensor, eps: float, unit: float) -> Tensor:
    """Returns the error bound of the norm of `summed`, whose own error bound is `delta`."""
    norm = (summed.square().mean(-1, keepdim=True) + eps).sqrt()
    # |rms(z + d) - rms(z)| <= rms(d); then the rounding of the float32 sum of squares.
    relative = delta.square().mean(-1, keepdim=True).sqrt() / norm
    relative = relative + summed.shape[-1] * torch.finfo(torch.float32).eps / 4
    relative = torch.where(relative < 0.5, relative / (1 - relative), torch.inf)
    weight = gain.abs() * (1 + unit)
    normed = weight / norm * (delta + (summed.abs() + delta) * relative)
    return _SECOND_ORDER * (normed + 6 * unit * weight / norm * (summed.abs() + delta))


def _group_size(spec: Quant, hidden_size: int) -> int:
    if isinstance(spec, allnorm.NvFp4):
        return NVFP4_GROUP_SIZE
    return spec.group_size if isinstance(spec, allnorm.Fp8PerGroup) else hidden_size


def _scale(largest: Tensor, spec: Quant) -> Tensor:
    """Returns the scale for groups with these largest magnitudes."""
    if isinstance(spec, allnorm.NvFp4):
        scale = largest.clamp(min=0) * spec.global_scale / 6
        return scale.clamp(max=_FP8_MAX).to(DTYPE).float()
    scale = largest.clamp(min=_MIN_AMAX) / _FP8_MAX
    if isinstance(spec, allnorm.Fp8PerGroup) and spec.scale_format != "float32":
        mantissa, exponent = torch.frexp(scale)
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
        scale = torch.ldexp(torch.ones_like(scale), exponent)
    return scale


def _half_unit(magnitude: Tensor, is_fp4: bool) -> Tensor:
    """Returns half a unit in the last place of e2m1 or float8_e4m3fn numbers of that magnitude."""
    if is_fp4:
        return torch.where(magnitude < 2, 0.25, torch.where(magnitude < 4, 0.5, 1.0))
    exponent = torch.frexp(magnitude).exponent - 1  # of the leading bit; three bits follow it
    return torch.ldexp(torch.ones_like(magnitude), exponent.clamp(min=-6) - 4)


def compare(name: str, got: Tensor, wanted: Tensor, limit: Tensor) -> str:
    """Describes the elements whose error exceeds the limit; "" if none does."""
    error = (got.float() - wanted.float()).abs()
    outside = ~(error <= limit)  # also where the error is NaN
    if not bool(outside.any()):
        return ""
    where = int(outside.flatten().nonzero()[0])
    return (
        f"{name}: {int(outside.sum())} of {outside.numel()} elements exceed the rounding error "
        f"bound, first at {where}: {float(got.flatten()[where]):g} instead of "
        f"{float(wanted.flatten()[where]):g}"
    )
