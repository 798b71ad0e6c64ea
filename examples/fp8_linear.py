"""Partial sums of one layer to the FP8 linear layer of the next, in two launches.

    torchrun --nproc-per-node 2 examples/fp8_linear.py

A block-scaled GEMM takes the quantized rows and their 1x128 scales without conversion. On GPUs of
compute capability 9.0 it is `torch._scaled_mm`, with 128x128 scales of the weight. On other devices
it is a matmul of the dequantized operands. Exits with 0 if the result equals that of quantizing the
16-bit `normed` in a separate step.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

import allnorm
from allnorm import reference

HIDDEN_SIZE, OUT_FEATURES, NUM_TOKENS, GROUP = 4096, 1536, 64, 128


def quantize_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes a weight in blocks of 128x128.

    Args:
        weight: [out_features, in_features], both multiples of 128.

    Returns:
        The weight in float8_e4m3fn, and float32 scales [out_features / 128, in_features / 128].
    """
    rows, columns = weight.shape
    blocks = weight.float().view(rows // GROUP, GROUP, columns // GROUP, GROUP)
    scale = blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-10) / 448
    quantized = (blocks / scale).to(torch.float8_e4m3fn).view(rows, columns)
    return quantized, scale.view(rows // GROUP, columns // GROUP)


def has_block_scaled_product(device: torch.device) -> bool:
    """Returns whether `torch._scaled_mm` supports 1x128 and 128x128 scales on the device."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def linear(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor
) -> torch.Tensor:
    """Returns `x @ weight.T` of quantized operands.

    Args:
        x: [num_tokens, in_features], float8_e4m3fn; num_tokens a multiple of 4.
        x_scale: [num_tokens, in_features / 128], float32, stride (1, num_tokens).
        weight: [out_features, in_features], float8_e4m3fn.
        weight_scale: [out_features / 128, in_features / 128], float32.

    Returns:
        [num_tokens, out_features], bfloat16.
    """
    if has_block_scaled_product(x.device):
        return torch._scaled_mm(
            x, weight.t(), x_scale, weight_scale.t(), out_dtype=torch.bfloat16, use_fast_accum=False
        )
    wide = x.float() * x_scale.repeat_interleave(GROUP, 1)
    blocks = weight_scale.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
    return (wide @ (weight.float() * blocks).t()).bfloat16()


def main() -> int:
    """Runs one rank; returns its exit code."""
    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else None
    if device is not None:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_cuda else "gloo")
    with allnorm.Communicator(device=device) as comm:
        torch.manual_seed(1)  # equal on every rank
        options = {"device": comm.device, "dtype": torch.bfloat16}
        residual = torch.randn(NUM_TOKENS, HIDDEN_SIZE, **options)
        norm_weight = torch.randn(HIDDEN_SIZE, **options)
        weight, weight_scale = quantize_weight(torch.randn(OUT_FEATURES, HIDDEN_SIZE, **options))
        torch.manual_seed(2 + comm.rank)
        x = torch.randn(NUM_TOKENS, HIDDEN_SIZE, **options)  # this rank's partial sum

        spec = allnorm.Fp8PerGroup(GROUP, "column_major")
        fused = comm.all_reduce_add_rms_norm_quant(x, residual, norm_weight, 1e-6, quant=spec)
        result = linear(fused.quantized, fused.scale, weight, weight_scale)

        normed, _ = comm.all_reduce_add_rms_norm(x, residual, norm_weight, 1e-6)
        separate = linear(*reference.quantize(normed, spec), weight, weight_scale)
        equal = torch.equal(result, separate)
        print(f"rank {comm.rank}: {tuple(result.shape)}, equal to the separate steps: {equal}")
    dist.destroy_process_group()
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
