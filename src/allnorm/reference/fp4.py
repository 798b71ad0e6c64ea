"""Step 6: e2m1 elements with e4m3 scales, NVFP4; and e4m3, which both kinds of quantisation use."""

from __future__ import annotations

import torch
from torch import Tensor

from allnorm.quant import DTYPE, NVFP4_GROUP_SIZE
from allnorm.reference.arithmetic import float32

_MAX = 448.0  # the greatest float8_e4m3fn
_NAN = 0x7F
_SIXTH = 1 / 6
# Halfway between neighbours of 0, 0.5, 1, 1.5, 2, 3, 4 and 6. Of two that are as near the one with
# an even last bit is taken, so that a tie is the upper one's where that has an even number.
_TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def to_e4m3(values: Tensor) -> Tensor:
    """`e4m3fn(min(max(v, -448), 448))`, to nearest even; every NaN the same one."""
    nan = torch.tensor(_NAN, dtype=torch.uint8, device=values.device)
    bits = values.clamp(-_MAX, _MAX).to(DTYPE).view(torch.uint8)
    return torch.where(values.isnan(), nan, bits).view(DTYPE)


def to_e2m1(values: Tensor) -> Tensor:
    """The four bits of `e2m1(v)` in uint8: to nearest even, saturating at 6, sign in the highest.

    Args:
        values: float32, no NaN.
    """
    size = values.abs()
    codes = torch.zeros_like(size, dtype=torch.uint8)
    for below, tie in enumerate(_TIES):
        above = size >= tie if below % 2 else size > tie
        codes += above.to(torch.uint8)
    return codes | values.signbit().to(torch.uint8) << 3


def to_nvfp4(y: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Elements and scales of NVFP4.

    Args:
        y: float32, `[..., hidden_size]`, a multiple of 16.
        global_scale: float32, `[1]`.

    Returns:
        uint8 `[..., hidden_size / 2]`, two elements a byte, the first in the low half; and
        float8_e4m3fn `[..., hidden_size / 16]`.
    """
    groups = y.unflatten(-1, (y.shape[-1] // NVFP4_GROUP_SIZE, NVFP4_GROUP_SIZE))
    amax = groups.abs().amax(-1)
    one = torch.ones_like(global_scale)
    scale = to_e4m3(amax * (global_scale * float32(_SIXTH, y)))
    factor = (one / (scale.float() * (one / global_scale))).clamp(max=torch.finfo(y.dtype).max)
    factor = torch.where(amax == 0, torch.zeros_like(factor), factor)
    # e2m1 has no NaN: the scale says it, and no element looks like a number.
    nan = scale.float().isnan() | (amax * factor).isnan()
    products = groups * factor.unsqueeze(-1)
    products = torch.where(nan.unsqueeze(-1), torch.zeros_like(products), products)
    codes = to_e2m1(products).view(*y.shape[:-1], y.shape[-1] // 2, 2)
    no_number = torch.tensor(_NAN, dtype=torch.uint8, device=y.device)
    scales = torch.where(nan, no_number, scale.view(torch.uint8)).view(DTYPE)
    return codes[..., 0] | codes[..., 1] << 4, scales
