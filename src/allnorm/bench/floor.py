"""The lower bound of a call's time: the bytes that a rank must send, divided by its bandwidth.

Every rank must send its partial sums for other ranks' rows, and the rows that it has finished:

    replicated residual   (N-1)/N * T * H * (e + e)     partial sums, then sums
    sharded residual      (N-1)/N * T * H * (e + r)     partial sums, then results

    only this rank's rows     (N-1)/N * T * H * e           partial sums
    sharded norm              (N-1)/N * T * 2 * 4 * S       sums of squares of S tensors, twice

Here N is the number of ranks, T the number of tokens, H the hidden size, e the size of an input
element, and r the size of a result element including its share of the scales. With a replicated
residual, sums are sent unquantized even if the results are quantized, because every rank needs them
for its residual.

The bandwidth is the rate at which all GPUs write to each other's memory at once, without multicast.
It is known for the GPUs that were measured. Other GPUs have no floor unless the caller passes a
bandwidth.
"""

from __future__ import annotations

import math

import numpy

from allnorm import quant
from allnorm.bench.modes import Mode, quant_of

# The best rates of the sweeps in docs/engineering-log: all ranks at once, no multicast.
_PUSH_GBPS = {"H200": {2: 362.0, 4: 350.0, 8: 334.0}}


def wire_bytes(
    world_size: int, num_tokens: int, hidden_size: int, element_bytes: int, mode: Mode
) -> float:
    """Returns the bytes that a rank must send per call, on average over the ranks."""
    if mode.slices:
        return (world_size - 1) / world_size * num_tokens * 2 * 4 * mode.slices
    gathered = hidden_size * element_bytes
    spec = quant_of(mode.quant)
    if mode.residual_sharded and spec:
        gathered = hidden_size + _scale_bytes(spec, hidden_size)
        gathered += hidden_size * element_bytes if mode.return_normed else 0
    row = hidden_size * element_bytes + (0 if mode.own_rows else gathered)
    return (world_size - 1) / world_size * num_tokens * row


def _scale_bytes(spec: quant.Quant, hidden_size: int) -> int:
    """Returns the bytes sent for the scales of a finished row."""
    if isinstance(spec, quant.NvFp4):
        return 0  # packed into the words of the elements, which take one byte each
    if isinstance(spec, quant.Fp8PerGroup) and quant.is_swizzled(spec):
        return 4 * (hidden_size // spec.group_size)  # sent as float32
    scales = quant.scale_geometry(spec, 1, hidden_size)
    return scales.shape[1] * scales.dtype.itemsize if scales else 0


def push_gbps(gpu: str, world_size: int) -> float | None:
    """Returns the bandwidth of each of `world_size` sending GPUs in GB/s; None if unknown.

    Interpolates between the measured numbers of ranks.
    """
    table = next((values for name, values in _PUSH_GBPS.items() if name in gpu), {})
    if not table or not min(table) <= world_size <= max(table):
        return None
    return float(numpy.interp(world_size, list(table), list(table.values())))


def floor_us(sent_bytes: float, gbps: float | None) -> float:
    """Returns the minimum time of sending in microseconds; NaN if the bandwidth is unknown."""
    return sent_bytes / gbps / 1e3 if gbps else math.nan
