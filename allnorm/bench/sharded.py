"""The unfused way with a sharded residual: reduce-scatter, norm of the own rows, all-gather.

The collectives want equal shares. Where the rows cannot be divided, the partial sums lie in a
buffer that was padded with rows of zeros before anything is timed, and a rank has the rows of its
share.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import allnorm
from allnorm.bench.arms import Arm
from allnorm.bench.case import Case, Outcome
from allnorm.bench.modes import Mode
from allnorm.bench.quantizer import quantizer
from allnorm.quant import Quant

# Renamed in torch 2.13; the package accepts 2.11.
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_PACKED = "packed scales of rows that are gathered would have to be laid out anew"


def baseline(case: Case, mode: Mode, name: str, local: bool) -> Arm | str:
    """The arm of that name, or why it cannot run this.

    With `local` allnorm's local kernel computes the norm, instead of PyTorch.
    """
    spec = case.spec(mode.quant)
    if isinstance(spec, allnorm.Fp8PerGroup) and spec.scale_format == "ue8m0_packed":
        return _PACKED
    share = -(-case.num_rows // case.world_size)
    lo = min(case.num_rows, case.rank * share)
    hi = min(case.num_rows, lo + share)
    padded = [_padded(x, share * case.world_size) for x in case.xs]
    residuals = [_padded(batch.residual[lo:hi], share) for batch in case.batches]
    norm = (_local_norm if local else _torch_norm)(case, residuals, _row_major(spec), mode)

    def call(index: int) -> Any:
        summed = padded[index].new_empty(share, padded[index].shape[1])
        reduce_scatter_into(summed, padded[index])
        residual, *parts = norm(index, summed)
        return residual, _gather([part for part in parts if part is not None])

    def outcome(result: Any) -> Outcome:
        residual, parts = result[0][: hi - lo], [part[: case.num_rows] for part in result[1]]
        if spec is None:
            return Outcome(residual, parts[0], rows=(lo, hi))
        quantized, *rest = parts
        scale = spec.scale if isinstance(spec, allnorm.Fp8PerTensor) else rest.pop(0)
        return Outcome(residual, rest[0] if rest else None, quantized, scale, rows=(lo, hi))

    return Arm(name, call, outcome)


def _local_norm(
    case: Case, residuals: list[torch.Tensor], spec: Quant | None, mode: Mode
) -> Callable[..., Any]:
    rest = [(batch.weight, case.shape.eps) for batch in case.batches]
    options = case.options(mode) | ({"quant": spec} if spec else {})

    function: Any = allnorm.add_rms_norm_quant if spec else allnorm.add_rms_norm
    static = isinstance(spec, allnorm.Fp8PerTensor)

    def norm(index: int, x: torch.Tensor) -> Any:
        result = function(x, residuals[index], *rest[index], **options)
        if spec is None:
            return result[1], result[0]
        return result.residual, result.quantized, None if static else result.scale, result.normed

    return norm


def _torch_norm(
    case: Case, residuals: list[torch.Tensor], spec: Quant | None, mode: Mode
) -> Callable[..., Any]:
    weights, eps, size = case.unbiased_weights(), case.shape.eps, (case.shape.hidden_size,)
    quantize = quantizer(spec, case.shape.hidden_size, case.device) if spec else None

    def norm(index: int, x: torch.Tensor) -> Any:
        residual = residuals[index] + x
        normed = F.rms_norm(residual, size, weights[index], eps)
        if quantize is None:
            return residual, normed
        quantized, scale = quantize(normed)
        kept = normed if mode.return_normed else None
        return residual, quantized, None if static else scale, kept

    static = isinstance(spec, allnorm.Fp8PerTensor)
    return norm


def _row_major(spec: Quant | None) -> Quant | None:
    """The spec with scales that can be gathered row by row; consumers would have to transpose."""
    if isinstance(spec, allnorm.Fp8PerGroup):
        return allnorm.Fp8PerGroup(spec.group_size, "row_major", spec.scale_format)
    return spec


def _padded(rows: torch.Tensor, height: int) -> torch.Tensor:
    """A contiguous copy with rows of zeros below, up to `height`."""
    result = rows.new_zeros(height, rows.shape[1])
    result[: rows.shape[0]] = rows
    return result


def _gather(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """All ranks' rows of each part; one launch on GPUs."""
    ranks = dist.get_world_size()
    wholes = [part.new_empty(part.shape[0] * ranks, *part.shape[1:]) for part in parts]
    together = len(parts) > 1 and parts[0].is_cuda
    # Private, and the only way to have one launch for several.
    grouped = dist._coalescing_manager(device=parts[0].device) if together else nullcontext()  # type: ignore[attr-defined]
    with grouped:
        for whole, part in zip(wholes, parts, strict=True):
            gather_into(whole.view(torch.uint8), part.view(torch.uint8))  # NCCL knows no FP8
    return wholes
