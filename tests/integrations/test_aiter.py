"""Tests the calls with AITER's signatures: bits against the reference, on every rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from rank_helpers import comm, device, on

import allnorm
from allnorm import reference
from allnorm.integrations.aiter import AiterCalls
from allnorm.testing import assert_same_bits, gather

EPS = 1e-6


def same(got: Iterable[torch.Tensor], expected: Iterable[torch.Tensor | None]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert_same_bits(one, other)


def inputs(shape: tuple[int, ...], dtype: torch.dtype, world_size: int) -> tuple[Any, ...]:
    """Returns the partial sums of all ranks, the residual and the weight."""
    generator = torch.Generator().manual_seed(sum(shape))

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(dtype).to(device())

    return [draw(*shape) for _ in range(world_size)], draw(*shape), draw(shape[-1])


@on(cpu=(3,), gpu=(2,))
@pytest.mark.parametrize("gemma", [False, True])
@pytest.mark.parametrize("shape", [(1, 4096), (5, 2880), (2, 3, 512)])
def test_norms(rank: int, world_size: int, shape: tuple[int, ...], gemma: bool) -> None:
    calls = AiterCalls(comm())
    xs, residual, weight = inputs(shape, torch.bfloat16, world_size)
    expected = reference.all_reduce_add_rms_norm(
        xs, residual, weight, EPS, weight_bias=1.0 if gemma else 0.0
    )
    x = xs[rank]
    for use_1stage in (False, True):
        got = calls.fused_ar_rms(
            x, residual, w=weight, eps=EPS, use_1stage=use_1stage, gemma_norm=gemma
        )
        same(got, expected)
        got = calls.custom_fused_ar_rms(x, residual, weight, EPS, use_1stage, 0, gemma)
        same(got, expected)
    out, res_out = torch.empty_like(x), torch.empty_like(x)
    got = calls.fused_ar_rms(
        x, residual, w=weight, eps=EPS, out=out, res_out=res_out, gemma_norm=gemma
    )
    assert got[0] is out
    assert got[1] is res_out
    same(got, expected)


@on(cpu=(3,), gpu=(2,))
@pytest.mark.parametrize("emit", [False, True])
@pytest.mark.parametrize("shape", [(1, 4096), (7, 512), (2, 3, 512), (0, 512)])
def test_quantized_rows(rank: int, world_size: int, shape: tuple[int, ...], emit: bool) -> None:
    calls = AiterCalls(comm())
    xs, residual, weight = inputs(shape, torch.bfloat16, world_size)
    x = xs[rank]
    for group_size in (None, 128, 32):
        quant = allnorm.Fp8PerToken() if group_size is None else allnorm.Fp8PerGroup(group_size)
        wanted = reference.all_reduce_add_rms_norm_quant(
            xs, residual, weight, EPS, quant, return_normed=True
        )
        scale = wanted.scale.reshape(*shape[:-1], wanted.scale.shape[-1])
        expected = (wanted.quantized, wanted.residual, scale, wanted.normed)[: 4 if emit else 3]
        if group_size is None:
            found = [
                calls.fused_ar_rms(
                    *(x, residual),
                    w=weight,
                    eps=EPS,
                    post_per_token_quant=True,
                    emit_bf16=emit,
                ),
                calls.custom_fused_ar_rms_quant(x, residual, weight, EPS, True, False, emit),
            ]
        else:
            found = [
                calls.fused_ar_rms_per_group_quant(
                    x, residual, w=weight, eps=EPS, group_size=group_size, emit_bf16=emit
                ),
                calls.custom_fused_ar_rms_per_group_quant(
                    x, residual, weight, EPS, group_size, False, emit
                ),
            ]
        for got in found:
            same(got, expected)
            assert got[0].dtype is torch.float8_e4m3fn


@on(cpu=(2,), gpu=(2,))
def test_preallocated_quantized_results(rank: int, world_size: int) -> None:
    xs, residual, weight = inputs((2, 3, 512), torch.float16, world_size)
    out = torch.empty((2, 3, 512), dtype=torch.float8_e4m3fn, device=device())
    scale_out = torch.empty((2, 3, 1), device=device())
    res_out = torch.empty_like(residual)
    AiterCalls(comm()).fused_ar_rms(
        *(xs[rank], residual),
        w=weight,
        eps=EPS,
        out=out,
        scale_out=scale_out,
        res_out=res_out,
        post_per_token_quant=True,
    )
    wanted = reference.all_reduce_add_rms_norm_quant(
        xs, residual, weight, EPS, allnorm.Fp8PerToken()
    )
    same((out, res_out), (wanted.quantized, wanted.residual))
    assert_same_bits(scale_out.view(-1, 1), wanted.scale)


@on(cpu=(2,), gpu=(2,))
def test_refusals_are_equal_on_every_rank(rank: int, world_size: int) -> None:
    calls = AiterCalls(comm())
    xs, residual, weight = inputs((2, 512), torch.bfloat16, world_size)
    x = xs[rank]
    texts = []
    for change in ({"out_hidden_dim": 1024}, {"w": weight[:256]}):
        with pytest.raises(allnorm.UnsupportedError, match="expected 512 for both") as caught:
            calls.fused_ar_rms(x, residual, **{"w": weight, "eps": EPS, **change})
        texts.append(str(caught.value))
    with pytest.raises(ValueError, match="group_size") as refused:
        calls.fused_ar_rms_per_group_quant(x, residual, w=weight, eps=EPS, group_size=100)
    texts.append(str(refused.value))
    assert len(set(map(tuple, gather(texts)))) == 1
    expected = reference.all_reduce_add_rms_norm(xs, residual, weight, EPS)
    same(calls.fused_ar_rms(x, residual, w=weight, eps=EPS), expected)
