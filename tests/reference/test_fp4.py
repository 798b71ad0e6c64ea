"""Tests MXFP8 and NVFP4: definition, use in GEMMs, compiled calls, rejected arguments."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from rank_helpers import comm, message_of, on, same_on_every_rank

import allnorm
from allnorm import quant as quants
from allnorm import reference
from allnorm.quant import Quant
from allnorm.testing import assert_same_bits, shared_input

GIVEN = torch.tensor([700.0])
SPECS: list[Quant] = [allnorm.NvFp4(GIVEN), allnorm.NvFp4(GIVEN, "row_major"), allnorm.MxFp8()]


def elements_of(quantized: torch.Tensor) -> torch.Tensor:
    """Decodes bytes that hold two e2m1 elements each."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64).to(quantized.device)
    both = torch.stack((quantized & 15, quantized >> 4), -1).flatten(-2).long()
    return values[both & 7] * torch.where(both & 8 != 0, -1.0, 1.0)


def scale_at(scale: torch.Tensor, row: int, group: int, groups: int) -> torch.Tensor:
    """Returns the scale of a row and group, by the formula on the API page."""
    tile = row // 128 * -(-groups // 4) + group // 4
    return scale[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + group % 4]


def decoded(quantized: torch.Tensor, scale: torch.Tensor, spec: Quant, width: int) -> torch.Tensor:
    """Dequantizes rows with tiled scales to float64, as a GEMM reads them."""
    is_mx = isinstance(spec, allnorm.Fp8PerGroup)
    size = 32 if is_mx else 16
    count, groups = quantized.shape[0], width // size
    tiles = quants.swizzled_rows(scale, -(-groups // 4))[:count, :groups]
    if is_mx:
        elements, scales = quantized.double(), torch.exp2(tiles.double() - 127)
    else:
        elements = elements_of(quantized).view(count, width)
        scales = tiles.contiguous().view(torch.float8_e4m3fn).double() / spec.global_scale.double()
    return elements * scales.repeat_interleave(size, 1)


@on(cpu=(2,), gpu=(1, 2))
@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
def test_gemm_of_quantized_rows(rank: int, world_size: int, sharded: bool) -> None:
    """Compares a GEMM of quantized results with a GEMM of the unquantized rows."""
    c = comm()
    make = {"dtype": torch.bfloat16, "device": c.device}
    tokens, width = 132, 512
    norm_weight = shared_input((width,), name="weight", **make)
    linear = shared_input((256, width), name="linear", **make)
    xs = [shared_input((tokens, width), name=f"x{r}", **make) for r in range(world_size)]
    residual = shared_input((tokens, width), name="residual", **make)
    lo, hi = c.row_shard(tokens) if sharded else (0, tokens)
    given = torch.full((1,), 448 * 6 / 16.0, device=c.device)
    blackwell = c.device.type == "cuda" and torch.cuda.get_device_capability()[0] >= 10
    for spec in (allnorm.MxFp8(), allnorm.NvFp4(given)):
        out = c.all_reduce_add_rms_norm_quant(
            xs[rank], residual[lo:hi], norm_weight, 1e-6, spec, True, residual_sharded=sharded
        )
        weight, weight_scale = reference.quantize(linear, spec)
        dense = decoded(out.quantized, out.scale, spec, width)
        other = decoded(weight, weight_scale, spec, width)
        exact = dense @ other.t()
        near = out.normed.double() @ linear.double().t()
        limit = 0.05 if isinstance(spec, allnorm.Fp8PerGroup) else 0.2
        assert float((exact - near).norm() / near.norm()) < limit
        if blackwell:
            size = dense.abs() @ other.abs().t()
            got = scaled_product(out, weight, weight_scale, spec)
            assert bool(((got - exact).abs() <= exact.abs() * 2**-8 + size * 2**-12).all())


def scaled_product(
    out: allnorm.QuantizedNorm, weight: torch.Tensor, weight_scale: torch.Tensor, spec: Quant
) -> torch.Tensor:
    """Multiplies with torch's scaled GEMM, which supports these formats since SM 10.0."""
    from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

    if isinstance(spec, allnorm.NvFp4):
        kinds, elements = (
            [ScalingType.BlockWise1x16, ScalingType.TensorWise],
            torch.float4_e2m1fn_x2,
        )
        inverse = 1 / spec.global_scale
        scales = [[scale, inverse] for scale in (out.scale, weight_scale)]
        swizzles = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]
    else:
        kinds, elements = [ScalingType.BlockWise1x32], torch.float8_e4m3fn
        scales = [[scale.view(torch.float8_e8m0fnu)] for scale in (out.scale, weight_scale)]
        swizzles = [SwizzleType.SWIZZLE_32_4_4]
    product: torch.Tensor = scaled_mm(
        out.quantized.view(elements),
        weight.view(elements).t(),
        scales[0],
        kinds,
        scales[1],
        kinds,
        swizzle_a=swizzles,
        swizzle_b=swizzles,
        output_dtype=torch.bfloat16,
    )
    return product.double()


@on(cpu=(2,), gpu=(2,))
def test_compiled(rank: int, world_size: int) -> None:
    c = comm()
    make = {"dtype": torch.bfloat16, "device": c.device}
    weight = shared_input((96,), name="weight", **make)
    given = torch.full((1,), 80.0, device=c.device)

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def program(x: torch.Tensor) -> Any:
        nv = c.all_reduce_add_rms_norm_quant(x, None, weight, 1e-5, allnorm.NvFp4(given))
        mx = c.all_reduce_add_rms_norm_quant(x, None, weight, 1e-5, allnorm.MxFp8())
        return nv.quantized, nv.scale, mx.quantized, mx.scale

    for tokens in (2, 130, 3):
        xs = [shared_input((tokens, 96), name=f"x{r}", **make) for r in range(world_size)]
        got = program(xs[rank])
        want = [
            tensor
            for spec in (allnorm.NvFp4(given), allnorm.MxFp8())
            for tensor in reference.all_reduce_add_rms_norm_quant(xs, None, weight, 1e-5, spec)[:2]
        ]
        for a, b in zip(got, want, strict=True):
            assert_same_bits(a, b, f"{tokens} rows, compiled")


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_layout_by_the_formula(spec: Quant) -> None:
    """Checks that scales have the API page's layout, and that elements are close to the values."""
    y = shared_input((131, 96), torch.float32, "y")
    quantized, scale = reference.quantize(y, spec)
    size = 32 if isinstance(spec, allnorm.Fp8PerGroup) else 16
    groups = 96 // size
    if isinstance(spec, allnorm.NvFp4):
        elements = elements_of(quantized)
        plain = reference.quantize(y, allnorm.NvFp4(spec.global_scale, "row_major"))[1].double()
        scales = plain / float(spec.global_scale)
    else:
        elements = quantized.double()
        plain = reference.quantize(y, allnorm.Fp8PerGroup(32, scale_format="ue8m0"))[1].double()
        scales = plain
    if spec.scale_layout == "swizzled_128x4":
        assert scale.shape == (-(-131 // 128) * -(-groups // 4) * 512,)
        for row, group in itertools.product((0, 1, 31, 32, 100, 127, 128, 130), range(groups)):
            got = scale_at(scale, row, group, groups)
            value = 2.0 ** (int(got) - 127) if size == 32 else float(got)
            assert value == plain[row, group]
        used = 131 * groups
        assert int((scale.view(torch.uint8) != 0).sum()) <= used
    dense = elements.view(131, groups, size) * scales.unsqueeze(-1)
    amax = y.double().view(131, groups, size).abs().amax(-1, keepdim=True)
    # Half of the widest step: 1 of 6 for e2m1, 16 of 448 for e4m3. Scales can be 1/16 too small.
    bound = amax * (0.24 if size == 16 else 0.0625)
    assert bool(((dense - y.double().view_as(dense)).abs() <= bound).all())


def e2m1_by_definition(values: torch.Tensor) -> torch.Tensor:
    """Rounds to the nearest of the eight e2m1 magnitudes, with ties to the even code."""
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    distance = (values.double().abs().clamp(max=6).unsqueeze(-1) - sizes).abs()
    even_first = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    code = even_first[distance[..., even_first].argmin(-1)]
    return (code | values.signbit().long() << 3).to(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_e2m1_of_every_16_bit_number(dtype: torch.dtype) -> None:
    """Puts each value into a group with amax 6, so that the scale is 1."""
    bits = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    numbers = bits[bits.isfinite() & (bits.abs() <= 6)]
    rows = torch.full((numbers.numel(), 16), 6.0, dtype=dtype)
    rows[:, 3] = numbers
    quantized, scale = reference.quantize(rows, allnorm.NvFp4(torch.ones(1), "row_major"))
    assert (scale.float() == 1).all()
    got = quantized[:, 1] >> 4
    assert torch.equal(got, e2m1_by_definition(numbers.float()))
    # The kernels quantize normed rows. The mean square of these rows is not 1, so the norm scales
    # them.
    out = allnorm.add_rms_norm_quant(
        rows, None, torch.ones(16, dtype=dtype), 0.0, allnorm.NvFp4(torch.ones(1)), True
    )
    want = reference.quantize(out.normed, allnorm.NvFp4(torch.ones(1)))
    assert_same_bits(out.quantized, want[0], "rows")
    assert_same_bits(out.scale, want[1], "scales")


REFUSED: dict[str, tuple[type[Exception], tuple[str, ...], Any]] = {
    "not a tensor": (TypeError, ("global_scale", "float"), lambda: allnorm.NvFp4(1.0)),
    "dtype": (TypeError, ("float16",), lambda: allnorm.NvFp4(torch.ones(1).half())),
    "elements": (ValueError, ("one element",), lambda: allnorm.NvFp4(torch.ones(2))),
    "layout": (ValueError, ("column_major",), lambda: allnorm.NvFp4(torch.ones(1), "column_major")),
    "mx of 64": (
        ValueError,
        ("64", "MxFp8"),
        lambda: allnorm.Fp8PerGroup(64, "swizzled_128x4", "ue8m0"),
    ),
    "mx in float32": (
        ValueError,
        ("float32", "MxFp8"),
        lambda: allnorm.Fp8PerGroup(32, "swizzled_128x4"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_specs_that_are_refused(name: str) -> None:
    error, words, make = REFUSED[name]
    message = message_of(error, make)
    assert all(word in message for word in words), message


@on(cpu=(2,), gpu=(2,))
def test_calls_that_are_refused(rank: int, world_size: int) -> None:
    c = comm()
    x = torch.zeros((2, 120), dtype=torch.bfloat16, device=c.device)
    weight = torch.ones(120, dtype=torch.bfloat16, device=c.device)
    given = torch.ones(1, device=c.device)
    call = c.all_reduce_add_rms_norm_quant
    messages = [
        message_of(
            allnorm.UnsupportedError, lambda: call(x, None, weight, 1e-5, allnorm.NvFp4(given))
        ),
        message_of(allnorm.UnsupportedError, lambda: call(x, None, weight, 1e-5, allnorm.MxFp8())),
        message_of(
            allnorm.UnsupportedError, lambda: c.plan(2, 120, torch.bfloat16, allnorm.NvFp4(given))
        ),
    ]
    wide = x.new_zeros((2, 128))
    meta = allnorm.NvFp4(torch.ones(1, device="meta"))
    weight = wide.new_ones(128)
    messages.append(message_of(ValueError, lambda: call(wide, None, weight, 1e-5, meta)))
    fp8 = torch.empty((2, 128), dtype=torch.float8_e4m3fn, device=c.device)
    nv = allnorm.NvFp4(given)
    messages.append(
        message_of(ValueError, lambda: call(wide, None, weight, 1e-5, nv, quantized_out=fp8))
    )
    narrow = fp8[:, :64].contiguous()
    messages.append(
        message_of(TypeError, lambda: call(wide, None, weight, 1e-5, nv, quantized_out=narrow))
    )
    scale = torch.empty(512, dtype=torch.float8_e4m3fn, device=c.device)
    messages.append(
        message_of(ValueError, lambda: call(wide, None, weight, 1e-5, nv, scale_out=scale))
    )
    assert c.plan(2, 128, torch.bfloat16, nv).num_chunks == 1
    same_on_every_rank([message.replace(str(c.device), "this device") for message in messages])
    words = ("multiple of 16", "group_size=32", "multiple of 16", "quant.global_scale", "(2, 64)")
    for message, word in zip(messages, (*words, "uint8", "empty_scale"), strict=True):
        assert word in message, message


def test_specs_are_values() -> None:
    given = torch.ones(1)
    assert allnorm.MxFp8() == allnorm.Fp8PerGroup(32, "swizzled_128x4", "ue8m0")
    assert allnorm.NvFp4(given) == allnorm.NvFp4(given, "swizzled_128x4")
    assert allnorm.NvFp4(given) != allnorm.NvFp4(torch.ones(1))
    assert allnorm.NvFp4(given) != allnorm.NvFp4(given, "row_major")
    assert hash(allnorm.NvFp4(given)) == hash(allnorm.NvFp4(given))
    assert "swizzled" in repr(allnorm.NvFp4(given))
