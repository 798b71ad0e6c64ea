"""The physical limit of a call: the bytes that a rank must send, at the rate of its link.

Every rank has to send its partial sums of other ranks' rows, and the rows that it has finished:

    replicated residual   (N-1)/N * T * H * (e + e)     partial sums, then sums
    sharded residual      (N-1)/N * T * H * (e + r)     partial sums, then results

At least so many bytes leave each of N ranks, where e is the size of an input element and r that of
a result element with its part of the scales. With a replicated residual sums must travel at full
width even if the results are quantised: every rank needs them for its residual.

The bandwidth is what all GPUs push into each other's memory at once, without multicast. It is
known for what was measured; other GPUs have no floor unless the caller says theirs.
"""

from __future__ import annotations

import math

import numpy

from allnorm import quant
from allnorm.bench.modes import Mode, quant_of

# 8x H200, NVSwitch, no multicast, CUDA 13.0, 264 blocks of 512 threads, all ranks at once: the best
# of the sweeps behind docs/engineering-log. 132 blocks reach 361, 347 and 329.
_PUSH_GBPS = {"H200": {2: 362.0, 4: 350.0, 8: 334.0}}


def wire_bytes(
    world_size: int, num_tokens: int, hidden_size: int, element_bytes: int, mode: Mode
) -> float:
    """Bytes that each rank must send in one call, on average over the ranks."""
    gathered = hidden_size * element_bytes
    spec = quant_of(mode.quant)
    if mode.residual_sharded and spec:
        gathered = hidden_size + _scale_bytes(spec, hidden_size)
        gathered += hidden_size * element_bytes if mode.return_normed else 0
    row = hidden_size * element_bytes + gathered
    return (world_size - 1) / world_size * num_tokens * row


def _scale_bytes(spec: quant.Quant, hidden_size: int) -> int:
    """What crosses the link of the scales of a finished row."""
    if isinstance(spec, quant.NvFp4):
        return 0  # they lie in the words of elements, a byte an element
    if isinstance(spec, quant.Fp8PerGroup) and quant.is_swizzled(spec):
        return 4 * (hidden_size // spec.group_size)  # as float32
    scales = quant.scale_geometry(spec, 1, hidden_size)
    return scales.shape[1] * scales.dtype.itemsize if scales else 0


def push_gbps(gpu: str, world_size: int) -> float | None:
    """What each of `world_size` GPUs can push at once, in 1e9 bytes a second; None if unknown.

    Between the measured numbers of ranks it is interpolated.
    """
    table = next((values for name, values in _PUSH_GBPS.items() if name in gpu), {})
    if not table or not min(table) <= world_size <= max(table):
        return None
    return float(numpy.interp(world_size, list(table), list(table.values())))


def floor_us(sent_bytes: float, gbps: float | None) -> float:
    """The least microseconds that sending takes; NaN where the bandwidth is unknown."""
    return sent_bytes / gbps / 1e3 if gbps else math.nan
