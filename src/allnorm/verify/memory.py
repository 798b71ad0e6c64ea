"""Memory layouts of the tensors of a test case."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch


def expression(value: Any) -> str:
    """Returns the expression that creates this value, without fields that have their defaults."""
    given = (
        f"{f.name}={getattr(getattr(value, f.name), '__name__', None) or getattr(value, f.name)!r}"
        for f in fields(value)
        if getattr(value, f.name) != f.default
    )
    return f"{type(value).__name__}({', '.join(given)})"


@dataclass(frozen=True, repr=False)
class Layout:
    """The layout of a tensor's rows in a larger buffer, which is filled with other numbers."""

    pad: int = 0  # elements between two rows
    offset: int = 0  # elements before the first row
    reverse: bool = False  # whether the leading dimensions are in reverse order
    expand: bool = False  # whether all rows are the same row, with stride 0

    __repr__ = expression

    def place(self, values: torch.Tensor) -> torch.Tensor:
        """Returns a copy of the values with this layout."""
        if self.expand:
            return values[:1].clone().expand(values.shape)
        order = list(range(values.dim() - 1))
        if self.reverse:
            order.reverse()
        order.append(values.dim() - 1)
        moved = values.permute(order)
        width = moved.shape[-1] + self.pad
        memory = torch.full(
            (moved[..., :1].numel() * width + self.offset,), 9.0, device=values.device
        ).to(values.dtype)
        rows = memory[self.offset :].view(*moved.shape[:-1], width)[..., : moved.shape[-1]]
        rows.copy_(moved)
        return rows.permute(order)  # a reversal is its own inverse


@dataclass(frozen=True, repr=False)
class Memory:
    """The memory layout of a call's tensors."""

    x: Layout = Layout()  # layout of this rank's rows
    residual: Layout = Layout()  # layout of the residual
    weight_offset: int = 0  # elements before the weights
    out: str = "new"  # for normed or reduced rows: "new" memory, the caller's ("own"), or "x"
    residual_out: str = "new"  # for the new residual: "new", "own", or "residual"
    results: Layout = Layout()  # layout of the caller's memory for results, quantized ones too

    __repr__ = expression


USUAL = Memory()
"""Contiguous inputs, and new memory for results."""
