"""Compares MXFP8 and NVFP4 with vLLM's Python code.

The layout of tiled scales must be equal. Quantized elements can differ; the tests bound
their number.
"""

from __future__ import annotations

import pytest
import torch

import allnorm
from allnorm import reference

pytest.importorskip("vllm", reason="vLLM is not installed: make test-engines")
pytestmark = pytest.mark.timeout(3000)

vllm_without_cuda = pytest.importorskip("vllm_without_cuda")
nvfp4 = pytest.importorskip("vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils")
mxfp8 = pytest.importorskip("vllm.model_executor.layers.quantization.utils.mxfp8_utils")

SHAPES = [(1, 64), (5, 96), (131, 160), (128, 2880), (300, 4096)]


def rows(num_tokens: int, hidden_size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, hidden_size, generator=generator).to(dtype)
    residual = torch.randn(num_tokens, hidden_size, generator=generator).to(dtype)
    weight = torch.rand(hidden_size, generator=generator).to(dtype)
    return allnorm.add_rms_norm(x, residual, weight, 1e-6)[0]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_nvfp4(shape: tuple[int, int], dtype: torch.dtype) -> None:
    y = rows(*shape, dtype)
    given = (448 * 6 / y.float().abs().max()).reshape(1)
    quantized, tiles = reference.quantize(y, allnorm.NvFp4(given))
    scale = reference.quantize(y, allnorm.NvFp4(given, "row_major"))[1]
    # The layout must match byte for byte.
    linear = nvfp4.convert_swizzled_to_linear(tiles.view(torch.uint8), *shape, 16)
    assert torch.equal(linear[:, : shape[1] // 16], scale.view(torch.uint8))
    # A few scales differ, because vLLM multiplies by 1/6 first. With equal scales, elements match.
    elements, scales = nvfp4.ref_nvfp4_quant(y, given, 16)
    same = scales == scale.float()
    assert float(same.double().mean()) > 0.98
    got = nvfp4.break_fp4_bytes(quantized, torch.float32)
    groups = (got == elements).unflatten(-1, (-1, 16)).all(-1)
    assert bool(groups[same].all())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mxfp8(shape: tuple[int, int], dtype: torch.dtype) -> None:
    y = rows(*shape, dtype)
    quantized, tiles = reference.quantize(y, allnorm.MxFp8())
    if not hasattr(mxfp8, "_mxfp8_e4m3_quantize_torch"):
        pytest.skip("this version quantizes by its extension alone")
    theirs, scales = mxfp8._mxfp8_e4m3_quantize_torch(y, is_sf_swizzled_layout=True)
    if (
        vllm_without_cuda.naive_mxfp8()
    ):  # vLLM's code uses the power of two below amax, so only the layouts agree
        assert torch.equal(tiles == 0, scales == 0)
        assert int((scales.int() - tiles.int()).max()) <= 9
        return
    assert torch.equal(tiles, scales)
    assert torch.equal(quantized.view(torch.uint8), theirs.view(torch.uint8))
