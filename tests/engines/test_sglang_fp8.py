"""Tests norms that return FP8 to SGLang's own linear functions, with emulated GEMMs on CPU.

An emulated GEMM checks that the scales have the layout that SGLang allocates, and multiplies in
float32.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import allnorm
from allnorm import reference
from allnorm.testing import RankPool, assert_same_bits, rank_input, shared_input

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed: make test-engines", allow_module_level=True)

import sglang_ranks as engine
from sglang_ranks import is_old, ranks

__all__ = ["ranks"]  # a fixture
HIDDEN = engine.HIDDEN_SIZE
BLOCK = [128, 128]
FUNCTIONS = ("deepgemm", "cutlass", "triton")


# ---- functions that run on each rank -----------------------------------------------------------


def function_of(gemm: str) -> Any:
    from sglang.srt.layers.quantization import fp8_utils

    tail = "" if gemm == "triton" else "_with_fallback"
    return getattr(fp8_utils, f"{gemm}_w8a8_block_fp8_linear{tail}")


def multiply(q: torch.Tensor, scale: torch.Tensor, weight: Any, weight_scale: Any) -> torch.Tensor:
    x = q.float() * scale.repeat_interleave(128, 1)
    blocks = weight_scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return (x @ (weight.float() * blocks[: weight.shape[0]]).T).bfloat16()


@contextlib.contextmanager
def emulated_gemms() -> Iterator[list[tuple[int, ...]]]:
    """Emulates SGLang's quantizers and GEMMs on the CPU; yields the strides of their scales."""
    from sglang.kernels.ops.quantization import fp8_kernel
    from sglang.srt.layers.quantization import fp8_utils

    strides: list[tuple[int, ...]] = []

    def expect(q: torch.Tensor, scale: torch.Tensor, **layout: bool) -> None:
        made = fp8_kernel.create_per_token_group_quant_fp8_output_scale(
            tuple(q.shape), q.device, 128, scale_ue8m0=False, **layout
        )
        assert (made.shape, made.stride(), made.dtype) == (scale.shape, scale.stride(), scale.dtype)
        assert q.dtype == torch.float8_e4m3fn
        assert q.is_contiguous()
        strides.append(scale.stride())

    def deepgemm(q: Any, weight: Any, scale: Any, weight_scale: Any, *a: Any, **k: Any) -> Any:
        expect(q, scale, column_major_scales=True, scale_tma_aligned=True)
        return multiply(q, scale, weight, weight_scale)

    def triton(q: Any, weight: Any, scale: Any, weight_scale: Any, *a: Any, **k: Any) -> Any:
        expect(q, scale, column_major_scales=False, scale_tma_aligned=False)
        return multiply(q, scale, weight, weight_scale)

    def cutlass(q: Any, weight_t: Any, scale: Any, weight_scale_t: Any, **k: Any) -> Any:
        # The kernel requires column-major scales with padded columns.
        assert scale.stride(0) == 1
        assert scale.stride(1) % 4 == 0
        strides.append(scale.stride())
        return multiply(q, scale, weight_t.T, weight_scale_t.T)

    def quantize(x: torch.Tensor, group_size: int, *, column_major_scales: bool, **k: Any) -> Any:
        layout = "column_major_tma" if column_major_scales else "row_major"
        return reference.quantize(x, allnorm.Fp8PerGroup(group_size, layout))

    def quantize_padded(x: torch.Tensor, group_size: int, **k: Any) -> Any:
        return reference.quantize(x, allnorm.Fp8PerGroup(group_size, "column_major_tma"))

    patch = pytest.MonkeyPatch()
    for name, stand_in in {
        "w8a8_block_fp8_matmul_deepgemm": deepgemm,
        "w8a8_block_fp8_matmul_triton": triton,
        "fp8_blockwise_scaled_mm": cutlass,
        "sglang_per_token_group_quant_fp8": quantize,
        "per_token_group_quant_fp8": quantize,
        "sglang_per_token_group_quant_fp8_row_padded": quantize_padded,
    }.items():
        patch.setattr(fp8_utils, name, stand_in, raising=name != "fp8_blockwise_scaled_mm")
    try:
        yield strides
    finally:
        patch.undo()


def weights(rows: int, columns: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    weight = rank_input((rows, columns), torch.float32, rank).to(torch.float8_e4m3fn)
    scale = 0.01 + 0.01 * shared_input((-(-rows // 128), columns // 128), torch.float32, "s").abs()
    return weight, scale


@engine.with_plugin
def hand_over(
    plugin: Any, rank: int, world_size: int, gemm: str, num_tokens: int, keep_bf16: bool
) -> str:
    """Passes a quantized norm's result to a linear function; returns the strides of the scales."""
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.quantization import fp8_utils

    norm = RMSNorm(HIDDEN, eps=1e-5).bfloat16()
    norm.weight.data.copy_(shared_input((HIDDEN,), torch.bfloat16, "weight"))
    engine.warm_up(torch.nn.Sequential(norm))
    x = rank_input((num_tokens, HIDDEN), torch.bfloat16, rank)
    residual = shared_input((num_tokens, HIDDEN), torch.bfloat16, "residual")
    weight, weight_scale = weights(256, HIDDEN, rank)
    function = function_of(gemm)
    patch = pytest.MonkeyPatch()
    patch.setattr(fp8_utils, "dispatch_w8a8_block_fp8_linear", lambda *a, **k: function)
    try:
        with torch.inference_mode(), emulated_gemms() as strides:
            plain, total = norm.forward_with_allreduce_fusion(x, residual)
            result = norm.forward_with_allreduce_fusion_quant_per_group(
                x, residual, use_attn_tp_group=False, keep_bf16=keep_bf16
            )
            if result is None:
                with pytest.raises(AssertionError):
                    function(
                        *reference.quantize(plain), BLOCK, weight_scale, input_scale=weight_scale
                    )
                return "16 bits"
            read, residual_out = result
            assert_same_bits(residual_out, total)
            if keep_bf16:
                assert_same_bits(read[0], plain)
            q, scale = read[-2:]
            got = function(q, weight, BLOCK, weight_scale, input_scale=scale)
            want = function(plain, weight, BLOCK, weight_scale)
            assert_same_bits(got, want)
            assert len(set(strides)) == 1
            return str(strides[0])
    finally:
        patch.undo()


def quantize_layers(model: Any, gemm: str, rank: int) -> None:
    """Makes a model's column-parallel layers compute in block-scaled FP8."""
    from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod

    method = Fp8LinearMethod.__new__(Fp8LinearMethod)
    method.use_marlin = method.use_mxfp8 = method.block_fp8_as_mxfp8 = False
    method.block_quant = True
    method.weight_block_size = BLOCK
    method.w8a8_block_fp8_linear = function_of(gemm)
    for layer in model.model.layers:
        for linear in (layer.self_attn.qkv_proj, layer.mlp.gate_up_proj):
            weight, scale = weights(*linear.weight.shape, rank)
            del linear.weight
            linear.weight = torch.nn.Parameter(weight, requires_grad=False)
            linear.weight_scale_inv = torch.nn.Parameter(scale, requires_grad=False)
            linear.quant_method = method


@engine.with_plugin
def run_quantized(
    plugin: Any, rank: int, world_size: int, family: str, gemm: str
) -> tuple[int, int]:
    from allnorm.integrations.sglang.norms import ATTRIBUTE

    model = engine.tiny_model(family)
    engine.by_definition(model)
    quantize_layers(model, gemm, rank)
    with emulated_gemms() as strides:
        want = engine.run(model, 6)
        before = len(strides)
        engine.warm_up(model)
        quantized = [
            module
            for module in model.modules()
            if getattr(getattr(module, ATTRIBUTE, None), "quant", None) is not None
        ]
        assert_same_bits(engine.run(model, 6), want)
        assert len(strides) == 2 * before
    return len(quantized), len(plugin.current().sites)


# ---- tests -------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_bf16", [False, True], ids=["fp8", "with bf16"])
@pytest.mark.parametrize("num_tokens", [1, 6, 8])
@pytest.mark.parametrize("gemm", FUNCTIONS)
def test_hand_over(ranks: RankPool, gemm: str, num_tokens: int, keep_bf16: bool) -> None:
    (got, _) = ranks.run(hand_over, gemm, num_tokens, keep_bf16)
    if gemm != "triton":
        assert got == str((1, -(-num_tokens // 4) * 4))
    else:
        assert got == ("16 bits" if is_old() else str((HIDDEN // 128, 1)))


@pytest.mark.parametrize("gemm", FUNCTIONS)
@pytest.mark.parametrize("family", list(engine.FAMILIES))
def test_a_quantized_model_computes_the_same(ranks: RankPool, family: str, gemm: str) -> None:
    quantized, fused = ranks.run(run_quantized, family, gemm)[0]
    layers = engine.NUM_LAYERS
    if is_old() or family in engine.REDUCE_THEMSELVES:
        assert fused == 2 * layers
    else:
        assert fused == (0 if family in engine.AT_BOUNDARIES else 2 * layers - 1)
    if family in (*engine.REDUCE_THEMSELVES, *engine.AT_BOUNDARIES):
        want = 0  # these families pass 16-bit tensors to linear layers
    elif is_old():
        # The Triton function of 0.5.17 takes no quantized input. Its Qwen3 layers read the shape
        # of the first norm's result, which therefore must be a tensor.
        want = 0 if gemm == "triton" else layers * (1 if family == "qwen3" else 2)
    else:
        # In 0.5.23, Qwen3's layers do not name the linear layer that reads a norm.
        want = 0 if family == "qwen3" else 2 * layers
    assert quantized == want
