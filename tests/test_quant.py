"""Tests quantization specs: accepted arguments, and the memory layout of scales."""

from __future__ import annotations

import dataclasses
import itertools
import pickle

import pytest
import torch

import allnorm
from allnorm import quant as quants

LAYOUTS = ("row_major", "column_major", "column_major_tma")
FORMATS = ("float32", "ue8m0", "ue8m0_packed")


def test_defaults() -> None:
    spec = allnorm.Fp8PerGroup()
    assert (spec.group_size, spec.scale_layout, spec.scale_format) == (128, "row_major", "float32")
    assert spec == allnorm.Fp8PerGroup(128, "row_major", "float32")


def test_every_combination_is_accepted_or_refused() -> None:
    for size, layout, form in itertools.product((16, 32, 64, 128, 256, 512), LAYOUTS, FORMATS):
        if form == "ue8m0_packed" and layout == "column_major":
            with pytest.raises(ValueError, match=f"{layout}.*scale_layout='column_major_tma'"):
                allnorm.Fp8PerGroup(size, layout, form)
        else:
            spec = allnorm.Fp8PerGroup(size, layout, form)
            made = "column_major_tma" if form == "ue8m0_packed" else layout
            assert dataclasses.astuple(spec) == (size, made, form)
    packed = allnorm.Fp8PerGroup(128, scale_format="ue8m0_packed")
    assert packed == allnorm.Fp8PerGroup(128, "column_major_tma", "ue8m0_packed"), "the only layout"


@pytest.mark.parametrize("size", [0, -128, 1, 8, 24, 100, 127, 1024])
def test_group_sizes_are_powers_of_two(size: int) -> None:
    with pytest.raises(ValueError, match=rf"group_size={size}.*16, 32, 64, 128, 256, 512"):
        allnorm.Fp8PerGroup(size)


@pytest.mark.parametrize("size", [128.0, "128", None, True])
def test_group_sizes_are_integers(size: object) -> None:
    with pytest.raises(TypeError, match="group_size"):
        allnorm.Fp8PerGroup(size)


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match=r"scale_layout='columns'.*row_major.*column_major_tma"):
        allnorm.Fp8PerGroup(128, "columns")
    with pytest.raises(ValueError, match=r"scale_format='e8m0'.*float32.*ue8m0_packed"):
        allnorm.Fp8PerGroup(128, "row_major", "e8m0")
    with pytest.raises(ValueError, match="scale_format"):
        allnorm.Fp8PerGroup(128, "row_major", 3)


def test_a_static_scale_is_one_float32() -> None:
    for scale in (torch.tensor(0.5), torch.tensor([0.5]), torch.ones(1, 1)):
        assert allnorm.Fp8PerTensor(scale).scale is scale
    with pytest.raises(TypeError, match=r"float.*tensor.*torch\.tensor"):
        allnorm.Fp8PerTensor(0.5)
    with pytest.raises(TypeError, match=r"bfloat16.*float32"):
        allnorm.Fp8PerTensor(torch.ones(1, dtype=torch.bfloat16))
    for shape in ((2,), (0,), (4, 1)):
        with pytest.raises(ValueError, match="one element"):
            allnorm.Fp8PerTensor(torch.ones(shape))


def test_specs_are_values() -> None:
    """Specs compare by value, because they are part of the cache key of prepared calls."""
    a, b = allnorm.Fp8PerGroup(64, "column_major"), allnorm.Fp8PerGroup(64, "column_major")
    assert a == b
    assert hash(a) == hash(b)
    assert allnorm.Fp8PerToken() == allnorm.Fp8PerToken()
    everything = [
        *(allnorm.Fp8PerGroup(size, layout) for size in (16, 32) for layout in LAYOUTS),
        allnorm.Fp8PerGroup(16, "row_major", "ue8m0"),
        allnorm.Fp8PerToken(),
    ]
    assert len(set(everything)) == len(everything)
    for spec in everything:
        assert pickle.loads(pickle.dumps(spec)) == spec
        with pytest.raises(dataclasses.FrozenInstanceError):
            spec.group_size = 1


def test_static_scales_are_compared_by_identity() -> None:
    scale = torch.ones(1)
    spec = allnorm.Fp8PerTensor(scale)
    assert spec == allnorm.Fp8PerTensor(scale)
    assert hash(spec) == hash(allnorm.Fp8PerTensor(scale))
    assert spec != allnorm.Fp8PerTensor(torch.ones(1))
    assert spec != allnorm.Fp8PerToken()
    assert "cpu" in repr(spec)


def ceil4(count: int) -> int:
    return -(-count // 4) * 4


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 4, 5, 7, 8, 33])
@pytest.mark.parametrize(("hidden_size", "size"), [(2944, 128), (128, 128), (7168, 512), (48, 16)])
def test_memory_layouts_of_scales(tokens: int, hidden_size: int, size: int) -> None:
    groups = hidden_size // size
    words = -(-groups // 4)
    expected = {
        ("row_major", "float32"): ((tokens, groups), (groups, 1), torch.float32),
        ("row_major", "ue8m0"): ((tokens, groups), (groups, 1), torch.float32),
        ("column_major", "float32"): ((tokens, groups), (1, tokens), torch.float32),
        ("column_major", "ue8m0"): ((tokens, groups), (1, tokens), torch.float32),
        ("column_major_tma", "float32"): ((tokens, groups), (1, ceil4(tokens)), torch.float32),
        ("column_major_tma", "ue8m0"): ((tokens, groups), (1, ceil4(tokens)), torch.float32),
        ("column_major_tma", "ue8m0_packed"): ((tokens, words), (1, ceil4(tokens)), torch.int32),
    }
    for (layout, form), (shape, stride, dtype) in expected.items():
        spec = allnorm.Fp8PerGroup(size, layout, form)
        scale = quants.empty_scale(spec, tokens, hidden_size, "cpu")
        assert (tuple(scale.shape), scale.stride(), scale.dtype) == (shape, stride, dtype), spec
        rows = ceil4(tokens) if layout == "column_major_tma" else tokens
        assert scale.untyped_storage().nbytes() == rows * shape[1] * 4
    scale = quants.empty_scale(allnorm.Fp8PerToken(), tokens, hidden_size, "cpu")
    assert (tuple(scale.shape), scale.dtype) == ((tokens, 1), torch.float32)
    assert scale.is_contiguous()


def test_memory_for_scales_is_refused_if_not_needed_or_unsupported() -> None:
    with pytest.raises(ValueError, match="already has a scale"):
        quants.empty_scale(allnorm.Fp8PerTensor(torch.ones(1)), 1, 64, "cpu")
    with pytest.raises(allnorm.UnsupportedError, match=r"2880.*128.*group_size=16 or 32 or 64"):
        quants.empty_scale(allnorm.Fp8PerGroup(128), 1, 2880, "cpu")
    with pytest.raises(allnorm.UnsupportedError, match=r"1001.*Fp8PerToken"):
        quants.empty_scale(allnorm.Fp8PerGroup(128), 1, 1001, "cpu")


@pytest.mark.parametrize(
    "spec",
    [
        allnorm.Fp8PerGroup(),
        allnorm.Fp8PerGroup(32, "column_major_tma", "ue8m0_packed"),
        allnorm.Fp8PerToken(),
        allnorm.Fp8PerTensor(torch.ones(1)),
    ],
    ids=repr,
)
def test_specs_survive_as_arguments_of_an_operator(spec: quants.Quant) -> None:
    assert quants.from_op_arguments(*quants.op_arguments(spec)) == spec


def test_wrong_quantization_arguments_of_operators() -> None:
    with pytest.raises(ValueError, match=r"quant_kind='per_row'.*per_token"):
        quants.from_op_arguments("per_row", 0, "", "", None)
    with pytest.raises(ValueError, match="group_size=5"):
        quants.from_op_arguments("per_group", 5, "row_major", "float32", None)
    with pytest.raises(TypeError, match="NoneType"):
        quants.from_op_arguments("per_tensor", 0, "", "", None)


def test_only_specs_are_specs() -> None:
    for wrong in (None, 128, "fp8", allnorm.Fp8PerGroup):
        with pytest.raises(TypeError, match=r"quant=.*Fp8PerGroup, Fp8PerToken or Fp8PerTensor"):
            quants.check_quant(wrong)
    quants.check_quant(allnorm.Fp8PerToken())


def test_quantized_norm_is_a_tuple() -> None:
    parts = [torch.zeros(1) for _ in range(3)]
    result = allnorm.QuantizedNorm(*parts)
    assert result.normed is None
    quantized, scale, residual, normed = result
    assert [quantized, scale, residual] == parts
    assert normed is None
