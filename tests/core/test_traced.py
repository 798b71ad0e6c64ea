"""Tests torch's transforms and tracers on calls: results are right, or the call is refused.

Each transform or tracer is applied to methods, functions and operators, for first and repeated
calls. Results are compared with those of a plain call, for inputs that were not used for tracing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_helpers import comm, message_of, on, same_on_every_rank
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import allnorm
from allnorm.quant import op_arguments
from allnorm.testing import assert_same_bits, rank_input
from allnorm.testing.rank import device

SHAPE, EPS = (3, 64), 1e-6
REPEATS = (0, 4)  # number of earlier calls of the same kind
Program = Callable[[torch.Tensor, torch.Tensor], Any]


class _Forms:
    """All forms of calls, as programs that take `x` and a residual or rows."""

    def __init__(self, c: allnorm.Communicator) -> None:
        weight = torch.linspace(0.5, 2, SHAPE[1], device=c.device)
        quant = allnorm.Fp8PerGroup(32)
        ops, name = torch.ops.allnorm, c.name
        lo, hi = c.row_shard(SHAPE[0])
        post_norm = allnorm.PostNorm(weight, EPS)

        def of(calls: Any) -> dict[str, Program]:
            return {
                "all_reduce": lambda x, r: calls.all_reduce(x),
                "norm": lambda x, r: calls.all_reduce_add_rms_norm(
                    x, r, weight, EPS, post_norm=post_norm, scale=0.5
                ),
                "sharded": lambda x, r: calls.all_reduce_add_rms_norm(
                    x, r[lo:hi], weight, EPS, residual_sharded=True
                ),
                "quant": lambda x, r: tuple(
                    calls.all_reduce_add_rms_norm_quant(x, r, weight, EPS, quant, True)
                ),
                "rows": lambda x, r: calls.all_gather_rows(x[lo:hi], SHAPE[0]),
            }

        before = (weight, EPS, 0.0, 0.5)
        self.programs: dict[str, Program] = {
            **{f"method {key}": f for key, f in of(c).items()},
            **{f"function {key}": f for key, f in of(allnorm).items()},
            "function local": lambda x, r: allnorm.add_rms_norm(x, r, weight, EPS),
            "function local quant": lambda x, r: tuple(
                allnorm.add_rms_norm_quant(x, r, weight, EPS, quant, True)
            ),
            "operator all_reduce": lambda x, r: ops.all_reduce(x, name),
            "operator norm": lambda x, r: ops.all_reduce_add_rms_norm(
                x, r, weight, EPS, 0.0, "rounded", name, False, None, "auto", *before
            ),
            "operator quant": lambda x, r: ops.all_reduce_add_rms_norm_quant(
                x, r, weight, EPS, *op_arguments(quant), True, 0.0, "rounded", name
            ),
            "operator rows": lambda x, r: ops.all_gather_rows(x[lo:hi], SHAPE[0], name),
            "operator local": lambda x, r: ops.add_rms_norm(x, r, weight, EPS, 0.0, "rounded"),
        }


class _Doubling(TorchDispatchMode):
    """Doubles the first result of every operator of allnorm."""

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = f(*args, **(kwargs or {}))
        if f.namespace != "allnorm":
            return results
        if isinstance(results, tuple | list):
            return (results[0].float() * 2, *results[1:])
        return results * 2


class _Watching(TorchFunctionMode):
    def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return f(*args, **(kwargs or {}))


class _Module(torch.nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program

    def forward(self, x: torch.Tensor, r: torch.Tensor) -> Any:
        return self.program(x, r)


def _second(results: Any) -> Any:
    return tuple(t[1] for t in results) if isinstance(results, tuple) else results[1]


def _first(results: Any) -> torch.Tensor:
    result: torch.Tensor = results[0] if isinstance(results, tuple) else results
    return result


def _vmap(f: Program, x: torch.Tensor, r: torch.Tensor) -> Any:
    return _second(torch.vmap(f)(torch.stack([x * 2, x]), torch.stack([r + 1, r])))


def _function_mode(f: Program, x: torch.Tensor, r: torch.Tensor) -> Any:
    with _Watching(), torch.device("meta"):  # which makes factory functions create meta tensors
        return f(x, r)


def _traced(
    trace: Callable[..., Any], **options: Any
) -> Callable[[Program, torch.Tensor, torch.Tensor], Any]:
    def run(f: Program, x: torch.Tensor, r: torch.Tensor) -> Any:
        return trace(f, torch.ones_like(x), torch.zeros_like(r), **options)(x, r)

    return run


def _jit(f: Program, x: torch.Tensor, r: torch.Tensor) -> Any:
    return torch.jit.trace(f, (x, r), check_trace=False)


def _make_fx(f: Program, x: torch.Tensor, r: torch.Tensor, **options: Any) -> Any:
    return make_fx(f, _allow_non_fake_inputs=True, **options)(x, r)


def _export(f: Program, x: torch.Tensor, r: torch.Tensor, strict: bool) -> Any:
    return torch.export.export(_Module(f), (x, r), strict=strict).module()


RIGHT: dict[str, Callable[[Program, torch.Tensor, torch.Tensor], Any]] = {
    "torch.jit.trace": _traced(_jit),
    "vmap": _vmap,
    "vmap of functionalize": lambda f, x, r: _vmap(torch.func.functionalize(f), x, r),
    "functionalize": lambda f, x, r: torch.func.functionalize(f)(x, r),
    "make_fx": _traced(_make_fx),
    "make_fx, fake": _traced(_make_fx, tracing_mode="fake"),
    "make_fx, symbolic": _traced(_make_fx, tracing_mode="symbolic"),
    "make_fx, pre_dispatch": _traced(_make_fx, pre_dispatch=True),
    "torch.export": _traced(_export, strict=False),
    "a function mode": _function_mode,
}


def _tangents(f: Program, x: torch.Tensor, r: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        return f(forward_ad.make_dual(x, torch.ones_like(x)), r)


REFUSED: dict[str, Callable[[Program, torch.Tensor, torch.Tensor], Any]] = {
    "grad": lambda f, x, r: torch.func.grad(lambda t: _first(f(t, r)).float().sum())(x),
    "vjp": lambda f, x, r: torch.func.vjp(f, x, r),
    "jvp": lambda f, x, r: torch.func.jvp(f, (x, r), (x, r)),
    "jacfwd": lambda f, x, r: torch.func.jacfwd(lambda t: _first(f(t, r)))(x),
    "jacrev": lambda f, x, r: torch.func.jacrev(lambda t: _first(f(t, r)))(x),
    "vmap of grad": lambda f, x, r: torch.vmap(
        torch.func.grad(lambda t, s: _first(f(t, s)).float().sum())
    )(torch.stack([x, x]), torch.stack([r, r])),
    "forward AD": _tangents,
    "autograd.functional.jvp": lambda f, x, r: torch.autograd.functional.jvp(
        lambda t: _first(f(t, r)), x, x
    ),
}


def _inputs(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = rank_input(SHAPE, torch.float32, rank, call=3, device=device())
    return x, rank_input(SHAPE, torch.float32, 7, call=4, device=device())


def _compare(got: Any, want: Any, what: str) -> None:
    got, want = (v if isinstance(v, tuple | list) else (v,) for v in (got, want))
    for place, (mine, expected) in enumerate(zip(got, want, strict=True)):
        assert_same_bits(mine, expected, f"{what}, result {place}")


@on(cpu=(2,), gpu=(2,))
@pytest.mark.parametrize("name", RIGHT)
def test_right_under_tracers(rank: int, world_size: int, name: str) -> None:
    transform, (x, r) = RIGHT[name], _inputs(rank)
    for form, program in _Forms(comm()).programs.items():
        for repeats in REPEATS:
            for _ in range(repeats):
                program(x, r)
            _compare(transform(program, x, r), program(x, r), f"{name}, {form}, {repeats}")
    comm().check()


@on(cpu=(2,), gpu=(2,))
@pytest.mark.parametrize("name", REFUSED)
def test_gradients_are_refused(rank: int, world_size: int, name: str) -> None:
    transform, (x, r), texts = REFUSED[name], _inputs(rank), []
    for form, program in _Forms(comm()).programs.items():
        for repeats in REPEATS:
            want = [program(x, r) for _ in range(max(repeats, 1))][-1]
            text = message_of(ValueError, lambda f=program: transform(f, x, r))
            assert "results carry no gradient" in text, (form, text)
            assert "torch.inference_mode()" in text, (form, text)
            texts.append(text)
            _compare(program(x, r), want, f"after {name}, {form}")
    comm().check()
    same_on_every_rank(texts)


@on(cpu=(2,), gpu=(2,))
def test_tangents_of_every_input(rank: int, world_size: int) -> None:
    """Checks that tangents of any input are refused, unless they are detached or without effect."""
    c, (x, r) = comm(), _inputs(rank)
    weight = torch.ones(SHAPE[1], device=c.device)
    given = {"x": x, "residual": r, "weight": weight}
    want = [c.all_reduce_add_rms_norm(**given, eps=EPS) for _ in range(4)][-1]
    for name, tensor in given.items():
        with forward_ad.dual_level():
            dual = {**given, name: forward_ad.make_dual(tensor, torch.ones_like(tensor))}
            text = message_of(ValueError, lambda d=dual: c.all_reduce_add_rms_norm(**d, eps=EPS))
            assert f"{name} has a tangent" in text, text
            detached = {key: tensor.detach() for key, tensor in dual.items()}
            _compare(c.all_reduce_add_rms_norm(**detached, eps=EPS), want, "detached")
            _compare(c.all_reduce_add_rms_norm(**given, eps=EPS), want, "without tangents")
            with torch.inference_mode():
                _compare(c.all_reduce_add_rms_norm(**dual, eps=EPS), want, "inference mode")


NESTED: dict[str, Callable[[Program, torch.Tensor, torch.Tensor], Any]] = {
    "mapped over": lambda f, n, r: torch.vmap(lambda t: f(t, r))(n),
    "x under vmap": lambda f, n, r: torch.vmap(lambda t: f(n, t))(torch.stack([r, r])),
    "residual under vmap": lambda f, n, r: torch.vmap(lambda t: f(t, n))(torch.stack([r, r])),
    "under grad": lambda f, n, r: torch.func.grad(lambda t: _first(f(n, r)).sum() + t.sum())(r),
    "under functionalize": lambda f, n, r: torch.func.functionalize(lambda t: f(n, t))(r),
    "alone": lambda f, n, r: f(n, r),
}


@on(cpu=(2,), gpu=(2,))
@pytest.mark.parametrize("layout", ["strided", "jagged"])
@pytest.mark.parametrize("name", NESTED)
def test_nested_tensors(rank: int, world_size: int, name: str, layout: str) -> None:
    """Nested tensors are refused, or each part of the result equals that part's call."""
    x, r = _inputs(rank)
    nested = torch.nested.nested_tensor([x, 2 * x], layout=getattr(torch, layout))
    num_refused = 0
    for form, program in _Forms(comm()).programs.items():
        parts = (x, 2 * x) if name == "mapped over" else (r, r)
        for repeats in REPEATS:
            want = [[_first(program(part, r)) for part in parts] for _ in range(repeats or 1)][-1]
            try:
                got = _first(NESTED[name](program, nested, r))
            except (TypeError, ValueError, RuntimeError):
                num_refused += 1
            else:
                _compare(got.unbind(), want, f"{name}, {form}, {repeats}")
            _compare(_first(program(parts[0], r)), want[0], f"after {name}, {form}")
    assert num_refused > 0
    comm().check()


@on(cpu=(2,), gpu=(2,))
def test_dispatch_modes_see_calls(rank: int, world_size: int) -> None:
    """A dispatch mode must see first and repeated calls, and its results must be returned."""
    x, r = _inputs(rank)
    for form, program in _Forms(comm()).programs.items():
        for repeats in REPEATS:
            want = [_first(program(x, r)) for _ in range(max(repeats, 1))][-1]
            with _Doubling():
                got = _first(program(x, r))
            assert_same_bits(got, (want.float() * 2).to(got.dtype), form)


@on(cpu=(2,), gpu=(2,))
def test_given_results(rank: int, world_size: int) -> None:
    """Tracing keeps preallocated memory for results; vmap refuses it."""
    c, (x, r) = comm(), _inputs(rank)
    weight, want = torch.ones(SHAPE[1], device=c.device), None
    out, residual_out = torch.empty_like(x), torch.empty_like(x)

    def program(x: torch.Tensor, r: torch.Tensor) -> Any:
        return c.all_reduce_add_rms_norm(x, r, weight, EPS, out=out, residual_out=residual_out)

    for repeats in REPEATS:
        for _ in range(repeats):
            program(x, r)
        want = tuple(t.clone() for t in program(x, r))
        traced = _jit(program, torch.ones_like(x), r)
        for memory in (out, residual_out):
            memory.fill_(7)
        _compare(traced(x, r), want, "traced")
        _compare((out, residual_out), want, "memory")
        text = message_of(ValueError, lambda: _vmap(program, x, r))
        assert "torch.vmap" in text
        assert "expected None" in text


@on(cpu=(2,), gpu=(2,))
def test_torchscript_keeps_calls(rank: int, world_size: int) -> None:
    """TorchScript neither drops unused calls, which peers make too, nor merges equal calls."""
    c, (x, r) = comm(), _inputs(rank)

    def program(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        if rank == 0:  # rank 0 does not use the results
            c.all_reduce(x)
            c.all_reduce(x)
            return x
        return c.all_reduce(x) + c.all_reduce(x)

    traced = _jit(program, torch.ones_like(x), r)
    want = c.all_reduce(x)
    for _ in range(4):
        got = traced(x, r)
    assert_same_bits(got, x if rank == 0 else want + want, "results")
    c.check()


def _reduce_in(group: dist.ProcessGroup) -> Program:
    return lambda x, r: allnorm.all_reduce(x, group=group)


@on(cpu=(2,), gpu=(2,))
def test_a_tracer_may_create_the_communicator_of_a_group(rank: int, world_size: int) -> None:
    x, r = _inputs(rank)
    want = comm().all_reduce(x)
    for transform in (_traced(_jit), _vmap, RIGHT["make_fx"]):
        group = dist.new_group(list(range(world_size)))
        got = transform(_reduce_in(group), x, r)
        assert_same_bits(got, want, "the first call")
        dist.destroy_process_group(group)


@on(cpu=(2,), gpu=(2,))
def test_written_results_have_new_versions(rank: int, world_size: int) -> None:
    """A call bumps the version of memory that it writes, so that autograd sees the write."""
    c, (x, r) = comm(), _inputs(rank)
    weight, quant = torch.ones(SHAPE[1], device=c.device), allnorm.Fp8PerGroup(32)

    def norm(**memory: torch.Tensor) -> None:
        c.all_reduce_add_rms_norm(memory.get("out", x), r, weight, EPS, **memory)

    calls: dict[str, tuple[Callable[..., Any], dict[str, torch.Tensor]]] = {
        "in place": (norm, {"out": x.clone()}),
        "norm": (
            lambda **m: c.all_reduce_add_rms_norm(x, r, weight, EPS, **m),
            {"out": torch.empty_like(x), "residual_out": torch.empty_like(x)},
        ),
        "unfused": (
            lambda **m: c.all_reduce_add_rms_norm(x, r, weight, EPS, algorithm="unfused", **m),
            {"out": torch.empty_like(x), "residual_out": torch.empty_like(x)},
        ),
        "all_reduce": (lambda **m: c.all_reduce(x, **m), {"out": torch.empty_like(x)}),
        "quant": (
            lambda **m: c.all_reduce_add_rms_norm_quant(x, r, weight, EPS, quant, **m),
            {
                "quantized_out": torch.empty(SHAPE, dtype=torch.float8_e4m3fn, device=c.device),
                "scale_out": torch.empty(SHAPE[0], SHAPE[1] // 32, device=c.device),
                "normed_out": torch.empty_like(x),
                "residual_out": torch.empty_like(x),
            },
        ),
        "rows": (
            lambda **m: c.all_gather_rows(x[slice(*c.row_shard(SHAPE[0]))], SHAPE[0], **m),
            {"out": torch.empty_like(x)},
        ),
    }
    for name, (call, memory) in calls.items():
        for repeat in range(5):
            base = {key: tensor._version for key, tensor in memory.items()}
            call(**memory)
            for key, tensor in memory.items():
                assert tensor._version > base[key], (name, key, repeat)
    scale = torch.ones(SHAPE, device=c.device, requires_grad=True)
    for _ in range(5):
        memory = torch.ones(SHAPE, device=c.device)
        product = (memory * scale).sum()  # the backward pass reads `memory`
        c.all_reduce(x, out=memory)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()
    with torch.inference_mode():  # tensors have no version counter here
        memory = torch.empty_like(x)
        for _ in range(5):
            c.all_reduce(x, out=memory)
    assert_same_bits(memory, c.all_reduce(x), "inference")
