"""Tests the parsing of options: accepted and rejected values."""

from __future__ import annotations

import pytest
import typer

from allnorm import names, topology
from allnorm.bench.modes import Shape
from allnorm.cli import bench, options
from allnorm.core import _native


def test_shapes_are_tokens_by_hidden_size() -> None:
    assert options.shapes("1x4096, 8192X64") == [Shape(1, 4096), Shape(8192, 64)]
    assert options.shapes("0x8,0x8") == [Shape(0, 8)]


@pytest.mark.parametrize("text", ["", ",", "4096", "1x", "x1", "1x0", "-1x8", "1x8x2", "1.5x8"])
def test_bad_shapes_are_rejected(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="expected"):
        options.shapes(text)


def test_integers() -> None:
    assert options.integers("1,16,1", "--tokens") == [1, 16]
    for text in ("", "a", "1,-2", "1.0", "²"):
        with pytest.raises(typer.BadParameter):
            options.integers(text, "--tokens")
    with pytest.raises(typer.BadParameter, match="at least 1"):
        options.integers("0", "--tp", minimum=1)


def test_choices_name_the_allowed_words() -> None:
    assert options.choices("float16", "--dtype", names.DTYPES) == ["float16"]
    with pytest.raises(typer.BadParameter, match=r"int8: expected .* float32"):
        options.choices("int8", "--dtype", names.DTYPES)


def test_shapes_of_models_have_the_constants_of_their_norms() -> None:
    assert options.model_shapes("qwen3.5-397b,gpt-oss-120b", [3, 4]) == [
        *(Shape(tokens, 4096, 1e-6, 1.0, "qwen3.5-397b") for tokens in (3, 4)),
        *(Shape(tokens, 2880, 1e-5, 0.0, "gpt-oss-120b") for tokens in (3, 4)),
    ]


def test_an_unknown_model_is_rejected_and_the_known_ones_are_named() -> None:
    with pytest.raises(typer.BadParameter, match=r"llama-3\.1-8b"):
        options.model_shapes("llama-4", [1])


def test_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "num_gpus", lambda: 0)
    assert options.device("auto") == "cpu"
    with pytest.raises(typer.BadParameter, match="no GPU"):
        options.device("cuda")
    monkeypatch.setattr(topology, "num_gpus", lambda: 8)
    assert options.device("auto") == "cuda"
    assert options.device("cpu") == "cpu"
    with pytest.raises(typer.BadParameter, match="cuda, cpu or auto"):
        options.device("tpu")


def test_world_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "num_gpus", lambda: 4)
    assert options.world_sizes("", "cuda") == [4]
    assert options.world_sizes("", "cpu") == [2]
    assert options.world_sizes("2,4", "cuda") == [2, 4]
    assert options.world_sizes("16", "cpu") == [16]
    assert options.world_sizes("", "cuda", default="2,4") == [2, 4]
    with pytest.raises(typer.BadParameter, match="8 ranks, but torch sees 4 GPUs"):
        options.world_sizes("2,8", "cuda")
    assert options.world_sizes("2,8", "cuda", share_gpus=True) == [2, 8]
    most = _native.MAX_WORLD_SIZE
    assert options.world_sizes(f"2,{most}", "cpu") == [2, most]
    with pytest.raises(typer.BadParameter, match=f"{most + 1} ranks: expected at most {most}"):
        options.world_sizes(str(most + 1), "cpu")


def test_more_ranks_than_cores_give_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "num_cores", lambda: 4)
    assert options.crowded(4, "cpu") == options.crowded(8, "cuda") == ""
    assert "8 ranks on 4 cores" in options.crowded(8, "cpu")


def test_too_little_memory_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "available_memory_bytes", lambda _: 8 << 30)
    options.check_memory(4 << 30, 2, "cpu", "")
    options.check_memory(8 << 30, 4, "cuda", "")  # each GPU has its own memory
    with pytest.raises(ValueError, match=r"about 12\.0 GiB .* 3 ranks together.*8\.0 GiB.*Less\."):
        options.check_memory(4 << 30, 3, "cpu", "Less.")
    monkeypatch.setattr(topology, "available_memory_bytes", lambda _: None)
    options.check_memory(1 << 60, 2, "cpu", "")


def test_shapes_of_bench() -> None:
    def shapes(*given: str) -> str:
        return ",".join(map(str, bench._shapes(*given)))

    default = "1x4096,16x4096,256x4096,1x2880,16x2880,256x2880,8192x4096"
    assert shapes("", "", "", "cpu") == default
    assert "8192x8192" in shapes("", "", "", "cuda")
    assert shapes("", "", "3x8", "cpu") == "3x8"
    assert shapes("qwen3-32b", "2", "3x8", "cpu") == "3x8,2x5120"
    assert shapes("", "2", "", "cpu") == "2x4096,2x2880"
