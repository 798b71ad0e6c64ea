"""Tests hyper_connection_input: a layer's input and coefficients from the residual streams."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from rank_helpers import DTYPES, comm, device, message_of, on

import allnorm
from allnorm import reference
from allnorm.core import stream_input
from allnorm.testing import assert_same_bits

WIDTHS = (64, 4096, 2880, 120, 7168)
HURTFUL = (float("nan"), float("inf"), -0.0, 1e-40, 3e38)


class Inputs:
    """The arguments of a call."""

    def __init__(
        self,
        seed: int,
        shape: tuple[int, ...],  # [..., streams, hidden_size]
        dtype: torch.dtype,
        wide: bool = False,  # the streams are float32
        wide_weight: bool = False,
        hurtful: bool = False,
        **constants: Any,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        *_, n, width = shape
        rows = n * (n + 2)

        def random(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator).to(device())

        streams = random(*shape)
        if hurtful:
            for token, value in zip(streams.view(-1, n * width), HURTFUL, strict=False):
                token[:: max(1, n * width // 3)] = value
        self.streams = streams if wide else streams.to(dtype)
        self.weight = random(width).to(torch.float32 if wide_weight and not wide else dtype)
        self.projection = allnorm.HyperConnectionProjection(
            random(rows, n * width) / (n * width) ** 0.5, random(3), random(rows), **constants
        )

    def wanted(self, **more: Any) -> Any:
        return reference.hyper_connection_input(
            self.streams, self.projection, self.weight, 1e-6, **more
        )

    def __call__(self, **more: Any) -> Any:
        return allnorm.hyper_connection_input(
            self.streams, self.projection, self.weight, 1e-6, **more
        )

    def check(self, what: str = "", **more: Any) -> Any:
        """Makes the call, and compares its results with the reference."""
        wanted = self.wanted(**more)
        assert_equal(self(**more), wanted, f"{what} {tuple(self.streams.shape)} {more}")
        return wanted


def assert_equal(got: Any, wanted: Any, what: str) -> None:
    assert type(got[1]) is allnorm.HyperConnection
    for name, one, other in zip(
        ("normed", "post", "mix"), (got[0], *got[1]), (wanted[0], *wanted[1]), strict=True
    ):
        assert_same_bits(one, other, f"{name} of {what}")


@on(cpu=(1,), gpu=(1,))
def test_results(rank: int, world_size: int) -> None:
    leading: tuple[tuple[int, ...], ...] = ((0,), (1,), (2, 3), (), (17,))
    for seed, (n, shape) in enumerate(itertools.product((2, 3, 4, 5, 8), leading)):
        inputs = Inputs(
            *(seed, (*shape, n, WIDTHS[seed % 5]), DTYPES[seed % 3]),
            *(seed % 2 == 0, seed % 4 == 1, seed % 3 == 0),
        )
        inputs.check(
            numerics=("rounded", "transformers", "vllm", "unrounded")[seed % 4],
            weight_bias=float(seed % 2),
        )


@on(cpu=(1,), gpu=(1,))
def test_odd_widths_and_many_tokens(rank: int, world_size: int) -> None:
    for seed, width in enumerate((1, 3, 8, 121, 255, 257, 4099, 14_336, 14_344, 40_000)):
        Inputs(seed, (2, 4, width), DTYPES[seed % 3], seed % 2 == 0).check()
    Inputs(9, (1000, 4, 264), torch.bfloat16).check()
    Inputs(10, (700, 8, 136), torch.float16, wide=True).check()


@on(cpu=(1,), gpu=(1,))
def test_constants(rank: int, world_size: int) -> None:
    for constants in (
        {"iterations": 1},
        {"iterations": 3, "hc_eps": 0.0},
        {"eps": 0.5, "hc_eps": 0.25, "post_scale": 1.0},
        {"eps": 0.0, "post_scale": -3.0},
    ):
        Inputs(4, (3, 4, 128), torch.bfloat16, **constants).check(str(constants))
    # Coefficients of any size saturate, and zeros stay finite.
    inputs = Inputs(5, (3, 4, 128), torch.bfloat16)
    fn, scale, base, *_ = inputs.projection
    for factor in (1e4, -1e4, 0.0, float("inf")):
        inputs.projection = allnorm.HyperConnectionProjection(fn, scale * factor, base)
        inputs.check(f"factor {factor}")
    inputs.streams = torch.zeros_like(inputs.streams)
    inputs.projection = allnorm.HyperConnectionProjection(fn, scale, base)
    normed, _ = inputs.check("zeros")
    assert bool((normed == 0).all())


@on(cpu=(1,), gpu=(1,))
def test_rows_of_the_matrix_sum_to_one(rank: int, world_size: int) -> None:
    _, connection = Inputs(1, (5, 4, 256), torch.bfloat16)()
    for dim in (-1, -2):
        torch.testing.assert_close(
            connection.mix.sum(dim), torch.ones(5, 4, device=device()), atol=1e-3, rtol=0
        )


@on(cpu=(1,), gpu=(1,))
def test_plain_pytorch(rank: int, world_size: int) -> None:
    """The bits are those of the docstring's formula up to the order of sums."""
    inputs = Inputs(3, (6, 4, 512), torch.float32)
    fn, scale, base, eps, hc_eps, iterations, post_scale = inputs.projection
    flat = inputs.streams.flatten(-2).double()
    flat = torch.nn.functional.rms_norm(flat, flat.shape[-1:], eps=eps)
    pre, post, mix = (flat @ fn.double().mT).split([4, 4, 16], -1)
    pre = torch.sigmoid(pre * scale[0] + base[:4]) + hc_eps
    post = post_scale * torch.sigmoid(post * scale[1] + base[4:8])
    mix = torch.softmax((mix * scale[2] + base[8:]).unflatten(-1, (4, 4)), -1) + hc_eps
    mix = mix / (mix.sum(-2, keepdim=True) + hc_eps)
    for _ in range(iterations - 1):
        mix = mix / (mix.sum(-1, keepdim=True) + hc_eps)
        mix = mix / (mix.sum(-2, keepdim=True) + hc_eps)
    x = (pre.unsqueeze(-1) * inputs.streams).sum(-2)
    normed = torch.nn.functional.rms_norm(x, x.shape[-1:], inputs.weight.double(), 1e-6)
    got, connection = inputs()
    for one, other in ((got, normed), (connection.post, post), (connection.mix, mix.mT)):
        torch.testing.assert_close(one.double(), other, atol=2e-5, rtol=2e-5)


@on(cpu=(1,), gpu=(1,))
def test_strides(rank: int, world_size: int) -> None:
    """Streams may be strided in every way."""
    for dims in ((5,), (2, 3), ()):
        inputs = Inputs(3, (*dims, 4, 128), torch.bfloat16)
        whole = inputs.streams
        wanted = inputs.check()
        layouts = [
            torch.cat((whole, whole), -1)[..., :128],
            torch.cat((whole[..., :1], whole), -1)[..., 1:],
            whole.mT.contiguous().mT,
            whole.movedim(-2, 0).contiguous().movedim(0, -2),
        ]
        for layout in layouts:
            inputs.streams = layout
            assert_equal(inputs(), wanted, f"strides {layout.stride()}")
        inputs.streams = whole[..., :1, :].expand(whole.shape)
        inputs.check("equal streams")


@on(cpu=(1,), gpu=(1,))
def test_a_token_does_not_depend_on_others(rank: int, world_size: int) -> None:
    """Kernels for few tokens and for many return the same bits."""
    inputs = Inputs(7, (200, 4, 2880), torch.bfloat16)
    normed, (post, mix) = inputs.check()
    whole = inputs.streams
    for first, count in ((0, 1), (199, 1), (3, 8), (100, 16), (50, 40)):
        inputs.streams = whole[first : first + count]
        part = slice(first, first + count)
        wanted = normed[part], allnorm.HyperConnection(post[part], mix[part])
        assert_equal(inputs(), wanted, f"{count} tokens")


@on(cpu=(2,), gpu=(2,))
def test_with_the_streams_of_all_reduce_hyper_connection(rank: int, world_size: int) -> None:
    """The connection fits the call after the layer."""
    c = comm()
    inputs = Inputs(2, (3, 4, 128), torch.bfloat16)
    x = torch.full((3, 128), 1.5 + rank, dtype=torch.bfloat16, device=device())
    _, connection = inputs.check()
    xs = [torch.full_like(x, 1.5 + r) for r in range(world_size)]
    got = c.all_reduce_hyper_connection(x, inputs.streams, connection)
    wanted = reference.all_reduce_hyper_connection(xs, inputs.streams, connection)
    assert_same_bits(got, wanted, "new streams")


@on(cpu=(1,), gpu=(1,))
def test_repeated_calls(rank: int, world_size: int) -> None:
    for seed in range(3):  # other tensors of the same geometry
        Inputs(seed, (3, 4, 72), torch.bfloat16).check()
    inputs = Inputs(4, (3, 4, 72), torch.bfloat16)
    with mock.patch.object(stream_input, "_check_tensors", side_effect=AssertionError("checked")):
        assert_equal(inputs(), inputs.wanted(), "a repeated call")
        with pytest.raises(AssertionError, match="checked"):
            inputs(numerics="vllm")
    inputs.weight = torch.full_like(inputs.weight, -0.0)
    for weight_bias in (0, 0.0, -0.0, 0.0):  # only -0.0 keeps the weight's sign
        inputs.check(weight_bias=weight_bias)
    inputs.projection = inputs.projection._replace(post_scale=-0.0)
    inputs.check()
    for wrong in (True, None, "0", torch.ones(())):
        message_of(TypeError, lambda wrong=wrong: inputs(weight_bias=wrong))

    good = Inputs(5, (3, 4, 72), torch.bfloat16)
    good.check()
    fn, streams = good.projection.fn, good.streams
    for name, like in (
        ("columns first", fn.T.contiguous().T),
        ("every second row", fn.repeat_interleave(2, 0)[::2]),
        ("negated", torch._neg_view(fn)),
        ("zeros without memory", torch._efficientzerotensor(fn.shape, device=fn.device)),
        ("misaligned", torch.cat([fn.new_zeros(1), fn.flatten()])[1:].view(fn.shape)),
    ):
        good.projection = good.projection._replace(fn=like)
        good.check(name)
        good.check(f"{name}, again")
    good.projection = good.projection._replace(fn=fn)
    good.streams = streams.transpose(0, 1).contiguous().transpose(0, 1)
    good.check("streams first")
    good.streams = torch.cat([streams.new_zeros(1), streams.flatten()])[1:].view(streams.shape)
    good.check("misaligned streams")
    good.streams = streams
    freed = fn.clone()
    freed.untyped_storage().resize_(0)
    good.projection = good.projection._replace(fn=freed)
    assert "no memory" in message_of(ValueError, good)

    learned = Inputs(6, (3, 4, 72), torch.bfloat16)
    weight = learned.weight = torch.nn.Parameter(learned.weight)
    for _ in range(2):
        with torch.no_grad():
            learned.check()
        assert "requires_grad" in message_of((ValueError, RuntimeError), learned)
    weight.requires_grad_(False)
    learned.check()


@on(cpu=(1,), gpu=(1,))
def test_refusals(rank: int, world_size: int) -> None:
    inputs = Inputs(2, (3, 4, 64), torch.bfloat16)
    streams, good, weight = inputs.streams, inputs.projection, inputs.weight
    fn, scale, base, *_ = good
    change: Callable[..., Any] = good._replace

    def call(*given: Any, **more: Any) -> Any:
        return lambda: allnorm.hyper_connection_input(*given, **more)

    for error, text, given in (
        (TypeError, "projection=None", (streams, None, weight, 1e-6)),
        (TypeError, "projection=(", (streams, (fn, scale, base), weight, 1e-6)),
        (TypeError, "streams is a int", (3, good, weight, 1e-6)),
        (TypeError, "weight is a NoneType", (streams, good, None, 1e-6)),
        (TypeError, "fn is a int", (streams, change(fn=1), weight, 1e-6)),
        (TypeError, "fn has dtype", (streams, change(fn=fn.bfloat16()), weight, 1e-6)),
        (TypeError, "scale has dtype", (streams, change(scale=scale.half()), weight, 1e-6)),
        (TypeError, "base has dtype", (streams, change(base=base.double()), weight, 1e-6)),
        (ValueError, "fn has shape", (streams, change(fn=fn[:-1]), weight, 1e-6)),
        (ValueError, "scale has shape", (streams, change(scale=scale[:2]), weight, 1e-6)),
        (ValueError, "base has shape", (streams, change(base=base[1:]), weight, 1e-6)),
        (ValueError, "2 to 8 streams", (streams[:, :1], good, weight, 1e-6)),
        (ValueError, "2 to 8 streams", (streams[0, 0], good, weight, 1e-6)),
        (ValueError, "fn has shape", (streams[:, :3], good, weight, 1e-6)),
        (allnorm.UnsupportedError, "float64", (streams.double(), good, weight, 1e-6)),
        (TypeError, "weight has dtype", (streams, good, weight.half(), 1e-6)),
        (ValueError, "weight has shape", (streams, good, weight[:3], 1e-6)),
        (ValueError, "weight has shape", (streams.float(), good, weight[:3], 1e-6)),
        (TypeError, "eps=", (streams, good, weight, None)),
        (ValueError, "eps=-1", (streams, good, weight, -1.0)),
        (ValueError, "eps=nan", (streams, good, weight, float("nan"))),
        (ValueError, "eps=1e+39", (streams, good, weight, 1e39)),
        (ValueError, "projection.eps", (streams, change(eps=-1.0), weight, 1e-6)),
        (ValueError, "projection.hc_eps", (streams, change(hc_eps=-1.0), weight, 1e-6)),
        (TypeError, "projection.post_scale", (streams, change(post_scale=True), weight, 1e-6)),
        (ValueError, "projection.iterations", (streams, change(iterations=0), weight, 1e-6)),
        (ValueError, "projection.iterations", (streams, change(iterations=1001), weight, 1e-6)),
        (TypeError, "projection.iterations", (streams, change(iterations=2.0), weight, 1e-6)),
    ):
        found = message_of(error, call(*given))
        assert text in found, (text, found)
    for error, text, more in (
        (ValueError, "numerics=", {"numerics": "exact"}),
        (TypeError, "weight_bias=", {"weight_bias": "1"}),
        (ValueError, "weight_bias=", {"weight_bias": float("inf")}),
    ):
        found = message_of(error, call(streams, good, weight, 1e-6, **more))
        assert text in found, (text, found)
    assert "requires_grad" in message_of(
        (ValueError, RuntimeError), call(streams.clone().requires_grad_(), good, weight, 1e-6)
    )
    inputs.check()


@on(cpu=(1,), gpu=(1,))
def test_operator_and_torch_compile(rank: int, world_size: int) -> None:
    operator = torch.ops.allnorm.hyper_connection_input.default
    for wide in (False, True):
        inputs = Inputs(4, (2, 3, 4, 64), torch.bfloat16, wide)
        fn, scale, base, eps, hc_eps, iterations, post_scale = inputs.projection
        given = (inputs.streams, fn, scale, base, inputs.weight, 1e-6, 0.0, "rounded")
        constants = (eps, hc_eps, iterations, post_scale)
        normed, post, mix = operator(*given, *constants)
        assert_equal((normed, allnorm.HyperConnection(post, mix)), inputs.check(), "operator")
        torch.library.opcheck(operator, (*given, *constants))

    def program(streams: Any, projection: Any, weight: Any) -> Any:
        x, connection = allnorm.hyper_connection_input(streams * 2, projection, weight, 1e-6)
        return x + 1, connection.post * 2, connection.mix

    fast = torch.compile(program, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (4, 6):
        inputs = Inputs(tokens, (tokens, 4, 128), torch.bfloat16)
        arguments = inputs.streams, inputs.projection, inputs.weight
        for one, other in zip(fast(*arguments), program(*arguments), strict=True):
            assert_same_bits(one, other, f"{tokens} tokens")


@pytest.mark.gpu
@on(gpu=(1,))
def test_cuda_graph(rank: int, world_size: int) -> None:
    for tokens in (1, 8, 40):
        inputs = Inputs(tokens, (tokens, 4, 4096), torch.bfloat16)
        inputs()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = inputs()
            again = inputs()
        for seed in range(3):
            inputs.streams.copy_(Inputs(seed, (tokens, 4, 4096), torch.bfloat16).streams)
            graph.replay()
            torch.cuda.synchronize()
            for results in (got, again):
                assert_equal(results, inputs.wanted(), f"replay {seed} of {tokens} tokens")
