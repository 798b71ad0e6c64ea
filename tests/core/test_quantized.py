"""Quantising calls: every byte, against the reference, over specs, algorithms, modes and shapes."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from rank_helpers import (
    ALGORITHMS,
    DTYPES,
    MODES,
    Case,
    assert_padding_is_zero,
    assert_ranks_agree,
    can_run,
    check_cases,
    comm,
    dtype_ids,
    on,
)

import allnorm
from allnorm import quant as quants
from allnorm import reference
from allnorm.quant import Quant
from allnorm.testing import SPECIAL_KINDS, RankPool, assert_same_bits, shared_input

FP8 = torch.float8_e4m3fn
LAYOUTS = [
    *itertools.product(("row_major", "column_major", "column_major_tma"), ("float32", "ue8m0")),
    ("column_major_tma", "ue8m0_packed"),
]


def specs(hidden_size: int) -> list[Quant]:
    """Every spec that fits."""
    fitting = [size for size in quants.GROUP_SIZES if hidden_size % size == 0]
    groups = [allnorm.Fp8PerGroup(size, *names) for size in fitting for names in LAYOUTS]
    return [*groups, allnorm.Fp8PerToken(), allnorm.Fp8PerTensor(torch.tensor([0.03]))]


def sweep(
    dtype: torch.dtype, shapes: list[tuple[int, int]], algorithms: tuple[str, ...]
) -> list[Case]:
    """Every spec with every algorithm; shapes and the rest take turns."""
    draw = random.Random(str(dtype))
    cases = []
    hidden_sizes = sorted({hidden_size for _, hidden_size in shapes})
    for hidden_size in hidden_sizes:
        tokens = itertools.cycle(t for t, h in shapes if h == hidden_size)
        for spec, algorithm in itertools.product(specs(hidden_size), algorithms):
            cases.append(
                Case(
                    (next(tokens), hidden_size),
                    dtype,
                    residual=draw.random() < 0.7,
                    float32_weight=draw.random() < 0.5,
                    weight_bias=draw.choice((0.0, 1.0, 0.25)),
                    eps=draw.choice((1e-6, 1e-5, 0.0)),
                    numerics=draw.choice(MODES),
                    algorithm=algorithm,
                    quant=spec,
                    return_normed=draw.random() < 0.5,
                    sharded=False,
                    call=len(cases),
                )
            )
    return cases


SHAPES = [
    *((tokens, 1024) for tokens in (0, 1, 2, 3, 5, 7, 8)),
    *((tokens, 2944) for tokens in (1, 3, 6)),
    *((tokens, 120) for tokens in (1, 2, 9)),
    *((tokens, 144) for tokens in (4, 5)),
    *((tokens, 7) for tokens in (1, 5)),
]


@on(cpu=(1, 2, 3), gpu=(1, 2, 3, 4, 8))
@pytest.mark.parametrize("dtype", **dtype_ids)
def test_every_spec_and_algorithm(pool: RankPool, dtype: torch.dtype) -> None:
    cases = sweep(dtype, SHAPES, ALGORITHMS)
    ran = pool.run(check_cases, cases)
    assert len(set(ran)) == 1
    assert ran[0] >= len(cases) // 2


@on(cpu=(4,))
def test_more_ranks(pool: RankPool) -> None:
    shapes = [(tokens, 256) for tokens in (0, 1, 3, 5, 33)]
    pool.run(check_cases, sweep(torch.bfloat16, shapes, ("one_shot", "two_shot")))


@on(cpu=(2, 3), gpu=(2, 3, 8))
def test_models_hidden_sizes(pool: RankPool) -> None:
    cases = [
        Case((tokens, hidden_size), algorithm=algorithm, quant=spec, return_normed=normed)
        for (hidden_size, size), tokens, algorithm, normed in zip(
            ((2880, 64), (2944, 128), (5760, 128), (4096, 128), (128, 128), (7168, 512), (120, 0))
            * 3,
            itertools.cycle((1, 2, 5, 33)),
            itertools.cycle(ALGORITHMS),
            itertools.cycle((True, False, False)),
            strict=False,
        )
        for spec in (
            allnorm.Fp8PerToken(),
            *(
                allnorm.Fp8PerGroup(size, *names)
                for names in (LAYOUTS[0], LAYOUTS[4], LAYOUTS[6])
                if size
            ),
        )
    ]
    pool.run(check_cases, cases)


@on(gpu=(2, 8))
@pytest.mark.parametrize("dtype", **dtype_ids)
def test_prefill_sizes(pool: RankPool, dtype: torch.dtype) -> None:
    cases = [
        Case((tokens, hidden_size), dtype, algorithm=algorithm, quant=spec, call=tokens)
        for tokens, hidden_size in ((1024, 4096), (257, 7168), (129, 16384))
        for algorithm in ("one_shot", "two_shot", "auto")
        for spec in (
            allnorm.Fp8PerGroup(128, "column_major_tma"),
            allnorm.Fp8PerGroup(128, "column_major_tma", "ue8m0_packed"),
            allnorm.Fp8PerToken(),
            allnorm.Fp8PerTensor(torch.tensor([0.02])),
        )
    ]
    pool.run(check_cases, cases)


@on(cpu=(2,), gpu=(2,))
def test_leading_dimensions(pool: RankPool) -> None:
    cases = [
        Case(shape, algorithm=algorithm, quant=spec, return_normed=True)
        for shape in ((64,), (2, 3, 64), (0, 3, 64), (2, 1, 3, 64))
        for algorithm in ALGORITHMS
        for spec in (
            allnorm.Fp8PerGroup(16, "column_major_tma"),
            allnorm.Fp8PerGroup(64),
            allnorm.Fp8PerToken(),
        )
    ]
    pool.run(check_cases, cases)


def special(rank: int, world_size: int, dtype: torch.dtype) -> None:
    c = comm()
    for kind, algorithm, spec in itertools.product(
        (*SPECIAL_KINDS, "sentinels"),
        ("one_shot", "two_shot", "unfused"),
        (
            allnorm.Fp8PerGroup(16, "column_major_tma"),
            allnorm.Fp8PerGroup(32, "column_major_tma", "ue8m0_packed"),
            allnorm.Fp8PerGroup(128, "row_major", "ue8m0"),
            allnorm.Fp8PerToken(),
            allnorm.Fp8PerTensor(torch.tensor(0.5)),
        ),
    ):
        if not can_run(c, algorithm, 256, dtype):
            continue
        case = Case(
            (7, 256),
            dtype,
            kind=kind,
            algorithm=algorithm,
            quant=spec,
            residual=kind != "zeros",
            return_normed=True,
            numerics="vllm" if kind == "denormals" else "rounded",
        )
        quantized, scale, residual, normed = case.run(c)
        case.compare(c, quantized, scale, residual, normed)
        # A NaN's payload is free, but the quantised bytes are the same on every rank.
        assert_ranks_agree(c, quantized)


@on(cpu=(1, 2, 3), gpu=(1, 2, 8))
@pytest.mark.parametrize("dtype", **dtype_ids)
def test_special_values(pool: RankPool, dtype: torch.dtype) -> None:
    pool.run(special, dtype)


def zero_weights(rank: int, world_size: int) -> None:
    """Groups of zeros of both signs, beside others; NaN and infinity in single groups."""
    c = comm()
    case = Case((5, 256), float32_weight=True)
    arguments = case.norm_arguments()
    weight = arguments.pop("weight")
    weight[32:64], weight[64:96] = 0.0, -0.0
    weight[130], weight[200] = float("nan"), float("inf")
    for bias, spec, algorithm in itertools.product(
        (0.0, -0.0),
        (
            allnorm.Fp8PerGroup(32),
            allnorm.Fp8PerGroup(32, "row_major", "ue8m0"),
            allnorm.Fp8PerGroup(16, "column_major_tma", "ue8m0_packed"),
        ),
        ALGORITHMS,
    ):
        if not can_run(c, algorithm, 256, case.dtype):
            continue
        arguments |= {"weight_bias": bias, "quant": spec}
        got = c.all_reduce_add_rms_norm_quant(
            case.x(rank), weight=weight, algorithm=algorithm, **arguments
        )
        want = reference.all_reduce_add_rms_norm_quant(
            case.xs(world_size), weight=weight, **arguments
        )
        for name, mine, theirs in zip(got._fields[:3], got, want, strict=False):
            assert_same_bits(mine, theirs, f"{name}, bias {bias}, {spec}, {algorithm}")
        if spec == allnorm.Fp8PerGroup(32):
            assert torch.isnan(got.scale).nonzero()[:, 1].unique().tolist() == [4]
            assert torch.isinf(got.scale).nonzero()[:, 1].unique().tolist() == [6]
            codes = got.quantized.view(torch.uint8)
            assert set(codes[:, 32:96].unique().tolist()) <= {0, 0x80}


@on(cpu=(1, 2), gpu=(1, 2))
def test_groups_of_zeros_and_of_nan(pool: RankPool) -> None:
    pool.run(zero_weights)


@pytest.mark.parametrize("value", [0.0, -0.0, -2.5, 1e-38, 1e-45, 1e38, float("inf"), float("nan")])
@on(cpu=(2,), gpu=(2,))
def test_any_given_scale(pool: RankPool, value: float) -> None:
    spec = allnorm.Fp8PerTensor(torch.tensor([value]))
    cases = [
        Case((4, 64), dtype, algorithm=algorithm, quant=spec)
        for dtype, algorithm in itertools.product(DTYPES, ALGORITHMS)
    ]
    pool.run(check_cases, cases)


def afterwards(rank: int, world_size: int) -> None:
    """Quantising the 16-bit result afterwards gives the same bytes, whoever makes it."""
    c = comm()
    for mode, spec in itertools.product(MODES, specs(256)):
        case = Case((9, 256), numerics=mode, quant=spec, return_normed=True)
        out = case.run(c)
        plain, residual = case.but(quant=None, return_normed=False).run(c)
        assert_same_bits(out.normed, plain, "normed")
        assert_same_bits(out.residual, residual, "residual")
        quantized, scale = reference.quantize(plain, case.spec())
        assert_same_bits(out.quantized, quantized, f"quantized, {spec}")
        assert_same_bits(out.scale, scale, f"scale, {spec}")


@on(cpu=(2,), gpu=(2, 4))
def test_quantising_afterwards_gives_the_same_bytes(pool: RankPool) -> None:
    pool.run(afterwards)


def rows_alone(rank: int, world_size: int) -> None:
    """A row's bytes do not depend on the batch it is in."""
    c = comm()
    draw = random.Random(3)
    for spec in (allnorm.Fp8PerGroup(64, "column_major_tma"), allnorm.Fp8PerToken()):
        case = Case((37, 576), quant=spec)
        whole, x, a = case.run(c), case.x(rank), case.norm_arguments()
        for _ in range(6):
            rows = sorted(draw.sample(range(37), draw.choice((1, 2, 16, 30))))
            few = c.all_reduce_add_rms_norm_quant(
                x[rows],
                a["residual"][rows],
                a["weight"],
                1e-6,
                quant=spec,
                algorithm=draw.choice(("auto", "unfused")),
            )
            for mine, theirs in zip(few[:3], whole[:3], strict=True):
                assert_same_bits(mine, theirs[rows], f"rows {rows}, {spec}")


@on(cpu=(2, 3), gpu=(2, 8))
def test_a_row_alone_equals_the_row_in_a_batch(pool: RankPool) -> None:
    pool.run(rows_alone)


def chunked(rank: int, world_size: int) -> None:
    """A workspace that holds few rows: several launches, and the bytes of one."""
    small = comm(workspace_bytes=64 << 10)
    for algorithm, spec, normed in itertools.product(
        ("one_shot", "two_shot"),
        (
            allnorm.Fp8PerGroup(128, "column_major_tma"),
            allnorm.Fp8PerGroup(64, "column_major_tma", "ue8m0_packed"),
            allnorm.Fp8PerGroup(32),
            allnorm.Fp8PerToken(),
            allnorm.Fp8PerTensor(torch.tensor([0.1])),
        ),
        (True, False),
    ):
        case = Case((133, 512), algorithm=algorithm, quant=spec, return_normed=normed)
        plan = small.plan(
            133, 512, case.dtype, case.spec(), return_normed=normed, algorithm=algorithm
        )
        assert plan.algorithm == algorithm
        assert plan.num_chunks > 1
        case.check(small)


@on(cpu=(2, 3), gpu=(2, 3, 8))
def test_row_chunks_beyond_the_workspace(pool: RankPool) -> None:
    pool.run(chunked)


def unfused_chunks(rank: int, world_size: int) -> None:
    """The unfused path cuts the rows too; scales and padding land where they should."""
    from allnorm import policy

    c = comm()
    kept, policy.UNFUSED_GATHER_BYTES = policy.UNFUSED_GATHER_BYTES, 5 * world_size * 256 * 2
    try:
        for spec, sharded, tokens in itertools.product(specs(256), (False, True), (3, 33, 35)):
            case = Case(
                (tokens, 256), algorithm="unfused", quant=spec, sharded=sharded, return_normed=True
            )
            assert c.plan(tokens, 256, case.dtype, algorithm="unfused").num_chunks == -(
                -tokens // 5
            )
            case.check(c)
        Case((33, 256), algorithm="unfused", sharded=True).check(c)
        Case((33, 256), algorithm="unfused").check(c)
    finally:
        policy.UNFUSED_GATHER_BYTES = kept


@on(cpu=(2, 3), gpu=(2, 3))
def test_row_chunks_of_the_unfused_path(pool: RankPool) -> None:
    pool.run(unfused_chunks)


def local(rank: int, world_size: int) -> None:
    """allnorm.add_rms_norm_quant: the op without the ranks."""
    c = comm()
    for dtype, hidden_size in itertools.product(DTYPES, (7, 144, 512)):
        for i, spec in enumerate(specs(hidden_size)):
            case = Case((5, hidden_size), dtype, quant=spec, numerics=MODES[i % 4], call=i)
            x, a = case.x(0), case.norm_arguments()
            if i % 3 == 0:
                a["residual"] = None
            got = allnorm.add_rms_norm_quant(x, quant=case.spec(), return_normed=i % 2 == 0, **a)
            want = reference.add_rms_norm_quant(x, quant=case.spec(), return_normed=i % 2 == 0, **a)
            for name, mine, theirs in zip(got._fields, got, want, strict=True):
                if theirs is None:
                    assert mine is None
                else:
                    assert_same_bits(mine, theirs, f"{name}, {case}")
                    assert mine.stride() == theirs.stride()
            assert_padding_is_zero(got.scale, spec)
    assert c.check() is None


@on(cpu=(1,), gpu=(1,))
def test_local(pool: RankPool) -> None:
    pool.run(local)


def positions(rank: int, world_size: int) -> None:
    """`quant` and `return_normed` by position, and the default: as the documented signature."""
    c = comm()
    case = Case((3, 256))
    x, residual, weight = case.x(rank), case.residual_tensor(), case.weight()
    out = c.all_reduce_add_rms_norm_quant(x, residual, weight, 1e-6, allnorm.Fp8PerToken(), True)
    assert out.scale.shape == (3, 1)
    assert out.normed is not None
    out = c.all_reduce_add_rms_norm_quant(x, residual, weight, 1e-6)
    assert out.scale.shape == (3, 2)
    assert out.normed is None
    case.but(quant=allnorm.Fp8PerGroup(128)).compare(c, *out)
    with allnorm.Communicator(device=c.device, numerics="vllm") as other:
        out = other.all_reduce_add_rms_norm_quant(x, residual, weight, 1e-6)
        case.but(quant=allnorm.Fp8PerGroup(128), numerics="vllm").compare(other, *out)


@on(cpu=(2,), gpu=(2,))
def test_positions_and_defaults(pool: RankPool) -> None:
    pool.run(positions)


def test_the_weights_of_these_tests_make_scales_that_differ() -> None:
    normed = shared_input((4, 256), torch.bfloat16, "y")
    scale = reference.quantize(normed, allnorm.Fp8PerGroup(32))[1]
    assert scale.unique().numel() > 16
