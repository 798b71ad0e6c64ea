"""A fused call that quantizes to FP8, and the block-scaled GEMM that reads its result.

    torchrun --nproc-per-node 2 examples/fp8_linear.py

The GEMM takes the quantized rows and their 1x128 scales as they are. On GPUs of compute capability
9.0 (H100, H200) it is `torch._scaled_mm`; on other devices, a float32 matmul emulates it. Checks
the GEMM's result bit by bit against quantizing the 16-bit `normed` in a separate step.
"""

import os
from typing import Any

import torch
import torch.distributed as dist

import allnorm
from allnorm.testing import assert_same_bits

HIDDEN_SIZE, OUT_FEATURES, NUM_TOKENS, GROUP, EPS = 4096, 1536, 64, 128, 1e-6


def quantize_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a weight [N, K] in float8_e4m3fn and its scales per 128x128 block, in float32."""
    rows, columns = weight.shape
    blocks = weight.float().view(rows // GROUP, GROUP, columns // GROUP, GROUP)
    scale = blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-10) / 448  # 448: largest e4m3
    quantized = (blocks / scale).to(torch.float8_e4m3fn).view(rows, columns)
    return quantized, scale.view(rows // GROUP, columns // GROUP)


def has_block_scaled_gemm(device: torch.device) -> bool:
    """Returns whether `torch._scaled_mm` supports 1x128 and 128x128 scales on the device."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def linear(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor
) -> torch.Tensor:
    """Returns `x @ weight.T` of quantized operands, in bfloat16; x has a multiple of 4 rows."""
    if has_block_scaled_gemm(x.device):
        return torch._scaled_mm(
            x, weight.t(), x_scale, weight_scale.t(), out_dtype=torch.bfloat16, use_fast_accum=False
        )
    wide = x.float() * x_scale.repeat_interleave(GROUP, 1)
    blocks = weight_scale.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
    return (wide @ (weight.float() * blocks).t()).bfloat16()


def main() -> None:
    """Runs one rank."""
    # One GPU per rank if there are enough, otherwise CPU ranks. torchrun sets the variables.
    gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    with allnorm.Communicator(device=device) as comm:
        torch.manual_seed(0)  # replicated tensors: equal on every rank
        residual = torch.randn(NUM_TOKENS, HIDDEN_SIZE, **options)
        norm = torch.randn(HIDDEN_SIZE, **options)
        weight, weight_scale = quantize_weight(torch.randn(OUT_FEATURES, HIDDEN_SIZE, **options))
        torch.manual_seed(1 + comm.rank)  # this rank's partial sum
        x = torch.randn_like(residual)

        # column_major: scales with stride (1, NUM_TOKENS), as torch._scaled_mm reads them.
        spec = allnorm.Fp8PerGroup(GROUP, "column_major")
        fused = comm.all_reduce_add_rms_norm_quant(x, residual, norm, EPS, quant=spec)
        output = linear(fused.quantized, fused.scale, weight, weight_scale)

        normed, _ = comm.all_reduce_add_rms_norm(x, residual, norm, EPS)
        separate = linear(*allnorm.reference.quantize(normed, spec), weight, weight_scale)
        assert_same_bits(output, separate, "output of the GEMM")

        dist.barrier()  # every rank has passed its checks
        if comm.rank == 0:
            gemm = "torch._scaled_mm" if has_block_scaled_gemm(device) else "an emulated GEMM"
            print(
                f"OK: {gemm} gives the same bits after the fused and after a separate "
                f"quantization ({comm.world_size} ranks on {device.type})"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
