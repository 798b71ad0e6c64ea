"""Tests calls whose input is an ExpertSum: compiled calls and refused calls."""

from __future__ import annotations

from typing import Any

import torch
from rank_helpers import Case, Experts, comm, device, message_of, on

import allnorm
from allnorm.testing import assert_same_bits


@on(cpu=(2,), gpu=(2,))
def test_torch_compile(rank: int, world_size: int) -> None:
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


@on(cpu=(1, 2), gpu=(2,))
def test_refusals(rank: int, world_size: int) -> None:
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
        (
            TypeError,
            "residual_shard is a ExpertSum",
            lambda: c.all_gather_rows(allnorm.ExpertSum(rows[None]), 1),
        ),
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
