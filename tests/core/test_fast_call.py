"""Tests repeated calls, which C dispatches: bits are right, and no call is taken for another."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import pathlib
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from limits import HANG_SECONDS
from rank_helpers import Case, Experts, comm, message_of, on, used_communicator
from script_helpers import script

import allnorm
from allnorm import policy
from allnorm.core import _native, fast_call
from allnorm.core.call import KEYWORDS, Call
from allnorm.core.dispatch import Dispatcher
from allnorm.testing import assert_same_bits
from allnorm.testing.rank import device

needs_library = pytest.mark.skipif(
    not fast_call.available(), reason="built without Python's headers, or for another interpreter"
)

BASE = Case(shape=(3, 4096))
GROUPS = allnorm.Fp8PerGroup(128)
REPEATED = (
    BASE,
    BASE.but(shape=(2, 5, 120), residual=False),
    BASE.but(shape=(7, 2880), dtype=torch.float16, float32_weight=True, weight_bias=1.0),
    BASE.but(shape=(1, 4096), algorithm="two_shot", numerics="unrounded"),
    BASE.but(shape=(5, 4096), sharded=True),
    BASE.but(quant=GROUPS),
    BASE.but(quant=GROUPS, return_normed=True, residual=False),
    BASE.but(quant=allnorm.Fp8PerGroup(128, "column_major")),
    BASE.but(quant=allnorm.Fp8PerToken(), shape=(9, 2944)),
    # 8 rows: column-major scales without padding between columns
    BASE.but(quant=allnorm.Fp8PerGroup(128, "column_major_tma", "ue8m0"), shape=(8, 4096)),
    BASE.but(quant=allnorm.Fp8PerTensor(torch.tensor([0.5]))),
    BASE.but(post_norm=True),
    BASE.but(post_norm=True, second_norm=False, scale=0.5),
    BASE.but(scale=0.5, quant=GROUPS, post_norm=True),
    BASE.but(experts=Experts(shared=True), post_norm=True),
    # 7 rows: padding between columns
    BASE.but(quant=allnorm.Fp8PerGroup(128, "column_major_tma"), shape=(7, 4096)),
)
DISPATCHED_IN_PYTHON = (
    BASE.but(algorithm="unfused"),
    BASE.but(shape=(0, 4096)),
    BASE.but(shape=(1, 4096), sharded=True),  # the last rank has no row
)


def refuse(*args: Any) -> Any:
    raise AssertionError("Python dispatched the call")


def only_c(c: allnorm.Communicator, number: int = 2) -> Any:
    """Makes Python's dispatch raise from the third call of a kind on (`number` 2)."""
    if number < 2:
        return contextlib.nullcontext()
    return mock.patch.object(c._endpoint.dispatcher, "_find", refuse)


def as_call(case: Case, rank: int) -> Call:
    given = case.call_arguments(comm())
    quant = given.get("quant")
    return Call(
        op="all_reduce_add_rms_norm" + ("" if quant is None else "_quant"),
        source=case.x(rank),
        residual=given["residual"],
        weight=given["weight"],
        eps=case.eps,
        weight_bias=case.weight_bias,
        numerics=case.numerics,
        algorithm=case.algorithm,
        residual_sharded=case.sharded,
        quant=quant,
        return_normed=case.return_normed,
    )


def run_in_c(c: allnorm.Communicator, call: Call) -> Any:
    """Returns the results of a call, or None if C left the call to Python."""
    with mock.patch.object(c._endpoint.dispatcher, "run", return_value=None):
        return c._dispatcher.call(**fields(call))


def fields(call: Call) -> dict[str, Any]:
    return dict(zip(KEYWORDS, call.values, strict=True))


@needs_library
@on(cpu=(1, 2, 3), gpu=(1, 2))
def test_repeated_calls(rank: int, world_size: int) -> None:
    """Repeats calls with new values at new addresses."""
    c = comm()
    for case in REPEATED:
        if world_size == 1 and case.algorithm == "two_shot":
            continue  # a single rank exchanges nothing
        for _ in range(2):
            case.check(c)
        with only_c(c):
            kept = []
            for call in range(3):
                other = case.but(call=call)
                results = other.method(c)(other.x(rank), **other.call_arguments(c))
                other.compare(c, *results)
                kept.append(results)
        static = isinstance(case.quant, allnorm.Fp8PerTensor)  # then the caller owns the scale
        new = [t for results in kept for i, t in enumerate(results) if not (static and i == 1)]
        addresses = [t.data_ptr() for t in new if t is not None]
        assert len(set(addresses)) == len(addresses), "results of two calls share memory"
        expected = allnorm.QuantizedNorm if case.quant is not None else tuple
        assert all(type(results) is expected for results in kept)
    c.check()


@needs_library
@on(cpu=(2,), gpu=(2,))
def test_repeated_calls_in_other_modes(rank: int, world_size: int) -> None:
    """Engines make calls under different autograd modes, with nn.Parameters as weights."""
    case = BASE.but(shape=(5, 2944))
    weight = torch.nn.Parameter(case.weight())
    modes = (torch.inference_mode, contextlib.nullcontext, torch.no_grad)
    with allnorm.Communicator(device=device()) as c:
        for mode in (*modes, torch.inference_mode, torch.inference_mode, torch.no_grad):
            for call in range(4):
                other = case.but(call=call)
                with mode(), only_c(c, call):
                    given = other.call_arguments(c)
                    if mode is not contextlib.nullcontext:
                        weight.data.copy_(other.weight())
                        given["weight"] = weight
                    normed, residual = other.method(c)(other.x(rank), **given)
                    other.compare(c, normed, residual)
                if mode is not torch.inference_mode:
                    assert not normed.requires_grad
                    normed.add_(residual)  # raises for inference tensors


@needs_library
@on(cpu=(1, 2), gpu=(1, 2))
def test_repeated_all_reduce(rank: int, world_size: int) -> None:
    c, case = comm(), BASE.but(shape=(6, 2880))
    expected = allnorm.reference.all_reduce(case.xs(world_size))
    for call in range(4):
        x = case.x(rank)
        with only_c(c, call):
            result = c.all_reduce(x)
        assert_same_bits(result, expected, f"call {call}")
        assert result.data_ptr() != x.data_ptr()
    operator = torch.ops.allnorm.all_reduce
    with only_c(c):
        assert_same_bits(operator(case.x(rank), c.name), expected, "by the operator")


@needs_library
@on(cpu=(2,), gpu=(2,))
def test_calls_that_python_dispatches(rank: int, world_size: int) -> None:
    c = comm()
    for case in DISPATCHED_IN_PYTHON:
        for _ in range(4):
            with mock.patch.object(
                c._endpoint.dispatcher, "_find", wraps=c._endpoint.dispatcher._find
            ) as find:
                case.check(c)
        has_rows = case.own_rows(c, case.x(rank)).numel() > 0 if case.sharded else False
        assert find.called != has_rows, case


def others(rank: int) -> Iterator[tuple[str, Call]]:
    """Yields a name and a call for each field in which a call can differ from BASE."""
    call = as_call(BASE, rank)
    x = call.x
    wide = torch.zeros(3, 2 * 4096, dtype=x.dtype, device=x.device)
    tensors = {
        "fewer rows": x[:2],
        "more dimensions": x[None],
        "rows apart": wide[:, :4096],
        "dtype": x.half(),
        "columns": x[:, :2048],
        "device": x.to("meta"),
        "gradient": x.clone().requires_grad_(),
        "class": torch.nn.Parameter(x, requires_grad=False),
        "no tensor": [0.0],
        "None": None,
    }
    for name, other in tensors.items():
        yield f"x: {name}", replace(call, source=other)
        if other is not None:
            yield f"residual: {name}", replace(call, residual=other)
    weight = call.weight
    assert weight is not None
    constants = {
        "residual": (None,),
        "weight": (weight.float(), weight[:-1], None),
        "out": (torch.empty_like(x),),
        "scale_out": (torch.empty_like(x),),
        "op": ("all_reduce", "add_rms_norm", None),
        "algorithm": ("one_shot", None),
        "eps": (1e-5, "1e-6", torch.tensor(call.eps)),
        "weight_bias": (-0.0, 0, False),
        "numerics": ("vllm",),
        "residual_sharded": (True, 0),
        "quant": (GROUPS, allnorm.Fp8PerTensor),
        "return_normed": (True, 0),
        "num_tokens": (3, 0.0, False),
        "post_norm": (allnorm.PostNorm(weight.clone(), call.eps),),
        "source": (allnorm.ExpertSum(x[:, None]),),
    }
    for field, values in constants.items():
        for value in values:
            yield f"{field}: {value}", replace(call, **{field: value})


@needs_library
@on(cpu=(2,), gpu=(2,))
def test_only_equal_calls_are_recognized(rank: int, world_size: int) -> None:
    c = comm()
    for _ in range(3):
        BASE.check(c)
    same = as_call(BASE, rank)
    assert type(run_in_c(c, same)) is tuple
    for name, call in others(rank):
        assert run_in_c(c, call) is None, name
    # The values are equal, but are different objects.
    equal = replace(
        same,
        source=same.x.clone(),
        eps=float("1e-6"),
        weight_bias=float("0"),
        numerics="".join(["round", "ed"]),
        algorithm="".join(["au", "to"]),
    )
    BASE.compare(c, *run_in_c(c, equal))
    quantized = BASE.but(quant=allnorm.Fp8PerGroup(128))
    for _ in range(3):
        quantized.check(c)
    same = as_call(quantized, rank)
    for spec in (allnorm.Fp8PerGroup(64), allnorm.Fp8PerToken(), None):
        assert run_in_c(c, replace(same, quant=spec)) is None, spec
    quantized.compare(c, *run_in_c(c, replace(same, quant=allnorm.Fp8PerGroup(128))))
    call: Any = c._dispatcher.call
    assert "positional argument" in message_of(TypeError, lambda: call("all_reduce", same.x))
    assert "'source'" in message_of(TypeError, lambda: call(op="all_reduce"))
    assert "'x'" in message_of(TypeError, lambda: call(op="all_reduce", source=same.x, x=same.x))
    c.check()


def given(rank: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields new arguments for BASE with memory for the results, in different layouts."""
    call = as_call(BASE, rank)
    x, residual, weight = call.x, call.residual, call.weight
    inputs = {"x": x, "residual": residual, "weight": weight, "eps": BASE.eps}
    yield "both", inputs | {"out": torch.empty_like(x), "residual_out": torch.empty_like(x)}
    yield "out", inputs | {"out": torch.empty_like(x)}
    yield "residual_out", inputs | {"residual_out": torch.empty_like(x)}
    yield "in place", inputs | {"out": x, "residual_out": residual}
    yield "out in place", inputs | {"out": x}
    yield "residual in place", inputs | {"out": torch.empty_like(x), "residual_out": residual}
    rows, columns = x.shape
    wide = torch.full((rows, columns + 64), 7.0, dtype=x.dtype, device=x.device)
    yield "rows apart", inputs | {"out": wide[:, :columns]}
    wide_x = wide.clone()
    wide_x[:, :columns] = x
    strided = inputs | {"x": wide_x[:, :columns]}
    yield "x with rows apart, in place", strided | {"out": strided["x"]}


@needs_library
@on(cpu=(2,), gpu=(2,))
def test_repeated_calls_into_given_memory(rank: int, world_size: int) -> None:
    c, expected = comm(), BASE.expected(world_size)
    for kind in range(len(list(given(rank)))):
        for turn in range(4):
            name, arguments = list(given(rank))[kind]
            weight = arguments["weight"].clone()
            with only_c(c, turn):
                results = c.all_reduce_add_rms_norm(**arguments)
            for argument, result, want in zip(
                ("out", "residual_out"), results, expected, strict=True
            ):
                assert_same_bits(result, want, f"{argument}, {name}, turn {turn}")
                assert result is arguments.get(argument, result)
            assert torch.equal(arguments["weight"], weight)
            out = arguments.get("out")
            if out is not None and not out.is_contiguous():
                gaps = out.as_strided((out.shape[0], 64), out.stride(), out.shape[1])
                assert torch.equal(gaps, torch.full_like(gaps, 7.0))
    x = BASE.x(rank)
    for turn in range(4):
        given_x = x.clone()
        with only_c(c, turn):
            assert c.all_reduce(given_x, out=given_x) is given_x
        assert_same_bits(given_x, allnorm.reference.all_reduce(BASE.xs(world_size)), "in place")


@needs_library
@on(cpu=(2,), gpu=(2,))
def test_many_kinds_of_calls(rank: int, world_size: int) -> None:
    """Alternates one call with more kinds of calls than C caches; it must stay prepared."""
    c = comm()
    cases = [BASE.but(shape=(rows, 1024)) for rows in range(1, 13)]
    for turn in range(3):
        for case in cases:
            case.but(call=turn).check(c)
            BASE.but(call=turn).check(c)
    with only_c(c):
        BASE.check(c)


@on(cpu=(2,), gpu=(2,))
def test_a_new_table_replaces_prepared_calls(rank: int, world_size: int) -> None:
    with allnorm.Communicator(device=device()) as c:
        case = BASE.but(call=1)
        for algorithm in ("two_shot", "one_shot", "two_shot"):
            curve = policy.Curve(4096, (policy.Step(None, algorithm),))
            c._use_tables((policy.Table("test", {("bfloat16", "norm"): [curve]}),))
            with mock.patch.object(
                Dispatcher, "_launch", autospec=True, side_effect=Dispatcher._launch
            ) as see:
                for _ in range(4):
                    case.check(c)
            seen = [call.args[1].plan.algorithm for call in see.call_args_list]
            assert seen == [algorithm] * (2 if fast_call.available() else 4)


@needs_library
@on(cpu=(2,))
def test_a_repeated_call_raises_if_a_peer_is_missing(rank: int, world_size: int) -> None:
    with used_communicator(0.5, *3 * [BASE.check]) as c:
        if rank == 0:
            with only_c(c):
                assert "rank 1" in message_of(allnorm.PeerTimeoutError, lambda: BASE.run(c))
        dist.barrier()


@needs_library
@on(cpu=(2,), gpu=(2,))
def test_references(rank: int, world_size: int) -> None:
    """Checks that C neither keeps references to arguments nor releases any of them twice."""
    c = comm()
    call = as_call(BASE.but(quant=allnorm.Fp8PerGroup(128)), rank)
    for _ in range(3):
        c._dispatcher.call(**fields(call))
    watched = (*call.values, c._endpoint._turn.lock, None, True, torch.bfloat16)
    gc.collect()
    before = [sys.getrefcount(thing) for thing in watched]
    others = replace(call, residual=None), replace(call, source=call.x[:1])
    dispatcher = c._endpoint.dispatcher
    dispatcher.run = lambda call: None
    for _ in range(1000):
        assert dispatcher.call(**fields(call)) is not None
        assert all(dispatcher.call(**fields(other)) is None for other in others)
    del dispatcher.run, others
    after = [sys.getrefcount(thing) for thing in watched]
    # Other code references some of them too, but far less than a thousand leaks would.
    assert all(abs(a - b) < 50 for a, b in zip(after, before, strict=True)), (before, after)
    results = run_in_c(c, call)
    alive = [weakref.ref(result) for result in results if result is not None]
    del results
    assert not any(reference() is not None for reference in alive)
    c.check()


@functools.cache
def interpreters() -> dict[int, str]:
    """Returns all supported CPython interpreters on this machine, keyed by minor version."""
    return script("tools/pythons.py").pythons()


@needs_library
@pytest.mark.parametrize("minor", [None, *range(11, 16)])
def test_any_interpreter(minor: int | None) -> None:
    """Tests one library with all CPython versions, which count references differently."""
    interpreter = sys.executable if minor is None else interpreters().get(minor)
    if interpreter is None:
        pytest.skip(f"no Python 3.{minor} on this machine")
    version = [interpreter, "-c", "import sys; print(sys.implementation.name, sys.version_info[1])"]
    found = subprocess.run(version, capture_output=True, text=True, check=True).stdout
    assert found.startswith("cpython")
    package = pathlib.Path(allnorm.__file__).parent
    library = package / "lib" / "liballnorm_python.so"
    pointers = (
        *("x", "residual", "weight", "out", "residual_out", "quantized", "scale"),
        *("post_weight", "expert_index", "expert_weights", "shared", "prefetch", "post", "mix"),
    )
    slices = [f"slice{i}_{p}" for i in range(_native.MAX_SLICES) for p in ("x", "weight", "out")]
    fields = "op", "num_slices", *pointers, *slices
    numbers = [ctypes.sizeof(_native.Call)] + [getattr(_native.Call, f).offset for f in fields]
    program = pathlib.Path(__file__).parent / "fast_call_alone.py"
    done = subprocess.run(
        [interpreter, "-I", str(program), str(library), *map(str, numbers)],
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ok 3.")


@needs_library
@on(cpu=(2,))
def test_communicators_leave_nothing(rank: int, world_size: int) -> None:
    """Checks that deleted communicators free their prepared calls."""
    for _ in range(2):
        with allnorm.Communicator(device=device(), workspace_bytes=1 << 16) as c:
            for rows in (1, 2, 3):
                case = BASE.but(shape=(rows, 512))
                x, weight = case.x(rank), case.weight()
                for _ in range(3):
                    c.all_reduce_add_rms_norm(x, None, weight, 1e-6)
            prepared = [weakref.ref(one) for one in c._endpoint.dispatcher._prepared.values()]
            left = weakref.ref(c)
        del c
        gc.collect()
        assert left() is None
        assert not any(reference() is not None for reference in prepared)


@on(cpu=(2,))
def test_threads(rank: int, world_size: int) -> None:
    """Threads share a communicator under a lock. All calls are equal, so order is irrelevant."""
    c = comm()
    x, (residual, weight) = BASE.x(rank), (BASE.residual_tensor(), BASE.weight())
    for _ in range(3):
        BASE.check(c)
    results: list[tuple[torch.Tensor, torch.Tensor]] = []
    turn = threading.Lock()

    def call() -> None:
        for _ in range(200):
            with turn:
                results.append(c.all_reduce_add_rms_norm(x, residual, weight, BASE.eps))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 800
    for result in results[::37]:
        BASE.compare(c, *result)


@on(cpu=(2,))
def test_watched(rank: int, world_size: int) -> None:
    """While calls are watched, Python sees all of them, even after a nested watch ends."""
    c = comm()
    seen = 0
    launch = Dispatcher._launch

    def see(*args: Any, **kwargs: Any) -> None:
        nonlocal seen
        seen += 1
        launch(*args, **kwargs)

    for _ in range(3):
        BASE.check(c)
    with mock.patch.object(Dispatcher, "_launch", see):
        BASE.check(c)
        assert seen == (0 if fast_call.available() else 1)
        seen = 0
        with fast_call.watched():
            BASE.check(c)
            with fast_call.watched():
                BASE.check(c)
            BASE.check(c)
        assert seen == 3
        seen = 0
        BASE.check(c)
        assert seen == (0 if fast_call.available() else 1)


@on(cpu=(2,), gpu=(2,))
def test_without_the_library(rank: int, world_size: int) -> None:
    call = as_call(BASE, rank)  # creates comm() while the library is available
    with mock.patch.object(fast_call, "_library", return_value=None):
        assert not fast_call.available()
        c = allnorm.Communicator(device=device())
        for number in range(4):
            BASE.but(call=number).check(c)
            BASE.but(call=number, quant=GROUPS).check(c)
        assert run_in_c(c, call) is None
        with fast_call.watched():
            BASE.check(c)
        c.close()


@needs_library
@on(gpu=(2,))
def test_different_devices_streams_and_addresses(rank: int, world_size: int) -> None:
    c = comm()
    for _ in range(3):
        BASE.check(c)
    call = as_call(BASE, rank)
    x, residual, weight = call.x, call.residual, call.weight
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view_as(x).copy_(x)
    assert run_in_c(c, replace(call, source=shifted)) is None
    BASE.compare(c, *c.all_reduce_add_rms_norm(shifted, residual, weight, BASE.eps))
    with torch.cuda.device((device().index + 1) % torch.cuda.device_count()):
        if torch.cuda.current_device() != device().index:
            assert run_in_c(c, call) is None
        results = c.all_reduce_add_rms_norm(x, residual, weight, BASE.eps)
    BASE.compare(c, *results)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # Python dispatches the first call on a new stream
        BASE.compare(c, *c.all_reduce_add_rms_norm(x, residual, weight, BASE.eps))
    with torch.cuda.stream(stream), only_c(c):
        torch.cuda._sleep(1 << 24)
        late = x * 1.0
        results = c.all_reduce_add_rms_norm(late, residual, weight, BASE.eps)
    stream.synchronize()
    BASE.compare(c, *results)
    c.check()
