"""Step 6 for NVFP4: e2m1 elements with e4m3 scales; and the e4m3 conversion that FP8 shares."""

from __future__ import annotations

import torch
from torch import Tensor

from allnorm.quant import DTYPE, NVFP4_GROUP_SIZE
from allnorm.reference.arithmetic import float32

_MAX = 448.0  # largest float8_e4m3fn
_NAN = 0x7F
_SIXTH = 1 / 6
# Midpoints between neighbors of 0, 0.5, 1, 1.5, 2, 3, 4 and 6. A tie rounds to the neighbor with an
# even last bit, that is, up if the upper neighbor has an even index.
_TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def to_e4m3(values: Tensor) -> Tensor:
    """Converts to e4m3fn: clamps to +-448, rounds to nearest even, and uses one NaN."""
    nan = torch.tensor(_NAN, dtype=torch.uint8, device=values.device)
    bits = values.clamp(-_MAX, _MAX).to(DTYPE).view(torch.uint8)
    return torch.where(values.isnan(), nan, bits).view(DTYPE)


def to_e2m1(values: Tensor) -> Tensor:
    """Converts to e2m1 codes in uint8: rounds to nearest even, saturates at 6; bit 3 is the sign.

    Args:
        values: float32, without NaN.
    """
    size = values.abs()
    codes = torch.zeros_like(size, dtype=torch.uint8)
    for below, tie in enumerate(_TIES):
        above = size >= tie if below % 2 else size > tie
        codes += above.to(torch.uint8)
    return codes | values.signbit().to(torch.uint8) << 3


def to_nvfp4(y: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the elements and scales of NVFP4.

    Args:
        y: float32 `[..., hidden_size]`, where hidden_size is a multiple of 16.
        global_scale: float32 `[1]`.

    Returns:
        Elements, uint8 `[..., hidden_size / 2]`: two per byte, the first in the low half. Scales,
        float8_e4m3fn `[..., hidden_size / 16]`.
    """
    groups = y.unflatten(-1, (y.shape[-1] // NVFP4_GROUP_SIZE, NVFP4_GROUP_SIZE))
    amax = groups.abs().amax(-1)
    one = torch.ones_like(global_scale)
    scale = to_e4m3(amax * (global_scale * float32(_SIXTH, y)))
    factor = (one / (scale.float() * (one / global_scale))).clamp(max=torch.finfo(y.dtype).max)
    factor = torch.where(amax == 0, torch.zeros_like(factor), factor)
    # e2m1 has no NaN, so the scale of a group with a NaN is NaN, and its elements are zero.
    nan = scale.float().isnan() | (amax * factor).isnan()
    products = groups * factor.unsqueeze(-1)
    products = torch.where(nan.unsqueeze(-1), torch.zeros_like(products), products)
    codes = to_e2m1(products).view(*y.shape[:-1], y.shape[-1] // 2, 2)
    no_number = torch.tensor(_NAN, dtype=torch.uint8, device=y.device)
    scales = torch.where(nan, no_number, scale.view(torch.uint8)).view(DTYPE)
    return codes[..., 0] | codes[..., 1] << 4, scales
