"""The unfused ways that `bench` compares with, and how far their results may be off.

A baseline sums in its own order and precision, so its bits differ. Its error is bounded, and the
bound is derived here, not guessed: N ranks cost at most N - 1 roundings of partial sums on its side
and one on the reference's, every later step at most one on either side.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F

import allnorm
from allnorm.cli.ranks.data import Batch

Result = tuple[torch.Tensor, torch.Tensor]
"""normed, residual_out."""

_SECOND_ORDER = 1.05  # products of roundings, left out of the first-order bound


def torch_norm(batch: Batch, eps: float, weight_bias: float) -> Callable[[torch.Tensor], Result]:
    """After an all-reduce of `x`: PyTorch's add, then PyTorch's RMSNorm."""
    residual, hidden_size = batch.residual, batch.weight.numel()
    weight = batch.weight + weight_bias if weight_bias else batch.weight

    def run(x: torch.Tensor) -> Result:
        dist.all_reduce(x)
        summed = residual + x
        return F.rms_norm(summed, (hidden_size,), weight, eps), summed

    return run


def local_norm(
    batch: Batch, eps: float, weight_bias: float, numerics: str
) -> Callable[[torch.Tensor], Result]:
    """After an all-reduce of `x`: this library's own local add + norm kernel."""
    residual, weight = batch.residual, batch.weight

    def run(x: torch.Tensor) -> Result:
        dist.all_reduce(x)
        return allnorm.add_rms_norm(
            x, residual, weight, eps, weight_bias=weight_bias, numerics=numerics
        )

    return run


def describe_error(
    got: Result, expected: Result, batch: Batch, eps: float, weight_bias: float
) -> str:
    """Compares a baseline's result with the reference.

    Args:
        got: the baseline's normed and residual_out.
        expected: the reference's.
        batch: their inputs.
        eps: of the norm.
        weight_bias: of the norm.

    Returns:
        "" if every element is within the derived bound, else what is not, in words.
    """
    limits = _bounds(expected, batch, eps, weight_bias)
    for name, value, wanted, limit in zip(
        ("normed", "residual_out"), got, expected, limits, strict=True
    ):
        error = (value.float() - wanted.float()).abs()
        outside = ~(error <= limit)  # also where the error is NaN
        if bool(outside.any()):
            where = int(outside.flatten().nonzero()[0])
            return (
                f"{name}: {int(outside.sum())} of {outside.numel()} elements beyond the bound of "
                f"its roundings, first at {where}: {float(value.flatten()[where]):g} instead of "
                f"{float(wanted.flatten()[where]):g}"
            )
    return ""


def _bounds(expected: Result, batch: Batch, eps: float, weight_bias: float) -> Result:
    """Largest allowed errors of normed and residual_out, element by element, in float32."""
    info = torch.finfo(batch.residual.dtype)
    unit = info.eps / 2
    magnitude = sum((x.float().abs() for x in batch.xs), torch.zeros_like(batch.residual).float())
    summed = expected[1].float()
    # N roundings of partial sums; two of the residual sum, a third if the norm reads it unrounded.
    delta = len(batch.xs) * unit * magnitude + 3 * unit * (summed.abs() + unit * magnitude)
    delta = _SECOND_ORDER * delta + info.smallest_normal * info.eps * 4
    norm = (summed.square().mean(-1, keepdim=True) + eps).sqrt()
    # | rms(z + d) - rms(z) | <= rms(d), and the float32 sum of squares has its own rounding.
    relative = delta.square().mean(-1, keepdim=True).sqrt() / norm
    relative = relative + summed.shape[-1] * torch.finfo(torch.float32).eps / 4
    relative = torch.where(relative < 0.5, relative / (1 - relative), torch.inf)
    weight = (batch.weight.float() + weight_bias).abs() * (1 + unit)
    normed = weight / norm * (delta + (summed.abs() + delta) * relative)
    normed = _SECOND_ORDER * (normed + 6 * unit * weight / norm * (summed.abs() + delta))
    return normed + info.smallest_normal * info.eps * 4, delta
