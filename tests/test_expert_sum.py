"""`x` as what the experts of a layer return: numerics step 0, before everything else."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from rank_helpers import (
    ALGORITHMS,
    MODES,
    Case,
    Experts,
    check_cases,
    comm,
    dtype_ids,
    message_of,
    on,
)

import allnorm
from allnorm import reference
from allnorm.testing import SPECIAL_KINDS, RankPool, assert_same_bits
from allnorm.testing.rank import device

KINDS = [
    Experts(top_k, weighted, shared, indexed)
    for top_k, weighted, shared, indexed in (
        *((1, True, False, True), (2, False, True, True), (8, True, True, True)),
        *((16, True, False, False), (3, False, False, False), (1, False, True, False)),
    )
]


def test_the_definition() -> None:
    """In the words of the numerics page, element by element."""
    rows = torch.tensor([[1.0, -0.0], [3.0, -0.0], [1e30, 5.0]], dtype=torch.bfloat16)
    index = torch.tensor([[1, 1, -1], [-1, -1, -1], [0, 3, 0], [-2, 0, 0]], dtype=torch.int32)
    weights = torch.tensor([[0.5, 0.25, torch.nan]] * 4)
    shared = torch.tensor([[0.125, -0.0]] * 4, dtype=torch.bfloat16)
    sums = reference.expert_sum(allnorm.ExpertSum(rows, weights, index, shared))
    assert sums.dtype == torch.bfloat16
    assert sums[:2].tolist() == [[2.375, 0.0], [0.125, 0.0]]
    assert not torch.signbit(sums[:2]).any(), "a sum begins with +0.0"
    assert sums[2:].isnan().all(), "an index that is no row"
    dense = reference.expert_sum(allnorm.ExpertSum(rows.view(1, 3, 2)))
    assert dense.shape == (1, 2)
    assert not torch.signbit(dense[0, 1])


def test_order_and_rounding() -> None:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(5, 16, 40, generator=generator).to(torch.float16)
    weights = torch.rand(5, 16, generator=generator)
    shared = torch.randn(5, 40, generator=generator).to(torch.float16)
    expected = torch.zeros(5, 40)
    for k in range(16):
        product = rows[:, k].float() * weights[:, k : k + 1]
        expected = expected + product
    expected = (expected + shared.float()).to(torch.float16)
    got = reference.expert_sum(allnorm.ExpertSum(rows, weights, None, shared))
    assert_same_bits(got, expected, "the reference")


@on(cpu=(1, 2, 3), gpu=range(1, 9))
@pytest.mark.parametrize("dtype", **dtype_ids)
def test_kinds_and_algorithms(pool: RankPool, dtype: torch.dtype) -> None:
    cases = [
        Case((5, 1024), dtype, algorithm=algorithm, residual=added, experts=experts)
        for algorithm, added, experts in itertools.product(ALGORITHMS, (True, False), KINDS)
    ]
    assert pool.run(check_cases, cases) == [len(cases)] * pool.world_size


@on(cpu=(2, 3), gpu=range(2, 9))
@pytest.mark.parametrize("dtype", **dtype_ids)
def test_shapes(pool: RankPool, dtype: torch.dtype) -> None:
    draw = random.Random(f"experts {dtype}")
    cases = [
        Case(
            (num_tokens, hidden_size),
            dtype,
            residual=draw.random() < 0.7,
            float32_weight=draw.random() < 0.5,
            numerics=draw.choice(MODES),
            algorithm=algorithm,
            call=draw.randrange(100),
            post_norm=draw.random() < 0.4,
            scale=draw.choice((1.0, 1.0, 0.22)),
            experts=draw.choice(KINDS),
        )
        for hidden_size, num_tokens, algorithm in itertools.product(
            (2048, 2880, 120, 4095, 8192, 16384, 7, 1),
            (0, 1, 2, 5),
            ("one_shot", "two_shot", "auto"),
        )
    ]
    pool.run(check_cases, cases)


@on(cpu=(2,), gpu=range(2, 9))
def test_more_rows(pool: RankPool) -> None:
    cases = [
        Case((num_tokens, hidden_size), algorithm=algorithm, call=num_tokens, experts=experts)
        for num_tokens, hidden_size in ((17, 4096), (64, 2304), (257, 120), (1025, 512))
        for algorithm in ALGORITHMS
        for experts in (KINDS[2], KINDS[3])
    ]
    pool.run(check_cases, cases)


@on(cpu=(1, 2, 3), gpu=(1, 2, 3, 8))
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
def test_quantised_and_sharded(pool: RankPool, sharded: bool) -> None:
    draw = random.Random(f"experts {sharded}")
    specs = (
        None,
        allnorm.Fp8PerGroup(64, "column_major_tma", "ue8m0_packed"),
        allnorm.Fp8PerToken(),
        allnorm.Fp8PerTensor(torch.tensor([0.05])),
    )
    cases = [
        Case(
            (tokens, 256),
            dtype,
            sharded=sharded,
            quant=spec,
            algorithm=algorithm,
            return_normed=spec is not None and draw.random() < 0.5,
            post_norm=draw.random() < 0.3,
            experts=draw.choice(KINDS),
            call=tokens,
        )
        for dtype, tokens, spec, algorithm in itertools.product(
            (torch.bfloat16, torch.float32), (0, 1, 5, 33), specs, ("two_shot", "unfused", "auto")
        )
    ]
    pool.run(check_cases, cases)


@on(cpu=(2, 3), gpu=(2, 3, 8))
@pytest.mark.parametrize("dtype", **dtype_ids)
def test_values_that_hurt(pool: RankPool, dtype: torch.dtype) -> None:
    cases = [
        Case((7, 264), dtype, kind=kind, algorithm=algorithm, experts=experts)
        for kind, algorithm, experts in itertools.product(
            (*SPECIAL_KINDS, "sentinels", "finite_sentinels"), ("one_shot", "two_shot"), KINDS[:4]
        )
    ]
    pool.run(check_cases, cases)


@on(cpu=(2, 4), gpu=(2, 4))
def test_tokens_without_any_expert(pool: RankPool) -> None:
    cases = [
        Case((9, 264), algorithm=algorithm, experts=Experts(4, True, shared, True, absent))
        for algorithm in ALGORITHMS
        for shared in (False, True)
        for absent in (0.9, 1.0)
    ]
    pool.run(check_cases, cases)


def incidents(rank: int, world_size: int) -> None:
    """What serving brings: padding rows, ranks without rows, a NaN where nobody looks."""
    c = comm()
    base = Case((6, 264))
    residual, weight = base.residual_tensor(), base.weight()

    def check(make: Any, what: str, algorithm: str) -> Any:
        everybody = [make(q) for q in range(world_size)]
        want = reference.all_reduce_add_rms_norm(everybody, residual, weight, 1e-6)
        for _ in range(3):
            got = c.all_reduce_add_rms_norm(
                everybody[rank], residual, weight, 1e-6, algorithm=algorithm
            )
            for name, one, other in zip(("normed", "residual"), got, want, strict=True):
                assert_same_bits(one, other, f"{what}: {name}")
        return got

    def rows_of(q: int, count: int) -> torch.Tensor:
        return base.but(shape=(count, 264)).x(q)

    def unused_nan(q: int) -> allnorm.ExpertSum:
        rows = rows_of(q, 5).clone()
        rows[3] = torch.nan
        index = torch.tensor([[0, 4, 2, -1]] * 6, dtype=torch.int32, device=device())
        return allnorm.ExpertSum(rows, None, index)

    def no_rows(q: int) -> allnorm.ExpertSum:
        count = 0 if q == 0 else 4
        index = torch.full((6, 2), -1, dtype=torch.int32, device=device())
        if q:
            index[:, 1] = 3
        return allnorm.ExpertSum(rows_of(q, count), None, index)

    def other_top_k(q: int) -> allnorm.ExpertSum:
        index = torch.arange(6 * (q + 1), dtype=torch.int32, device=device()) % 7
        return allnorm.ExpertSum(rows_of(q, 7), None, index.view(6, q + 1))

    def odd_memory(q: int) -> allnorm.ExpertSum:
        """Nothing lies where it would if it had been made for the call."""
        rows = rows_of(q, 18).view(-1)
        wide = torch.zeros(18 * 264 + 1, dtype=rows.dtype, device=rows.device)
        wide[1:] = rows
        index = torch.zeros(6, 5, dtype=torch.int32, device=device())[:, 1:4]
        index[:] = torch.arange(18, device=device()).view(6, 3) - 1
        weights = torch.rand(3, 6, generator=torch.Generator().manual_seed(q)).to(device())
        shared = torch.zeros(6, 400, dtype=rows.dtype, device=rows.device)[:, 3:267]
        shared[:] = base.x(q)
        return allnorm.ExpertSum(
            wide[1:].view(18, 264), weights.t().contiguous()[:, :3], index, shared
        )

    def negated(q: int) -> allnorm.ExpertSum:
        """Weights that stand for the negative of their memory, in rows that lie apart."""
        wide = torch.rand(6, 5, generator=torch.Generator().manual_seed(q)).to(device())
        index = torch.arange(12, dtype=torch.int32, device=device()).view(6, 2)
        weights = torch._neg_view(wide[:, 1:3])
        return allnorm.ExpertSum(rows_of(q, 12), weights, index)

    def repeated(q: int) -> allnorm.ExpertSum:
        """One index for all tokens, and rows that lie in each other."""
        index = torch.tensor([[2, 2, 0]], dtype=torch.int32, device=device()).expand(6, 3)
        return allnorm.ExpertSum(rows_of(q, 1).expand(3, 264), None, index)

    def padding(q: int) -> allnorm.ExpertSum:
        index = torch.tensor([[0, 1]] * 3 + [[-1, -1]] * 3, dtype=torch.int32, device=device())
        weights = torch.full((6, 2), torch.nan, device=device())
        weights[:3] = 0.5
        return allnorm.ExpertSum(rows_of(q, 2), weights, index)

    for algorithm in ALGORITHMS:
        for make in (unused_nan, no_rows, other_top_k, odd_memory, negated, repeated, padding):
            normed, _ = check(make, f"{make.__name__} {algorithm}", algorithm)
            assert not normed.isnan().any(), make.__name__

    def wrong(q: int) -> allnorm.ExpertSum:
        index = torch.tensor([[0, 1]] * 6, dtype=torch.int32, device=device())
        if q == world_size - 1:
            index[1, 0], index[2, 1], index[4, 1] = 2, -2, 2**31 - 1
        return allnorm.ExpertSum(rows_of(q, 2), None, index)

    for algorithm in ALGORITHMS:
        normed, _ = check(wrong, f"an index that is no row, {algorithm}", algorithm)
        assert normed.isnan().all(1).tolist() == [False, True, True, False, True, False]
    c.check()


@on(cpu=(1, 2, 3), gpu=(1, 2, 3))
def test_incidents(pool: RankPool) -> None:
    pool.run(incidents)


def alone(rank: int, world_size: int) -> None:
    for dtype, experts in itertools.product((torch.bfloat16, torch.float32), KINDS):
        case = Case((5, 2880), dtype, experts=experts, post_norm=True)
        arguments = case.norm_arguments()
        want = reference.add_rms_norm(case.x(1), **arguments)
        for one, other in zip(allnorm.add_rms_norm(case.x(1), **arguments), want, strict=True):
            assert_same_bits(one, other, f"{case}")
        spec = allnorm.Fp8PerGroup(64)
        got = allnorm.add_rms_norm_quant(case.x(1), quant=spec, **arguments)
        wanted = reference.add_rms_norm_quant(case.x(1), quant=spec, **arguments)
        assert_same_bits(got.quantized, wanted.quantized, f"{case}")


@on(cpu=(1,), gpu=(1,))
def test_without_an_exchange(pool: RankPool) -> None:
    pool.run(alone)


def compiled(rank: int, world_size: int) -> None:
    c = comm()

    def program(rows: Any, weights: Any, index: Any, shared: Any, residual: Any, w: Any) -> Any:
        experts = allnorm.ExpertSum(rows, weights, index, shared)
        normed, residual = c.all_reduce_add_rms_norm(experts, residual, w, 1e-6)
        again = allnorm.all_reduce_add_rms_norm(
            allnorm.ExpertSum(rows.view(-1, 2, 264)), residual[: rows.shape[0] // 2], w, 1e-6
        )
        out = c.all_reduce_add_rms_norm_quant(
            experts, residual, w, 1e-6, residual_sharded=False, quant=allnorm.Fp8PerToken()
        )
        return normed, residual, *again, out.quantized, out.scale, out.residual

    fast = torch.compile(program, fullgraph=True)
    for tokens in (4, 6):
        case = Case((tokens, 264), experts=Experts(2, True, True, True))
        experts = case.x(rank)
        rows = experts.rows[: tokens * 2]
        index = experts.index.clamp(max=rows.shape[0] - 1)
        given = (
            rows,
            experts.weights,
            index,
            experts.shared,
            case.residual_tensor(),
            case.weight(),
        )
        for one, other in zip(fast(*given), program(*given), strict=True):
            assert_same_bits(one, other, f"{tokens} tokens")


@on(cpu=(2,), gpu=(2,))
def test_torch_compile(pool: RankPool) -> None:
    pool.run(compiled)


def refuse(rank: int, world_size: int) -> None:
    c = comm()
    case = Case((2, 64))
    rows, residual, weight = case.but(shape=(5, 64)).x(rank), case.residual_tensor(), case.weight()
    index = torch.tensor([[0, 1, 2], [2, 1, 0]], dtype=torch.int32, device=device())
    weights = torch.ones(2, 3, device=device())

    def call(
        rows: Any = rows,
        weights: Any = weights,
        index: Any = index,
        shared: Any = None,
        **more: Any,
    ) -> Any:
        experts = allnorm.ExpertSum(rows, weights, index, shared)
        return c.all_reduce_add_rms_norm(experts, residual, weight, 1e-6, **more)

    sums = call()[0]
    for error, words, make in (
        (TypeError, "x is a ExpertSum", lambda: c.all_reduce(allnorm.ExpertSum(rows))),
        (TypeError, "rows is a int", lambda: call(3)),
        (ValueError, "rows has shape (5, 64)", lambda: call(index=None, weights=None)),
        (ValueError, "rows has shape (1, 5, 64)", lambda: call(rows[None])),
        (TypeError, "index has dtype torch.int64", lambda: call(index=index.long())),
        (TypeError, "weights has dtype torch.bfloat16", lambda: call(weights=weights.bfloat16())),
        (TypeError, "shared has dtype torch.float32", lambda: call(shared=residual.float())),
        (ValueError, "index has shape (3,)", lambda: call(index=index[0])),
        (
            ValueError,
            "weights has shape (2, 2): expected (2, 3)",
            lambda: call(weights=weights[:, :2]),
        ),
        (ValueError, "shared has shape (1, 64)", lambda: call(shared=residual[:1])),
        (ValueError, "residual has shape", lambda: call(index=index[:1], weights=weights[:1])),
        (
            ValueError,
            "top_k is 17",
            lambda: call(
                index=torch.zeros(2, 17, dtype=torch.int32, device=device()), weights=None
            ),
        ),
        (ValueError, "top_k is 0", lambda: call(index=index[:, :0], weights=None)),
        (ValueError, "out shares memory with rows", lambda: call(out=rows[:2])),
        (ValueError, "out shares memory with shared", lambda: _share(call, residual)),
        (TypeError, "experts=1", lambda: c.plan(2, 64, experts=1)),
    ):
        assert words in message_of(error, make), words
    assert_same_bits(call()[0], sums, "after refusals")
    assert c.plan(2, 64, experts=True) == c.plan(2, 64)
    c.check()


def _share(call: Any, residual: torch.Tensor) -> Any:
    shared = residual.clone()
    return call(shared=shared, out=shared)


@on(cpu=(1, 2), gpu=(2,))
def test_refusals(pool: RankPool) -> None:
    pool.run(refuse)
