"""Tests the code that the engine plugins share: ranks decide alike, even if one rank fails."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from limits import HANG_SECONDS
from rank_helpers import on, same_on_every_rank

import allnorm
from allnorm import config
from allnorm.core import _native
from allnorm.errors import ConfigurationError
from allnorm.integrations import engines
from allnorm.testing import assert_same_bits, rank_input, shared_input


def outcome(**changes: Any) -> engines.Outcome:
    arguments: dict[str, Any] = {"hidden_size": 64, "max_tokens": 32, "dtype": torch.bfloat16}
    assert dist.group.WORLD is not None
    return engines.engine_communicator(
        dist.group.WORLD, torch.device("cpu"), **(arguments | changes)
    )


def refused(**changes: Any) -> str:
    """Returns the reason why no rank gets a communicator, which must be equal on all ranks."""
    made = outcome(**changes)
    assert made.communicator is None
    return same_on_every_rank(made.reason)


@on(cpu=(2, 3))
def test_communicator(rank: int, world_size: int) -> None:
    made = outcome(numerics="vllm")
    assert made.reason == ""
    assert made.communicator is not None
    with made.communicator as communicator:
        assert communicator.numerics == "vllm"
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


@on(cpu=(2,))
def test_no_rank_fuses_if_one_refuses(rank: int, world_size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ALLNORM_DISABLE", str(rank))
        assert "ALLNORM_DISABLE=1 (rank 1 of the group)" in refused()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ALLNORM_DISABEL", "1")
        assert "unknown environment variable ALLNORM_DISABEL" in refused()
    assert "no luck (rank 1 of the group)" in refused(obstacle="no luck" if rank else "")
    assert "float64" in refused(dtype=torch.float64)


@on(cpu=(2,))
@pytest.mark.parametrize("place", ["kernels", "library"])
def test_no_rank_fuses_if_one_fails(rank: int, world_size: int, place: str) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no kernel image is available")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1 and place == "kernels":
            patch.setattr(engines, "_try_kernels", broken)
        elif rank == 1:
            patch.setattr(_native, "library", broken)
        assert "no kernel image is available" in refused()


@on(cpu=(1,))
def test_one_rank_is_not_fused(rank: int, world_size: int) -> None:
    assert refused() == "one rank: there is nothing to exchange"


def test_disabled_setting() -> None:
    assert config.read_settings({"ALLNORM_DISABLE": "1"}).disabled
    for off in ({}, {"ALLNORM_DISABLE": ""}, {"ALLNORM_DISABLE": "0"}):
        assert not config.read_settings(off).disabled
    with pytest.raises(ConfigurationError, match=r"ALLNORM_DISABLE='yes': expected 0 or 1"):
        config.read_settings({"ALLNORM_DISABLE": "yes"})


@pytest.mark.parametrize(("value", "words"), [("1", "ALLNORM_DISABLE=1"), ("on", "'on'"), ("", "")])
def test_reason_when_disabled(monkeypatch: pytest.MonkeyPatch, value: str, words: str) -> None:
    monkeypatch.setenv("ALLNORM_DISABLE", value)
    assert words in engines.disabled_reason()
    assert bool(engines.disabled_reason()) == bool(words)


def test_size_of_the_workspace() -> None:
    def for_tokens(tokens: int) -> int | None:
        return engines._workspace_bytes(8192, tokens, torch.bfloat16)

    assert for_tokens(1) == 8 << 20
    assert for_tokens(512) == 7 * 512 * 8192 * 2
    assert for_tokens(1 << 20) == 256 << 20


def test_messages_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
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


def test_no_engine_is_imported() -> None:
    code = (
        "import sys, allnorm.integrations.engines;"
        "assert not {'vllm', 'sglang', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG_SECONDS)
