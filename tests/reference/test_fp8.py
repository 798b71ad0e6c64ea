"""Compares the reference's quantization and shards with a scalar version of the numerics page."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from rank_helpers import MODES, dtype_ids

import allnorm
from allnorm import reference
from allnorm.quant import Quant
from allnorm.testing import all_inputs, assert_same_bits, shared_input, special_input

FP8 = torch.float8_e4m3fn


def e4m3_value(code: int) -> float:
    """Decodes e4m3fn: sign, 4 exponent bits with bias 7, 3 mantissa bits; 0x7f is NaN."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


POSITIVE = np.array([e4m3_value(code) for code in range(127)])


def scalar_e4m3(value: np.float32) -> int:
    """Computes e4m3fn(clamp(value)), rounding to nearest, ties to the even code."""
    if np.isnan(value):
        return 0x7F
    size = min(abs(float(value)), 448.0)
    above = int(np.searchsorted(POSITIVE, size))
    if POSITIVE[above] != size:
        below = above - 1
        middle = (POSITIVE[below] + POSITIVE[above]) / 2
        if size < middle or (size == middle and below % 2 == 0):
            above = below
    return above | (0x80 if np.signbit(value) else 0)


def scalar_scale(group: np.ndarray, power_of_two: bool) -> np.float32:
    amax = np.float32(1e-10)
    for value in group:
        if np.isnan(value):
            return np.float32(np.nan)
        amax = max(amax, abs(value))
    scale = np.float32(amax / np.float32(448))
    if power_of_two and np.isfinite(scale):
        mantissa, exponent = math.frexp(float(scale))  # 0.5 <= mantissa < 1
        scale = np.float32(math.ldexp(1.0, exponent if mantissa > 0.5 else exponent - 1))
    return scale


@np.errstate(all="ignore")
def scalar_quantize(
    y: torch.Tensor, group_size: int, power_of_two: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = y.float().reshape(-1, y.shape[-1]).numpy()
    scales = np.empty((rows.shape[0], rows.shape[1] // group_size), np.float32)
    codes = np.empty(rows.shape, np.uint8)
    for t, g in np.ndindex(*scales.shape):
        columns = slice(g * group_size, (g + 1) * group_size)
        scales[t, g] = scalar_scale(rows[t, columns], power_of_two)
        codes[t, columns] = [scalar_e4m3(v / scales[t, g]) for v in rows[t, columns]]
    return torch.from_numpy(codes).view(FP8).view(y.shape), torch.from_numpy(scales)


def float32_at(bits: list[int]) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def test_the_dtype_has_the_values_of_the_page() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    expected = torch.tensor([e4m3_value(code) for code in range(256)])
    assert_same_bits(values, expected, "float8_e4m3fn")


def test_every_16_bit_number_is_rounded_to_nearest_even() -> None:
    one = allnorm.Fp8PerTensor(torch.tensor(1.0))
    for dtype in (torch.bfloat16, torch.float16):
        y = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype).view(1, -1)
        quantized, scale = reference.quantize(y, one)
        assert scale is one.scale
        expected = [scalar_e4m3(value) for value in y[0].float().numpy()]
        assert_same_bits(quantized.view(torch.uint8)[0], torch.tensor(expected, dtype=torch.uint8))


def test_ties_and_their_neighbors() -> None:
    middles = torch.from_numpy((POSITIVE[1:] + POSITIVE[:-1]) / 2).float().view(torch.int32)
    edges = torch.cat([middles - 1, middles, middles + 1]).view(torch.float32)
    more = torch.tensor([448.0, 464.0, 480.0, 1e30, math.inf, 2.0**-10, 2.0**-149, 0.0, math.nan])
    y = torch.cat([edges, more])
    y = torch.cat([y, -y]).view(1, -1)
    quantized, _ = reference.quantize(y, allnorm.Fp8PerTensor(torch.tensor([1.0])))
    expected = torch.tensor([scalar_e4m3(v) for v in y[0].numpy()], dtype=torch.uint8)
    assert_same_bits(quantized.view(torch.uint8)[0], expected, "ties")


def rows_of_many_sizes(dtype: torch.dtype, hidden_size: int) -> torch.Tensor:
    """Returns rows from denormal to overflowing; their groups differ in magnitude too."""
    largest = math.log2(torch.finfo(dtype).max)
    smallest = math.log2(torch.finfo(dtype).smallest_normal)
    exponents = torch.linspace(smallest - 4, largest - 3, 12).round().view(-1, 1)
    wave = torch.arange(hidden_size).view(1, -1) // 16 % 5
    y = shared_input((12, hidden_size), torch.float32, "y").clamp(-4, 4).double()
    return (y * 2.0 ** (exponents + wave - 2).double()).to(dtype)


@pytest.mark.parametrize("dtype", **dtype_ids)
@pytest.mark.parametrize("size", [16, 32, 64, 128, 256, 512])
def test_groups_are_the_scalar_transcription(size: int, dtype: torch.dtype) -> None:
    y = rows_of_many_sizes(dtype, 2 * size)
    for form in ("float32", "ue8m0"):
        got = reference.quantize(y, allnorm.Fp8PerGroup(size, "row_major", form))
        want = scalar_quantize(y, size, form == "ue8m0")
        assert_same_bits(got[1], want[1], f"scale, {form}")
        assert_same_bits(got[0], want[0], f"quantized, {form}")


@pytest.mark.parametrize("dtype", **dtype_ids)
def test_rows_are_the_scalar_transcription(dtype: torch.dtype) -> None:
    for hidden_size in (1, 7, 120, 300):
        y = rows_of_many_sizes(dtype, hidden_size)
        got = reference.quantize(y, allnorm.Fp8PerToken())
        want = scalar_quantize(y, hidden_size, False)
        assert got[1].shape == (12, 1)
        assert_same_bits(got[1], want[1], "scale")
        assert_same_bits(got[0], want[0], "quantized")


@np.errstate(all="ignore")
def test_any_static_scale_divides() -> None:
    y = torch.cat([special_input(k, (3, 40), torch.float32, 0) for k in ("nan", "infinity")])
    y[1] = 0.0
    for value in (0.3, -0.3, 1e-30, 1e30, 2.0**-149, 0.0, -0.0, math.inf, math.nan):
        quantized, _ = reference.quantize(y, allnorm.Fp8PerTensor(torch.tensor(value)))
        codes = [scalar_e4m3(v / np.float32(value)) for v in y.flatten().numpy()]
        expected = torch.tensor(codes, dtype=torch.uint8)
        assert_same_bits(quantized.view(torch.uint8).flatten(), expected, f"divided by {value}")


def test_groups_of_zeros_keep_their_signs() -> None:
    y = torch.zeros(2, 64)
    y[1, ::2] = -0.0
    quantized, scale = reference.quantize(y, allnorm.Fp8PerGroup(16))
    assert (scale == torch.tensor(1e-10) / torch.tensor(448.0)).all()
    assert quantized.view(torch.uint8).unique().tolist() == [0, 0x80]
    assert (quantized.view(torch.uint8)[1, ::2] == 0x80).all()


def test_nan_and_infinity_stay_in_their_group() -> None:
    y = torch.ones(2, 64, dtype=torch.bfloat16)
    y[0, 20], y[1, 40] = math.nan, -math.inf
    for form in ("float32", "ue8m0"):
        quantized, scale = reference.quantize(y, allnorm.Fp8PerGroup(16, "row_major", form))
        assert torch.isnan(scale).nonzero().tolist() == [[0, 1]]
        assert torch.isinf(scale).nonzero().tolist() == [[1, 2]]
        codes = quantized.view(torch.uint8)
        assert (codes[0, 16:32] == 0x7F).all()
        assert codes[1, 40] == 0x7F  # infinity / infinity
        assert codes[1, 32:48].sort().values.tolist() == [0] * 15 + [0x7F]
        assert torch.isfinite(quantized.float()).sum() == 2 * 64 - 17
    packed = allnorm.Fp8PerGroup(16, "column_major_tma", "ue8m0_packed")
    words = reference.quantize(y, packed)[1]
    exponents = [[word >> 8 * i & 0xFF for i in range(4)] for word in words[:, 0].tolist()]
    assert exponents[0][1] == exponents[1][2] == 255
    assert sum(row.count(255) for row in exponents) == 2


def test_powers_of_two_are_rounded_up_only_between_them() -> None:
    exact = float32_at([0x3F800000, 0x3F800001, 0x3FFFFFFF, 0x40000000, 0x2B000000])
    y = (exact.double() * 448).float().view(-1, 1).expand(-1, 16).contiguous()
    _, scale = reference.quantize(y, allnorm.Fp8PerGroup(16, "row_major", "ue8m0"))
    for value, given in zip(scale[:, 0].tolist(), (y[:, 0] / 448.0).tolist(), strict=True):
        assert math.log2(value).is_integer()
        assert value / 2 < given <= value


LAYOUTS = ("row_major", "column_major", "column_major_tma")


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 4, 5, 33])
def test_layouts_hold_the_same_scales(tokens: int) -> None:
    y = shared_input((tokens, 2944), torch.bfloat16, "y")
    for form in ("float32", "ue8m0"):
        specs = [allnorm.Fp8PerGroup(128, layout, form) for layout in LAYOUTS]
        results = [reference.quantize(y, spec) for spec in specs]
        strides = [(23, 1), (1, tokens), (1, -(-tokens // 4) * 4)]
        for (quantized, scale), stride in zip(results, strides, strict=True):
            assert scale.stride() == stride
            assert_same_bits(quantized, results[0][0], "quantized")
            assert_same_bits(scale, results[0][1], "scale")
        assert_padding_is_zero(results[2][1])


def assert_padding_is_zero(scale: torch.Tensor) -> None:
    rows, column = scale.shape[0], scale.stride(1)
    memory = scale.as_strided((scale.shape[1], column), (column, 1)).view(torch.int32)
    assert (memory[:, rows:] == 0).all()


@pytest.mark.parametrize(("hidden_size", "size"), [(2944, 128), (512, 128), (48, 16), (7168, 512)])
def test_packed_scales_are_the_exponents(hidden_size: int, size: int) -> None:
    y = rows_of_many_sizes(torch.float32, hidden_size)[2:]
    plain = reference.quantize(y, allnorm.Fp8PerGroup(size, "row_major", "ue8m0"))
    packed = allnorm.Fp8PerGroup(size, "column_major_tma", "ue8m0_packed")
    quantized, words = reference.quantize(y, packed)
    assert_same_bits(quantized, plain[0], "quantized")
    assert words.dtype == torch.int32
    groups = hidden_size // size
    assert words.shape == (10, -(-groups // 4))
    assert words.stride() == (1, 12)
    assert_padding_is_zero(words)
    for t, g in itertools.product(range(10), range(4 * words.shape[1])):
        byte = int(words[t, g // 4]) >> 8 * (g % 4) & 0xFF
        if g >= groups:
            assert byte == 0
        else:
            assert 2.0 ** (byte - 127) == plain[1][t, g]


def test_leading_dimensions_are_rows() -> None:
    y = shared_input((2, 3, 64), torch.float16, "y")
    for spec in (allnorm.Fp8PerGroup(32, "column_major"), allnorm.Fp8PerToken()):
        quantized, scale = reference.quantize(y, spec)
        flat, flat_scale = reference.quantize(y.view(6, 64), spec)
        assert quantized.shape == (2, 3, 64)
        assert_same_bits(quantized.view(6, 64), flat)
        assert scale.shape == flat_scale.shape
        assert_same_bits(scale, flat_scale)
    assert reference.quantize(y[0, 0], allnorm.Fp8PerToken())[1].shape == (1, 1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", **dtype_ids)
def test_the_call_equals_norm_then_quantization(dtype: torch.dtype, mode: str) -> None:
    xs = all_inputs(3, (5, 256), dtype)
    residual, weight = (shared_input(s, dtype, "rw") for s in ((5, 256), (256,)))
    options = {"weight_bias": 1.0, "numerics": mode}
    normed, total = reference.all_reduce_add_rms_norm(xs, residual, weight, 1e-5, **options)
    for spec in (allnorm.Fp8PerGroup(64, "column_major", "ue8m0"), allnorm.Fp8PerToken()):
        out = reference.all_reduce_add_rms_norm_quant(
            xs, residual, weight, 1e-5, spec, True, **options
        )
        quantized, scale = reference.quantize(normed, spec)
        for got, want in zip(out, (quantized, scale, total, normed), strict=True):
            assert_same_bits(got, want)
        local = reference.add_rms_norm_quant(
            reference.all_reduce(xs), residual, weight, 1e-5, spec, **options
        )
        assert local.normed is None
        for got, want in zip(local, out[:3], strict=False):
            assert_same_bits(got, want)
        assert reference.all_reduce_add_rms_norm_quant(xs, residual, weight, 1e-5, spec)[3] is None


def test_preallocated_results() -> None:
    x, residual, weight = torch.randn(2, 32), torch.randn(2, 32), torch.ones(32)
    spec = allnorm.Fp8PerGroup(16)
    expected = reference.all_reduce_add_rms_norm_quant([x], residual, weight, 1e-6, spec, True)
    memory = {
        "quantized_out": torch.empty(2, 32, dtype=FP8),
        "scale_out": torch.empty(2, 2),
        "normed_out": torch.empty(2, 32),
        "residual_out": residual,
    }
    result = reference.all_reduce_add_rms_norm_quant([x], residual, weight, 1e-6, spec, **memory)
    for got, want, given in zip(
        result,
        expected,
        (memory[n] for n in ("quantized_out", "scale_out", "residual_out", "normed_out")),
        strict=True,
    ):
        assert got is given
        assert_same_bits(got, want)


# ---- shards --------------------------------------------------------------------------------------


def test_row_shards_are_a_partition() -> None:
    assert [reference.row_shard(7, 3, r) for r in range(3)] == [(0, 3), (3, 5), (5, 7)]
    assert [reference.row_shard(1, 3, r) for r in range(3)] == [(0, 1), (1, 1), (1, 1)]
    for tokens, world_size in itertools.product(range(40), range(1, 9)):
        bounds = [reference.row_shard(tokens, world_size, r) for r in range(world_size)]
        assert bounds[0][0] == 0
        assert bounds[-1][1] == tokens
        assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))
        heights = [hi - lo for lo, hi in bounds]
        longer = tokens % world_size
        assert heights == [tokens // world_size + 1] * longer + [tokens // world_size] * (
            world_size - longer
        )


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 7, 33])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_a_sharded_residual_changes_no_bit(tokens: int, world_size: int) -> None:
    xs = all_inputs(world_size, (tokens, 64), torch.bfloat16)
    residual = shared_input((tokens, 64), torch.bfloat16, "residual")
    weight = shared_input((64,), torch.float32, "weight")
    bounds = [reference.row_shard(tokens, world_size, r) for r in range(world_size)]
    shards = [residual[lo:hi] for lo, hi in bounds]
    assert_same_bits(reference.all_gather_rows(shards, tokens), residual)
    for given, whole in ((shards, residual), (None, None)):
        want = reference.all_reduce_add_rms_norm(xs, whole, weight, 1e-6, numerics="vllm")
        normed, totals = reference.all_reduce_add_rms_norm(
            xs, given, weight, 1e-6, numerics="vllm", residual_sharded=True
        )
        assert_same_bits(normed, want[0], "normed")
        for total, (lo, hi) in zip(totals, bounds, strict=True):
            assert_same_bits(total, want[1][lo:hi], "residual_out")
    spec = allnorm.Fp8PerGroup(32, "column_major_tma", "ue8m0_packed")
    want = reference.all_reduce_add_rms_norm_quant(xs, residual, weight, 1e-6, quant=spec)
    got = reference.all_reduce_add_rms_norm_quant(
        xs, shards, weight, 1e-6, quant=spec, residual_sharded=True
    )
    assert_same_bits(got.quantized, want.quantized)
    assert_same_bits(got.scale, want.scale)
    assert_same_bits(torch.cat(got.residual), want.residual)


def test_shards_of_more_dimensions_and_in_place() -> None:
    xs = all_inputs(2, (3, 1, 16), torch.float32)
    shards = [torch.randn(2, 16), torch.randn(1, 16)]
    whole = torch.cat(shards).view(3, 1, 16)
    want = reference.all_reduce_add_rms_norm(xs, whole, torch.ones(16), 1e-6)
    normed, totals = reference.all_reduce_add_rms_norm(
        xs, shards, torch.ones(16), 1e-6, residual_sharded=True, residual_out=shards
    )
    assert normed.shape == (3, 1, 16)
    assert all(a is b for a, b in zip(totals, shards, strict=True))
    assert_same_bits(torch.cat(shards), want[1].view(3, 16))


# ---- refusals ------------------------------------------------------------------------------------


def test_wrong_arguments() -> None:
    y, w, quantize = torch.ones(4, 64), torch.ones(64), reference.quantize
    norm, on_meta = reference.all_reduce_add_rms_norm, torch.ones(1, device="meta")
    shards = [y[:2], y[:3]]
    for kind, words, wrong in (
        (TypeError, "float64", lambda: quantize(y.double())),
        (TypeError, "quant", lambda: quantize(y, "fp8")),
        (ValueError, "hidden_size", lambda: quantize(torch.ones(()), allnorm.Fp8PerToken())),
        (ValueError, "64.*128", lambda: quantize(y, allnorm.Fp8PerGroup(128))),
        (ValueError, "meta", lambda: quantize(y, allnorm.Fp8PerTensor(on_meta))),
        (
            *(TypeError, "quant"),
            lambda: reference.all_reduce_add_rms_norm_quant([y], None, w, 1e-6, quant=None),
        ),
        (
            *(TypeError, "list of all ranks"),
            lambda: norm([y], y, w, 1e-6, residual_sharded=True),
        ),
        (
            *(ValueError, r"shards\[1\] has shape \[3, 64\].*\[2, 64\]"),
            lambda: norm([y, y], shards, w, 1e-6, residual_sharded=True),
        ),
        (ValueError, "empty", lambda: reference.all_gather_rows([], 0)),
        (ValueError, "differ", lambda: reference.all_gather_rows([y[:2], y[:2].half()], 4)),
        *(
            (ValueError, "rank", lambda n=numbers: reference.row_shard(*n))
            for numbers in ((-1, 2, 0), (3, 0, 0), (3, 2, 2), (3, 2, -1))
        ),
    ):
        with pytest.raises(kind, match=words):
            wrong()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", **dtype_ids)
def test_cuda_gives_the_bits_of_the_cpu(dtype: torch.dtype) -> None:
    y = torch.cat(
        [
            rows_of_many_sizes(dtype, 2944),
            *(special_input(kind, (5, 2944), dtype, 0) for kind in ("nan", "infinity", "huge")),
        ]
    )
    specs: list[Quant] = [allnorm.Fp8PerToken()]
    specs += [allnorm.Fp8PerGroup(128, layout) for layout in LAYOUTS]
    specs += [allnorm.Fp8PerGroup(16, "column_major_tma", form) for form in ("ue8m0_packed",)]
    for spec in specs:
        on_cpu, on_gpu = reference.quantize(y, spec), reference.quantize(y.cuda(), spec)
        for name, a, b in zip(("quantized", "scale"), on_gpu, on_cpu, strict=True):
            assert_same_bits(a, b, f"{name}, {spec}")
            assert a.stride() == b.stride()
    for value in (0.3, -2.5, 1e-30, 0.0, math.inf):
        scale = torch.tensor([value])
        on_cpu = reference.quantize(y, allnorm.Fp8PerTensor(scale))
        on_gpu = reference.quantize(y.cuda(), allnorm.Fp8PerTensor(scale.cuda()))
        assert_same_bits(on_gpu[0], on_cpu[0], f"divided by {value}")


def test_the_largest_element_of_a_group_becomes_448() -> None:
    y = shared_input((9, 128), torch.bfloat16, "y")
    quantized, scale = reference.quantize(y, allnorm.Fp8PerGroup(128))
    assert (quantized.float().abs().amax(-1) == 448).all()
    restored = quantized.float() * scale
    assert ((restored - y.float()).abs() <= y.float().abs() / 16 + scale * 2.0**-10).all()
