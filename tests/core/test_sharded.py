"""Sharded residuals: each rank keeps its own rows; what all ranks see has the same bits."""

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
    assert_ranks_agree,
    check_cases,
    comm,
    dtype_ids,
    message_of,
    on,
)

import allnorm
from allnorm import reference
from allnorm.testing import (
    SPECIAL_KINDS,
    RankPool,
    assert_same_bits,
    shared_input,
)

TOKENS = (0, 1, 2, 3, 5, 7, 33)
SPECS = (
    None,
    allnorm.Fp8PerGroup(128, "column_major_tma", "ue8m0_packed"),
    allnorm.Fp8PerGroup(64, "column_major_tma"),
    allnorm.Fp8PerGroup(16),
    allnorm.Fp8PerToken(),
    allnorm.Fp8PerTensor(torch.tensor([0.05])),
)


@on(cpu=(1, 2, 3, 4), gpu=(1, 2, 3, 4, 8))
@pytest.mark.parametrize("dtype", **dtype_ids)
def test_every_spec_and_number_of_rows(pool: RankPool, dtype: torch.dtype) -> None:
    draw = random.Random(str(dtype))
    cases = [
        Case(
            (tokens, draw.choice((256, 1152))),
            dtype,
            sharded=True,
            quant=spec,
            algorithm=algorithm,
            residual=draw.random() < 0.7,
            numerics=draw.choice(MODES),
            weight_bias=draw.choice((0.0, 1.0)),
            float32_weight=draw.random() < 0.5,
            return_normed=spec is not None and draw.random() < 0.5,
            call=tokens,
        )
        for spec, tokens, algorithm in itertools.product(SPECS, TOKENS, ALGORITHMS)
    ]
    pool.run(check_cases, cases)


@on(cpu=(2, 3), gpu=(2, 3, 8))
def test_hidden_sizes(pool: RankPool) -> None:
    cases = [
        Case((tokens, hidden_size), dtype, sharded=True, quant=spec, residual=tokens != 2)
        for hidden_size, spec in (
            (2880, allnorm.Fp8PerGroup(64)),
            (2944, allnorm.Fp8PerGroup(128, "column_major_tma", "ue8m0_packed")),
            (5760, None),
            (120, allnorm.Fp8PerToken()),
            (7, None),
            (7, allnorm.Fp8PerToken()),
            (1, None),
            (4095, None),
            (4096, allnorm.Fp8PerGroup(512)),
        )
        for tokens, dtype in zip((1, 2, 5, 16), itertools.cycle(DTYPES), strict=False)
    ]
    pool.run(check_cases, cases)


@on(cpu=(2, 3), gpu=(2, 3))
def test_leading_dimensions(pool: RankPool) -> None:
    cases = [
        Case(shape, sharded=True, quant=spec, algorithm=algorithm)
        for shape in ((64,), (2, 3, 64), (0, 3, 64), (1, 5, 1, 64))
        for spec in (None, allnorm.Fp8PerGroup(32))
        for algorithm in ("auto", "unfused")
    ]
    pool.run(check_cases, cases)


@on(cpu=(2, 3, 8), gpu=(2, 3, 8))
def test_row_chunks_beyond_the_workspace(pool: RankPool) -> None:
    cases = [
        Case((tokens, 512), sharded=True, quant=spec, call=tokens, return_normed=normed)
        for tokens in (1, 50, 131)
        for spec, normed in ((None, False), (SPECS[1], True), (SPECS[2], False), (SPECS[5], False))
    ]
    pool.run(check_cases, cases, kwargs={"workspace_bytes": 64 << 10})


@on(gpu=(2, 8))
@pytest.mark.parametrize("dtype", **dtype_ids)
def test_prefill_sizes(pool: RankPool, dtype: torch.dtype) -> None:
    cases = [
        Case((tokens, hidden_size), dtype, sharded=True, quant=spec, numerics=mode)
        for (tokens, hidden_size), mode in zip(
            ((2048, 4096), (777, 7168), (300, 16384)), MODES, strict=False
        )
        for spec in (None, *SPECS[1:3], SPECS[5])
    ]
    pool.run(check_cases, cases)


@on(cpu=(2, 3), gpu=(2, 8))
@pytest.mark.parametrize("dtype", **dtype_ids)
def test_special_values(pool: RankPool, dtype: torch.dtype) -> None:
    pool.run(special, dtype)


def special(rank: int, world_size: int, dtype: torch.dtype) -> None:
    c = comm()
    for kind, spec, algorithm in itertools.product(
        (*SPECIAL_KINDS, "sentinels", "finite_sentinels"),
        (None, SPECS[1], SPECS[3], SPECS[4]),
        ("two_shot", "unfused"),
    ):
        case = Case((11, 256), dtype, sharded=True, quant=spec, kind=kind, algorithm=algorithm)
        case.check(c)


def layers(rank: int, world_size: int, tokens: int) -> None:
    """A model: the residual stays sharded from layer to layer and is gathered at the end."""
    c = comm()
    lo, hi = c.row_shard(tokens)
    assert (lo, hi) == reference.row_shard(tokens, world_size, rank)
    shard, whole = None, None
    for layer in range(4):
        case = Case((tokens, 320), call=layer)
        xs, weight = case.xs(world_size), case.weight()
        quant = allnorm.Fp8PerGroup(64) if layer % 2 else None
        if quant is None:
            normed, shard = c.all_reduce_add_rms_norm(
                xs[rank], shard, weight, 1e-6, residual_sharded=True
            )
        else:
            out = c.all_reduce_add_rms_norm_quant(
                xs[rank], shard, weight, 1e-6, quant, True, residual_sharded=True
            )
            normed, shard = out.normed, out.residual
        want, whole = reference.all_reduce_add_rms_norm(xs, whole, weight, 1e-6)
        assert_same_bits(normed, want, f"normed of layer {layer}")
        assert shard.shape == (hi - lo, 320)
        assert_same_bits(shard, whole[lo:hi], f"residual of layer {layer}")
    gathered = c.all_gather_rows(shard, tokens)
    assert_same_bits(gathered, whole, "the gathered residual")
    assert_ranks_agree(c, gathered)


@on(cpu=(1, 2, 3, 4), gpu=(1, 2, 3, 8))
@pytest.mark.parametrize("tokens", TOKENS)
def test_layers(pool: RankPool, tokens: int) -> None:
    pool.run(layers, tokens)


def mixed(rank: int, world_size: int, calls: int) -> None:
    """Sharded, quantised and plain calls on one communicator, no barriers between."""
    c = comm()
    draw = random.Random(9)
    pending = []
    for call in range(calls):
        case = Case(
            (draw.choice((1, 1, 2, 3, 8, 40)), draw.choice((128, 1024))),
            draw.choice((torch.bfloat16, torch.float32)),
            sharded=draw.random() < 0.5,
            quant=draw.choice(SPECS),
            algorithm=draw.choice(("auto", "two_shot")),
            residual=draw.random() < 0.7,
            call=call,
        )
        pending.append((case, case.x(rank), case.call_arguments(c)))
    results = [case.method(c)(x, **arguments) for case, x, arguments in pending]
    for (case, _, _), result in zip(pending, results, strict=True):
        case.compare(c, *result)


@on(cpu=(2, 3), gpu=(2, 5, 8))
def test_many_calls_without_a_barrier(pool: RankPool) -> None:
    pool.run(mixed, 100 if pool.device == "cpu" else 400)


def in_place(rank: int, world_size: int) -> None:
    c = comm()
    for algorithm, tokens, dtype in itertools.product(("auto", "unfused"), TOKENS, DTYPES):
        case = Case((tokens, 264), dtype, sharded=True, algorithm=algorithm, call=tokens)
        x, a = case.x(rank), case.call_arguments(c)
        normed, shard = c.all_reduce_add_rms_norm(x, out=x, residual_out=a["residual"], **a)
        assert normed is x
        assert shard is a["residual"]
        case.compare(c, normed, shard)
        # a shard that is a view of rows in the middle of something
        a = case.call_arguments(c)
        room = torch.full((a["residual"].shape[0] + 4, 270), 5.0, dtype=dtype, device=c.device)
        view = room[2:-2, 3:267].copy_(a["residual"])
        normed, shard = c.all_reduce_add_rms_norm(
            case.x(rank), **{**a, "residual": view, "residual_out": view}
        )
        assert shard is view
        case.compare(c, normed, shard)
        around = torch.cat([room[:2].flatten(), room[-2:].flatten(), room[:, :3].flatten()])
        assert (around == 5.0).all()


@on(cpu=(1, 2, 3), gpu=(1, 2, 3))
def test_in_place(pool: RankPool) -> None:
    pool.run(in_place)


def shards_of_no_rows(rank: int, world_size: int) -> None:
    """The owner of no row has a residual all the same: it is not told from its memory."""
    c = comm()
    weight = shared_input((64,), torch.bfloat16, "weight", device=c.device)
    for with_residual, tokens in itertools.product((True, False), (0, 1, world_size - 1)):
        case = Case((tokens, 64), sharded=True, residual=with_residual)
        case.check(c)
        # no rows of something that has memory, and of something that has none
        arguments = case.call_arguments(c)
        if with_residual and not arguments["residual"].shape[0]:
            arguments["residual"] = weight.new_zeros(3, 64)[3:]
        case.compare(c, *c.all_reduce_add_rms_norm(case.x(rank), **arguments))


@on(cpu=(2, 3, 5), gpu=(2, 3, 8))
def test_fewer_rows_than_ranks(pool: RankPool) -> None:
    pool.run(shards_of_no_rows)


# ---- refusals, plans -----------------------------------------------------------------------------


def refusals(rank: int, world_size: int) -> list[str]:
    """Calls that every rank makes alike; each rank's own bounds are taken out of the words."""
    c = comm()
    case = Case((6, 64), sharded=True)
    x, a = case.x(rank), case.call_arguments(c)
    shard, weight = a["residual"], a["weight"]
    whole, (lo, hi) = case.residual_tensor(), c.row_shard(6)
    assert whole is not None
    common = {"eps": 1e-6, "residual_sharded": True}
    texts = []
    for method, more in (
        (c.all_reduce_add_rms_norm, {}),
        (c.all_reduce_add_rms_norm_quant, {"quant": allnorm.Fp8PerGroup(16)}),
    ):
        for residual, changes, error, words in (
            (whole, {}, ValueError, ("residual", "(6, 64)", f"({hi - lo}, 64)", "row_shard")),
            (shard[:1], {}, ValueError, ("(1, 64)", f"{lo} up to {hi} of 6")),
            (shard.view(hi - lo, 1, 64), {}, ValueError, ("residual",)),
            (shard.float(), {}, TypeError, ("residual", "float32")),
            (shard, {"residual_sharded": 1.5}, TypeError, ("residual_sharded=1.5",)),
            (shard, {"residual_out": torch.empty_like(x)}, ValueError, ("residual_out", "(6, 64)")),
            (shard, {"residual_out": x[: hi - lo]}, ValueError, ("residual_out", "x")),
            (shard, {"algorithm": "one_shot"}, allnorm.UnsupportedError, ("one_shot", "'auto'")),
        ):
            arguments = {**common, **more, **changes}
            text = message_of(error, lambda: method(x, residual, weight, **arguments))  # noqa: B023
            assert all(word in text for word in words), (text, words)
            texts.append(text)
        case.check(c)
    return [text for text in texts if "row" not in text]


@on(cpu=(2, 3), gpu=(2,))
def test_refusals(pool: RankPool) -> None:
    texts = pool.run(refusals)
    assert all(other == texts[0] for other in texts)


def one_shot_says_why(rank: int, world_size: int) -> None:
    c = comm()
    with pytest.raises(allnorm.UnsupportedError, match=r"belongs to one rank.*owners.*'auto'"):
        Case((6, 64), sharded=True, algorithm="one_shot").run(c)


@on(cpu=(2,), gpu=(2,))
def test_one_shot_says_why_not(pool: RankPool) -> None:
    pool.run(one_shot_says_why)


def plans(rank: int, world_size: int) -> list[object]:
    c = comm()
    found = []
    for tokens, hidden_size, spec, dtype in itertools.product(
        (0, 1, 64, 8192), (128, 4096, 16384), (*SPECS[:3], SPECS[5]), DTYPES
    ):
        plan = c.plan(tokens, hidden_size, dtype, spec, True)
        found.append(plan)
        assert plan == c.plan(tokens, hidden_size, dtype, quant=spec, residual_sharded=True)
        assert plan.algorithm == ("two_shot" if world_size > 1 else "unfused")
        assert "owners" in plan.reason or world_size == 1
        assert (plan.num_chunks == 0) == (tokens == 0)
        # Quantisation chooses no other algorithm.
        whole = c.plan(tokens, hidden_size, dtype, spec)
        assert whole.algorithm == c.plan(tokens, hidden_size, dtype).algorithm
        found.append(whole)
    if world_size > 1:
        with pytest.raises(allnorm.UnsupportedError, match="owners"):
            c.plan(4, 128, torch.bfloat16, residual_sharded=True, algorithm="one_shot")
    for error, words, arguments in (
        (allnorm.UnsupportedError, "2880", (1, 2880, torch.bfloat16, allnorm.Fp8PerGroup(128))),
        (TypeError, "quant='fp8'", (1, 128, torch.bfloat16, "fp8")),
        (TypeError, "residual_sharded=2", (1, 128, torch.bfloat16, None, 2)),
    ):
        assert words in message_of(error, lambda: c.plan(*arguments))  # noqa: B023
    assert c.plan(3, 128, torch.bfloat16, return_normed=True).algorithm
    return found


@on(cpu=(1, 2, 3), gpu=(1, 2, 8))
def test_plans(pool: RankPool) -> None:
    results = pool.run(plans)
    assert all(result == results[0] for result in results)
