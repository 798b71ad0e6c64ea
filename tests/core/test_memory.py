"""Where inputs and results lie: in place, preallocated, strided, unaligned."""

from __future__ import annotations

import itertools

import pytest
import torch
from rank_helpers import Case, comm, dtype_ids, on, usable

import allnorm
from allnorm import reference
from allnorm.testing import RankPool, assert_same_bits


def embed(tensor: torch.Tensor, pad: int, offset: int) -> torch.Tensor:
    """The same values as a view of wider rows that begin `offset` elements into their memory."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    width = rows.shape[1] + pad
    wide = torch.full((rows.shape[0] * width + offset,), 77.0, dtype=rows.dtype, device=rows.device)
    view = wide[offset:].view(rows.shape[0], width)[:, : rows.shape[1]]
    view.copy_(rows)
    return view.view(tensor.shape) if tensor.dim() == 2 else view


def in_place(rank: int, world_size: int, dtype: torch.dtype) -> None:
    c = comm()
    for (hidden_size, num_tokens), algorithm in (
        (shape, algorithm)
        for shape in itertools.product((120, 4096, 7), (1, 5, 40))
        for algorithm in usable(c, shape[0], dtype)
    ):
        case = Case((num_tokens, hidden_size), dtype, algorithm=algorithm, call=num_tokens)
        for use_out, use_residual in itertools.product((True, False), repeat=2):
            x, arguments = case.x(rank), case.norm_arguments()
            more = {}
            if use_out:
                more["out"] = x
            if use_residual:
                more["residual_out"] = arguments["residual"]
            normed, total = c.all_reduce_add_rms_norm(x, algorithm=algorithm, **arguments, **more)
            assert (normed is x) == use_out
            assert (total is arguments["residual"]) == use_residual
            case.compare(c, normed, total)
        x = case.x(rank)
        assert c.all_reduce(x, algorithm=algorithm, out=x) is x
        assert_same_bits(x, reference.all_reduce(case.xs(world_size)), f"all_reduce, {case}")


@on(cpu=(1, 2, 3), gpu=(1, 2, 3, 8))
@pytest.mark.parametrize("dtype", **dtype_ids)
def test_in_place(pool: RankPool, dtype: torch.dtype) -> None:
    pool.run(in_place, dtype)


def preallocated(rank: int, world_size: int) -> None:
    c = comm()
    for algorithm, (pad, offset) in itertools.product(
        usable(c, 264, torch.bfloat16), ((0, 0), (8, 0), (3, 0), (0, 1), (8, 8), (5, 3))
    ):
        case = Case((6, 264), algorithm=algorithm)
        empty = torch.zeros(case.shape, dtype=case.dtype, device=c.device)
        out, residual_out = (embed(empty, pad, offset) for _ in range(2))
        normed, total = case.run(c, out=out, residual_out=residual_out)
        assert normed is out
        assert total is residual_out
        case.compare(c, normed, total)
        for view in (out, residual_out):
            beyond = view.as_strided((5, pad), (264 + pad, 1), view.storage_offset() + 264)
            assert (beyond == 77.0).all(), "nothing is written between the rows"
            before = view.as_strided((offset,), (1,), 0)
            assert (before == 77.0).all(), "nothing is written before the rows"


@on(cpu=(1, 2), gpu=(1, 2, 8))
def test_preallocated_and_strided_results(pool: RankPool) -> None:
    pool.run(preallocated)


def strided(rank: int, world_size: int, dtype: torch.dtype) -> None:
    c = comm()
    for algorithm, (pad, offset), num_tokens in itertools.product(
        usable(c, 520, dtype), ((8, 0), (3, 0), (0, 1), (16, 8), (5, 3), (4096, 0)), (1, 9)
    ):
        case = Case((num_tokens, 520), dtype, algorithm=algorithm, call=offset)
        x, arguments = case.x(rank), case.norm_arguments()
        arguments["residual"] = embed(arguments["residual"], pad, offset)
        arguments["weight"] = embed(arguments["weight"].view(1, -1), 0, offset)[0]
        normed, total = c.all_reduce_add_rms_norm(
            embed(x, pad, offset), algorithm=algorithm, **arguments
        )
        assert normed.is_contiguous()
        assert total.is_contiguous()
        case.compare(c, normed, total)
        reduced = c.all_reduce(embed(x, pad, offset), algorithm=algorithm)
        assert_same_bits(reduced, reference.all_reduce(case.xs(world_size)), f"{case}")


@on(cpu=(1, 2, 3), gpu=(1, 2, 8))
@pytest.mark.parametrize("dtype", **dtype_ids)
def test_strided_and_unaligned_rows(pool: RankPool, dtype: torch.dtype) -> None:
    pool.run(strided, dtype)


def odd_views(rank: int, world_size: int) -> None:
    c = comm()
    case = Case((4, 6, 64))
    expected = case.expected(world_size)
    arguments = case.norm_arguments()
    # leading dimensions that no single stride describes
    x = case.x(rank).transpose(0, 1).contiguous().transpose(0, 1)
    assert x.stride() == (64, 256, 1)
    normed, total = c.all_reduce_add_rms_norm(x, **arguments)
    assert normed.is_contiguous()
    assert_same_bits(normed, expected[0], "transposed leading dimensions")
    assert_same_bits(total, expected[1], "transposed leading dimensions")
    # one row for all tokens (stride 0)
    row = Case((1, 64)).x(rank)
    rows = [Case((1, 64)).x(r).expand(5, 64) for r in range(world_size)]
    weight = arguments["weight"]
    got = c.all_reduce_add_rms_norm(row.expand(5, 64), None, weight, 1e-6)
    want = reference.all_reduce_add_rms_norm(rows, None, weight, 1e-6)
    assert_same_bits(got[0], want[0], "expanded rows")
    # rows in reverse distance: every second row of a larger tensor
    big = Case((10, 64)).x(rank)
    bigs = [Case((10, 64)).x(r)[::2] for r in range(world_size)]
    got = c.all_reduce_add_rms_norm(big[::2], None, weight, 1e-6)
    want = reference.all_reduce_add_rms_norm(bigs, None, weight, 1e-6)
    assert_same_bits(got[0], want[0], "every second row")
    # hidden size 1: any last stride is contiguous
    narrow = Case((6, 4)).x(rank)[:, :1]
    narrows = [Case((6, 4)).x(r)[:, :1] for r in range(world_size)]
    assert_same_bits(c.all_reduce(narrow), reference.all_reduce(narrows), "one column")


@on(cpu=(1, 2), gpu=(1, 2))
def test_unusual_views(pool: RankPool) -> None:
    pool.run(odd_views)


def same_geometry_other_memory(rank: int, world_size: int) -> None:
    """What a call remembers of an earlier one with these shapes must not decide about memory."""
    c = comm()
    case = Case((4, 64), float32_weight=True)
    case.check(c)
    x, arguments = case.x(rank), case.norm_arguments()
    # a weight with gaps after one without would be read as if it had none
    gaps = torch.full((128,), 5.0, device=c.device)
    gaps[::2] = arguments["weight"]
    with pytest.raises(ValueError, match="stride"):
        c.all_reduce_add_rms_norm(x, **{**arguments, "weight": gaps[::2]})
    # -0.0 + -0.0 keeps its sign, 0.0 + -0.0 does not: an equal weight_bias, other bits
    arguments["weight"] = torch.full((64,), -0.0, device=c.device)
    for bias in (0.0, -0.0):
        arguments["weight_bias"] = bias
        normed, _ = c.all_reduce_add_rms_norm(x, **arguments)
        want, _ = reference.all_reduce_add_rms_norm(case.xs(world_size), **arguments)
        assert_same_bits(normed, want, f"weight_bias {bias}")
    # aligned after unaligned and the other way round
    for pad, offset in ((0, 0), (0, 1), (0, 0), (8, 1), (8, 0), (8, 1)):
        arguments = case.norm_arguments()
        arguments["residual"] = embed(arguments["residual"], 16, offset)
        case.compare(c, *c.all_reduce_add_rms_norm(embed(x, pad, offset), **arguments))
    # strided results before and after fresh ones
    for _ in range(2):
        arguments = case.norm_arguments()
        out, residual_out = (embed(torch.zeros_like(x), 8, 0) for _ in range(2))
        case.compare(
            c, *c.all_reduce_add_rms_norm(x, **arguments, out=out, residual_out=residual_out)
        )
        case.compare(c, *c.all_reduce_add_rms_norm(x, **arguments))


@on(cpu=(2,), gpu=(2,))
def test_earlier_calls_decide_nothing_about_memory(pool: RankPool) -> None:
    pool.run(same_geometry_other_memory)


def overlaps(rank: int, world_size: int) -> list[str]:
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
        with pytest.raises(ValueError, match="shares memory") as caught:
            c.all_reduce_add_rms_norm(*tensors, weight, **arguments, **results)
        texts.append(str(caught.value))
    with pytest.raises(ValueError, match="shares memory"):
        c.all_reduce(big[:4], out=big[1:5])
    case.check(c)
    return texts


@on(cpu=(2,), gpu=(2,))
def test_overlapping_memory_is_refused(pool: RankPool) -> None:
    texts = pool.run(overlaps)
    assert texts[0] == texts[1]


def wide_type(rank: int, world_size: int) -> None:
    """More than 2**31 elements: offsets are 64-bit (incident 12). Compared on sampled rows."""
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


@pytest.mark.slow
@on(gpu=(2, 8))
def test_more_than_two_to_the_31_elements(pool: RankPool) -> None:
    pool.run(wide_type)


def test_unsupported_error_is_a_value_error() -> None:
    assert issubclass(allnorm.UnsupportedError, ValueError)
    assert issubclass(allnorm.UnsupportedError, allnorm.AllnormError)
