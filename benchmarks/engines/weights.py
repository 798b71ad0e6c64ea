"""Values for the dummy weights that the engines' ranks are started with."""

from __future__ import annotations

import zlib

import torch


@torch.no_grad()
def fill(model: torch.nn.Module, rank: int, prefix: str = "") -> int:
    """Fills the weights in place, on any device: other values on each rank, but for norms.

    Returns:
        How many were filled; quantised and integer ones are left alone.
    """
    filled = 0
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or parameter.element_size() < 2:
            continue
        of_a_norm = parameter.dim() == 1
        key = 0 if of_a_norm else 1 + rank
        generator = torch.Generator(parameter.device)
        generator.manual_seed(zlib.crc32(f"{prefix}{key} {name}".encode()))
        if of_a_norm:
            parameter.normal_(1.0, 0.1, generator=generator)
        else:
            parameter.normal_(0.0, 0.02, generator=generator)
        filled += 1
    return filled
