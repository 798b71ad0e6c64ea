"""Tests arguments that kernels cannot read, or that are invalid on one rank only.

Neither first calls nor repeated calls, which C dispatches, may return wrong results. If one rank
refuses a call, its peers must raise long before their timeout.
"""

from __future__ import annotations

import decimal
import fractions
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rank_helpers import Case, comm, device, message_of, on, run_and_check, same_on_every_rank

import allnorm
from allnorm import quant as quants
from allnorm import reference
from allnorm.core.prepared_call import Result
from allnorm.testing import assert_same_bits

CASE = Case((4, 64), torch.float32)
TIMEOUT_SECONDS, SOON_SECONDS = 120.0, 30.0
REPEATS = (0, 4)  # number of earlier calls of the same kind


class Plain(torch.Tensor):
    """A tensor subclass with ordinary memory."""


class Wrapper(torch.Tensor):
    """A tensor subclass without its own memory, which wraps a tensor."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return f(*[a.inner if isinstance(a, cls) else a for a in args], **(kwargs or {}))


def distributed(tensor: torch.Tensor) -> torch.Tensor:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    return DTensor.from_local(tensor, mesh, run_check=False)


def awaited(tensor: torch.Tensor) -> torch.Tensor:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return AsyncCollectiveTensor(tensor)


def masked(tensor: torch.Tensor) -> torch.Tensor:
    from torch.masked import masked_tensor

    made: torch.Tensor = masked_tensor(tensor.clone(), tensor == tensor)
    return made


# name: (function that converts a valid tensor, text in the error message)
KINDS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "a subclass": (lambda t: t.as_subclass(Plain), ".as_subclass(torch.Tensor)"),
    "a wrapper": (Wrapper, "is a Wrapper"),
    "DTensor": (distributed, ".to_local()"),
    "AsyncCollectiveTensor": (awaited, ".wait()"),
    "masked": (masked, ".get_data()"),
    "sparse": (lambda t: t.to_sparse(), "sparse"),
    "functional": (torch._to_functional_tensor, "functionalisation"),
    "requires grad": (lambda t: t.clone().requires_grad_(), "torch.no_grad()"),
}
PLACES = ("x", "residual", "weight", "out", "residual_out")


def good(c: allnorm.Communicator, into: bool = True) -> dict[str, Any]:
    """Returns a valid call's arguments in new tensors; with `into`, also memory for results."""
    x = CASE.x(c.rank)
    memory = {"out": torch.empty_like(x), "residual_out": torch.empty_like(x)} if into else {}
    return {"x": x, **CASE.call_arguments(c), **memory}


@on(cpu=(2,), gpu=(2,))
@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_tensors_are_refused(rank: int, world_size: int, name: str) -> None:
    make, words = KINDS[name]
    c, texts = comm(), []
    call = c.all_reduce_add_rms_norm
    for repeats in REPEATS:
        for place in PLACES:
            for _ in range(repeats):
                CASE.compare(c, *call(**good(c)))
                CASE.compare(c, *call(**good(c, into=False)))
            arguments = good(c, into="out" in place)
            arguments[place] = make(arguments[place])
            texts.append(message_of((TypeError, ValueError), lambda a=arguments: call(**a)))
            assert place in texts[-1], texts[-1]
            assert words in texts[-1], texts[-1]
            CASE.compare(c, *call(**good(c, into="out" in place)))
        x = make(CASE.x(rank))
        for refused in (
            lambda t=x: c.all_reduce(t),
            lambda t=x: c.all_reduce(t, algorithm="unfused"),
            lambda t=x: allnorm.add_rms_norm(t, None, CASE.weight(), 1e-6),
            lambda t=x: allnorm.add_rms_norm(CASE.x(rank), t, CASE.weight(), 1e-6),
            lambda t=x: allnorm.add_rms_norm_quant(
                t, None, CASE.weight(), 1e-6, quant=quants.DEFAULT_QUANT
            ),
            lambda t=x: c.all_gather_rows(t, 4 * world_size),
        ):
            texts.append(message_of((TypeError, ValueError), refused))
            assert words in texts[-1], texts[-1]
            for _ in range(repeats):
                c.all_reduce(CASE.x(rank))
                c.all_gather_rows(CASE.x(rank), 4 * world_size)
                allnorm.add_rms_norm(CASE.x(rank), None, CASE.weight(), 1e-6)
                allnorm.add_rms_norm(CASE.x(rank), CASE.x(rank), CASE.weight(), 1e-6)
    assert c.check() is None
    same_on_every_rank(texts)


@on(cpu=(1, 2), gpu=(2,))
def test_a_scale_that_requires_grad(rank: int, world_size: int) -> None:
    """Such a scale is accepted only while gradients are disabled."""
    scale = torch.ones(1, device=device(), requires_grad=True)
    case = CASE.but(quant=allnorm.Fp8PerTensor(scale))
    for _ in range(3):
        assert "torch.no_grad()" in message_of(ValueError, lambda: case.run(comm()))
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                case.check(comm())


def freed(tensor: torch.Tensor) -> torch.Tensor:
    made = tensor.clone()
    made.untyped_storage().resize_(0)
    return made


def freed_view(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view of freed memory; its address is its offset."""
    whole = torch.stack([tensor, tensor])
    view = whole[1]
    whole.untyped_storage().resize_(0)
    return view


@on(cpu=(1, 2, 3), gpu=(2,))
@pytest.mark.parametrize("free", [freed, freed_view])
def test_freed_memory(
    rank: int, world_size: int, free: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Every rank refuses tensors in freed memory, so the communicator stays usable."""
    c = comm()
    quantized = CASE.but(quant=allnorm.Fp8PerToken())
    tensor = allnorm.Fp8PerTensor(free(torch.ones(2, 1, device=c.device)[1]))
    for repeats in REPEATS:
        for place in PLACES:
            for _ in range(repeats):
                CASE.compare(c, *c.all_reduce_add_rms_norm(**good(c)))
                CASE.compare(c, *c.all_reduce_add_rms_norm(**good(c, into=False)))
            for algorithm in ("auto", "two_shot", "unfused"):
                arguments = {**good(c, into="out" in place), "algorithm": algorithm}
                arguments[place] = free(arguments[place])
                text = message_of(ValueError, lambda a=arguments: c.all_reduce_add_rms_norm(**a))
                assert f"{place} has shape" in text
                assert "no memory" in text
        for call in (
            lambda: c.all_reduce(free(CASE.x(rank))),
            lambda: c.all_gather_rows(free(CASE.x(rank)), 4 * world_size),
            lambda: allnorm.add_rms_norm(free(CASE.x(rank)), None, CASE.weight(), 1e-6),
            lambda: allnorm.add_rms_norm(CASE.x(rank), free(CASE.x(rank)), CASE.weight(), 1e-6),
            lambda: allnorm.add_rms_norm(CASE.x(rank), None, free(CASE.weight()), 1e-6),
            lambda: quantized.run(c, scale_out=free(torch.ones(4, 1, device=c.device))),
            lambda: CASE.but(quant=tensor).run(c),
        ):
            for _ in range(repeats):
                c.all_reduce(CASE.x(rank))
                allnorm.add_rms_norm(CASE.x(rank), CASE.x(rank), CASE.weight(), 1e-6)
                allnorm.add_rms_norm(CASE.x(rank), None, CASE.weight(), 1e-6)
            assert "no memory" in message_of(ValueError, call)
    CASE.check(c)
    quantized.check(c)


def negated(tensor: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = torch._neg_view(-tensor)
    assert made.is_neg()
    return made


def imaginary(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor that torch negates lazily, through its public functions."""
    made = torch.complex(torch.zeros_like(tensor), -tensor).conj().imag
    assert made.is_neg()
    return made


@on(cpu=(1, 2), gpu=(2,))
def test_negated_and_zero_tensors_are_resolved(rank: int, world_size: int) -> None:
    """Tests tensors that are lazily negated, and zero tensors without memory."""
    c = comm()
    zeros = torch._efficientzerotensor
    xs = CASE.xs(world_size)
    for algorithm in ("auto", "two_shot", "unfused") * 2:
        for place in ("x", "residual", "weight"):
            arguments = {**good(c, into=False), "algorithm": algorithm}
            arguments[place] = negated(arguments[place])
            CASE.compare(c, *c.all_reduce_add_rms_norm(**arguments))
            shape = arguments[place].shape
            arguments[place] = zeros(shape, dtype=torch.float32, device=c.device)
            plain = {**arguments, place: torch.zeros(shape, device=c.device)}
            want = c.all_reduce_add_rms_norm(**plain)
            for _ in range(2):
                got = c.all_reduce_add_rms_norm(**arguments)
                assert_same_bits(got[0], want[0], f"normed, zero {place}")
                assert_same_bits(got[1], want[1], f"residual_out, zero {place}")
        chosen = {"algorithm": algorithm}
        x = CASE.x(rank)
        out, residual_out = negated(torch.ones_like(x)), negated(torch.ones_like(x))
        results = CASE.run(c, out=out, residual_out=residual_out, **chosen)
        assert results[0] is out
        assert results[1] is residual_out
        CASE.compare(c, *(result.resolve_neg() for result in results))
        want = reference.all_reduce(xs)
        assert_same_bits(c.all_reduce(negated(x), algorithm=algorithm), want, "negated")
        # imag has strided columns, so use one column. CUDA kernels need rows of at least 16 bytes.
        any_width = "unfused" if c.device.type == "cuda" else algorithm
        column = c.all_reduce(imaginary(x)[:, :1], algorithm=any_width)
        assert_same_bits(column, want[:, :1].contiguous(), "imaginary parts")
        gathered = c.all_gather_rows(negated(x), 4 * world_size, algorithm=algorithm)
        assert_same_bits(gathered, torch.cat(xs), "gathered")
        per_tensor = CASE.but(quant=allnorm.Fp8PerTensor(torch.full((1,), 0.5, device=c.device)))
        negative = allnorm.Fp8PerTensor(negated(torch.full((1,), 0.5, device=c.device)))
        results = per_tensor.run(c, quant=negative, **chosen)
        assert results.scale is negative.scale
        per_tensor.compare(c, results.quantized, per_tensor.quant.scale, *results[2:])
    residual, weight = CASE.residual_tensor(), CASE.weight()
    want = allnorm.add_rms_norm(x, residual, weight, 1e-6)
    for _ in range(4):
        got = allnorm.add_rms_norm(negated(x), negated(residual), negated(weight), 1e-6)
        assert_same_bits(got[0], want[0], "local")
    out = zeros(CASE.shape, dtype=torch.float32, device=c.device)
    assert "zero tensor" in message_of(ValueError, lambda: c.all_reduce(x, out=out))


@on(cpu=(1, 2), gpu=(2,))
def test_lazy_clones_are_not_written_through(rank: int, world_size: int) -> None:
    c = comm()
    want = reference.all_reduce(CASE.xs(world_size))
    for _ in range(4):
        x = CASE.x(rank)
        clone = torch._lazy_clone(x)
        assert c.all_reduce(clone, out=clone) is clone
        assert_same_bits(clone, want, "the clone")
        assert_same_bits(x, CASE.x(rank), "the original")
        out = torch._lazy_clone(x)
        c.all_reduce(torch._lazy_clone(x), out=out)
        assert_same_bits(out, want, "a second clone")
        assert_same_bits(x, CASE.x(rank), "the original")


def at_odd_address(tensor: torch.Tensor) -> torch.Tensor:
    buffer = bytearray(tensor.numel() * tensor.element_size() + 64)
    begin = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr() % 16
    view = torch.frombuffer(
        buffer, dtype=tensor.dtype, offset=17 - begin, count=tensor.numel()
    ).view(tensor.shape)
    assert view.data_ptr() % 2 == 1
    return view.copy_(tensor)


@on(cpu=(1, 2))
def test_addresses_between_elements(rank: int, world_size: int) -> None:
    """Tests addresses on rank 0 that are not multiples of the element size."""
    c = comm()
    move = at_odd_address if rank == 0 else torch.clone
    for dtype in (torch.bfloat16, torch.float32):
        case = CASE.but(dtype=dtype)
        for _ in range(4):
            for place in ("", *PLACES):
                x = case.x(rank)
                arguments = {"x": x, **case.call_arguments(c)}
                if "out" in place:
                    arguments |= {"out": torch.empty_like(x), "residual_out": torch.empty_like(x)}
                if place:
                    arguments[place] = move(arguments[place])
                results = c.all_reduce_add_rms_norm(**arguments)
                case.compare(c, *results)
                if "out" in place:
                    assert results[PLACES.index(place) - 3] is arguments[place]


def overlapping(c: allnorm.Communicator) -> Any:
    x = CASE.x(c.rank)
    big = torch.cat([x, x])
    return c.all_reduce(big[:4], out=big[1:5])


def expanded_shard(c: allnorm.Communicator) -> Any:
    rows = CASE.but(shape=(3, 64), sharded=True)
    lo, hi = c.row_shard(3)
    memory = torch.zeros(1, 64, device=c.device).expand(hi - lo, 64)
    return rows.run(c, residual_out=memory)


def wrong_height(c: allnorm.Communicator) -> Any:
    rows = CASE.but(shape=(3, 64), sharded=True)
    return rows.run(c, residual=torch.zeros(1, 64, device=c.device))


def own_rows_of_x(c: allnorm.Communicator) -> Any:
    row = CASE.but(shape=(1, 64), sharded=True)
    lo, hi = c.row_shard(1)
    x = row.x(c.rank)
    return c.all_reduce_add_rms_norm(
        x, None, row.weight(), 1e-6, residual_sharded=True, residual_out=x[lo:hi]
    )


def gathered_height(c: allnorm.Communicator) -> Any:
    return c.all_gather_rows(torch.zeros(1, 64, device=c.device), 3)


def out_of_memory(c: allnorm.Communicator) -> Any:
    def fail(*args: Any) -> Any:
        raise MemoryError("no memory for results")

    with mock.patch.object(Result, "make", fail):
        return c.all_reduce(CASE.but(shape=(5, 64)).x(c.rank))


# Calls that rank 0 refuses for a reason that its peers cannot see, and text in its error.
ALONE: dict[str, tuple[Callable[[allnorm.Communicator], Any], str]] = {
    "freed x": (lambda c: c.all_reduce(freed(CASE.x(c.rank))), "no memory"),
    "freed residual": (lambda c: CASE.run(c, residual=freed(CASE.residual_tensor())), "no memory"),
    "freed out": (lambda c: c.all_reduce(CASE.x(c.rank), out=freed(CASE.x(0))), "no memory"),
    "overlap": (overlapping, "shares memory"),
    "columns apart": (
        lambda c: c.all_reduce(CASE.x(c.rank).repeat(1, 2)[:, ::2]),
        "contiguous last dimension",
    ),
    "an expanded shard": (expanded_shard, "distinct"),
    "a shard too low": (wrong_height, "this rank's rows"),
    "own rows of x": (own_rows_of_x, "shares memory"),
    "too few rows to gather": (gathered_height, "this rank's rows"),
    "out of memory": (out_of_memory, "no memory for results"),
}
# Rank 1 makes these calls too, because its rows differ. Otherwise it calls all_reduce.
SAME = {
    "an expanded shard": expanded_shard,
    "a shard too low": wrong_height,
    "own rows of x": own_rows_of_x,
    "too few rows to gather": gathered_height,
}


def refuse_alone(rank: int, world_size: int, name: str, unfused: bool, repeats: int) -> str:
    """Makes a call that rank 0 refuses; returns this rank's error."""
    call, words = ALONE[name]
    c = allnorm.Communicator(device=device(), timeout=TIMEOUT_SECONDS)
    run = c._dispatcher.call
    forced = mock.patch.object(
        c._dispatcher,
        "call",
        (lambda **fields: run(**{**fields, "algorithm": "unfused"})) if unfused else run,
    )
    for _ in range(repeats):
        CASE.check(c)
        c.all_reduce(CASE.x(rank))
    dist.barrier()
    start = time.monotonic()
    with forced:
        if rank == 0:
            text = message_of((ValueError, MemoryError), lambda: call(c))
            assert words in text
        else:
            other = SAME.get(name, lambda c: c.all_reduce(CASE.x(rank)))
            text = message_of(allnorm.PeerDivergedError, lambda: run_and_check(c, lambda: other(c)))
            assert "it has refused it" in text
    assert time.monotonic() - start < SOON_SECONDS
    dist.barrier()
    c.close()
    with allnorm.Communicator(device=device()) as fresh:
        CASE.check(fresh)
    return text


@on(cpu=(2,), gpu=(2,))
@pytest.mark.parametrize("repeats", REPEATS)
@pytest.mark.parametrize("name", ALONE)
def test_peers_learn_why_a_rank_refuses_a_call(
    rank: int, world_size: int, name: str, repeats: int
) -> None:
    assert ALONE[name][1] in refuse_alone(rank, world_size, name, False, repeats)


@on(cpu=(2,))
@pytest.mark.parametrize("name", ALONE)
def test_peers_learn_that_a_rank_refuses_an_unfused_call(
    rank: int, world_size: int, name: str
) -> None:
    refuse_alone(rank, world_size, name, True, 0)


@on(cpu=(1, 2), gpu=(2,))
def test_types_and_signs_of_constants(rank: int, world_size: int) -> None:
    """Checks that equal values of different type or sign are not mistaken for each other."""
    c, x = comm(), CASE.x(rank)
    weight = torch.full((64,), -0.0, device=c.device)
    for zero in (float, np.float32, np.float64, fractions.Fraction):
        for first, second in ((0.0, -0.0), (-0.0, 0.0)):
            for bias in (*[zero(first)] * 4, zero(second), zero(first)):
                normed, _ = c.all_reduce_add_rms_norm(x, None, weight, 1e-6, weight_bias=bias)
                want, _ = reference.all_reduce_add_rms_norm(
                    CASE.xs(world_size), None, weight, 1e-6, weight_bias=float(bias)
                )
                assert_same_bits(normed, want, f"weight_bias {bias!r}")
                local, _ = allnorm.add_rms_norm(x, None, weight, 1e-6, weight_bias=bias)
                want, _ = reference.add_rms_norm(x, None, weight, 1e-6, weight_bias=float(bias))
                assert_same_bits(local, want, f"local, weight_bias {bias!r}")
    given = (x, CASE.residual_tensor(), CASE.weight())
    for eps in (0.0, 1.0):
        for _ in range(4):
            want = c.all_reduce_add_rms_norm(*given, eps)
        wrong = (str(eps), decimal.Decimal(eps), bool(eps), torch.tensor(eps), [eps], None, 10**400)
        for value in wrong:
            for name in ("eps", "weight_bias"):
                refused = {"eps": eps, name: value}
                kinds = (TypeError, ValueError)
                for call in (c.all_reduce_add_rms_norm, allnorm.add_rms_norm):
                    more = {"eps": eps, **refused}
                    text = message_of(kinds, lambda f=call, m=more: f(*given, **m))
                    assert name in text, text
        for value in (int(eps), np.float32(eps), np.float64(eps), fractions.Fraction(eps)):
            for _ in range(4):
                got = c.all_reduce_add_rms_norm(*given, value)
                assert_same_bits(got[0], want[0], f"eps {value!r}")
    assert "float32" in message_of(
        ValueError, lambda: c.all_reduce_add_rms_norm(*given, eps, weight_bias=1e39)
    )
    shard = torch.ones(1, 64, device=c.device)
    for _ in range(4):
        c.all_gather_rows(shard, world_size)
        for count in (np.int64(world_size), float(world_size), True, str(world_size)):
            text = message_of(TypeError, lambda n=count: c.all_gather_rows(shard, n))
            assert "num_tokens" in text
    for flag in (0, np.bool_(False), 0.0):
        text = message_of(
            TypeError, lambda f=flag: c.all_reduce_add_rms_norm(*given, eps, residual_sharded=f)
        )
        assert "residual_sharded" in text
    CASE.check(c)
