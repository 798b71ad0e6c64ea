"""Tests calls with post norms or scaled sums, or without a second norm: compiled and refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_helpers import Case, comm, device, message_of, on

import allnorm
from allnorm.testing import assert_same_bits, same_bits, shared_input


@on(cpu=(1, 2), gpu=(1, 2))
def test_an_unaligned_weight(rank: int, world_size: int) -> None:
    c, case = comm(), Case((4, 264))
    x, residual = case.x(rank), case.residual_tensor()
    strided = shared_input((528,), torch.bfloat16, "odd", device=device())[1:265]
    for weight, into in ((None, {}), (case.weight(), {}), (case.weight(), {"residual_out": 0})):
        given = residual.clone()
        into = dict.fromkeys(into, given)
        want, got = (
            c.all_reduce_add_rms_norm(
                x, given, weight, 1e-6, post_norm=allnorm.PostNorm(post, 1e-6), **more
            )
            for post, more in ((strided.clone(), {}), (strided, into))
        )
        for one, other in zip(got, want, strict=True):
            assert one is other is None or same_bits(one, other)


@on(cpu=(2,), gpu=(2,))
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_torch_compile(rank: int, world_size: int, dynamic: bool) -> None:
    c = comm()

    def program(x: Any, residual: Any, weight: Any, post: Any) -> Any:
        norm = allnorm.PostNorm(post, 1e-5, 1.0)
        normed, residual = c.all_reduce_add_rms_norm(
            x, residual, weight, 1e-6, post_norm=norm, scale=0.5
        )
        nothing, residual = c.all_reduce_add_rms_norm(normed, residual, None, 1e-6, post_norm=norm)
        assert nothing is None
        out = c.all_reduce_add_rms_norm_quant(
            residual, residual, weight, 1e-6, allnorm.Fp8PerToken(), True, post_norm=norm
        )
        return normed, residual, out.quantized, out.scale, out.normed

    torch.compiler.reset()
    fast = torch.compile(program, fullgraph=True, dynamic=dynamic)
    for tokens in (3, 5):
        case = Case((tokens, 264))
        given = (case.x(rank), case.residual_tensor(), case.weight(), case.weight().float())
        for one, other in zip(fast(*given), program(*given), strict=True):
            assert_same_bits(one, other, f"{tokens} tokens")


@on(cpu=(1, 2), gpu=(2,))
def test_refusals(rank: int, world_size: int) -> None:
    c = comm()
    case = Case((2, 64))
    x, residual, weight = case.x(rank), case.residual_tensor(), case.weight()
    post = allnorm.PostNorm(weight, 1e-6)

    def call(norm: Any = None, weight: Any = weight, **more: Any) -> Any:
        return c.all_reduce_add_rms_norm(x, residual, weight, 1e-6, post_norm=norm, **more)

    for error, words, make in (
        (TypeError, "post_norm=0.5: expected an allnorm.PostNorm", lambda: call(0.5)),
        (TypeError, "weight is None", lambda: call(None, None)),
        (TypeError, "weight is None", lambda: call(None, None, scale=2.0)),
        (ValueError, "out without a weight", lambda: call(post, None, out=torch.empty_like(x))),
        (
            ValueError,
            "post_norm.weight has shape (63,)",
            lambda: call(allnorm.PostNorm(weight[1:], 1e-6)),
        ),
        (
            TypeError,
            "post_norm.weight has dtype torch.float16",
            lambda: call(allnorm.PostNorm(weight.half(), 1e-6)),
        ),
        (ValueError, "post_norm.eps=-1.0", lambda: call(allnorm.PostNorm(weight, -1.0))),
        (TypeError, "post_norm.eps='1'", lambda: call(allnorm.PostNorm(weight, "1"))),
        (ValueError, "scale=inf", lambda: call(scale=float("inf"))),
        (ValueError, "scale=nan", lambda: call(scale=float("nan"))),
        (TypeError, "scale=True", lambda: call(scale=True)),
        (TypeError, "scale=tensor", lambda: call(scale=torch.tensor(2.0))),
        (
            TypeError,
            "weight is None",
            lambda: c.all_reduce_add_rms_norm_quant(x, residual, None, 1e-6, post_norm=post),
        ),
        (TypeError, "post_norm=1", lambda: c.plan(2, 64, post_norm=1)),
        (ValueError, "scale=nan", lambda: c.plan(2, 64, scale=float("nan"))),
    ):
        assert words in message_of(error, make), words
    plan = c.plan(2, 64, post_norm=post, scale=0.22)
    assert plan == c.plan(2, 64)
    case.but(post_norm=True).check(c)
    # An integer scale is accepted, and 1 has no effect.
    got, want = call(scale=1), call()
    assert_same_bits(got[0], want[0], "scale=1")
    c.check()
