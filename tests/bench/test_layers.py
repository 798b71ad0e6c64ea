"""Tests chains of layers on CPU ranks, where prefetch is a hint without effect."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import allnorm
from allnorm.bench import layers
from allnorm.bench.layers import ARMS, Job
from allnorm.policy import Table
from allnorm.testing import run_ranks

JOB = Job(("tiny",), (1, 5), "bfloat16", "cpu", layers=3, seconds=0.01)


def with_hints(rank: int, world_size: int, job: Job, wrong_on: int = -1) -> Any:
    """Runs the benchmark and counts the calls by their hint.

    On rank `wrong_on`, calls with a hint return one wrong bit.
    """
    call = allnorm.Communicator.all_reduce_add_rms_norm
    shapes: list[tuple[int, ...]] = []

    def watching(comm: Any, *arguments: Any, prefetch: Any, **more: Any) -> Any:
        result = call(comm, *arguments, prefetch=prefetch, **more)
        if prefetch is not None:
            shapes.append(tuple(prefetch.shape))
            if rank == wrong_on:
                result[0].view(torch.int16)[-1, -1] ^= 1
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(allnorm.Communicator, "all_reduce_add_rms_norm", watching)
        return layers.run(rank, world_size, job), shapes


def test_both_chains_are_right() -> None:
    (found, hints), (others, _) = run_ranks(with_hints, 2, args=(JOB,))
    assert found == others, "times are equal on every rank"
    assert [(chain.model, chain.num_tokens) for chain in found] == [("tiny", 1), ("tiny", 5)]
    model = layers.find("tiny", 2)
    gate_up = (model.intermediate_size, model.hidden_size)  # half of two matrices
    qkv = ((model.num_heads + 2 * model.num_kv_heads) * model.head_dim // 2, model.hidden_size)
    assert set(hints) == {gate_up, qkv}
    assert hints[:4] == [gate_up, qkv, gate_up, qkv]
    for chain in found:
        assert not any(chain.errors.values())
        off, on = chain.rows(2)
        assert (off["arm"], on["arm"]) == tuple(ARMS)
        assert off["correct"]
        assert on["correct"]
        assert 0 < on["p50_us"] <= on["p90_us"] <= on["p99_us"]
        assert on["gain_per_site_us"] == (off["p50_us"] - on["p50_us"]) / 2
        assert (off["layers"], off["hidden_size"], off["world_size"]) == (3, 256, 2)


def test_a_wrong_bit_of_one_rank_is_found_in_the_timed_run() -> None:
    job = dataclasses.replace(JOB, tokens=(5,))
    for (chain,), _ in run_ranks(with_hints, 2, args=(job, 1)):
        assert chain.errors["prefetch:off"] == ""
        error = "rank 1: the norm of call 0 differs from an unfused call's"
        assert chain.errors["prefetch:on"] == error
        assert [row["correct"] for row in chain.rows(2)] == [True, False]


def test_tables_keep_their_choices_when_prefetch_is_forced() -> None:
    measured = Table("tuned", {}, 350.0, 0)
    assert layers.forced((measured,), 64) == (Table("a trial", {}, 350.0, 64), measured)
    assert layers.forced((), 8) == (Table("a trial", {}, 0.0, 8),)


def test_models_that_cannot_be_timed() -> None:
    for name, ranks, words in (
        ("tiny-moe", 2, "has experts"),
        ("tiny", 3, "cannot share"),
        ("llama", 2, "unknown model"),
    ):
        with pytest.raises(ValueError, match=words):
            layers.find(name, ranks)


def test_bytes_of_the_weights() -> None:
    """A layer of Llama 3.1 8B has 218 million weights in its GEMMs."""
    job = dataclasses.replace(JOB, layers=1)
    whole = layers.num_bytes(layers.find("llama-3.1-8b", 1), job, 1)
    assert whole == 2 * 4096 * (4096 + 3 * 14336 + 4096 + 2 * 1024)
    assert layers.num_bytes(layers.find("llama-3.1-8b", 2), job, 2) == whole // 2
