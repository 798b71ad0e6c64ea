"""DTensor weights: finds the local tensor if this rank holds the whole weight."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor


def whole_local(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns this rank's local tensor if it is the whole tensor, otherwise None."""
    if not isinstance(tensor, DTensor):
        return tensor
    local = tensor.to_local()
    is_whole = local.shape == tensor.shape and not any(p.is_partial() for p in tensor.placements)
    return local if is_whole else None
