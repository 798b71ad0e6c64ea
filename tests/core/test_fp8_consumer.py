"""Checks that FP8 GEMMs of fused and of separately quantized rows are bit-identical."""

from __future__ import annotations

import pytest
import torch
from rank_helpers import comm, on
from script_helpers import script

import allnorm
from allnorm import reference
from allnorm.testing import assert_same_bits, shared_input


@on(cpu=(2,), gpu=(2, 4))
@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
def test_gemms_of_fused_and_of_separate_quantization(
    rank: int, world_size: int, sharded: bool
) -> None:
    communicator = comm()
    fp8 = script("examples/fp8_linear.py")
    make = {"dtype": torch.bfloat16, "device": communicator.device}
    weight, weight_scale = fp8.quantize_weight(shared_input((768, 2048), name="linear", **make))
    norm_weight = shared_input((2048,), name="weight", **make)
    for tokens, layout in ((4, "column_major"), (64, "column_major_tma"), (132, "column_major")):
        spec = allnorm.Fp8PerGroup(128, layout)
        xs = [shared_input((tokens, 2048), name=f"x{r}", **make) for r in range(world_size)]
        residual = shared_input((tokens, 2048), name="residual", **make)
        lo, hi = communicator.row_shard(tokens) if sharded else (0, tokens)
        out = communicator.all_reduce_add_rms_norm_quant(
            xs[rank], residual[lo:hi], norm_weight, 1e-6, spec, residual_sharded=sharded
        )
        got = fp8.linear(out.quantized, out.scale, weight, weight_scale)

        normed, _ = reference.all_reduce_add_rms_norm(xs, residual, norm_weight, 1e-6)
        assert_same_bits(
            got, fp8.linear(*reference.quantize(normed, spec), weight, weight_scale), "product"
        )
        # Compares with exact arithmetic too, because both products could be wrong in the same way.
        dense = out.quantized.double() * out.scale.double().repeat_interleave(128, 1)
        blocks = weight_scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
        exact = dense @ (weight.double() * blocks).t()
        size = dense.abs() @ (weight.double() * blocks).abs().t()
        # Tensor cores keep about 14 bits of each product; the sum is rounded to bfloat16.
        assert bool(((got.double() - exact).abs() <= exact.abs() * 2**-8 + size * 2**-12).all())
    is_cuda = communicator.device.type == "cuda"
    is_hopper = is_cuda and torch.cuda.get_device_capability() == (9, 0)
    assert fp8.has_block_scaled_gemm(communicator.device) == is_hopper
