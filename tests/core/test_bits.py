"""Every bit of the fused op, against the reference, over dtypes, modes, algorithms and shapes."""

from __future__ import annotations

import itertools

import pytest
import torch
from rank_helpers import (
    ALGORITHMS,
    DTYPES,
    MODES,
    Case,
    assert_ranks_agree,
    can_run,
    check_cases,
    comm,
    dtype_ids,
    on,
    usable,
)

import allnorm
from allnorm import reference
from allnorm.testing import RankPool, assert_same_bits

HIDDEN_SIZES = (4096, 2880, 2944, 5760, 120, 8192, 7168, 16384, 4095, 7, 1)


@on(cpu=(1, 2, 3, 4, 5, 8), gpu=range(1, 9))
@pytest.mark.parametrize("dtype", **dtype_ids)
def test_modes_and_algorithms(pool: RankPool, dtype: torch.dtype) -> None:
    cases = [
        Case((5, 1024), dtype, numerics=mode, algorithm=algorithm, residual=with_residual)
        for mode, algorithm, with_residual in itertools.product(MODES, ALGORITHMS, (True, False))
    ]
    ran = pool.run(check_cases, cases)
    assert ran == [len(cases)] * pool.world_size


def sweep(dtype: torch.dtype, tokens: tuple[int, ...]) -> list[Case]:
    """Every hidden size with every token count and algorithm; the rest takes turns."""
    cases = []
    modes, booleans = itertools.cycle(MODES), itertools.cycle((True, False, True))
    for hidden_size, num_tokens, algorithm in itertools.product(
        HIDDEN_SIZES, tokens, ("one_shot", "two_shot", "auto")
    ):
        call = len(cases)
        cases.append(
            Case(
                (num_tokens, hidden_size),
                dtype,
                residual=next(booleans),
                float32_weight=call % 2 == 0,
                weight_bias=(0.0, 1.0, 0.0, 0.25)[call % 4],
                eps=(1e-6, 1e-5, 0.0, 1.0)[call // 2 % 4],
                numerics=next(modes),
                algorithm=algorithm,
                call=call,
            )
        )
    return cases


@on(cpu=(2, 3), gpu=range(2, 9))
@pytest.mark.parametrize("dtype", **dtype_ids)
def test_shapes(pool: RankPool, dtype: torch.dtype) -> None:
    pool.run(check_cases, sweep(dtype, (0, 1, 2, 5)))


@on(cpu=(5, 8))
def test_shapes_with_more_ranks_than_cores(pool: RankPool) -> None:
    pool.run(check_cases, sweep(torch.bfloat16, (1, 3)))


@on(cpu=(2,), gpu=range(2, 9))
def test_more_rows(pool: RankPool) -> None:
    cases = [
        Case((num_tokens, hidden_size), algorithm=algorithm, call=num_tokens)
        for num_tokens, hidden_size in ((17, 4096), (64, 2880), (257, 120), (1025, 2944))
        for algorithm in ALGORITHMS
    ]
    pool.run(check_cases, cases)


@on(gpu=(2, 3, 8))
@pytest.mark.parametrize("dtype", **dtype_ids)
def test_prefill_sizes(pool: RankPool, dtype: torch.dtype) -> None:
    cases = [
        Case((num_tokens, hidden_size), dtype, algorithm=algorithm, numerics=mode, call=num_tokens)
        for (num_tokens, hidden_size), mode in zip(
            ((2048, 4096), (1024, 8192), (777, 7168), (300, 16384), (129, 20480)),
            itertools.cycle(MODES),
            strict=False,
        )
        for algorithm in ("one_shot", "two_shot", "auto")
        # Wider rows than 64 KiB take `unfused` on CUDA; asked for by name the others refuse.
        if algorithm == "auto" or hidden_size * dtype.itemsize <= 64 << 10
    ]
    pool.run(check_cases, cases)


@on(cpu=(2, 4), gpu=(2, 4, 8))
@pytest.mark.parametrize(
    "shape", [(64,), (2, 3, 64), (2, 1, 3, 64), (0, 3, 64), (2, 0, 64)], ids=str
)
def test_leading_dimensions(pool: RankPool, shape: tuple[int, ...]) -> None:
    pool.run(check_cases, [Case(shape, algorithm=algorithm) for algorithm in ALGORITHMS])


@on(cpu=(2, 3), gpu=(2, 3))
@pytest.mark.parametrize("dtype", **dtype_ids)
def test_extreme_eps_and_bias(pool: RankPool, dtype: torch.dtype) -> None:
    cases = [
        Case((3, 264), dtype, eps=eps, weight_bias=bias, numerics=mode, float32_weight=True)
        # 0.1 and 1e-6 are no float32: they must be rounded once, and before the addition
        for eps, bias, mode in itertools.product((0.0, 1e-45, 1e-6, 1e30), (0.0, 0.1, -1.0), MODES)
    ]
    pool.run(check_cases, cases)


def all_reduce_cases(rank: int, world_size: int) -> None:
    c = comm()
    for dtype, hidden_size, num_tokens, algorithm in itertools.product(
        DTYPES, (1, 7, 120, 2880, 4096), (0, 1, 3, 17), ALGORITHMS
    ):
        case = Case((num_tokens, hidden_size), dtype)
        x = case.x(rank)
        before = x.clone()
        if not can_run(c, algorithm, hidden_size, dtype):
            with pytest.raises(allnorm.UnsupportedError, match=algorithm):
                c.all_reduce(x, algorithm=algorithm)
            continue
        reduced = c.all_reduce(x, algorithm=algorithm)
        assert_same_bits(
            reduced, reference.all_reduce(case.xs(world_size)), f"all_reduce by {algorithm}: {case}"
        )
        assert_same_bits(x, before, "x, which must not be modified")
        assert_ranks_agree(c, reduced)


@on(cpu=(1, 2, 3, 5), gpu=range(1, 9))
def test_all_reduce(pool: RankPool) -> None:
    pool.run(all_reduce_cases)


def residual_is_the_unfused_sum(rank: int, world_size: int) -> None:
    """Without any part of the library: incident 1 and feature 7."""
    c = comm()
    case = Case((16, 4096))
    _, residual_out = case.run(c)
    reduced = c.all_reduce(case.x(rank))
    assert_same_bits(residual_out, reduced + case.residual_tensor(), "residual_out")


@on(cpu=(2, 3), gpu=(2, 8))
def test_residual_is_the_unfused_sum(pool: RankPool) -> None:
    pool.run(residual_is_the_unfused_sum)


def inputs_stay(rank: int, world_size: int) -> None:
    c = comm()
    for algorithm in usable(c, 520, torch.bfloat16):
        case = Case((9, 520), algorithm=algorithm)
        x, arguments = case.x(rank), case.norm_arguments()
        residual, weight = arguments["residual"], arguments["weight"]
        copies = [t.clone() for t in (x, residual, weight)]
        normed, total = c.all_reduce_add_rms_norm(x, algorithm=algorithm, **arguments)
        for name, t, copy in zip(
            ("x", "residual", "weight"), (x, residual, weight), copies, strict=True
        ):
            assert_same_bits(t, copy, name)
        pointers = {t.data_ptr() for t in (x, residual, weight, normed, total)}
        assert len(pointers) == 5, "results are new tensors"
        assert normed.is_contiguous()
        assert total.is_contiguous()
        # without a residual the reduced sum is returned, in a tensor of its own
        normed, total = c.all_reduce_add_rms_norm(
            x, algorithm=algorithm, **{**arguments, "residual": None}
        )
        assert total.data_ptr() not in (x.data_ptr(), normed.data_ptr())


@on(cpu=(1, 2), gpu=(1, 2))
def test_inputs_are_not_modified(pool: RankPool) -> None:
    pool.run(inputs_stay)
