"""Counts how often other formulas of NVFP4 differ from numerics step 6, emulated on CPU.

FlashInfer (0.7.2) has three formulas. The precise one (FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH),
also used by Transformer Engine, is step 6. The default computes `global * (amax * sixth)` and uses
`rcp.approx.ftz.f32`, whose error is up to one unit in the last place. Here both reciprocals are
off by one unit, in either direction, in every group, so the counted share is an upper bound. The
fused all-reduce divides `global / scale`, here exactly.

    python benchmarks/nvfp4_reciprocals.py
"""

from __future__ import annotations

import itertools

import torch

from allnorm.reference.fp4 import to_e2m1, to_e4m3

_ROWS, _COLUMNS, _GROUP = 1024, 4096, 16


def off_by(value: torch.Tensor, units: int) -> torch.Tensor:
    """Returns positive float32 values moved by `units` units in the last place."""
    return (value.view(torch.int32) + units).view(torch.float32)


def quantize(
    groups: torch.Tensor, scale: torch.Tensor, given: torch.Tensor, units: tuple[int, int]
) -> torch.Tensor:
    """Quantizes with reciprocals that are off by `units`."""
    one = torch.ones_like(given)
    factor = off_by(one / (scale.float() * off_by(one / given, units[0])), units[1])
    return to_e2m1(groups * torch.where(scale.float() == 0, 0, factor).unsqueeze(-1))


def main() -> None:
    """Prints the shares of different scales and elements."""
    generator = torch.Generator().manual_seed(1)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        y = torch.randn(_ROWS, _COLUMNS, generator=generator).to(dtype).float()
        groups = y.unflatten(-1, (-1, _GROUP))
        amax = groups.abs().amax(-1)
        given = torch.tensor([448 * 6 / 5.7])
        sixth = torch.full_like(given, 1 / 6)
        scale = to_e4m3(amax * (given * sixth))
        other = to_e4m3(given * (amax * sixth))
        scales = (scale.view(torch.uint8) != other.view(torch.uint8)).double().mean()
        exact = quantize(groups, scale, given, (0, 0))
        ways = itertools.product((-1, 0, 1), repeat=2)
        shares = {
            units: float((quantize(groups, scale, given, units) != exact).double().mean())
            for units in ways
        }
        worst = max(shares, key=shares.__getitem__)
        one = torch.where(scale.float() == 0, 0, given / scale.float())
        divided = (to_e2m1(groups * one.unsqueeze(-1)) != exact).double().mean()
        print(
            f"{str(dtype)[6:]}: scales {float(scales):.2e}; elements at most {shares[worst]:.2e}, "
            f"with reciprocals off by {worst}; off by (0, 1): {shares[0, 1]:.2e}, "
            f"(0, -1): {shares[0, -1]:.2e}; with global / scale {float(divided):.2e}"
        )


if __name__ == "__main__":
    main()
