"""Tests sharded residuals and all_gather_rows: layers of a model, refused calls, plans."""

from __future__ import annotations

import itertools

import pytest
import torch
from rank_helpers import DTYPES, Case, assert_ranks_agree, comm, message_of, on, same_on_every_rank

import allnorm
from allnorm import reference
from allnorm.testing import assert_same_bits

SPECS = (
    None,
    allnorm.Fp8PerGroup(128, "column_major_tma", "ue8m0_packed"),
    allnorm.Fp8PerGroup(64, "column_major_tma"),
    allnorm.Fp8PerTensor(torch.tensor([0.05])),
)
MX = allnorm.MxFp8()


@on(cpu=(1, 2, 3, 4), gpu=(1, 2, 3, 8))
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 5, 7, 33])
def test_layers(rank: int, world_size: int, tokens: int) -> None:
    """Keeps the residual sharded from layer to layer, and gathers it at the end."""
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
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 5, 7, 33])
def test_layers_of_own_rows(rank: int, world_size: int, tokens: int) -> None:
    """Keeps only this rank's rows from layer to layer; all results are preallocated."""
    c = comm()
    lo, hi = c.row_shard(tokens)
    shard, whole = None, None
    for layer in range(4):
        case = Case((tokens, 320), call=layer)
        xs, weight = case.xs(world_size), case.weight()
        out = torch.empty(hi - lo, 320, dtype=case.dtype, device=c.device)
        options = {"residual_sharded": True, "gather": False, "residual_out": torch.empty_like(out)}
        if layer % 2:
            found = c.all_reduce_add_rms_norm_quant(
                xs[rank], shard, weight, 1e-6, MX, normed_out=out, **options
            )
            normed, shard = found.normed, found.residual
            want = reference.quantize(normed, MX)
            assert_same_bits(found.quantized, want[0], f"quantized of layer {layer}")
            assert_same_bits(found.scale, want[1], f"scale of layer {layer}")
        else:
            normed, shard = c.all_reduce_add_rms_norm(
                xs[rank], shard, weight, 1e-6, out=out, **options
            )
        assert normed is out
        assert shard is options["residual_out"]
        expected, whole = reference.all_reduce_add_rms_norm(xs, whole, weight, 1e-6)
        assert_same_bits(normed, expected[lo:hi], f"normed of layer {layer}")
        assert_same_bits(shard, whole[lo:hi], f"residual of layer {layer}")


def test_reference_of_own_rows() -> None:
    """The reference returns lists of all ranks' rows, and stores them."""
    xs, weight = [torch.randn(5, 64) for _ in range(3)], torch.randn(64)
    shards = reference.all_reduce_add_rms_norm(xs, None, weight, 1e-6, residual_sharded=True)[1]
    whole, _ = reference.all_reduce_add_rms_norm(xs, torch.cat(shards), weight, 1e-6)
    options = {"residual_sharded": True, "gather": False}
    memory = [torch.empty_like(shard) for shard in shards]
    normed, _ = reference.all_reduce_add_rms_norm(xs, shards, weight, 1e-6, out=memory, **options)
    assert [rows.shape[0] for rows in normed] == [2, 2, 1]
    assert all(mine is given for mine, given in zip(normed, memory, strict=True))
    assert_same_bits(torch.cat(normed), whole, "normed")
    for quant in (allnorm.Fp8PerToken(), allnorm.Fp8PerGroup(32), MX):
        found = reference.all_reduce_add_rms_norm_quant(
            xs, shards, weight, 1e-6, quant, True, **options
        )
        for rank, rows in enumerate(normed):
            for mine, want in zip(
                (found.quantized[rank], found.scale[rank]),
                reference.quantize(rows, quant),
                strict=True,
            ):
                assert_same_bits(mine, want, f"{quant} of rank {rank}")
            assert_same_bits(found.normed[rank], rows, "normed")
    with pytest.raises(ValueError, match="gather=False without residual_sharded"):
        reference.all_reduce_add_rms_norm(xs, None, weight, 1e-6, gather=False)


@on(cpu=(2, 5), gpu=(2, 8))
def test_empty_shards_may_have_memory(rank: int, world_size: int) -> None:
    """A rank that owns no rows can pass an empty residual with or without memory."""
    c = comm()
    case = Case((1, 64), sharded=True)
    arguments = case.call_arguments(c)
    if not arguments["residual"].shape[0]:
        arguments["residual"] = torch.zeros(3, 64, dtype=case.dtype, device=c.device)[3:]
    case.compare(c, *c.all_reduce_add_rms_norm(case.x(rank), **arguments))


@on(cpu=(2, 3), gpu=(2,))
def test_refusals(rank: int, world_size: int) -> None:
    """Checks that all ranks raise equal messages, except for those that name a rank's own rows."""
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
            (shard.half(), {}, TypeError, ("residual", "float16")),
            (shard, {"residual_sharded": 1.5}, TypeError, ("residual_sharded=1.5",)),
            (shard, {"gather": 0}, TypeError, ("gather=0",)),
            (
                *(whole, {"gather": False, "residual_sharded": False}, ValueError),
                ("gather=False", "residual_sharded=False", "row_shard()"),
            ),
            (shard, {"residual_out": torch.empty_like(x)}, ValueError, ("residual_out", "(6, 64)")),
            (shard, {"residual_out": x[: hi - lo]}, ValueError, ("residual_out", "x")),
            (
                *(shard, {"algorithm": "one_shot"}, allnorm.UnsupportedError),
                ("one_shot", "belongs to one rank", "owners", "'auto'"),
            ),
        ):
            arguments = {**common, **more, **changes}
            text = message_of(error, lambda: method(x, residual, weight, **arguments))  # noqa: B023
            assert all(word in text for word in words), (text, words)
            texts.append(text)
        case.check(c)
    same_on_every_rank([text for text in texts if "row" not in text])


@on(cpu=(1, 2, 3), gpu=(1, 2, 8))
def test_plans(rank: int, world_size: int) -> None:
    c = comm()
    found = []
    for tokens, hidden_size, spec, dtype in itertools.product(
        (0, 1, 64, 8192), (128, 4096, 16384), SPECS, DTYPES
    ):
        plan = c.plan(tokens, hidden_size, dtype, spec, True)
        found.append(plan)
        assert plan == c.plan(tokens, hidden_size, dtype, quant=spec, residual_sharded=True)
        assert plan.algorithm == ("two_shot" if world_size > 1 else "unfused")
        assert "owners" in plan.reason or world_size == 1
        assert (plan.num_chunks == 0) == (tokens == 0)
        # Quantization does not change the algorithm.
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
    own = c.plan(64, 128, torch.bfloat16, residual_sharded=True, gather=False)
    assert own == c.plan(64, 128, torch.bfloat16, residual_sharded=True)
    with pytest.raises(ValueError, match="gather=False with residual_sharded=False"):
        c.plan(64, 128, torch.bfloat16, gather=False)
    same_on_every_rank(found)


@on(cpu=(2, 3), gpu=(2,))
def test_refusals_of_all_gather_rows(rank: int, world_size: int) -> None:
    c = comm()
    shard = Case((2, 64)).x(rank)
    tokens = 2 * world_size
    for error, words, call in (
        (ValueError, "(2, 64)", lambda: c.all_gather_rows(shard, tokens + 2 * world_size)),
        (ValueError, "num_tokens=-1", lambda: c.all_gather_rows(shard, -1)),
        (TypeError, "num_tokens=2.0", lambda: c.all_gather_rows(shard, 2.0)),
        (TypeError, "list", lambda: c.all_gather_rows([1.0], tokens)),
        (allnorm.UnsupportedError, "float64", lambda: c.all_gather_rows(shard.double(), tokens)),
        (ValueError, "(2, 1, 64)", lambda: c.all_gather_rows(shard[:, None], tokens)),
        (ValueError, "contiguous", lambda: c.all_gather_rows(shard.t().contiguous().t(), tokens)),
        (ValueError, "'ring'", lambda: c.all_gather_rows(shard, tokens, algorithm="ring")),
        (ValueError, "num_tokens rows", lambda: c.all_gather_rows(shard, tokens, out=shard)),
        (TypeError, "out", lambda: c.all_gather_rows(shard, tokens, out=1)),
        (ValueError, "num_tokens=-3", lambda: c.row_shard(-3)),
        (TypeError, "num_tokens=True", lambda: c.row_shard(True)),
        (TypeError, "num_tokens='4'", lambda: c.row_shard("4")),
    ):
        assert words in message_of(error, call), words
    memory = torch.empty(tokens, 64, dtype=shard.dtype, device=c.device)
    lo, hi = c.row_shard(tokens)
    with pytest.raises(ValueError, match=r"out shares memory with residual_shard\. Pass separate"):
        c.all_gather_rows(memory[lo:hi], tokens, out=memory)
    with pytest.raises(allnorm.UnsupportedError, match=r"owners.*'auto'"):
        c.all_gather_rows(shard, tokens, algorithm="one_shot")
    assert c.all_gather_rows(shard, tokens).shape == (tokens, 64)
