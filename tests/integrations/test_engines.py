"""Tests the shared parts of the plugins: all ranks decide alike, whatever one of them lacks."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from limits import HANG_SECONDS
from rank_helpers import on

import allnorm
from allnorm import config
from allnorm.core import _native
from allnorm.errors import ConfigurationError
from allnorm.integrations import engines
from allnorm.testing import RankPool, assert_same_bits, rank_input, shared_input


def outcome(**changes: Any) -> engines.Outcome:
    arguments: dict[str, Any] = {"hidden_size": 64, "max_tokens": 32, "dtype": torch.bfloat16}
    assert dist.group.WORLD is not None
    return engines.engine_communicator(
        dist.group.WORLD, torch.device("cpu"), **(arguments | changes)
    )


def fuse_a_call(rank: int, world_size: int) -> tuple[str, str]:
    made = outcome(numerics="vllm")
    communicator = made.communicator
    assert communicator is not None
    with communicator:
        x = rank_input((5, 64), torch.bfloat16, rank)
        residual = shared_input((5, 64), torch.bfloat16, "residual")
        weight = shared_input((64,), torch.bfloat16, "weight")
        got = communicator.all_reduce_add_rms_norm(x, residual, weight, 1e-6)
        xs = [rank_input((5, 64), torch.bfloat16, peer) for peer in range(world_size)]
        want = allnorm.reference.all_reduce_add_rms_norm(
            xs, residual, weight, 1e-6, numerics="vllm"
        )
        for mine, expected in zip(got, want, strict=True):
            assert_same_bits(mine, expected)
        assert communicator.plan(32, 64).num_chunks == 1
        return made.reason, communicator.numerics


def refuse_on_one_rank(rank: int, world_size: int, cause: str) -> engines.Outcome:
    if cause == "environment":
        os.environ["ALLNORM_DISABLE"] = "1" if rank == 1 else "0"
    elif cause == "typo":
        os.environ["ALLNORM_DISABEL"] = "1"
    try:
        return outcome(
            obstacle="no luck" if cause == "obstacle" and rank == 1 else "",
            dtype=torch.float64 if cause == "dtype" else torch.bfloat16,
        )
    finally:
        os.environ.pop("ALLNORM_DISABLE", None)
        os.environ.pop("ALLNORM_DISABEL", None)


def fail_on_one_rank(rank: int, world_size: int, place: str) -> engines.Outcome:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no kernel image is available")

    real = engines._try_kernels if place == "kernels" else _native.library
    try:
        if rank == 1 and place == "kernels":
            engines._try_kernels = broken
        elif rank == 1:
            _native.library = broken
        return outcome()
    finally:
        if place == "kernels":
            engines._try_kernels = real
        else:
            _native.library = real


@on(cpu=[2, 3])
def test_the_communicator_computes_in_the_mode(pool: RankPool) -> None:
    assert set(pool.run(fuse_a_call)) == {("", "vllm")}


@on(cpu=[2])
@pytest.mark.parametrize(
    ("cause", "words"),
    [
        ("environment", "ALLNORM_DISABLE=1 (rank 1 of the group)"),
        ("obstacle", "no luck (rank 1 of the group)"),
        ("typo", "unknown environment variable ALLNORM_DISABEL"),
        ("dtype", "float64"),
    ],
)
def test_one_rank_refuses_for_all(pool: RankPool, cause: str, words: str) -> None:
    made = pool.run(refuse_on_one_rank, cause)
    assert made[0] == made[1]
    assert made[0].communicator is None
    assert words in made[0].reason


@on(cpu=[2])
@pytest.mark.parametrize("place", ["kernels", "library"])
def test_a_failure_on_one_rank_is_everybodys_outcome(pool: RankPool, place: str) -> None:
    made = pool.run(fail_on_one_rank, place)
    assert made[0] == made[1]
    assert made[0].communicator is None
    assert "no kernel image is available" in made[0].reason


def test_one_rank_alone_is_not_fused(pools: Any) -> None:
    (made,) = pools.get("cpu", 1).run(refuse_on_one_rank, "nothing")
    assert made.communicator is None
    assert made.reason == "one rank: there is nothing to exchange"


def test_the_switch() -> None:
    assert config.read_settings({"ALLNORM_DISABLE": "1"}).disabled
    for off in ({}, {"ALLNORM_DISABLE": ""}, {"ALLNORM_DISABLE": "0"}):
        assert not config.read_settings(off).disabled
    with pytest.raises(ConfigurationError, match=r"ALLNORM_DISABLE='yes': expected 0 or 1"):
        config.read_settings({"ALLNORM_DISABLE": "yes"})


@pytest.mark.parametrize(("value", "words"), [("1", "ALLNORM_DISABLE=1"), ("on", "'on'"), ("", "")])
def test_the_switch_in_words(monkeypatch: pytest.MonkeyPatch, value: str, words: str) -> None:
    monkeypatch.setenv("ALLNORM_DISABLE", value)
    assert words in engines.disabled_reason()
    assert bool(engines.disabled_reason()) == bool(words)


def test_the_workspace_is_for_the_largest_batch() -> None:
    def for_tokens(tokens: int) -> int | None:
        return engines._workspace_bytes(8192, tokens, torch.bfloat16)

    assert for_tokens(1) == 8 << 20
    assert for_tokens(512) == 7 * 512 * 8192 * 2
    assert for_tokens(1 << 20) == 256 << 20


def test_each_thing_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    announcer = engines.Announcer(logging.getLogger("an.engine"))
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            announcer.warning("not fused: no luck")
            announcer.info("2 of 2 reductions fused")
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert said == [
        ("WARNING", "allnorm: not fused: no luck"),
        ("INFO", "allnorm: 2 of 2 reductions fused"),
    ]


def test_importing_it_imports_no_engine() -> None:
    code = (
        "import sys, allnorm.integrations.engines;"
        "assert not {'vllm', 'sglang', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG_SECONDS)
