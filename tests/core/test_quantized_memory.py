"""Where inputs and results of quantising calls lie: strided, in place, preallocated, new."""

from __future__ import annotations

import itertools

import pytest
import torch
from rank_helpers import ALGORITHMS, Case, can_run, comm, dtype_ids, on

import allnorm
from allnorm import quant as quants
from allnorm import reference
from allnorm.testing import RankPool, assert_same_bits

FP8 = torch.float8_e4m3fn


def strided_inputs(rank: int, world_size: int, dtype: torch.dtype) -> None:
    c = comm()
    for (pad, offset), algorithm in itertools.product(
        ((8, 0), (3, 0), (0, 1), (16, 8), (5, 3)), ALGORITHMS
    ):
        if not can_run(c, algorithm, 256, dtype):
            continue
        case = Case((6, 256), dtype, algorithm=algorithm, call=offset)
        case = case.but(quant=allnorm.Fp8PerGroup(64, "column_major"), return_normed=True)
        arguments = case.call_arguments(c)
        tensors = {"x": case.x(rank), "residual": arguments["residual"]}
        for name, values in tensors.items():
            memory = torch.full((6 * (256 + pad) + offset,), 7.0, dtype=dtype, device=c.device)
            tensors[name] = memory[offset:].view(6, 256 + pad)[:, :256].copy_(values)
        results = c.all_reduce_add_rms_norm_quant(**{**arguments, **tensors})
        assert results.quantized.is_contiguous()
        assert results.normed.is_contiguous()
        case.compare(c, *results)
    # Leading dimensions that no single stride describes.
    case = Case((4, 6, 64), dtype, quant=allnorm.Fp8PerToken())
    x = case.x(rank).transpose(0, 1).contiguous().transpose(0, 1)
    results = c.all_reduce_add_rms_norm_quant(x, **case.call_arguments(c))
    assert results.quantized.is_contiguous()
    case.compare(c, *results)


@on(cpu=(1, 2), gpu=(1, 2))
@pytest.mark.parametrize("dtype", **dtype_ids)
def test_strided_inputs(pool: RankPool, dtype: torch.dtype) -> None:
    pool.run(strided_inputs, dtype)


def preallocated(rank: int, world_size: int, sharded: bool) -> None:
    c = comm()
    for algorithm, spec, pad in itertools.product(
        ("auto", "two_shot", "unfused"),
        (
            allnorm.Fp8PerGroup(64),
            allnorm.Fp8PerGroup(64, "column_major"),
            allnorm.Fp8PerGroup(64, "column_major_tma"),
            allnorm.Fp8PerGroup(64, "column_major_tma", "ue8m0_packed"),
            allnorm.Fp8PerToken(),
            allnorm.Fp8PerTensor(torch.tensor([0.1])),
        ),
        (0, 8, 5),
    ):
        if not can_run(c, algorithm, 320, torch.bfloat16, sharded):
            continue
        case = Case((7, 320), algorithm=algorithm, quant=spec, sharded=sharded)
        arguments = case.call_arguments(c)
        x, residual = case.x(rank), arguments["residual"]
        wide = torch.zeros(7, 320 + pad, dtype=FP8, device=c.device)
        wide.view(torch.uint8).fill_(77)
        out = wide[:, :320]
        memory = {"quantized_out": out, "normed_out": x, "residual_out": residual}
        if not isinstance(spec, allnorm.Fp8PerTensor):
            memory["scale_out"] = quants.empty_scale(spec, 7, 320, c.device)
            # Whatever lay there, padding rows too: all of it is written.
            dirty = torch.empty(0, dtype=torch.uint8, device=c.device)
            dirty.set_(memory["scale_out"].untyped_storage()).fill_(0xEE)
        result = c.all_reduce_add_rms_norm_quant(x, **{**arguments, **memory})
        assert result.quantized is out
        assert result.normed is x
        assert result.residual is residual
        given = arguments["quant"].scale if "scale_out" not in memory else memory["scale_out"]
        assert result.scale is given
        case.but(return_normed=True).compare(c, *result)
        assert (wide[:, 320:].view(torch.uint8) == 77).all(), "nothing is written between rows"
        again = c.all_reduce_add_rms_norm_quant(case.x(rank), **case.call_arguments(c))
        assert again.quantized.is_contiguous(), "a call with strided results leaves nothing behind"
        case.compare(c, *again)


@on(cpu=(1, 2, 3), gpu=(1, 2))
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
def test_in_place_and_preallocated(pool: RankPool, sharded: bool) -> None:
    pool.run(preallocated, sharded)


def results_are_new(rank: int, world_size: int) -> None:
    c = comm()
    for algorithm in ("auto", "unfused"):
        case = Case((4, 64), algorithm=algorithm, quant=allnorm.Fp8PerGroup(16), return_normed=True)
        x, a = case.x(rank), case.call_arguments(c)
        inputs = {"x": x, "residual": a["residual"], "weight": a["weight"]}
        copies = {name: tensor.clone() for name, tensor in inputs.items()}
        out = c.all_reduce_add_rms_norm_quant(x, **a)
        for name, tensor in inputs.items():
            assert_same_bits(tensor, copies[name], name)
        pointers = {t.data_ptr() for t in (*inputs.values(), *out)}
        assert len(pointers) == 7
        assert all(t.is_contiguous() for t in out)
        static = allnorm.Fp8PerTensor(torch.tensor([0.5], device=c.device))
        out = c.all_reduce_add_rms_norm_quant(x, **{**a, "quant": static})
        assert out.scale is static.scale
        assert_same_bits(static.scale, torch.tensor([0.5]))


@on(cpu=(1, 2), gpu=(1, 2))
def test_inputs_stay_and_results_are_new(pool: RankPool) -> None:
    pool.run(results_are_new)


def changing_scales(rank: int, world_size: int) -> None:
    """What is prepared for one given scale serves another, and keeps none of them alive."""
    c = comm()
    case = Case((3, 64), quant=allnorm.Fp8PerTensor(torch.tensor([1.0])))
    x, a = case.x(rank), case.norm_arguments()
    case.check(c)
    prepared = len(c._endpoint.dispatcher._prepared)
    for i in range(40):
        spec = allnorm.Fp8PerTensor(torch.tensor([0.01 * (i + 1)], device=c.device))
        got = c.all_reduce_add_rms_norm_quant(x, quant=spec, **a)
        want = reference.all_reduce_add_rms_norm_quant(case.xs(world_size), quant=spec, **a)
        assert_same_bits(got.quantized, want.quantized, str(i))
    assert len(c._endpoint.dispatcher._prepared) == prepared


@on(cpu=(2,), gpu=(2,))
def test_given_scales_may_change(pool: RankPool) -> None:
    pool.run(changing_scales)
