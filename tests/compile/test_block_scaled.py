"""Tests that vLLM's MXFP8 and NVFP4 quantization operators fuse with bit-identical results."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from rank_helpers import comm, message_of, on
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

import allnorm
from allnorm import reference
from allnorm.compile import block_scaled, fuse
from allnorm.integrations.vllm import quants
from allnorm.quant import empty_scale
from allnorm.testing import assert_same_bits

from .helpers import EPS, Inputs, fused_calls, llama, nodes_calling, reduce, table

FP4_LAYOUTS = {True: "swizzled_128x4", False: "row_major"}


def nvfp4(input: Any, input_scale: Any, is_sf_swizzled_layout: bool) -> Any:
    spec = allnorm.NvFp4(input_scale, FP4_LAYOUTS[is_sf_swizzled_layout])
    quantized, scale = reference.quantize(input, spec)
    if not is_sf_swizzled_layout:
        return quantized, scale.view(torch.uint8)
    rows = (input.shape[0] + 127) // 128 * 128
    return quantized, scale.view(torch.int32).view(rows, -1)


def nvfp4_out(
    input: Any, input_scale: Any, is_sf_swizzled_layout: bool, *, output: Any, output_scale: Any
) -> None:
    quantized, scale = nvfp4(input, input_scale, is_sf_swizzled_layout)
    output.zero_()[:, : quantized.shape[1]] = quantized
    output_scale.zero_()[:, : scale.shape[1]] = scale


def nvfp4_fake(input: Any, input_scale: Any, is_sf_swizzled_layout: bool) -> Any:
    return output_of(input), scale_of(input, is_sf_swizzled_layout)


def output_of(y: Any, padding: int = 0) -> Any:
    return torch.empty((y.shape[0], y.shape[1] // 2 + padding), dtype=torch.uint8, device=y.device)


def scale_of(y: Any, swizzled: bool, padding: int = 0) -> Any:
    tokens, groups = y.shape[0], y.shape[1] // 16 + padding // 8
    if not swizzled:
        return torch.empty((tokens, groups), dtype=torch.uint8, device=y.device)
    shape = ((tokens + 127) // 128 * 128, (groups + 3) // 4)
    return torch.empty(shape, dtype=torch.int32, device=y.device)


def mxfp8(x: Any, is_sf_swizzled_layout: bool = False, alignment: int = 0) -> Any:
    return reference.quantize(x, allnorm.MxFp8())


def mxfp8_fake(x: Any, is_sf_swizzled_layout: bool = False, alignment: int = 0) -> Any:
    scale = empty_scale(allnorm.MxFp8(), *x.shape, x.device)
    return torch.empty_like(x, dtype=torch.float8_e4m3fn), scale


_libraries = []
_FP4 = "scaled_fp4_quant{}(Tensor input, Tensor input_scale, bool is_sf_swizzled_layout{}) -> {}"
_OUT = ", *, Tensor(a!) output, Tensor(b!) output_scale"
_MX = "(Tensor x, bool is_sf_swizzled_layout=False, int alignment=0) -> (Tensor, Tensor)"
for _space, _schema, _run, _fake in (
    ("_C", _FP4.format("", "", "(Tensor, Tensor)"), nvfp4, nvfp4_fake),
    ("_C", _FP4.format(".out", _OUT, "()"), nvfp4_out, lambda *_, **__: None),
    ("vllm", f"mxfp8_quantize{_MX}", mxfp8, mxfp8_fake),
):
    _library = torch.library.Library(_space, "FRAGMENT")
    _name = _schema.split("(")[0]
    _library.define(_schema)
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_space}::{_name}", _fake, lib=_library)
    _libraries.append(_library)


def stored(
    y: Any, given: Any, swizzled: bool = True, padding: int = 0, transposed: bool = False
) -> Any:
    """Calls the operator in its functional wrapper, as vLLM does."""
    scale = scale_of(y, swizzled, padding)
    _, output, scale = auto_functionalized(
        torch.ops._C.scaled_fp4_quant.out,
        input=y,
        input_scale=given,
        is_sf_swizzled_layout=swizzled,
        output=output_of(y, padding),
        output_scale=scale.t().contiguous().t() if transposed else scale,
    )
    return output, scale.view(torch.float8_e4m3fn)


def wrapped(y: Any, given: Any, **views: Any) -> Any:
    """Calls the operator in Inductor's default wrapper, `auto_functionalized_v2`."""
    _, scale, output = auto_functionalized_v2(
        torch.ops._C.scaled_fp4_quant.out,
        input=y,
        input_scale=given,
        is_sf_swizzled_layout=True,
        _output_base_index=1,
        _output_scale_base_index=0,
        _all_bases=[scale_of(y, True), output_of(y)],
        **views,
    )
    return output, scale.view(torch.float8_e4m3fn)


def quantizing(quantize):
    """Returns a layer that quantizes the normed tensor with `quantize(y, given)`.

    A layer is a function of (x, residual, weight, given), where `given` is the global scale. Its
    last result is the sum.
    """

    def layer(x, residual, w, given):
        total = reduce(x) + residual
        return *quantize(llama(total, w), given), total

    return layer


def stored_in_a_part(y, given):
    part = {"_output_slice_dim": 0, "_output_slice_start": 0, "_output_slice_end": y.shape[0]}
    return wrapped(y, given, **part)


def returned(swizzled):
    def quantize(y, given):
        quantized, scale = torch.ops._C.scaled_fp4_quant.default(y, given, swizzled)
        return quantized, scale.view(torch.float8_e4m3fn)

    return quantizing(quantize)


def mx_in_tiles(y, _):
    quantized, scale = torch.ops.vllm.mxfp8_quantize.default(y, True)
    return quantized, scale.view(torch.float8_e8m0fnu)


def mx_with_the_16_bit_rows(x, residual, w, given):
    total = reduce(x) + residual
    y = llama(total, w)
    return *torch.ops.vllm.mxfp8_quantize.default(y, True, 32), total, y


def scales_in_columns(y, given):
    return stored(y, given, swizzled=False, transposed=True)[:1]


def scale_of_the_rows(y, given):
    return stored(y, y.float().abs().amax(-1, keepdim=True).amax(0))


LAYERS = {
    **table(
        "nvfp4",
        stored_in_tiles=quantizing(stored),
        stored_in_rows=quantizing(functools.partial(stored, swizzled=False)),
        stored_in_bases=quantizing(wrapped),
        returned_in_tiles=returned(True),
        returned_in_rows=returned(False),
        scale_without_a_dimension=quantizing(lambda y, given: stored(y, given.view([]))),
    ),
    **table("mxfp8", mx_with_the_16_bit_rows, mx_in_tiles=quantizing(mx_in_tiles)),
}
# Maps a reason to a layer whose quantization stays in the graph, after the fused 16-bit call.
UNFUSED_LAYERS = {
    "it changes only a part of a tensor": quantizing(stored_in_a_part),
    "padded to 264 elements from 256": quantizing(functools.partial(stored, padding=8)),
    "a layout allnorm does not write": quantizing(scales_in_columns),
    "computed from the reduced tensor": quantizing(scale_of_the_rows),
    "its scales are row-major bytes": quantizing(
        lambda y, _: torch.ops.vllm.mxfp8_quantize.default(y, False)
    ),
    "its rows are padded to a multiple of 768": quantizing(
        lambda y, _: torch.ops.vllm.mxfp8_quantize.default(y, True, 768)
    ),
}


def inputs_of(rank: int, tokens: int = 24) -> list[torch.Tensor]:
    return [*Inputs(shape=(tokens, 512)).make(rank), torch.tensor([37.5])]


def traced(function: Any, inputs: list[torch.Tensor], dynamic: bool) -> Any:
    """Returns a layer's graph; with `dynamic`, the graph is for any number of tokens."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    kinds = [DimDynamic.DYNAMIC if dynamic else DimDynamic.STATIC, DimDynamic.STATIC]
    fakes = [
        mode.from_tensor(t, symbolic_context=StatelessSymbolicContext(kinds))
        if t.dim() == 2
        else mode.from_tensor(t, static_shapes=True)
        for t in inputs
    ]
    with mode:
        return make_fx(function)(*fakes)


@on(cpu=(2,))
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", [*LAYERS, *UNFUSED_LAYERS])
def test_operators_that_quantize_blocks(
    rank: int, world_size: int, name: str, dynamic: bool
) -> None:
    layer, quant = LAYERS.get(name) or (UNFUSED_LAYERS[name], None)
    module = traced(layer, inputs_of(rank), dynamic)
    with torch.no_grad():
        report = fuse(
            module, None, comm(), decompositions=quants.decompositions(), approximate_quant=True
        )
        module.graph.lint()
        assert len(fused_calls(module)) == 1, str(report)
        (site,) = report.fused
        operators = nodes_calling(module, "auto_functionalized", "scaled_fp4", "mxfp8_quantize")
        assert bool(operators) == (quant is None), str(module.graph)
        assert site.quant == quant
        if quant is None:
            assert name in site.note
            return
        assert site.note == ""
        for tokens in (24, 131, 1) if dynamic else (24,):
            check(module, layer, rank, world_size, tokens, quant)


def check(module: Any, function: Any, rank: int, world_size: int, tokens: int, quant: str) -> None:
    """Compares bytes with the reference, and shapes and dtypes with those of the unfused layer."""
    inputs = inputs_of(rank, tokens)
    results, like = module(*inputs), function(*inputs)
    given = inputs[3]
    spec = allnorm.MxFp8() if quant == "mxfp8" else allnorm.NvFp4(given)
    if quant == "nvfp4" and like[1].shape == (tokens, 32):
        spec = allnorm.NvFp4(given, "row_major")
    xs = [inputs_of(r, tokens)[0] for r in range(world_size)]
    want = reference.all_reduce_add_rms_norm_quant(
        xs, *inputs[1:3], EPS, spec, numerics="transformers", weight_bias=-0.0, return_normed=True
    )
    for i, (mine, theirs, plain) in enumerate(zip(results, want, like, strict=False)):
        assert (mine.shape, mine.dtype) == (plain.shape, plain.dtype), i
        assert_same_bits(as_bytes(mine), as_bytes(theirs), f"result {i}")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8).flatten()


def test_block_scaled_refuses_other_quantizations() -> None:
    y = torch.zeros(2, 64)
    text = message_of(TypeError, lambda: block_scaled(y, allnorm.Fp8PerToken()))
    assert "expected allnorm.MxFp8() or an allnorm.NvFp4" in text
    text = message_of(TypeError, lambda: block_scaled(y, allnorm.Fp8PerGroup(32)))
    assert "Fp8PerGroup" in text
