"""Tests the modes of `bench` and the names of their arms."""

from __future__ import annotations

import pytest

import allnorm
from allnorm.bench import modes as bench_modes
from allnorm.bench.modes import Mode


@pytest.mark.parametrize(
    ("text", "name", "spec"),
    [
        ("per_group:128", "per_group:128", allnorm.Fp8PerGroup(128)),
        ("per_group", "per_group:128", allnorm.Fp8PerGroup(128)),
        ("per_group:64:row_major:float32", "per_group:64", allnorm.Fp8PerGroup(64)),
        (
            "per_group:ue8m0:64:column_major_tma",
            "per_group:64:column_major_tma:ue8m0",
            allnorm.Fp8PerGroup(64, "column_major_tma", "ue8m0"),
        ),
        (
            "per_group:128:ue8m0_packed",
            "per_group:128:column_major_tma:ue8m0_packed",
            allnorm.Fp8PerGroup(128, "column_major_tma", "ue8m0_packed"),
        ),
        ("per_token", "per_token", allnorm.Fp8PerToken()),
        ("per_tensor", "per_tensor", [1 / 64]),
        ("none", "", None),
    ],
)
def test_specs(text: str, name: str, spec: object) -> None:
    assert bench_modes.quant_name(text) == name
    assert bench_modes.quant_name(name or "none") == name
    found = bench_modes.quant_of(name)
    assert (found.scale.tolist() if isinstance(found, allnorm.Fp8PerTensor) else found) == spec


@pytest.mark.parametrize(
    "text",
    [
        *("per_block", "per_token:128", "per_group:x", "per_group:64:128", "per_group:100"),
        *("per_group:ue8m0:ue8m0", "per_group:column_major:ue8m0_packed"),
    ],
)
def test_bad_specs_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|Pass"):
        bench_modes.quant_name(text)


def test_modes_are_all_combinations() -> None:
    assert bench_modes.modes([], ["replicated"]) == [Mode()]
    assert bench_modes.modes(["none", "per_token"], bench_modes.RESIDUALS, True) == [
        Mode(),
        Mode("per_token", return_normed=True),
        Mode(residual_sharded=True),
        Mode("per_token", residual_sharded=True, return_normed=True),
    ]
    changed = bench_modes.modes(
        *(["none", "per_token"], ["replicated"]),
        float32_residual=True,
        own_rows=True,
        slices=2,
        streams=4,
        next_input=True,  # type: ignore[arg-type]
    )
    assert changed == [
        Mode(),
        Mode(float32_residual=True),
        Mode("per_token"),
        Mode("per_token", float32_residual=True),
        Mode(residual_sharded=True, own_rows=True),
        Mode("per_token", residual_sharded=True, own_rows=True),
        Mode(slices=2),
        Mode(streams=4),
        Mode(streams=4, next_input=True),
    ]
    assert [str(mode) for mode in changed[-4:]] == [
        "per_token, sharded residual, own rows",
        "sharded norm of 2",
        "4 streams",
        "4 streams, next input",
    ]
    assert bench_modes.modes([], ["replicated"], next_input=True) == [Mode()]
    assert str(Mode("per_token", True, True)) == "per_token, with normed, sharded residual"
    assert str(Mode()) == ""


def test_names_of_arms() -> None:
    quantized = Mode("per_token")
    assert bench_modes.arm_names("cpu", Mode())[-2:] == ["gloo+torch", "gloo+local"]
    unfused = ["nccl+torch+quant", "nccl+local+quant"]
    assert bench_modes.arm_names("cuda", quantized)[-2:] == unfused
    every = bench_modes.known_arms("cuda", [Mode(), quantized])
    assert every[:4] == ("allnorm", "allnorm:one_shot", "allnorm:two_shot", "allnorm:unfused")
    assert {*bench_modes.PEERS, "nccl+torch", "nccl+torch+quant", "allnorm16"} <= {*every}
    assert not {*bench_modes.known_arms("cpu", [Mode()])} & {*bench_modes.PEERS}


def test_peers_run_on_gpus_with_replicated_residuals() -> None:
    assert bench_modes.peer_names("cuda", Mode()) == list(bench_modes.PEERS)
    assert bench_modes.peer_names("cuda", Mode(residual_sharded=True)) == []
    assert bench_modes.peer_names("cpu", Mode()) == []
    assert bench_modes.peer_names("cuda", Mode(float32_residual=True)) == []
    assert bench_modes.peer_names("cuda", Mode(slices=2)) == []
    assert bench_modes.arm_names("cuda", Mode(slices=2))[-2:] == ["nccl+torch", "nccl+inductor"]
    assert bench_modes.arm_names("cpu", Mode(slices=2))[-1] == "gloo+torch"
    assert bench_modes.peer_names("cuda", Mode(streams=4)) == ["flashinfer", "sglang"]
    assert bench_modes.peer_names("cuda", Mode(streams=3)) == []


def test_a_quantized_call_is_compared_with_the_16_bit_call() -> None:
    chosen = ("nccl+torch", "vllm")
    assert bench_modes.with_compared(chosen, [Mode("per_token")]) == chosen
    assert bench_modes.with_compared(["allnorm"], [Mode()]) == ("allnorm",)
    quantized = bench_modes.with_compared(["allnorm"], [Mode("per_token")])
    assert quantized == ("allnorm", "allnorm16")


def test_calls_with_changed_residuals_or_rows_are_compared_with_the_plain_call() -> None:
    changed = [Mode(float32_residual=True), Mode(residual_sharded=True, own_rows=True)]
    compared = bench_modes.with_compared(["allnorm"], changed)
    assert compared == ("allnorm", bench_modes.RESIDUAL16, bench_modes.GATHERED)
    for mode, name in zip(changed, compared[1:], strict=True):
        assert name in bench_modes.arm_names("cuda", mode)
        assert name not in bench_modes.arm_names("cuda", Mode(residual_sharded=True))
        assert not bench_modes.is_other(name)


def test_algorithms_of_a_peer_share_a_column() -> None:
    assert bench_modes.family("flashinfer:one_shot") == "flashinfer"
    assert bench_modes.family("symm_mem:two_shot+local+quant") == "symm_mem+local+quant"
    assert bench_modes.family("allnorm:two_shot") == "allnorm:two_shot"
