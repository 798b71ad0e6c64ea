"""allnorm.add_rms_norm: the library's own local kernel, not collective."""

from __future__ import annotations

import itertools

import pytest
import torch
from rank_helpers import MODES, dtype_ids

import allnorm
from allnorm import reference
from allnorm.testing import SPECIAL_KINDS, assert_same_bits, rank_input, shared_input, special_input

devices = pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
HIDDEN_SIZES = (1, 3, 7, 8, 9, 31, 120, 255, 256, 257, 1000, 2880, 2944, 4095, 4096, 5760, 16384)


def check(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, **more: object
) -> None:
    more = {"eps": 1e-6, **more}
    got = allnorm.add_rms_norm(x, residual, weight, **more)
    want = reference.all_reduce_add_rms_norm([x], residual, weight, **more)
    for name, a, b in zip(("normed", "residual_out"), got, want, strict=True):
        assert a.is_contiguous()
        assert_same_bits(a, b, f"{name} of {list(x.shape)} {x.dtype} {more}")


@devices
@pytest.mark.parametrize("dtype", **dtype_ids)
@pytest.mark.parametrize("mode", MODES)
def test_hidden_sizes(mode: str, dtype: torch.dtype, where: str) -> None:
    for hidden_size, num_tokens in itertools.product(HIDDEN_SIZES, (1, 6)):
        x = rank_input((num_tokens, hidden_size), dtype, 0, device=where)
        residual = shared_input(x.shape, dtype, "residual", device=where)
        for weight_dtype in {dtype, torch.float32}:
            weight = shared_input((hidden_size,), weight_dtype, "weight", device=where)
            check(x, residual, weight, numerics=mode)
        check(x, None, weight, eps=0.5, weight_bias=1.0, numerics=mode)


@devices
@pytest.mark.parametrize("dtype", **dtype_ids)
def test_special_values(dtype: torch.dtype, where: str) -> None:
    for kind, mode, rank in itertools.product(SPECIAL_KINDS, MODES, (0, 1)):
        x = special_input(kind, (9, 264), dtype, rank, device=where)
        residual = special_input(kind, (9, 264), dtype, 1 - rank, device=where)
        weight = shared_input((264,), torch.float32, "weight", device=where)
        check(x, residual, weight, numerics=mode)
        check(x, None, weight, numerics=mode)


@devices
def test_shapes_and_strides(where: str) -> None:
    wide = rank_input((4, 6, 200), torch.bfloat16, 0, device=where)
    weight = shared_input((64,), torch.bfloat16, "weight", device=where)
    for x in (
        wide[..., :64],
        wide[..., 3:67],
        wide[:, 0, :64],
        wide[0, 0, :64],
        wide.transpose(0, 1)[..., :64],
        wide[:0, :, :64],
        wide[:, ::2, 1:65],
        wide[:1, :1, :64].expand(4, 6, 64),
    ):
        check(x, None, weight)
        check(x, x.clone(), weight)
        check(x.contiguous(), x, weight)


@devices
def test_inputs_stay_and_results_are_new(where: str) -> None:
    x, residual = (rank_input((4, 64), torch.bfloat16, r, device=where) for r in (0, 1))
    weight = shared_input((64,), torch.bfloat16, "weight", device=where)
    copies = [t.clone() for t in (x, residual, weight)]
    normed, total = allnorm.add_rms_norm(x, None, weight, 1e-6)
    assert_same_bits(total, x, "the sum without a residual")
    assert len({t.data_ptr() for t in (x, normed, total)}) == 3
    allnorm.add_rms_norm(x, residual, weight, 1e-6)
    for t, copy in zip((x, residual, weight), copies, strict=True):
        assert_same_bits(t, copy, "an input")


@devices
def test_refusals(where: str) -> None:
    x = rank_input((4, 64), torch.bfloat16, 0, device=where)
    w = shared_input((64,), torch.bfloat16, "weight", device=where)
    for error, arguments, more in (
        (TypeError, (None, None, w), {}),
        (allnorm.UnsupportedError, (x.double(), None, w.double()), {}),
        (ValueError, (x, x[:2], w), {}),
        ((TypeError, ValueError), (x, x.float(), w), {}),
        (ValueError, (x, None, w[:63]), {}),
        ((TypeError, ValueError), (x, None, w.half()), {}),
        (ValueError, (x.repeat(1, 2)[:, ::2], None, w), {}),
        (ValueError, (x, None, w.repeat(2)[::2]), {}),
        (ValueError, (x, None, w), {"numerics": "exact"}),
        (ValueError, (x, None, w), {"eps": -1.0}),
        (ValueError, (x, None, w), {"weight_bias": float("inf")}),
    ):
        with pytest.raises(error):
            allnorm.add_rms_norm(*arguments, **{"eps": 1e-6, **more})
    with pytest.raises((allnorm.UnsupportedError, allnorm.NativeLibraryError, ValueError)):
        allnorm.add_rms_norm(x.to("meta"), None, w.to("meta"), 1e-6)
    check(x, None, w)


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


@pytest.mark.gpu
def test_cuda_gives_the_bits_of_the_cpu() -> None:
    for hidden_size in (7, 2880, 4096, 16384):
        x = rank_input((33, hidden_size), torch.bfloat16, 0)
        w = shared_input((hidden_size,), torch.float32, "weight")
        on_cpu = allnorm.add_rms_norm(x, x, w, 1e-6)
        on_gpu = allnorm.add_rms_norm(x.cuda(), x.cuda(), w.cuda(), 1e-6)
        for a, b in zip(on_gpu, on_cpu, strict=True):
            assert_same_bits(a, b, str(hidden_size))
