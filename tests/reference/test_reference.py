"""Compares the reference with exact arithmetic and a scalar version of the numerics page."""

from __future__ import annotations

import ctypes
import ctypes.util
import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from rank_helpers import MODES, dtype_ids

import allnorm
from allnorm import reference
from allnorm.testing import all_inputs, assert_same_bits, same_bits, shared_input

_libm = ctypes.CDLL(ctypes.util.find_library("m") or "libm.so.6")
_libm.fmaf.argtypes = [ctypes.c_float] * 3
_libm.fmaf.restype = ctypes.c_float


def fmaf(a: float, b: float, c: float) -> float:
    return _libm.fmaf(a, b, c)


def round_to_float32(exact: Fraction) -> float:
    """Rounds to the nearest float32, ties to even, with denormals and overflow; +0 for zero."""
    if exact == 0:
        return 0.0
    magnitude = abs(exact)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    rounded = round(magnitude / unit) * unit  # round() of a Fraction: ties to even
    value = math.inf if rounded >= Fraction(2) ** 128 else float(rounded)
    return math.copysign(value, -1.0 if exact < 0 else 1.0)


def random_floats(count: int, low: int, high: int, sparse: bool, seed: int) -> torch.Tensor:
    """Returns float32 with exponents in [low, high). If sparse, few bits are set, to cause ties."""
    generator = torch.Generator().manual_seed(seed)
    mantissa = torch.randint(0, 1 << 24, (count,), generator=generator)
    for _ in range(3 if sparse else 0):
        mantissa &= torch.randint(0, 1 << 24, (count,), generator=generator)
    sign = torch.randint(0, 2, (count,), generator=generator) * 2 - 1
    exponent = torch.randint(low, high, (count,), generator=generator)
    return torch.ldexp((mantissa * sign).double(), exponent - 23).float()


# exponents of the factors and of the addend: ordinary, denormal result, near overflow, far apart
REGIMES = {
    "ordinary": ((-10, 10), (-20, 20)),
    "denormal": ((-75, -60), (-150, -120)),
    "denormal_factors": ((-149, -120), (-20, 20)),
    "overflow": ((55, 66), (110, 128)),
    "far_apart": ((-20, 20), (-90, 90)),
}


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_fma_is_libm_fmaf(regime: str, sparse: bool) -> None:
    factors, addend = REGIMES[regime]
    count = 100_000
    a, b = (random_floats(count, *factors, sparse, seed) for seed in (1, 2))
    c = random_floats(count, *addend, sparse, 3)
    expected = torch.tensor(list(map(fmaf, a.tolist(), b.tolist(), c.tolist())))
    assert_same_bits(reference.fma(a, b, c), expected, regime)


def test_fma_of_arbitrary_bit_patterns() -> None:
    generator = torch.Generator().manual_seed(5)
    a, b, c = (
        torch.randint(-(1 << 31), 1 << 31, (300_000,), generator=generator)
        .int()
        .view(torch.float32)
        for _ in range(3)
    )
    expected = torch.tensor(list(map(fmaf, a.tolist(), b.tolist(), c.tolist())))
    assert_same_bits(reference.fma(a, b, c), expected, "fma")


@pytest.mark.parametrize("regime", REGIMES)
def test_fma_is_exact_arithmetic_rounded_once(regime: str) -> None:
    factors, addend = REGIMES[regime]
    a, b = (random_floats(3000, *factors, True, seed) for seed in (11, 12))
    c = random_floats(3000, *addend, True, 13)
    got = reference.fma(a, b, c).tolist()
    for x, y, z, result in zip(a.tolist(), b.tolist(), c.tolist(), got, strict=True):
        if math.isinf(z):
            continue
        assert result == round_to_float32(Fraction(x) * Fraction(y) + Fraction(z)), (x, y, z)


def test_fma_special_values() -> None:
    inf, nan = math.inf, math.nan
    largest = torch.finfo(torch.float32).max
    values = [0.0, -0.0, 1.0, -1.0, inf, -inf, nan, largest, -largest, 2.0**-149, 2.0**-126]
    a, b, c = (g.reshape(-1) for g in torch.meshgrid(*[torch.tensor(values)] * 3, indexing="ij"))
    expected = torch.tensor(list(map(fmaf, a.tolist(), b.tolist(), c.tolist())))
    assert_same_bits(reference.fma(a, b, c), expected, "fma")


def test_square_root_and_division_are_correctly_rounded() -> None:
    a = random_floats(1_000_000, -149, 127, False, 21).abs()
    b = random_floats(1_000_000, -149, 127, False, 22)
    with np.errstate(all="ignore"):
        roots, quotients = np.sqrt(a.numpy()), a.numpy() / b.numpy()
    assert_same_bits(reference.sqrt(a), torch.from_numpy(roots), "sqrt")
    assert_same_bits(a / b, torch.from_numpy(quotients), "division")
    for x, root in zip(a[:2000].tolist(), roots.tolist(), strict=False):
        above = float(np.nextafter(np.float32(root), np.float32(np.inf)))
        below = float(np.nextafter(np.float32(root), np.float32(-np.inf)))
        exact, low, high = (
            Fraction(x),
            Fraction(root) + Fraction(below),
            Fraction(root) + Fraction(above),
        )
        assert low**2 <= 4 * exact <= high**2 or x == 0.0, "numpy rounds square roots correctly"


# ---- a second transcription of the page: one number at a time, butterflies over all their lanes


def scalar_square_sum(row: np.ndarray, elems_per_pack: int) -> np.float32:
    packs = []
    for begin in range(0, len(row), elems_per_pack):
        pack = row[begin : begin + elems_per_pack]
        p = float(np.float32(pack[0]) * np.float32(pack[0]))
        for z in pack[1:]:
            p = fmaf(z, z, p)
        packs.append(np.float32(p))
    sums = []
    for begin in range(0, len(packs), 32):
        lanes = packs[begin : begin + 32]
        sums.append(scalar_butterfly(lanes + [np.float32(0)] * (32 - len(lanes))))
    width = 1
    while width < len(sums):
        width *= 2
    return scalar_butterfly(sums + [np.float32(0)] * (width - len(sums)))


def scalar_butterfly(lanes: list[np.float32]) -> np.float32:
    offset = len(lanes) // 2
    while offset:
        lanes = [np.float32(c + lanes[i ^ offset]) for i, c in enumerate(lanes)]
        offset //= 2
    assert len({lane.tobytes() for lane in lanes}) == 1, "the lanes of a butterfly agree"
    return lanes[0]


def scalar_round(value: np.float32, dtype: torch.dtype) -> np.float32:
    """Computes f(T(value)) without torch."""
    if dtype == torch.float32:
        return value
    if dtype == torch.float16:
        return np.float32(np.float16(value))
    bits = int(np.float32(value).view(np.uint32))
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return np.uint32(bits).view(np.float32)


def scalar_add_rms_norm(
    rows: list[np.ndarray],
    residual: np.ndarray | None,
    weight: np.ndarray,
    dtype: torch.dtype,
    mode: str,
    eps: float,
    weight_bias: float,
) -> tuple[np.ndarray, np.ndarray]:
    hidden_size = len(weight)
    total, rounded = np.empty(hidden_size, np.float32), np.empty(hidden_size, np.float32)
    for i in range(hidden_size):
        a = rows[0][i]
        for row in rows[1:]:
            a = np.float32(a + row[i])
        a = scalar_round(a, dtype)
        total[i] = a if residual is None else np.float32(a + residual[i])
        rounded[i] = scalar_round(total[i], dtype)
    z = rounded if mode in ("rounded", "transformers") else total
    mean = scalar_square_sum(z, 4 if dtype == torch.float32 else 8) / np.float32(hidden_size)
    rstd = np.float32(1) / np.sqrt(np.float32(mean + np.float32(eps)))
    normed = np.empty(hidden_size, np.float32)
    for i in range(hidden_size):
        y = np.float32(z[i] * rstd)
        if mode in ("transformers", "vllm"):
            y = scalar_round(y, dtype)
        gain = np.float32(np.float32(weight_bias) + weight[i])
        normed[i] = scalar_round(np.float32(y * gain), dtype)
    return normed, rounded


@pytest.mark.parametrize("elems_per_pack", [4, 8])
@pytest.mark.parametrize(
    "hidden_size", [1, 3, 7, 8, 9, 31, 120, 255, 256, 257, 1023, 2880, 4095, 5760]
)
def test_square_sum_is_the_tree_of_the_page(hidden_size: int, elems_per_pack: int) -> None:
    z = shared_input((2, hidden_size), torch.float32, "z", seed=hidden_size)
    got = reference.square_sum(z, elems_per_pack)
    expected = [scalar_square_sum(row.numpy(), elems_per_pack) for row in z]
    assert_same_bits(got, torch.tensor(np.array(expected)), "square sum")


def test_another_summation_order_would_be_seen() -> None:
    z = shared_input((64, 2880), torch.float32, "z")
    ours = reference.square_sum(z, 8)
    assert not torch.equal(ours, (z * z).sum(-1))
    assert not torch.equal(ours, reference.square_sum(z, 4))


@pytest.mark.parametrize("dtype", **dtype_ids)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("with_residual", [True, False], ids=["residual", "no_residual"])
def test_reference_is_the_scalar_transcription(
    mode: str, dtype: torch.dtype, with_residual: bool
) -> None:
    for hidden_size, world_size, eps, bias in (
        (7, 1, 0.0, 0.0),
        (300, 3, 1e-6, 1.0),
        (77, 8, 3.0, 0.1),
    ):
        xs = all_inputs(world_size, (hidden_size,), dtype, seed=9)
        residual = shared_input((hidden_size,), dtype, "residual") if with_residual else None
        weight = shared_input((hidden_size,), torch.float32, "weight")
        normed, residual_out = reference.all_reduce_add_rms_norm(
            xs, residual, weight, eps, weight_bias=bias, numerics=mode
        )
        expected = scalar_add_rms_norm(
            [x.float().numpy() for x in xs],
            None if residual is None else residual.float().numpy(),
            weight.numpy(),
            dtype,
            mode,
            eps,
            bias,
        )
        assert_same_bits(normed.float(), torch.from_numpy(expected[0]), "normed")
        assert_same_bits(residual_out.float(), torch.from_numpy(expected[1]), "residual_out")
        assert normed.dtype == residual_out.dtype == dtype


@pytest.mark.parametrize("dtype", **dtype_ids)
def test_modes_differ_where_they_should(dtype: torch.dtype) -> None:
    """In 16 bits all four modes differ. In float32 they agree, as rounding has no effect."""
    xs = all_inputs(4, (16, 4096), dtype)
    residual = shared_input((16, 4096), dtype, "residual")
    weight = shared_input((4096,), dtype, "weight")
    outs = [
        reference.all_reduce_add_rms_norm(xs, residual, weight, 1e-6, numerics=mode)[0]
        for mode in MODES
    ]
    equal = [torch.equal(outs[i], outs[j]) for i in range(4) for j in range(i)]
    assert equal == [dtype == torch.float32] * 6


@pytest.mark.parametrize("dtype", **dtype_ids)
def test_close_to_torch_rms_norm(dtype: torch.dtype) -> None:
    xs = all_inputs(4, (33, 2880), dtype)
    residual = shared_input((33, 2880), dtype, "residual")
    weight = shared_input((2880,), torch.float32, "weight")
    normed, residual_out = reference.all_reduce_add_rms_norm(xs, residual, weight, 1e-5)
    exact_sum = sum(x.double() for x in xs).to(dtype).double() + residual.double()
    exact = torch.nn.functional.rms_norm(exact_sum, (2880,), weight.double(), 1e-5)
    # One rounding to T per result; normed also has the relative error 2^-p of the rounded sum.
    ulp = torch.finfo(dtype).eps
    torch.testing.assert_close(residual_out.double(), exact_sum, rtol=ulp, atol=4 * ulp)
    torch.testing.assert_close(normed.double(), exact, rtol=3 * ulp, atol=8 * ulp)


def test_reduced_sum_is_rounded_before_the_residual_is_added() -> None:
    """Tests incident 1: adding the residual to the unrounded sum gives different bits."""
    xs = [torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([2.0**-8], dtype=torch.bfloat16)]
    residual = torch.tensor([-1.0], dtype=torch.bfloat16)
    total = reference.all_reduce_add_rms_norm(xs, residual, torch.ones(1), 1e-6)[1]
    assert total.item() == 0.0  # 1 + 2^-8 rounds to 1; unrounded, 2^-8 would be left


@pytest.mark.parametrize("dtype", **dtype_ids)
def test_negative_zero_keeps_its_sign(dtype: torch.dtype) -> None:
    zeros = torch.full((2, 8), -0.0, dtype=dtype)
    normed, total = reference.all_reduce_add_rms_norm(
        [zeros, zeros], zeros, torch.ones(8), 1e-6, weight_bias=0.0
    )
    assert torch.signbit(total).all()
    assert torch.signbit(normed).all()
    assert not torch.signbit(reference.all_reduce([zeros, zeros.abs()])).any()


def test_weight_bias_is_always_added() -> None:
    """0.0 + (-0.0) is 0.0, so skipping the addition of a zero bias would change a sign."""
    normed, _ = reference.add_rms_norm(torch.ones(1, 4), None, torch.full((4,), -0.0), 1e-6)
    assert not torch.signbit(normed).any()


def test_nan_stays_in_its_row() -> None:
    x = torch.ones(3, 16)
    x[1, 5] = math.nan
    normed, total = reference.all_reduce_add_rms_norm(
        [x, torch.ones(3, 16)], None, torch.ones(16), 1e-6
    )
    assert torch.isnan(normed[1]).all()
    assert int(torch.isnan(total).sum()) == 1
    assert not torch.isnan(normed[[0, 2]]).any()


@pytest.mark.parametrize("dtype", **dtype_ids)
def test_results_are_new_and_contiguous(dtype: torch.dtype) -> None:
    wide = shared_input((2, 3, 48), dtype, "x")
    x = wide[..., :32]
    for result in (
        reference.all_reduce([x]),
        *reference.all_reduce_add_rms_norm([x], None, torch.ones(32), 1e-6),
        *reference.add_rms_norm(x, None, torch.ones(32), 1e-6),
    ):
        assert result.shape == x.shape
        assert result.dtype == dtype
        assert result.is_contiguous()
        assert result.untyped_storage().data_ptr() != wide.untyped_storage().data_ptr()


def test_preallocated_results() -> None:
    x, residual = torch.randn(2, 8), torch.randn(2, 8)
    expected = reference.all_reduce_add_rms_norm([x], residual, torch.ones(8), 1e-6)
    out = torch.empty(2, 8)
    normed, total = reference.all_reduce_add_rms_norm(
        [x], residual, torch.ones(8), 1e-6, out=out, residual_out=residual
    )
    assert normed is out
    assert total is residual
    assert_same_bits(out, expected[0])
    assert_same_bits(residual, expected[1])


def test_wrong_arguments() -> None:
    x, w, call = torch.ones(2, 8), torch.ones(8), reference.all_reduce_add_rms_norm
    for kind, words, wrong in (
        (ValueError, "empty", lambda: reference.all_reduce([])),
        (ValueError, "differ", lambda: reference.all_reduce([x, torch.ones(2, 9)])),
        (TypeError, "float64", lambda: reference.all_reduce([x.double()])),
        (ValueError, "numerics", lambda: call([x], None, w, 1e-6, numerics="exact")),
        (ValueError, "algorithm", lambda: call([x], None, w, 1e-6, algorithm="ring")),
        (ValueError, "weight has shape", lambda: call([x], None, torch.ones(9), 1e-6)),
        (TypeError, "weight is", lambda: call([x], None, w.half(), 1e-6)),
        (ValueError, "residual has shape", lambda: call([x], torch.ones(3, 8), w, 1e-6)),
        (TypeError, "residual is", lambda: call([x], x.half(), w, 1e-6)),
    ):
        with pytest.raises(kind, match=words):
            wrong()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", **dtype_ids)
@pytest.mark.parametrize("mode", MODES)
def test_cuda_gives_the_bits_of_the_cpu(mode: str, dtype: torch.dtype) -> None:
    random.seed(1)
    for hidden_size in (7, 2880, 16384):
        xs = all_inputs(3, (65, hidden_size), dtype, scale=random.choice([1e-4, 1.0, 30.0]))
        residual = shared_input((65, hidden_size), dtype, "residual")
        weight = shared_input((hidden_size,), torch.float32, "weight")
        on_cpu = reference.all_reduce_add_rms_norm(xs, residual, weight, 1e-6, numerics=mode)
        on_gpu = reference.all_reduce_add_rms_norm(
            [x.cuda() for x in xs], residual.cuda(), weight.cuda(), 1e-6, numerics=mode
        )
        for name, a, b in zip(("normed", "residual_out"), on_gpu, on_cpu, strict=True):
            assert_same_bits(a, b, name)


@pytest.mark.gpu
def test_cuda_fma_gives_the_bits_of_the_cpu() -> None:
    for factors, addend in REGIMES.values():
        a, b = (random_floats(1_000_000, *factors, True, seed) for seed in (1, 2))
        c = random_floats(1_000_000, *addend, True, 3)
        assert_same_bits(reference.fma(a.cuda(), b.cuda(), c.cuda()), reference.fma(a, b, c), "fma")


# Step 1c: post norm and scale


def post_normed(
    inputs: list[torch.Tensor], post_norm: allnorm.PostNorm | None, scale: float, numerics: str
) -> torch.Tensor:
    """Computes post norm and scale with calls that do not use step 1c."""
    reduced = reference.all_reduce(inputs)
    if post_norm is not None:
        # Without a residual, both modes of a pair normalize the same values.
        mode = {"unrounded": "rounded", "vllm": "transformers"}.get(numerics, numerics)
        reduced, _ = reference.add_rms_norm(
            reduced,
            None,
            post_norm.weight,
            post_norm.eps,
            weight_bias=post_norm.weight_bias,
            numerics=mode,
        )
    if scale == 1:
        return reduced
    factor = torch.tensor(scale, dtype=torch.float32)
    return (reduced.float() * factor).to(reduced.dtype)


@pytest.mark.parametrize("numerics", MODES)
@pytest.mark.parametrize("dtype", reference.DTYPES)
@pytest.mark.parametrize("scale", [1.0, 0.22, -1.5])
@pytest.mark.parametrize("normed", [False, True])
def test_post_norm_and_scale_are_steps_of_their_own(
    numerics: str, dtype: torch.dtype, scale: float, normed: bool
) -> None:
    inputs = all_inputs(3, (5, 333), dtype)
    residual = shared_input((5, 333), dtype, "residual")
    weight = shared_input((333,), dtype, "weight")
    post = allnorm.PostNorm(
        shared_input((333,), torch.float32, "post_weight"), 1e-5, weight_bias=1.0
    )
    post_norm = post if normed else None
    changed = post_normed(inputs, post_norm, scale, numerics)
    want = reference.add_rms_norm(changed, residual, weight, 1e-6, numerics=numerics)
    got = reference.all_reduce_add_rms_norm(
        inputs, residual, weight, 1e-6, numerics=numerics, post_norm=post_norm, scale=scale
    )
    assert_same_bits(got[0], want[0])
    assert_same_bits(got[1], want[1])
    quantized = reference.all_reduce_add_rms_norm_quant(
        inputs,
        residual,
        weight,
        1e-6,
        allnorm.Fp8PerToken(),
        numerics=numerics,
        post_norm=post_norm,
        scale=scale,
    )
    bits, scales = reference.quantize(want[0], allnorm.Fp8PerToken())
    assert_same_bits(quantized.quantized.view(torch.uint8), bits.view(torch.uint8))
    assert_same_bits(quantized.scale, scales)
    assert_same_bits(quantized.residual, want[1])
    if not normed:
        return
    nothing, total = reference.all_reduce_add_rms_norm(
        inputs, residual, None, 1e-6, numerics=numerics, post_norm=post_norm, scale=scale
    )
    assert nothing is None
    assert_same_bits(total, want[1])


def test_a_missing_weight_needs_a_post_norm() -> None:
    x = torch.ones(2, 8)
    with pytest.raises(ValueError, match="weight is None: expected a tensor, or a post_norm"):
        reference.add_rms_norm(x, None, None, 1e-6)
    post_norm = allnorm.PostNorm(torch.ones(8), 1e-6)
    with pytest.raises(ValueError, match="weight is None: expected a tensor"):
        reference.add_rms_norm_quant(
            x,
            None,
            None,
            1e-6,
            allnorm.Fp8PerToken(),
            post_norm=post_norm,
        )
    with pytest.raises(ValueError, match=r"post_norm\.weight has shape \[7\]"):
        reference.add_rms_norm(x, None, None, 1e-6, post_norm=allnorm.PostNorm(torch.ones(7), 1e-6))


def scalar_expert_sum(experts: allnorm.ExpertSum, choices: list[list[int]]) -> list[list[float]]:
    """Computes step 0 with exact sums and products, each rounded separately."""
    rows = experts.rows.reshape(-1, experts.rows.shape[-1]).double().tolist()
    result = []
    for token, chosen in enumerate(choices):
        total = [Fraction(0)] * experts.rows.shape[-1]
        for k, row in enumerate(chosen):
            if row == -1:
                continue
            weight = 1.0 if experts.weights is None else float(experts.weights[token, k])
            for i, value in enumerate(rows[row]):
                term = Fraction(round_to_float32(Fraction(weight) * Fraction(value)))
                total[i] = Fraction(round_to_float32(total[i] + term))
        if experts.shared is not None:
            for i, value in enumerate(experts.shared[token].double().tolist()):
                total[i] = Fraction(round_to_float32(total[i] + Fraction(value)))
        result.append([float(value) for value in total])
    return result


@pytest.mark.parametrize("dtype", **dtype_ids)
@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("with_shared", [False, True])
def test_expert_sum_is_step_zero(
    dtype: torch.dtype, indexed: bool, weighted: bool, with_shared: bool
) -> None:
    tokens, top_k, hidden_size, num_rows = 4, 3, 9, 5
    quant = allnorm.Fp8PerToken()
    generator = torch.Generator().manual_seed(3)
    shape = (num_rows, hidden_size) if indexed else (tokens, top_k, hidden_size)
    rows = torch.randn(shape, generator=generator).to(dtype)
    choices = [[token * top_k + k for k in range(top_k)] for token in range(tokens)]
    if indexed:
        choices = [[2, 0, -1], [-1, -1, -1], [4, 4, 1], [-1, 3, 0]]
    experts = allnorm.ExpertSum(
        rows,
        torch.randn(tokens, top_k, generator=generator) if weighted else None,
        torch.tensor(choices, dtype=torch.int32) if indexed else None,
        torch.randn(tokens, hidden_size, generator=generator).to(dtype) if with_shared else None,
    )
    expected = torch.tensor(scalar_expert_sum(experts, choices), dtype=torch.float32)
    got = reference.expert_sum(experts)
    assert_same_bits(got, expected.to(dtype))

    # An ExpertSum in place of x gives the same results as its sum.
    other = torch.randn(tokens, hidden_size, generator=generator).to(dtype)
    weight = torch.randn(hidden_size, generator=generator).to(dtype)
    inputs = (([experts, other], [got, other]), ([other, experts], [other, got]))
    for norm, (mine, dense), more in (
        *((reference.all_reduce_add_rms_norm, pair, ()) for pair in inputs),
        *((reference.all_reduce_add_rms_norm_quant, pair, (quant,)) for pair in inputs),
        (reference.add_rms_norm, (experts, got), ()),
        (reference.add_rms_norm_quant, (experts, got), (quant,)),
    ):
        results = (norm(x, other, weight, 1e-6, *more) for x in (mine, dense))
        for a, b in zip(*results, strict=True):
            assert a is b is None or same_bits(a, b)


def test_expert_sum_of_nothing_is_zero_and_of_no_row_nan() -> None:
    rows = torch.full((2, 4), -0.0)
    rows[1] = torch.nan
    index = torch.tensor([[0, -1], [-1, -1], [0, 2], [-2, 0]], dtype=torch.int32)
    got = reference.expert_sum(allnorm.ExpertSum(rows, index=index))
    # Sums start with 0.0, so a zero loses its sign. Rows that no token chose are not read.
    assert_same_bits(got[:2], torch.zeros(2, 4))
    assert got[2:].isnan().all()
    empty = allnorm.ExpertSum(rows[:0], index=torch.full((3, 2), -1, dtype=torch.int32))
    assert_same_bits(reference.expert_sum(empty), torch.zeros(3, 4))


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (TypeError, "rows is torch.int32", {"rows": torch.zeros(3, 2, 4, dtype=torch.int32)}),
        (
            ValueError,
            r"rows has shape \[3, 4\]: expected \[num_tokens",
            {"rows": torch.zeros(3, 4)},
        ),
        (ValueError, "top_k is 17", {"rows": torch.zeros(3, 17, 4)}),
        (ValueError, "top_k is 0", {"rows": torch.zeros(3, 0, 4)}),
        (ValueError, "at least one column", {"rows": torch.zeros(3, 2, 0)}),
        (
            ValueError,
            r"rows has shape \[3, 2, 4\]: expected \[num_rows",
            {"index": torch.zeros(3, 2)},
        ),
        (
            TypeError,
            "index is torch.int64: expected int32",
            {"rows": torch.zeros(3, 4), "index": torch.zeros(3, 2, dtype=torch.int64)},
        ),
        (
            ValueError,
            r"index has shape \[3\]",
            {"rows": torch.zeros(3, 4), "index": torch.zeros(3, dtype=torch.int32)},
        ),
        (TypeError, "weights is torch.float16", {"weights": torch.zeros(3, 2).half()}),
        (ValueError, r"weights has shape \[3, 3\]", {"weights": torch.zeros(3, 3)}),
        (TypeError, "shared is torch.float16", {"shared": torch.zeros(3, 4).half()}),
        (ValueError, r"shared has shape \[2, 4\]", {"shared": torch.zeros(2, 4)}),
        (ValueError, "shared is on meta", {"shared": torch.zeros(3, 4, device="meta")}),
    ],
)
def test_expert_sum_refuses_wrong_tensors(
    error: type[Exception], message: str, changes: dict[str, torch.Tensor]
) -> None:
    experts = allnorm.ExpertSum(**{"rows": torch.zeros(3, 2, 4), **changes})
    with pytest.raises(error, match=message):
        reference.expert_sum(experts)


def test_the_reference_accepts_arguments_of_calls() -> None:
    xs = [torch.randn(4, 8) for _ in range(2)]
    out = torch.zeros(4, 8)
    assert reference.all_reduce(xs, algorithm="one_shot", out=out) is out
    assert_same_bits(out, reference.all_reduce(xs), "reduced")
    shards = [out[:2], out[2:]]
    whole = torch.zeros(4, 8)
    assert reference.all_gather_rows(shards, 4, algorithm="two_shot", out=whole) is whole
    assert_same_bits(whole, out, "rows")
    for call in (
        lambda: reference.all_reduce(xs, algorithm="ring"),
        lambda: reference.all_gather_rows(shards, 4, algorithm="ring"),
    ):
        with pytest.raises(ValueError, match="ring"):
            call()
