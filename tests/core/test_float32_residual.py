"""Tests residuals in float32 of 16-bit rows, beyond the calls in the table of corners."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from rank_helpers import Case, assert_ranks_agree, comm, on
from torch._subclasses.fake_tensor import FakeTensorMode

import allnorm
from allnorm import reference
from allnorm.core.dispatch import Dispatcher
from allnorm.testing import assert_same_bits

CASE = Case((5, 2880), float32_residual=True)


@on(cpu=(1, 2, 3), gpu=(1, 2, 8))
@pytest.mark.parametrize("sharded", [False, True])
def test_layers(rank: int, world_size: int, sharded: bool) -> None:
    """Keeps the stream in float32 over some layers; the sums are those of plain additions."""
    c = comm()
    lo, hi = c.row_shard(5) if sharded else (0, 5)
    whole = CASE.residual_tensor()
    assert whole is not None
    assert whole.dtype is torch.float32
    stream = whole[lo:hi].clone()
    for layer in range(4):
        case = CASE.but(call=layer)
        xs, weight = case.xs(world_size), case.weight()
        normed, stream = c.all_reduce_add_rms_norm(
            xs[rank], stream, weight, 1e-6, residual_sharded=sharded
        )
        want, _ = reference.all_reduce_add_rms_norm(xs, whole, weight, 1e-6)
        whole = reference.all_reduce(xs).float() + whole
        assert normed.dtype is torch.bfloat16
        assert_same_bits(normed, want, f"normed of layer {layer}")
        assert_same_bits(stream, whole[lo:hi], f"residual of layer {layer}")
    if sharded:
        stream = c.all_gather_rows(stream, 5)
    assert_same_bits(stream, whole, "the stream")
    assert_ranks_agree(c, stream)


def test_modes_differ_only_in_the_weight() -> None:
    x, residual, weight = CASE.x(0), CASE.residual_tensor(), CASE.weight()
    got = {
        mode: allnorm.add_rms_norm(x, residual, weight, 1e-6, numerics=mode)
        for mode in reference.NUMERICS
    }
    assert_same_bits(got["rounded"][0], got["unrounded"][0], "rounded")
    assert_same_bits(got["transformers"][0], got["vllm"][0], "transformers")
    assert not torch.equal(got["rounded"][0], got["vllm"][0])
    for _, total in got.values():
        assert_same_bits(total, got["rounded"][1], "the sum")


@on(cpu=(2,), gpu=(2,))
def test_repeated_and_compiled(rank: int, world_size: int) -> None:
    c = comm()
    case = CASE.but(quant=allnorm.Fp8PerGroup(64), return_normed=True)

    def run(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[object, ...]:
        both = c.all_reduce_add_rms_norm(x, residual, weight, 1e-6)
        return *both, *c.all_reduce_add_rms_norm_quant(x, both[1], weight, 1e-6, case.quant, True)

    arguments = case.x(rank), case.residual_tensor(), case.weight()
    first = run(*arguments)
    run(*arguments)
    with mock.patch.object(Dispatcher, "run", side_effect=AssertionError("not repeated in C")):
        again = run(*arguments)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")(*arguments)
    for one, two, three in zip(first, again, compiled, strict=True):
        assert_same_bits(two, one, "repeated")
        assert_same_bits(three, one, "compiled")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fakes(dtype: torch.dtype) -> None:
    with FakeTensorMode():
        x, residual = torch.empty(6, 64, dtype=dtype), torch.empty(6, 64)
        norm = (torch.empty(64), 1e-6, 0.0, "rounded")
        given = (x, residual, *norm)
        ops = torch.ops.allnorm
        for normed, total in (ops.all_reduce_add_rms_norm(*given, "any"), ops.add_rms_norm(*given)):
            assert (normed.dtype, total.dtype, total.shape) == (dtype, torch.float32, (6, 64))
        shard = ops.all_reduce_add_rms_norm(x, residual[:3], *norm, "any", True)[1]
        assert (shard.dtype, shard.shape) == (torch.float32, (3, 64))


@on(cpu=(2,), gpu=(2,))
def test_refusals(rank: int, world_size: int) -> None:
    c = comm()
    x, weight = CASE.x(rank), CASE.weight()
    for wrong in (x.half(), x.double()):
        with pytest.raises(TypeError, match=r"expected torch.bfloat16 or torch.float32"):
            c.all_reduce_add_rms_norm(x, wrong, weight, 1e-6)
    with pytest.raises(
        TypeError, match=r"residual has dtype torch.bfloat16: expected torch.float32"
    ):
        c.all_reduce_add_rms_norm(x.float(), x, weight.float(), 1e-6)
    for residual, out in ((x, x.float()), (x.float(), x.clone()), (None, x.float())):
        with pytest.raises(TypeError, match=r"residual_out has dtype"):
            c.all_reduce_add_rms_norm(x, residual, weight, 1e-6, residual_out=out)
    with pytest.raises(TypeError, match=r"residual_dtype=torch.float16: expected None"):
        c.plan(5, 2880, residual_dtype=torch.float16)
    CASE.check(c)
