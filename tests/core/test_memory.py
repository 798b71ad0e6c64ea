"""Tests memory that calls refuse, has over 2**31 elements, or changes between calls."""

from __future__ import annotations

import pytest
import torch
from rank_helpers import Case, comm, on, same_on_every_rank

import allnorm
from allnorm import reference
from allnorm.testing import assert_same_bits


@on(cpu=(2,), gpu=(2,))
def test_overlapping_memory_is_refused(rank: int, world_size: int) -> None:
    c = comm()
    case = Case((4, 64))
    x, arguments = case.x(rank), case.norm_arguments()
    residual, weight = arguments.pop("residual"), arguments.pop("weight")
    big = torch.zeros(6, 64, dtype=x.dtype, device=c.device)
    texts = []
    for tensors, results in (
        ((big[:4], residual), {"out": big[1:5]}),
        ((x, big[:4]), {"residual_out": big[1:5]}),
        ((x, residual), {"out": residual}),
        ((x, residual), {"residual_out": x}),
        ((x, residual), {"out": big[:4], "residual_out": big[:4]}),
        ((x, residual), {"out": big[:4], "residual_out": big[2:]}),
        ((x, None), {"residual_out": x}),
    ):
        for repeats in (0, 3):
            for _ in range(repeats):
                out = {"out": torch.empty_like(x), "residual_out": torch.empty_like(x)}
                c.all_reduce_add_rms_norm(x, residual, weight, **arguments, **out)
            with pytest.raises(ValueError, match="shares memory") as caught:
                c.all_reduce_add_rms_norm(*tensors, weight, **arguments, **results)
            texts.append(str(caught.value))
    with pytest.raises(ValueError, match="shares memory"):
        c.all_reduce(big[:4], out=big[1:5])
    memory = torch.zeros(4, 72, dtype=x.dtype, device=c.device)
    for out in (
        memory.as_strided((2, 3, 72), (72, 72, 1)),  # rows (0, 1) and (1, 0) share memory
        memory[:1].expand(6, 72).view(2, 3, 72),
    ):
        with pytest.raises(ValueError, match="distinct, contiguous rows"):
            c.all_reduce(x.new_zeros(2, 3, 72), out=out)
    # Without a check, this weight would be read as if it had no gaps, like the previous call's.
    gaps = torch.full((128,), 5.0, dtype=x.dtype, device=c.device)
    case.check(c)
    with pytest.raises(ValueError, match="stride"):
        c.all_reduce_add_rms_norm(x, residual, gaps[::2], **arguments)
    case.check(c)
    same_on_every_rank(texts)


@pytest.mark.slow
@on(gpu=(2, 8))
def test_more_than_two_to_the_31_elements(rank: int, world_size: int) -> None:
    """Checks that offsets have 64 bits (incident 12), by comparing sampled rows."""
    c = comm()
    hidden_size = 8192
    num_tokens = 2**31 // hidden_size + 3
    base = [Case((61, hidden_size)).x(r) for r in range(world_size)]

    def rows(r: int, index: torch.Tensor) -> torch.Tensor:
        return base[r][index % 61] * (1 + (index // 61 % 7)).to(base[r].dtype)[:, None]

    x = torch.empty(num_tokens, hidden_size, dtype=torch.bfloat16, device=c.device)
    for begin in range(0, num_tokens, 8192):
        index = torch.arange(begin, min(begin + 8192, num_tokens), device=c.device)
        x[begin : begin + 8192] = rows(rank, index)
    weight = Case((1, hidden_size)).weight()
    normed, total = c.all_reduce_add_rms_norm(x, None, weight, 1e-6, out=x)
    step = max(1, num_tokens // 4000)
    index = torch.cat([torch.arange(0, num_tokens, step), torch.arange(num_tokens - 8, num_tokens)])
    index = index.to(c.device)
    want = reference.all_reduce_add_rms_norm(
        [rows(r, index) for r in range(world_size)], None, weight, 1e-6
    )
    assert_same_bits(normed[index], want[0], "normed")
    assert_same_bits(total[index], want[1], "residual_out")


@on(cpu=(2,), gpu=(2,))
def test_given_scales_may_change(rank: int, world_size: int) -> None:
    """Checks that prepared calls work with any given scale and keep no scale alive."""
    c = comm()
    case = Case((3, 64), quant=allnorm.Fp8PerTensor(torch.tensor([1.0])))
    x, a = case.x(rank), case.norm_arguments()
    case.check(c)
    case.but(quant=allnorm.NvFp4(torch.tensor([1.0]))).check(c)
    prepared = len(c._endpoint.dispatcher._prepared)
    for i in range(40):
        scale = torch.tensor([0.01 * (i + 1)], device=c.device)
        for spec in (allnorm.Fp8PerTensor(scale), allnorm.NvFp4(1 / scale)):
            got = c.all_reduce_add_rms_norm_quant(x, quant=spec, **a)
            want = reference.all_reduce_add_rms_norm_quant(case.xs(world_size), quant=spec, **a)
            assert_same_bits(got.quantized, want.quantized, f"{spec}, {i}")
    assert len(c._endpoint.dispatcher._prepared) == prepared
