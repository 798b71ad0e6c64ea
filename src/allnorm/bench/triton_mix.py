"""A Triton kernel that mixes residual streams and adds a reduced row. Import only with a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import allnorm

_ELEMS_PER_PROGRAM = 1024


@triton.jit
def _mix(  # type: ignore[no-untyped-def]
    reduced,
    residual,
    post,
    factors,
    mixed,
    hidden_size,
    STREAMS: tl.constexpr,  # noqa: N803
    SIZE: tl.constexpr,  # noqa: N803
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = columns < hidden_size
    row = tl.load(reduced + token * hidden_size + columns, mask=inside).to(tl.float32)
    for i in tl.static_range(STREAMS):
        total = tl.load(post + token * STREAMS + i) * row
        for j in tl.static_range(STREAMS):
            # Each stream is loaded again for each result, from the L1 cache.
            stream = residual + (token * STREAMS + j) * hidden_size + columns
            factor = tl.load(factors + (token * STREAMS + i) * STREAMS + j)
            total += factor * tl.load(stream, mask=inside).to(tl.float32)
        result = total.to(mixed.dtype.element_ty)
        tl.store(mixed + (token * STREAMS + i) * hidden_size + columns, result, mask=inside)


def mix(
    reduced: torch.Tensor, residual: torch.Tensor, connection: allnorm.HyperConnection
) -> torch.Tensor:
    """Returns the new streams of a reduced sum; all tensors are contiguous."""
    num_tokens, streams, hidden_size = residual.shape
    mixed = torch.empty_like(residual)
    size = min(_ELEMS_PER_PROGRAM, triton.next_power_of_2(hidden_size))
    grid = (num_tokens, triton.cdiv(hidden_size, size))
    _mix[grid](
        *(reduced, residual, connection.post, connection.mix, mixed, hidden_size),
        STREAMS=streams,
        SIZE=size,
    )
    return mixed
