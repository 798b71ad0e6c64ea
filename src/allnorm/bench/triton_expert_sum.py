"""A Triton kernel that sums the rows of a token's experts. Import only with a GPU."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

import allnorm

_ELEMS_PER_PROGRAM = 1024


@triton.jit
def _sum(  # type: ignore[no-untyped-def]
    rows,
    weights,
    index,
    shared,
    sums,
    hidden_size,
    TOP_K: tl.constexpr,  # noqa: N803
    SIZE: tl.constexpr,  # noqa: N803
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = columns < hidden_size
    total = tl.zeros((SIZE,), dtype=tl.float32)
    for k in tl.static_range(TOP_K):
        row = tl.load(index + token * TOP_K + k).to(tl.int64)
        weight = tl.load(weights + token * TOP_K + k)
        there = inside & (row >= 0)
        values = tl.load(rows + row * hidden_size + columns, mask=there, other=0.0)
        total += weight * values.to(tl.float32)
    total += tl.load(shared + token * hidden_size + columns, mask=inside).to(tl.float32)
    result = total.to(sums.dtype.element_ty)
    tl.store(sums + token * hidden_size + columns, result, mask=inside)


def expert_sum(experts: allnorm.ExpertSum, sums: torch.Tensor) -> None:
    """Writes the sums of `experts`, which must be contiguous and have every optional field."""
    num_tokens, hidden_size = sums.shape
    size = min(_ELEMS_PER_PROGRAM, triton.next_power_of_2(hidden_size))
    index: Any = experts.index
    grid = (num_tokens, triton.cdiv(hidden_size, size))
    _sum[grid](
        *(experts.rows, experts.weights, index, experts.shared, sums, hidden_size),
        TOP_K=index.shape[1],
        SIZE=size,
    )
