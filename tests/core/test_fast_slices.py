"""Tests repeated calls of rms_norm_sharded, which C dispatches: no call is taken for another."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from rank_helpers import Case, comm, message_of, on, used_communicator
from torch.autograd import forward_ad

import allnorm
from allnorm import reference
from allnorm.core import fast_call
from allnorm.core.call import Call
from allnorm.core.slices import Slices
from allnorm.testing import assert_same_bits
from allnorm.testing.rank import device

from .test_fast_call import fields, needs_library, only_c, run_in_c

EPS = 1e-6
BF16 = torch.bfloat16
SHAPE, SIZES = (3,), (2048, 256)
KINDS: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype, dict[str, Any]], ...] = (
    (SHAPE, SIZES, BF16, {}),
    ((2, 5), (120, 64, 24), torch.float16, {"weight_bias": 1.0, "numerics": "transformers"}),
    ((1,), (2880,), torch.float32, {}),
    ((7,), (8, 16, 24, 32), BF16, {"numerics": "unrounded"}),
    ((600,), (64, 64), BF16, {}),
)
_Tensors = list[torch.Tensor]


def ranks_tensors(
    seed: int,
    world_size: int,
    shape: tuple[int, ...] = SHAPE,
    sizes: tuple[int, ...] = SIZES,
    dtype: torch.dtype = BF16,
) -> tuple[list[_Tensors], list[_Tensors]]:
    """Returns new tensors and weights of all ranks; the last weight is float32."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def move(tensors: list[_Tensors]) -> list[_Tensors]:
        return [[x.to(dtype).to(device()) for x in each] for each in tensors]

    xs = move([[draw(*shape, size) for size in sizes] for _ in range(world_size)])
    weights = move([[draw(size) for size in sizes] for _ in range(world_size)])
    return xs, [[*each[:-1], each[-1].float()] for each in weights]


def expected(c: allnorm.Communicator, seed: int, *kind: Any, **options: Any) -> _Tensors:
    """Returns this rank's results for the tensors of a seed."""
    xs, weights = ranks_tensors(seed, c.world_size, *kind)
    bias, numerics = options.get("weight_bias", 0.0), options.get("numerics")
    return reference.rms_norm_sharded(xs, weights, EPS, bias, numerics=numerics)[c.rank]


def own(c: allnorm.Communicator, seed: int = 0, *kind: Any) -> tuple[_Tensors, _Tensors]:
    """Returns new tensors and weights of this rank."""
    xs, weights = ranks_tensors(seed, c.world_size, *kind)
    return xs[c.rank], weights[c.rank]


def compare(results: _Tensors, wanted: _Tensors, what: str = "") -> None:
    for number, (one, other) in enumerate(zip(results, wanted, strict=True)):
        assert_same_bits(one, other, f"tensor {number} {what}")


def check(c: allnorm.Communicator, seed: int = 0) -> None:
    """Makes a call and compares its results."""
    compare(c.rms_norm_sharded(*own(c, seed), EPS), expected(c, seed))


def prepare(c: allnorm.Communicator) -> None:
    """Makes calls until C repeats them."""
    for _ in range(3):
        check(c)


def call_of(c: allnorm.Communicator, xs: Any, weights: Any, outs: Any = None) -> Call:
    slices = Slices(tuple(xs), tuple(weights), outs if outs is None else tuple(outs))
    return Call(op="rms_norm_sharded", source=xs[0], eps=EPS, numerics=c.numerics, slices=slices)


def misaligned(x: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a tensor at an address at which no kernel can read it."""
    if x.device.type == "cuda":
        return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)
    memory = torch.frombuffer(
        bytearray(x.numel() * x.element_size() + 1), dtype=x.dtype, count=x.numel(), offset=1
    )
    return memory.view(x.shape).copy_(x)


@needs_library
@on(cpu=(1, 2, 3), gpu=(1, 2))
def test_repeated_calls(rank: int, world_size: int) -> None:
    """Repeats calls with new values at new addresses, in lists and in tuples."""
    c = comm()
    for *kind, options in KINDS:
        kept: list[_Tensors] = []
        for call in range(6):
            xs, weights = own(c, call, *kind)
            given: Any = (xs, weights) if call % 2 else (tuple(xs), tuple(weights))
            before = [x.clone() for x in xs]
            with only_c(c, call):
                results = c.rms_norm_sharded(*given, EPS, **options)
            compare(results, expected(c, call, *kind, **options), f"{kind} call {call}")
            compare(xs, before, "the input")
            assert type(results) is list
            assert all(one.is_contiguous() for one in results)
            kept.append(results)
        addresses = {one.data_ptr() for results in kept for one in results}
        assert len(addresses) == sum(map(len, kept)), "results of two calls share memory"
    c.check()


def given_memory(xs: _Tensors) -> Iterator[tuple[str, Any]]:
    """Yields preallocated results in different layouts."""
    new = [torch.full_like(x, 7.0) for x in xs]
    yield "new", new
    yield "in place", xs
    yield "the first in place", [xs[0], new[1]]
    yield "the second in place", (new[0], xs[1])
    wide = torch.full((*xs[0].shape[:-1], xs[0].shape[-1] + 64), 7.0, dtype=BF16, device=device())
    yield "rows apart", [wide[..., : xs[0].shape[-1]], new[1]]


@needs_library
@on(cpu=(1, 2), gpu=(1, 2))
def test_repeated_calls_into_given_memory(rank: int, world_size: int) -> None:
    c = comm()
    for number, name in enumerate([name for name, _ in given_memory(own(c)[0])]):
        for call in range(5):
            xs, weights = own(c, call)
            out = list(given_memory(xs))[number][1]
            versions = [one._version for one in out]
            with only_c(c, call):
                results = c.rms_norm_sharded(xs, weights, EPS, out=out)
            assert all(one is other for one, other in zip(results, out, strict=True))
            assert [one._version for one in out] == [v + 1 for v in versions], name
            compare(results, expected(c, call), name)


@needs_library
@on(cpu=(1, 2), gpu=(1, 2))
def test_columns_of_one_matrix(rank: int, world_size: int) -> None:
    """Norms q and k, columns of one matrix, in place and into other columns of the matrix."""
    c, width = comm(), sum(SIZES)
    for shape in ((5,), (2, 3)):
        for first in (0, width):  # of the columns for results
            for call in range(5):
                xs, weights = own(c, call, shape)
                rest = torch.full((*shape, width + 64), 7.0, dtype=BF16, device=device())
                whole = torch.cat((*xs, rest), -1)
                columns = list(whole[..., :width].split(SIZES, -1))
                out = columns if not first else list(whole[..., width : 2 * width].split(SIZES, -1))
                # Python copies results of three dimensions whose rows are apart.
                with only_c(c, call if len(shape) == 1 else 0):
                    c.rms_norm_sharded(columns, weights, EPS, out=out)
                wanted = torch.cat(expected(c, call, shape), -1)
                assert_same_bits(whole[..., first : first + width], wanted, f"from {first}")
                if first:
                    assert_same_bits(whole[..., :width], torch.cat(xs, -1), "the input")
                assert bool((whole[..., 2 * width :] == 7.0).all())
        # Results that begin in the last columns of k, and results that end in the first ones of q.
        for at in (width - 8, 8):
            taken = list(whole[..., at : at + width].split(SIZES, -1))
            norm = functools.partial(c.rms_norm_sharded, columns, weights, EPS, out=taken)
            message = message_of(ValueError, norm)
            assert "shares memory" in message
            dist.barrier()


@needs_library
@on(cpu=(2,), gpu=(2,))
def test_after_a_copied_call(rank: int, world_size: int) -> None:
    """Checks that C reads rows that are apart after Python has read a copy of such rows."""
    c, shape = comm(), (11,)
    for call in range(5):
        xs, weights = own(c, call, shape)
        whole = torch.cat((*xs, torch.ones_like(xs[1])), -1)
        columns = (whole if call else misaligned(whole))[:, : sum(SIZES)].split(SIZES, -1)
        with only_c(c, call):
            results = c.rms_norm_sharded(columns, weights, EPS)
        compare(results, expected(c, call, shape), f"call {call}")


def others(c: allnorm.Communicator) -> Iterator[tuple[str, Call]]:
    """Yields calls that differ from the one of `prepare`, each with its difference."""
    xs, weights = own(c)
    x, y = xs
    w, v = weights

    def named(name: str, xs: Any, weights: Any = weights, outs: Any = None) -> tuple[str, Call]:
        return name, replace(call_of(c, own(c)[0], weights, outs), slices=Slices(xs, weights, outs))

    base = call_of(c, xs, weights)
    wide = torch.zeros(*SHAPE, 2 * SIZES[0], dtype=BF16, device=device())
    for name, other in {
        "rows": x[:2],
        "dimensions": x[None],
        "rows apart": wide[:, : SIZES[0]],
        "dtype": x.half(),
        "columns": x[:, :1024],
        "device": x.to("meta"),
        "gradient": x.clone().requires_grad_(),
        "class": torch.nn.Parameter(x, requires_grad=False),
        "negated": torch._neg_view(x),
        "no tensor": [0.0],
        "None": None,
    }.items():
        yield named(f"first tensor: {name}", (other, y), (w, v))
        yield named(f"second tensor: {name}", (x, other), (w, v))
        yield named(f"first result: {name}", (x, y), (w, v), (other, torch.empty_like(y)))
    for name, other in {
        "dtype": w.float(),
        "columns": w[:-1],
        "gradient": w.clone().requires_grad_(),
        "None": None,
    }.items():
        yield named(f"first weight: {name}", (x, y), (other, v))
    yield named("second weight", (x, y), (w, v.bfloat16()))
    yield named("one slice", (x,), (w,))
    yield named("three slices", (x, y, y.clone()), (w, v, v.clone()))
    yield named("five slices", (x, y) * 3, (w, v) * 3)
    yield named("a slice of nothing", (x, y, None), (w, v, None))
    yield named("other order", (y, x), (v, w))
    yield named("one tensor twice", (x, x), (w, w))
    yield named("weights of another number", (x, y), (w,))
    yield named("results", (x, y), (w, v), (torch.empty_like(x), torch.empty_like(y)))
    yield named("result of nothing", (x, y), (w, v), (torch.empty_like(x), None))
    yield named("no results", (x, y), (w, v), (None, None))
    yield named("results in place", (x, y), (w, v), (x, y))
    lists: Any = [x, y]
    yield named("a list", lists, (w, v))
    constants: dict[str, tuple[Any, ...]] = {
        "op": ("all_reduce",),
        "eps": (1e-5, "1e-6", torch.tensor(EPS)),
        "weight_bias": (1.0, -0.0, 0),
        "numerics": ("vllm",),
        "algorithm": ("one_shot",),
        "weight": (w,),
        "residual": (x.clone(),),
        "prefetch": (w,),
        "slices": (None, (x, y)),
    }
    for field, values in constants.items():
        for value in values:
            if field != "weight":  # the first slice's weight takes its place
                yield f"{field}: {value}", replace(base, **{field: value})
    yield named("misaligned tensor", (x, misaligned(y)), (w, v))
    yield named("misaligned weight", (x, y), (misaligned(w), v))


@needs_library
@on(cpu=(2,), gpu=(2,))
def test_only_equal_calls_are_recognized(rank: int, world_size: int) -> None:
    c = comm()
    prepare(c)
    assert type(run_in_c(c, call_of(c, *own(c)))) is list
    for name, call in others(c):
        assert run_in_c(c, call) is None, name
    dist.barrier()
    # Other weights of equal geometry, and equal constants that are other objects.
    equal = replace(call_of(c, *own(c, 9)), eps=float("1e-6"), algorithm="".join(["au", "to"]))
    compare(run_in_c(c, equal), expected(c, 9))
    same = call_of(c, *own(c))
    with forward_ad.dual_level():
        assert run_in_c(c, same) is None
    with fast_call.watched():
        assert run_in_c(c, same) is None
    with torch.inference_mode():
        assert run_in_c(c, call_of(c, *own(c))) is None
    check(c)


@needs_library
@on(cpu=(2,), gpu=(2,))
def test_other_calls_are_right(rank: int, world_size: int) -> None:
    """Makes calls between repeated ones that C must leave to Python."""
    c = comm()
    prepare(c)
    for kind in (((2,), SIZES, BF16), (SHAPE, SIZES[::-1], BF16), (SHAPE, SIZES, torch.float16)):
        compare(c.rms_norm_sharded(*own(c, 1, *kind), EPS), expected(c, 1, *kind), str(kind))
        with only_c(c):
            check(c, 2)
    xs, weights = own(c)
    wanted = expected(c, 0)
    for _ in range(4):  # the same tensor twice
        first, second = c.rms_norm_sharded([xs[0]] * 2, [weights[0]] * 2, EPS)
        assert_same_bits(first, wanted[0], "twice")
        assert_same_bits(second, wanted[0], "twice")
        odd = [xs[0], misaligned(xs[1])]
        compare(c.rms_norm_sharded(odd, weights, EPS), wanted, "misaligned")
        odd_weights = [misaligned(weights[0]), weights[1]]
        compare(c.rms_norm_sharded(xs, odd_weights, EPS), wanted, "misaligned weight")
        out = [torch.empty_like(xs[0]), odd[1]]
        compare(c.rms_norm_sharded(xs, weights, EPS, out=out), wanted, "misaligned result")
    with only_c(c):
        check(c, 3)


@needs_library
@on(cpu=(2,), gpu=(2,))
def test_refusals_of_repeated_calls(rank: int, world_size: int) -> None:
    """Checks that the geometry of a repeated call does not hide what is wrong with another."""
    c = comm()
    for _ in range(4):
        xs, weights = own(c)
        out = [torch.empty_like(x) for x in xs]
        compare(c.rms_norm_sharded(xs, weights, EPS, out=out), expected(c, 0))
    prepare(c)
    xs, weights = own(c)
    memory = torch.empty(2 * xs[0].numel(), dtype=BF16, device=device())
    shifted = [memory[at:][: x.numel()].view_as(x) for x, at in zip(xs, (0, 8), strict=True)]
    for text, call in (
        ("out[1] shares memory with", lambda: c.rms_norm_sharded(xs, weights, EPS, out=shifted)),
        (
            "out[0] shares memory with tensors[0]",
            lambda: c.rms_norm_sharded(
                [memory[8:][: xs[0].numel()].view_as(xs[0]), xs[1]],
                weights,
                EPS,
                out=[shifted[0], out[1]],
            ),
        ),
        (
            "out[0] shares memory with weights[0]",
            lambda: c.rms_norm_sharded(
                *(xs, [out[0].view(-1)[: SIZES[0]], weights[1]], EPS), out=out
            ),
        ),
        (
            "tensors[1] with requires_grad=True",
            lambda: c.rms_norm_sharded([xs[0], xs[1].clone().requires_grad_()], weights, EPS),
        ),
        (
            "weights[0] with requires_grad=True",
            lambda: c.rms_norm_sharded(xs, [weights[0].clone().requires_grad_(), weights[1]], EPS),
        ),
        (
            "out[1]",
            lambda: c.rms_norm_sharded(xs, weights, EPS, out=[out[0], None]),  # type: ignore[list-item]
        ),
        ("weights[1]", lambda: c.rms_norm_sharded(xs, [weights[0], None], EPS)),  # type: ignore[list-item]
    ):
        message = message_of((ValueError, TypeError), call)
        assert text in message, message
        dist.barrier()
        check(c)


@needs_library
@on(cpu=(2,), gpu=(2,))
def test_repeated_calls_in_other_modes(rank: int, world_size: int) -> None:
    """Makes calls under different autograd modes, with nn.Parameters as weights."""
    modes = (torch.inference_mode, torch.no_grad, contextlib.nullcontext)
    with allnorm.Communicator(device=device()) as c:
        for mode in (*modes, *modes[::-1], torch.no_grad):
            for call in range(4):
                xs, weights = own(c, call)
                if mode is not contextlib.nullcontext:
                    weights = [torch.nn.Parameter(weight) for weight in weights]
                with mode(), only_c(c, call):
                    results = c.rms_norm_sharded([x.clone() for x in xs], weights, EPS)
                compare(results, expected(c, call), mode.__name__)
                assert all(one.is_inference() == (mode is torch.inference_mode) for one in results)
                assert not any(one.requires_grad for one in results)


@needs_library
@on(cpu=(1, 2), gpu=(1, 2))
def test_no_tokens_and_unfused(rank: int, world_size: int) -> None:
    """Python makes these calls, however often."""
    c = comm()
    for _ in range(4):
        xs, weights = own(c, 0, (0,))
        results = c.rms_norm_sharded(xs, weights, EPS)
        assert [x.shape for x in results] == [(0, size) for size in SIZES]
        compare(c.rms_norm_sharded(*own(c), EPS, algorithm="unfused"), expected(c, 0))
    prepare(c)


@needs_library
@on(cpu=(2, 3), gpu=(2,))
def test_alternating_calls(rank: int, world_size: int) -> None:
    """Alternates calls of slices with other calls of one communicator, all repeated by C."""
    c, case = comm(), Case(shape=(3, 4096))
    for turn in range(8):
        with only_c(c, turn):
            check(c, turn)
            case.but(call=turn).check(c)
            compare(
                c.rms_norm_sharded(*own(c, turn, (5,), (64,)), EPS),
                expected(c, turn, (5,), (64,)),
            )
            x = case.x(rank)
            assert_same_bits(
                c.all_reduce(x, out=x), reference.all_reduce(case.xs(world_size)), "all_reduce"
            )
    c.check()


@needs_library
@on(cpu=(2,))
def test_a_repeated_call_raises_if_a_peer_is_missing(rank: int, world_size: int) -> None:
    def into(c: allnorm.Communicator, out: _Tensors) -> _Tensors:
        return c.rms_norm_sharded(*own(c), EPS, out=out)

    out = [torch.empty(*SHAPE, size, dtype=BF16) for size in SIZES]
    with used_communicator(0.5, *3 * [lambda c: into(c, out)]) as c:
        if rank == 0:
            with only_c(c):
                message = message_of(allnorm.PeerTimeoutError, lambda: into(c, out))
            assert "rank 1" in message
            assert all(bool(x.isnan().all()) for x in out)
        dist.barrier()


@needs_library
@on(cpu=(2,), gpu=(2,))
def test_references(rank: int, world_size: int) -> None:
    """Checks that C neither keeps references to tensors nor releases any of them twice."""
    c = comm()
    prepare(c)
    call = call_of(c, *own(c))
    assert call.slices is not None
    watched = [call.slices, call.slices.tensors, call.slices.weights, *call.slices.given, None]
    wrong = replace(call, slices=Slices(call.slices.tensors, call.slices.weights[:1], None))
    gc.collect()
    before = [sys.getrefcount(thing) for thing in watched]
    dispatcher = c._endpoint.dispatcher
    dispatcher.run = lambda call: None  # type: ignore[method-assign]
    for _ in range(1000):
        assert dispatcher.call(**fields(call)) is not None
        assert dispatcher.call(**fields(wrong)) is None
    del dispatcher.run
    after = [sys.getrefcount(thing) for thing in watched]
    assert all(abs(a - b) < 50 for a, b in zip(after, before, strict=True)), (before, after)
    xs, weights = own(c)
    with only_c(c):
        results = c.rms_norm_sharded(xs, weights, EPS)
    alive = [weakref.ref(one) for one in (*xs, *weights, *results)]
    del xs, weights, results
    assert not any(reference() is not None for reference in alive)
    c.check()
