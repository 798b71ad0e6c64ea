"""Tests `allnorm.add_rms_norm` and `add_rms_norm_quant`, which exchange nothing."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
from rank_helpers import check_cases, on

import allnorm
from allnorm import reference
from allnorm.core import dispatch, fast_call, local
from allnorm.core.dispatch import Dispatcher
from allnorm.testing import assert_same_bits, rank_input, shared_input
from allnorm.verify.case import VALUES, with_padding
from allnorm.verify.corners import BOTH, DTYPE_LIST, MODES, every
from allnorm.verify.memory import Layout, Memory

HIDDEN_SIZES = (1, 3, 7, 8, 9, 31, 120, 255, 256, 257, 1000, 2880, 2944, 4095, 4096, 5760, 16384)
MAKE = Dispatcher.run
devices = pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
SPECS = (
    allnorm.Fp8PerGroup(128),
    allnorm.Fp8PerGroup(128, "column_major"),
    allnorm.Fp8PerGroup(128, "column_major_tma", "ue8m0_packed"),
    allnorm.Fp8PerToken(),
    allnorm.Fp8PerTensor(torch.tensor([0.25])),
)


@pytest.fixture(autouse=True)
def nothing_prepared() -> Iterator[None]:
    """Starts each test without prepared calls, as in a new process."""
    with mock.patch.object(local, "_threads", local._Threads()):
        yield


def inputs(
    where: str, call: int = 0, shape: tuple[int, ...] = (3, 4096), dtype: Any = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = rank_input(shape, dtype, 0, call=call, device=where)
    residual = shared_input(shape, dtype, "residual", call=call, device=where)
    return x, residual, shared_input(shape[-1:], dtype, "weight", call=call, device=where)


def check(tensors: tuple[torch.Tensor | None, ...], **more: Any) -> tuple[torch.Tensor, ...]:
    x, residual, weight = tensors
    more = {"eps": 1e-6, **more}
    got = allnorm.add_rms_norm(x, residual, weight, **more)
    want = reference.all_reduce_add_rms_norm([x], residual, weight, **more)
    for name, a, b in zip(("normed", "residual_out"), got, want, strict=True):
        assert_same_bits(a, b, name)
    return got


def check_quantized(
    tensors: tuple[torch.Tensor | None, ...], quant: Any, return_normed: bool = False, **more: Any
) -> Any:
    x, residual, weight = tensors
    eps = more.pop("eps", 1e-6)
    got = allnorm.add_rms_norm_quant(x, residual, weight, eps, quant, return_normed, **more)
    want = reference.all_reduce_add_rms_norm_quant(
        [x], residual, weight, eps, quant=quant, return_normed=return_normed, **more
    )
    for name, a, b in zip(got._fields, got, want, strict=True):
        if b is None:
            assert a is None
            continue
        if name == "scale" and isinstance(quant, allnorm.Fp8PerTensor):
            assert a is quant.scale
        elif name == "scale":
            a, b = with_padding(a, quant), with_padding(b, quant)
        assert_same_bits(a, b, f"{name}, {quant}")
    return got


@on(cpu=(1,), gpu=(1,))
@pytest.mark.parametrize("dtype", DTYPE_LIST, ids=str)
def test_widths_values_and_memory(rank: int, world_size: int, dtype: torch.dtype) -> None:
    common = {"op": "local", "dtype": dtype, "residual": BOTH}
    layouts = [Layout(136), Layout(136, 3), Layout(0, 1), Layout(reverse=True)]
    check_cases(
        rank,
        world_size,
        [
            *every(
                shape=[(tokens, width) for width in HIDDEN_SIZES for tokens in (1, 6)],
                float32_weight=BOTH,
                weight_bias=[0.0, 1.0],
                numerics=MODES,
                **common,
            ),
            *every(shape=(9, 264), kind=list(VALUES), numerics=MODES, **common),
            *every(
                shape=[(4, 6, 64), (0, 6, 64)],
                memory=[Memory(x, residual) for x in layouts for residual in (x, Layout())],
                **common,
            ),
            *every(shape=(24, 64), kind="equal_rows", memory=Memory(Layout(expand=True)), **common),
        ],
    )


@devices
@pytest.mark.parametrize("shape", [(3, 4096), (2, 3, 120), (0, 512), (1, 31), (5, 2944)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_repeated(shape: tuple[int, ...], dtype: torch.dtype, where: str) -> None:
    results = []
    for call in range(4):
        x, residual, weight = inputs(where, call, shape, dtype)
        results.append(check((x, residual, weight)))
        results.append(check((x, None, weight), eps=1e-5, weight_bias=1.0, numerics="vllm"))
    if x.numel():
        addresses = [t.data_ptr() for pair in results for t in pair]
        assert len(set(addresses)) == len(addresses), "results of two calls share memory"


@devices
@pytest.mark.parametrize("quant", SPECS, ids=str)
def test_repeated_quantized(quant: Any, where: str) -> None:
    for call in range(4):
        if isinstance(quant, allnorm.Fp8PerTensor):
            quant = allnorm.Fp8PerTensor(torch.tensor([0.25 * (call + 1)], device=where))
        for shape in ((8, 4096), (7, 2048)):
            x, residual, weight = inputs(where, call, shape)
            check_quantized((x, residual, weight), quant)
            check_quantized((x, None, weight), quant, return_normed=True)


@devices
@pytest.mark.skipif(not fast_call.available(), reason="built without Python's headers")
def test_c_dispatches_repeated_calls(where: str) -> None:
    for call in range(5):
        with mock.patch.object(Dispatcher, "run", autospec=True, side_effect=MAKE) as make:
            check(inputs(where, call))
            check_quantized(inputs(where, call), SPECS[0])
        assert make.call_count == (2 if call < 2 else 0)
    with (
        mock.patch.object(Dispatcher, "run", autospec=True, side_effect=MAKE) as make,
        fast_call.watched(),
    ):
        check(inputs(where))
    assert make.called


@devices
def test_changed_arguments(where: str) -> None:
    """Checks that a call that differs from a prepared call is not mistaken for it."""
    x, residual, weight = tensors = inputs(where)
    for _ in range(3):
        check(tensors)
    wide = torch.zeros(3, 2 * 4096, dtype=x.dtype, device=where)
    wide[:, :4096] = x
    shifted = torch.zeros(x.numel() + 1, dtype=x.dtype, device=where)[1:].view_as(x).copy_(x)
    for _ in range(3):
        check((wide[:, :4096], residual, weight))
        check((shifted, residual, weight))
        check((x, shifted, weight))
        check((x[:2], residual[:2], weight))
        check((x[None], residual[None], weight))
        check((x, residual, weight.float()))
        check((x, residual, -weight), eps=0.5)
        check(tensors, numerics="unrounded")
        check(tensors, weight_bias=-0.0)
        check(tensors, weight_bias=0.25)
        check(tensors)


@devices
def test_many_kinds(where: str) -> None:
    """Alternates more kinds of calls than the cache holds; a full cache is emptied."""
    with mock.patch.object(dispatch, "_MAX_PREPARED", 5):
        for call in range(4):
            for rows in range(1, 12):
                check(inputs(where, call, (rows, 256)))
        dispatcher = local._threads.dispatchers[inputs(where)[0].device]
        assert len(dispatcher.prepared_calls()) <= 5


@devices
def test_without_the_library(where: str) -> None:
    with mock.patch.object(fast_call, "_library", return_value=None):
        for call in range(4):
            check(inputs(where, call))
            check_quantized(inputs(where, call), SPECS[0])


def test_threads() -> None:
    """Checks that each thread has its own prepared calls."""

    def work(number: int) -> None:
        for call in range(40):
            check(inputs("cpu", number, (64, 512)))
            check(inputs("cpu", call, (number + 1, 512)))

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, number) for number in range(4)]:
            done.result()


@pytest.mark.gpu
def test_different_streams_and_devices() -> None:
    """Makes calls on a different stream, and with a different current device if one exists."""
    for _ in range(3):
        check(inputs("cuda:0"))
    stream = torch.cuda.Stream(0)
    stream.wait_stream(torch.cuda.current_stream(0))
    x, residual, weight = inputs("cuda:0", 7)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1 << 24)
        late = x * 1.0
        got = allnorm.add_rms_norm(late, residual, weight, 1e-6)
    stream.synchronize()
    want = reference.all_reduce_add_rms_norm([x], residual, weight, 1e-6)
    assert_same_bits(got[0], want[0], "normed on another stream")
    with torch.cuda.device(torch.cuda.device_count() - 1):
        check(inputs("cuda:0", 8))


@devices
def test_refusals(where: str) -> None:
    """Checks that invalid calls are refused before and after similar valid calls are prepared."""
    x = rank_input((4, 64), torch.bfloat16, 0, device=where)
    w = shared_input((64,), torch.bfloat16, "weight", device=where)
    rows = (
        (TypeError, (None, None, w), {}),
        (TypeError, ([1.0], None, w), {}),
        (allnorm.UnsupportedError, (x.double(), None, w.double()), {}),
        (ValueError, (x, x[:2], w), {}),
        ((TypeError, ValueError), (x, x.half(), w), {}),
        (ValueError, (x, None, w[:63]), {}),
        ((TypeError, ValueError), (x, None, w.half()), {}),
        (ValueError, (x.repeat(1, 2)[:, ::2], None, w), {}),
        (ValueError, (x, None, w.repeat(2)[::2]), {}),
        (ValueError, (x, None, w), {"numerics": "exact"}),
        (ValueError, (x, None, w), {"eps": -1.0}),
        (ValueError, (x, None, w), {"eps": float("nan")}),
        (TypeError, (x, None, w), {"eps": True}),
        (TypeError, (x, None, w), {"eps": []}),
        (ValueError, (x, None, w), {"weight_bias": float("inf")}),
        (TypeError, (x, None, w), {"weight_bias": "0"}),
    )
    for repeats in (0, 3):
        for error, arguments, more in rows:
            for _ in range(repeats):
                check((x, None, w))
            with pytest.raises(error):
                allnorm.add_rms_norm(*arguments, **{"eps": 1e-6, **more})
    for quant in (None, 128, "per_token"):
        with pytest.raises(TypeError, match="Fp8PerGroup"):
            allnorm.add_rms_norm_quant(x, None, w, 1e-6, quant)
    with pytest.raises(TypeError, match="return_normed"):
        allnorm.add_rms_norm_quant(x, None, w, 1e-6, SPECS[0], 1)
    with pytest.raises((allnorm.UnsupportedError, allnorm.NativeLibraryError, ValueError)):
        allnorm.add_rms_norm(x.to("meta"), None, w.to("meta"), 1e-6)
    check((x, None, w))


@devices
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile(backend: str, where: str) -> None:
    x = rank_input((4, 64), torch.bfloat16, 0, device=where)
    w = shared_input((64,), torch.float32, "weight", device=where)
    torch._dynamo.reset()
    fast = torch.compile(
        lambda x, w: allnorm.add_rms_norm(x, x, w, 1e-6, weight_bias=1.0, numerics="vllm"),
        fullgraph=True,
        backend=backend,
    )
    want = reference.add_rms_norm(x, x, w, 1e-6, weight_bias=1.0, numerics="vllm")
    for a, b in zip(fast(x, w), want, strict=True):
        assert_same_bits(a, b, backend)
