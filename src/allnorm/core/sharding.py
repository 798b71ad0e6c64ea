"""Weights as DTensors: which of them a rank holds whole, so that a call can take them."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor


def whole_local(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns what this rank holds of a tensor; None unless that is the whole tensor."""
    if not isinstance(tensor, DTensor):
        return tensor
    local = tensor.to_local()
    is_whole = local.shape == tensor.shape and not any(p.is_partial() for p in tensor.placements)
    return local if is_whole else None
