"""Tests peer libraries at a model's sites, with fakes that use gloo on CPU ranks."""

from __future__ import annotations

from typing import Any

import pytest

from allnorm.bench import peers
from allnorm.bench.e2e import models as e2e_models
from allnorm.bench.e2e import run as ranks_e2e
from allnorm.bench.e2e.models import PEER_ARMS, Job
from allnorm.testing import run_ranks

from . import fake_peers


def job(*arms: str, model: str = "tiny", dtype: str = "bfloat16") -> Job:
    dimensions = e2e_models.find(model, num_layers=2)
    return Job(dimensions, (1, 2), 5, 3, arms, dtype, "cpu", rounds=1)


def with_fakes(rank: int, world_size: int, what: Job) -> Any:
    fake_peers.install("flashinfer", "sglang", "vllm")
    return without(rank, world_size, what)


def without(rank: int, world_size: int, what: Job) -> Any:
    for peer in peers.REGISTRY.values():
        peer.device_type = "cpu"
    return *ranks_e2e.run(rank, world_size, what), fake_peers.calls


def with_failing(rank: int, world_size: int, what: Job) -> Any:
    def fail(**arguments: Any) -> None:
        raise RuntimeError("no such kernel")

    fake_peers.allreduce_fusion.__code__ = fail.__code__
    return with_fakes(rank, world_size, what)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("model", "arms"),
    [("tiny", PEER_ARMS), ("tiny-moe", PEER_ARMS), ("tiny-gemma", ("sglang+local", "vllm+local"))],
)
def test_a_library_computes_the_same_as_the_torch_arm(model: str, arms: tuple[str, ...]) -> None:
    what = job(*PEER_ARMS, model=model)
    records, missing, calls = run_ranks(with_fakes, 2, args=(what,))[0]
    assert [(r["batch_size"], r["arm"]) for r in records] == [
        (batch_size, arm) for batch_size in (1, 2) for arm in arms
    ]
    for record in records:
        # The fakes use the torch arm's all-reduce and norm, or bit-identical ones.
        assert record["finite"]
        assert record["logits_max_diff"] == 0, record["arm"]
        assert record["tokens_equal_torch"] == record["num_tokens"]
    fused = {"flashinfer", "sglang"}
    assert missing.keys() == fused - {*arms}
    assert all("does not support post norms" in reason for reason in missing.values())
    names = [name for name, _ in calls]
    assert {"fusion", "sglang"} & {*names} == ({"fusion", "sglang"} if fused <= {*arms} else set())
    assert names.count("close") == 3


def test_nccl_replaces_a_library_that_lacks_a_kernel() -> None:
    """Runs SGLang with a dtype other than bfloat16, the only one that it supports."""
    records, missing, calls = run_ranks(with_fakes, 2, args=(job("sglang", dtype="float32"),))[0]
    assert missing == {}
    assert [record["arm"] for record in records] == ["sglang", "sglang"]
    assert "sglang" not in {name for name, _ in calls}


@pytest.mark.parametrize("arm", PEER_ARMS)
def test_a_library_that_is_not_installed_is_missing(arm: str) -> None:
    records, missing, _ = run_ranks(without, 2, args=(job("allnorm", arm),))[0]
    assert {record["arm"] for record in records} == {"allnorm"}
    assert list(missing) == [arm]
    assert "No module named" in missing[arm]


def test_a_library_that_fails_is_missing() -> None:
    what = job("allnorm", "flashinfer", "vllm+local")
    for records, missing, _ in run_ranks(with_failing, 2, args=(what,)):
        assert {record["arm"] for record in records} == {"allnorm", "vllm+local"}
        assert list(missing) == ["flashinfer"]
        assert "no such kernel" in missing["flashinfer"]
