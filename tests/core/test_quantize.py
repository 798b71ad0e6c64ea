"""Tests `allnorm.quantize`, which quantizes rows without norming them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import allnorm
from allnorm import names, quant, reference
from allnorm.core import fast_call, local
from allnorm.core.dispatch import Dispatcher
from allnorm.quant import Quant, check_hidden_size
from allnorm.testing import DTYPES, assert_same_bits, rank_input, shared_input, special_input
from allnorm.testing.inputs import SPECIAL_KINDS, random_projection
from allnorm.verify.case import with_padding

MAKE = Dispatcher.run
devices = pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
# Groups within a lane's elements, within a chunk, and of several chunks; rows of one and of many.
SHAPES = ((0, 512), (1, 512), (3, 2880), (2, 5, 120), (5, 2944), (130, 1024), (7, 16384), (2, 1001))
GLOBALS = (300.0, 0.0, float("nan"), -2.0)
SCALES = (0.03, -2.0, 0.0, 1e-40, float("inf"), float("nan"))


@pytest.fixture(autouse=True)
def nothing_prepared() -> Iterator[None]:
    """Starts each test without prepared calls, as in a new process."""
    with mock.patch.object(local, "_threads", local._Threads()):
        yield


def specs(where: str, width: int, ordinary: bool = False) -> list[Quant]:
    """Returns the specs for rows of this width; with `ordinary` only those that make no NaN."""
    scales, globals_ = (SCALES[:1], GLOBALS[:1]) if ordinary else (SCALES, GLOBALS)

    def one(value: float) -> torch.Tensor:
        return torch.tensor([value], device=where)

    every: list[Quant] = [
        *(allnorm.Fp8PerGroup(size) for size in names.GROUP_SIZES),
        *(allnorm.Fp8PerGroup(128, "column_major", form) for form in ("float32", "ue8m0")),
        *(allnorm.Fp8PerGroup(size, "column_major_tma") for size in (16, 128)),
        *(allnorm.Fp8PerGroup(size, scale_format="ue8m0_packed") for size in (16, 64)),
        *(allnorm.MxFp8(), allnorm.Fp8PerToken()),
        *(allnorm.Fp8PerTensor(one(scale)) for scale in scales),
        *(allnorm.NvFp4(one(value)) for value in globals_),
        *(allnorm.NvFp4(one(value), "row_major") for value in globals_),
    ]
    fitting = []
    for spec in every:
        try:
            check_hidden_size(spec, width)
        except allnorm.UnsupportedError:
            continue
        fitting.append(spec)
    return fitting


def check(x: torch.Tensor, spec: Quant) -> tuple[torch.Tensor, torch.Tensor]:
    before = x.clone()
    got, wanted = allnorm.quantize(x, spec), reference.quantize(x, spec)
    assert_same_bits(got[0], wanted[0], f"quantized, {spec}")
    if isinstance(spec, allnorm.Fp8PerTensor):
        assert got[1] is spec.scale
    else:
        assert got[1].stride() == wanted[1].stride()
        a, b = (with_padding(scale, spec) for scale in (got[1], wanted[1]))
        assert_same_bits(a, b, f"scale, {spec}")
    assert_same_bits(x, before, "x")
    return got


@devices
@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_spec(shape: tuple[int, ...], dtype: torch.dtype, where: str) -> None:
    for call, spec in enumerate(specs(where, shape[-1])):
        check(rank_input(shape, dtype, 0, call=call, device=where), spec)


@devices
@dtypes
@pytest.mark.parametrize("kind", SPECIAL_KINDS)
def test_special_values(kind: str, dtype: torch.dtype, where: str) -> None:
    for width in (512, 1024):
        for spec in specs(where, width):
            check(special_input(kind, (6, width), dtype, 0, device=where), spec)


@devices
def test_every_16_bit_pattern(where: str) -> None:
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(128, 512)
    for dtype in (torch.bfloat16, torch.float16):
        for spec in specs(where, 512):
            check(patterns.view(dtype).to(where), spec)


@devices
def test_memory(where: str) -> None:
    """Quantizes strided, unaligned and virtual rows; their contents are not changed."""
    wide = rank_input((6, 3, 700), torch.bfloat16, 0, device=where)
    columns = wide[..., 5:517]
    for x in (columns, columns[::2], columns[:, 1], columns[0], columns[0, 0], columns.neg()):
        for spec in specs(where, 512):
            check(x, spec)
    virtual = torch._neg_view(wide[..., :512])
    check(virtual, allnorm.Fp8PerToken())
    with pytest.raises(ValueError, match="contiguous last dimension"):
        allnorm.quantize(wide.transpose(0, -1), allnorm.Fp8PerToken())


@devices
@dtypes
def test_equals_the_fused_quantization(dtype: torch.dtype, where: str) -> None:
    x = rank_input((9, 2944), dtype, 0, device=where)
    weight = shared_input((2944,), dtype, "weight", device=where)
    for spec in specs(where, 2944):
        fused = allnorm.add_rms_norm_quant(x, None, weight, 1e-6, spec, return_normed=True)
        assert fused.normed is not None
        quantized, scale = check(fused.normed, spec)
        assert_same_bits(quantized, fused.quantized, f"quantized, {spec}")
        a, b = (with_padding(each, spec) for each in (scale, fused.scale))
        assert_same_bits(a, b, f"scale, {spec}")


@devices
def test_the_next_layers_input(where: str) -> None:
    generator = torch.Generator().manual_seed(1)
    projection = random_projection(generator, 4, 512, torch.device(where))
    streams = rank_input((5, 4, 512), torch.bfloat16, 0, device=where)
    weight = shared_input((512,), torch.bfloat16, "weight", device=where)
    normed, _ = allnorm.hyper_connection_input(streams, projection, weight, 1e-6)
    wanted, _ = reference.hyper_connection_input(streams, projection, weight, 1e-6)
    for spec in specs(where, 512):
        assert_same_bits(check(normed, spec)[0], reference.quantize(wanted, spec)[0], str(spec))


@devices
@pytest.mark.skipif(not fast_call.available(), reason="built without Python's headers")
def test_c_dispatches_repeated_calls(where: str) -> None:
    for spec in (allnorm.Fp8PerGroup(), allnorm.Fp8PerToken(), allnorm.MxFp8()):
        for call in range(5):
            x = rank_input((4, 512), torch.bfloat16, 0, call=call, device=where)
            with mock.patch.object(Dispatcher, "run", autospec=True, side_effect=MAKE) as make:
                check(x, spec)
            assert make.call_count == (call < 2)


@devices
def test_refusals(where: str) -> None:
    x = rank_input((4, 512), torch.bfloat16, 0, device=where)
    other = "meta" if where == "cpu" else "cpu"
    rows: tuple[tuple[Any, Any, Any, str], ...] = (
        (TypeError, None, allnorm.Fp8PerToken(), "x"),
        (TypeError, allnorm.ExpertSum(x.view(4, 1, 512)), allnorm.Fp8PerToken(), "torch.Tensor"),
        (allnorm.UnsupportedError, x.double(), allnorm.Fp8PerToken(), "float64"),
        (TypeError, x, None, "Fp8PerGroup"),
        (TypeError, x, 128, "Fp8PerGroup"),
        (allnorm.UnsupportedError, x[:, :120], allnorm.Fp8PerGroup(), "120"),
        (allnorm.UnsupportedError, x[:, :120], allnorm.NvFp4(torch.ones(1, device=where)), "120"),
        (ValueError, x, allnorm.Fp8PerTensor(torch.ones(1, device=other)), "quant.scale"),
        (ValueError, x, allnorm.NvFp4(torch.ones(1, device=other)), "quant.global_scale"),
    )
    for repeats in (0, 3):
        for error, given, spec, text in rows:
            for _ in range(repeats):
                check(x, allnorm.Fp8PerToken())
            with pytest.raises(error, match=text):
                allnorm.quantize(given, spec)
    with pytest.raises(ValueError, match="gradient"):
        allnorm.quantize(x.clone().requires_grad_())
    with pytest.raises((allnorm.UnsupportedError, allnorm.NativeLibraryError)):
        allnorm.quantize(x.to("meta"))


@devices
def test_operator(where: str) -> None:
    for spec, tokens in itertools.product(specs(where, 512, ordinary=True), (0, 1, 5)):
        x = rank_input((tokens, 512), torch.bfloat16, 0, device=where)
        given = (x, *quant.op_arguments(spec))
        torch.library.opcheck(torch.ops.allnorm.quantize.default, given)
        traced = make_fx(functools.partial(allnorm.quantize, quant=spec))(x)
        called = {node.target for node in traced.graph.nodes if node.op == "call_function"}
        assert torch.ops.allnorm.quantize.default in called
        for got, wanted in zip(traced(x), reference.quantize(x, spec), strict=True):
            assert_same_bits(got, wanted, str(spec))


@devices
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compile(backend: str, where: str) -> None:
    torch._dynamo.reset()
    for spec in (allnorm.Fp8PerGroup(64), allnorm.NvFp4(torch.ones(1, device=where))):
        fast = torch.compile(
            lambda t, s=spec: allnorm.quantize(t * 2, s), fullgraph=True, backend=backend
        )
        x = rank_input((4, 512), torch.bfloat16, 0, device=where)
        for got, wanted in zip(fast(x), reference.quantize(x * 2, spec), strict=True):
            assert_same_bits(got, wanted, f"{backend}, {spec}")


@pytest.mark.gpu
def test_graph() -> None:
    """Replays a graph with new rows and a new static scale."""
    x = rank_input((5, 2880), torch.bfloat16, 0, device="cuda")
    for spec in specs("cuda", 2880):
        static = getattr(spec, "scale", getattr(spec, "global_scale", None))
        allnorm.quantize(x, spec)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = allnorm.quantize(x, spec)
        for call in range(1, 4):
            x.copy_(rank_input((5, 2880), torch.bfloat16, 0, call=call, device="cuda"))
            if static is not None:
                static.fill_(0.1 * call)
            graph.replay()
            for a, b in zip(got, reference.quantize(x, spec), strict=True):
                assert_same_bits(with_padding(a, spec), with_padding(b, spec), str(spec))
