"""Parsing of options: accepted and rejected values."""

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
def test_bad_shapes_are_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="expected"):
        options.shapes(text)


def test_integers() -> None:
    assert options.integers("1,16,1", "--tokens") == [1, 16]
    for text in ("", "a", "1,-2", "1.0", "²"):
        with pytest.raises(typer.BadParameter):
            options.integers(text, "--tokens")
    with pytest.raises(typer.BadParameter, match="at least 1"):
        options.integers("0", "--tp", minimum=1)


def test_choices_name_what_is_allowed() -> None:
    assert options.choices("float16", "--dtype", names.DTYPES) == ["float16"]
    with pytest.raises(typer.BadParameter, match=r"int8: expected .* float32"):
        options.choices("int8", "--dtype", names.DTYPES)


@pytest.mark.parametrize(
    ("name", "hidden_size", "eps", "weight_bias"),
    [
        ("llama-3.1-8b", 4096, 1e-5, 0.0),
        ("llama-3.1-70b", 8192, 1e-5, 0.0),
        ("qwen3-32b", 5120, 1e-6, 0.0),
        ("gpt-oss-120b", 2880, 1e-5, 0.0),
        ("deepseek-v3", 7168, 1e-6, 0.0),
        ("qwen3.5-397b", 4096, 1e-6, 1.0),
        ("gemma-3-27b", 5376, 1e-6, 1.0),
        ("qwen3-30b-a3b", 2048, 1e-6, 0.0),
    ],
)
def test_models(name: str, hidden_size: int, eps: float, weight_bias: float) -> None:
    shape = options.model_shapes(name, [3])[0]
    assert shape == Shape(3, hidden_size, eps, weight_bias, name)


def test_an_unknown_model_is_refused_with_the_known_ones() -> None:
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


def test_too_little_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "available_memory_bytes", lambda _: 8 << 30)
    options.check_memory(4 << 30, 2, "cpu", "")
    options.check_memory(8 << 30, 4, "cuda", "")  # each GPU has its own
    with pytest.raises(ValueError, match=r"about 12\.0 GiB .* 3 ranks together.*8\.0 GiB.*Less\."):
        options.check_memory(4 << 30, 3, "cpu", "Less.")
    monkeypatch.setattr(topology, "available_memory_bytes", lambda _: None)
    options.check_memory(1 << 60, 2, "cpu", "")


def test_bench_defaults_are_shapes_of_real_models() -> None:
    cpu = [str(shape) for shape in bench._shapes("", "", "", "cpu")]
    assert cpu == ["1x4096", "16x4096", "256x4096", "1x2880", "16x2880", "256x2880", "8192x4096"]
    assert "8192x8192" in [str(shape) for shape in bench._shapes("", "", "", "cuda")]


def test_bench_takes_only_what_it_is_given() -> None:
    assert [str(s) for s in bench._shapes("", "", "3x8", "cpu")] == ["3x8"]
    assert [str(s) for s in bench._shapes("qwen3-32b", "2", "3x8", "cpu")] == ["3x8", "2x5120"]
    assert [str(s) for s in bench._shapes("", "2", "", "cpu")] == ["2x4096", "2x2880"]
