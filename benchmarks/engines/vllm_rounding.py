"""Determines the rounding mode of vLLM's compiled norm: counts differing elements per mode.

Compiles vLLM's native norm (vllm.ir, provider "native") with Inductor, and runs allnorm's add +
norm in every mode on the same rows. Needs one GPU and vLLM.
"""

from __future__ import annotations

from typing import Any

import torch

import allnorm

MODES = ("rounded", "unrounded", "transformers", "vllm")


def native(name: str) -> Any:
    from vllm.ir.op import IrOp

    return IrOp.registry[name].impls["native"].impl_fn


def main() -> None:
    import vllm.ir.ops  # noqa: F401 - registers them

    torch.manual_seed(0)
    compiled = torch.compile(native("fused_add_rms_norm"), dynamic=True)
    for hidden_size in (4096, 8192):
        x, residual = (torch.randn(256, hidden_size, device="cuda").bfloat16() for _ in range(2))
        weight = (1 + 0.1 * torch.randn(hidden_size, device="cuda")).bfloat16()
        normed, summed = compiled(x, residual, weight, 1e-5)
        eager, _ = native("fused_add_rms_norm")(x, residual, weight, 1e-5)
        for mode in MODES:
            ours, total = allnorm.add_rms_norm(x, residual, weight, 1e-5, numerics=mode)
            share = float((ours != normed).float().mean())
            against_eager = float((ours != eager).float().mean())
            print(
                f"hidden_size {hidden_size} {mode:12} differs from Inductor's in {share:.3%} of "
                f"elements, from eager PyTorch's in {against_eager:.3%}; sums "
                f"{'equal' if torch.equal(total, summed) else 'DIFFER'}"
            )


if __name__ == "__main__":
    main()
