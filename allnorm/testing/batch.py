"""Inputs that every rank can make for every rank, so that each computes the reference alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Batch:
    """One call's inputs.

    Attributes:
        xs: every rank's partial sum, each [num_tokens, hidden_size].
        residual: [num_tokens, hidden_size], the same on every rank.
        weight: [hidden_size].
    """

    xs: tuple[torch.Tensor, ...]
    residual: torch.Tensor
    weight: torch.Tensor


def make_batch(
    num_tokens: int,
    hidden_size: int,
    dtype: torch.dtype,
    device: torch.device,
    world_size: int,
    seed: int,
    weight_bias: float = 0.0,
) -> Batch:
    """Random inputs, different on every rank; a function of the arguments alone.

    Args:
        num_tokens: rows.
        hidden_size: columns.
        dtype: of all tensors.
        device: where they are made.
        world_size: how many partial sums.
        seed: another seed makes other inputs.
        weight_bias: the weight is centred at `1 - weight_bias`.

    Returns:
        The inputs of all ranks.
    """
    generator = torch.Generator(device=device)

    def normal(part: int, *shape: int) -> torch.Tensor:
        generator.manual_seed(seed * 1009 + part)
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32)

    return Batch(
        xs=tuple(normal(2 + r, num_tokens, hidden_size).to(dtype) for r in range(world_size)),
        residual=normal(0, num_tokens, hidden_size).to(dtype),
        weight=(1.0 - weight_bias + 0.1 * normal(1, hidden_size)).to(dtype),
    )
