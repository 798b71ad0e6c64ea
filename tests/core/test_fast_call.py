"""Repeated calls, made without Python: the same bits, and nothing taken for what it is not."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import functools
import gc
import pathlib
import re
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from limits import HANG_SECONDS
from rank_helpers import Case, comm, message_of, on
from script_helpers import script

import allnorm
from allnorm import policy
from allnorm.core import _native, fast_call
from allnorm.core.call import KEYWORDS, Call
from allnorm.core.dispatch import Dispatcher
from allnorm.testing import RankPool, assert_same_bits
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
    # 7 rows: padding between columns
    BASE.but(quant=allnorm.Fp8PerGroup(128, "column_major_tma"), shape=(7, 4096)),
)
LEFT_TO_PYTHON = (
    BASE.but(algorithm="unfused"),
    BASE.but(shape=(0, 4096)),
    BASE.but(shape=(1, 4096), sharded=True),  # the last rank's share is no row
)


def refuse(*args: Any) -> Any:
    raise AssertionError("Python was asked")


def as_called(case: Case, rank: int) -> Call:
    """The call of a case."""
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


def inputs_of(case: Case, rank: int) -> tuple[torch.Tensor, Any, Any]:
    call = as_called(case, rank)
    return call.x, call.residual, call.weight


class MissedError(Exception):
    """Python was asked."""


def make(c: allnorm.Communicator, call: Call) -> Any:
    """The results of a call if it is made without Python; else None."""
    with mock.patch.object(c._endpoint.dispatcher, "run", side_effect=MissedError):
        try:
            return c._dispatcher.call(**fields(call))
        except MissedError:
            return None


def fields(call: Call) -> dict[str, Any]:
    return dict(zip(KEYWORDS, call.values, strict=True))


@needs_library
@on(cpu=(2, 3), gpu=(2,))
def test_repeated_calls(rank: int, world_size: int) -> None:
    """From the third time on, and with other values at other addresses."""
    c = comm()
    for case in REPEATED:
        for _ in range(2):
            case.check(c)
        with mock.patch.object(c._endpoint.dispatcher, "_find", refuse):
            kept = []
            for call in range(3):
                other = case.but(call=call)
                results = other.method(c)(other.x(rank), **other.call_arguments(c))
                other.compare(c, *results)
                kept.append(results)
        static = isinstance(case.quant, allnorm.Fp8PerTensor)  # its scale is the one given
        new = [t for results in kept for i, t in enumerate(results) if not (static and i == 1)]
        addresses = [t.data_ptr() for t in new if t is not None]
        assert len(set(addresses)) == len(addresses), "every call has results of its own"
        expected = allnorm.QuantizedNorm if case.quant is not None else tuple
        assert all(type(results) is expected for results in kept)
    c.check()


@needs_library
@on(cpu=(2,), gpu=(2,))
def test_repeated_calls_in_other_modes(rank: int, world_size: int) -> None:
    """An engine calls first as it loads, and then in inference mode; weights are parameters."""
    case = BASE.but(shape=(5, 2944))
    weight = torch.nn.Parameter(case.weight())
    modes = (contextlib.nullcontext, torch.no_grad, torch.inference_mode, torch.inference_mode)
    with allnorm.Communicator(device=device()) as c:
        for mode in (*modes, torch.no_grad):
            for call in range(4):
                other = case.but(call=call)
                with (
                    mode(),
                    mock.patch.object(
                        c._endpoint.dispatcher,
                        "_find",
                        refuse if call >= 2 else c._endpoint.dispatcher._find,
                    ),
                ):
                    given = other.call_arguments(c)
                    if mode is not contextlib.nullcontext:
                        weight.data.copy_(other.weight())
                        given["weight"] = weight
                    results = other.method(c)(other.x(rank), **given)
                    other.compare(c, *results)


@needs_library
@on(cpu=(2,), gpu=(2,))
def test_repeated_all_reduce(rank: int, world_size: int) -> None:
    c, case = comm(), BASE.but(shape=(6, 2880))
    expected = allnorm.reference.all_reduce(case.xs(world_size))
    for call in range(4):
        with mock.patch.object(
            c._endpoint.dispatcher, "_find", refuse if call >= 2 else c._endpoint.dispatcher._find
        ):
            assert_same_bits(c.all_reduce(case.x(rank)), expected, f"call {call}")
    operator = torch.ops.allnorm.all_reduce
    with mock.patch.object(c._endpoint.dispatcher, "_find", refuse):
        assert_same_bits(operator(case.x(rank), c.name), expected, "by the operator")


@needs_library
@on(cpu=(2,), gpu=(2,))
def test_left_to_python(rank: int, world_size: int) -> None:
    c = comm()
    for case in LEFT_TO_PYTHON:
        for _ in range(4):
            with mock.patch.object(
                c._endpoint.dispatcher, "_find", wraps=c._endpoint.dispatcher._find
            ) as find:
                case.check(c)
        has_rows = case.own_rows(c, case.x(rank)).numel() > 0 if case.sharded else False
        assert find.called != has_rows, case


@needs_library
@on(cpu=(1,), gpu=(1,))
def test_one_rank(rank: int, world_size: int) -> None:
    """One rank exchanges nothing."""
    c = comm()
    for case in REPEATED:
        if case.algorithm == "two_shot":
            continue
        for call in range(4):
            find = refuse if call >= 2 else c._endpoint.dispatcher._find
            with mock.patch.object(c._endpoint.dispatcher, "_find", find):
                case.but(call=call).check(c)
    x = BASE.x(rank)
    for call in range(4):
        find = refuse if call >= 2 else c._endpoint.dispatcher._find
        with mock.patch.object(c._endpoint.dispatcher, "_find", find):
            result = c.all_reduce(x)
        assert_same_bits(result, x, "the sum of one")
        assert result.data_ptr() != x.data_ptr()


def others(rank: int) -> Iterator[tuple[str, Call]]:
    """What differs from the call of BASE in one thing."""
    call = as_called(BASE, rank)
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
def test_recognizes_nothing_else(rank: int, world_size: int) -> None:
    c = comm()
    for _ in range(3):
        BASE.check(c)
    same = as_called(BASE, rank)
    assert type(make(c, same)) is tuple
    for name, call in others(rank):
        assert make(c, call) is None, name
    # Equal, if not the same objects.
    equal = replace(
        same,
        source=same.x.clone(),
        eps=float("1e-6"),
        weight_bias=float("0"),
        numerics="".join(["round", "ed"]),
        algorithm="".join(["au", "to"]),
    )
    BASE.compare(c, *make(c, equal))
    quantized = BASE.but(quant=allnorm.Fp8PerGroup(128))
    for _ in range(3):
        quantized.check(c)
    same = as_called(quantized, rank)
    for spec in (allnorm.Fp8PerGroup(64), allnorm.Fp8PerToken(), None):
        assert make(c, replace(same, quant=spec)) is None, spec
    quantized.compare(c, *make(c, replace(same, quant=allnorm.Fp8PerGroup(128))))
    call: Any = c._dispatcher.call
    assert "positional argument" in message_of(TypeError, lambda: call("all_reduce", same.x))
    assert "'source'" in message_of(TypeError, lambda: call(op="all_reduce"))
    assert "'x'" in message_of(TypeError, lambda: call(op="all_reduce", source=same.x, x=same.x))
    c.check()


def given(rank: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Inputs of BASE, and memory for its results, anew each time."""
    x, residual, weight = inputs_of(BASE, rank)
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
def test_repeated_into_given(rank: int, world_size: int) -> None:
    """Into memory of the caller's, whichever way it lies: without Python too."""
    c, expected = comm(), BASE.expected(world_size)
    for kind in range(len(list(given(rank)))):
        for turn in range(4):
            name, arguments = list(given(rank))[kind]
            weight = arguments["weight"].clone()
            find = c._endpoint.dispatcher._find if turn < 2 else refuse
            with mock.patch.object(c._endpoint.dispatcher, "_find", find):
                results = c.all_reduce_add_rms_norm(**arguments)
            for argument, result, want in zip(
                ("out", "residual_out"), results, expected, strict=True
            ):
                assert_same_bits(result, want, f"{argument}, {name}, turn {turn}")
                assert result is arguments.get(argument, result)
            assert torch.equal(arguments["weight"], weight)
            out = arguments.get("out")
            if out is not None and not out.is_contiguous():
                beside = out.as_strided((out.shape[0], 64), out.stride(), out.shape[1])
                assert torch.equal(beside, torch.full_like(beside, 7.0)), "columns beside are left"
    x = BASE.x(rank)
    for turn in range(4):
        given_x = x.clone()
        with mock.patch.object(
            c._endpoint.dispatcher, "_find", c._endpoint.dispatcher._find if turn < 2 else refuse
        ):
            assert c.all_reduce(given_x, out=given_x) is given_x
        assert_same_bits(given_x, allnorm.reference.all_reduce(BASE.xs(world_size)), "in place")


@on(cpu=(2,), gpu=(2,))
def test_shared_memory_is_refused(rank: int, world_size: int) -> None:
    """However often it went well before, what would be overwritten is refused."""
    c = comm()
    for kind in range(2):
        for _ in range(3):
            c.all_reduce_add_rms_norm(**list(given(rank))[kind][1])
    x, residual, weight = inputs_of(BASE, rank)
    both = torch.empty(2 * x.numel() - 8, dtype=x.dtype, device=x.device)
    lower, upper = both[: x.numel()].view_as(x), both[-x.numel() :].view_as(x)
    for out, residual_out, text in (
        (lower, upper, "out shares memory with residual_out"),
        (lower, lower.view_as(x), "out shares memory with residual_out"),
        (residual.view_as(x), lower, "out shares memory with residual"),
        (residual, lower, "out shares memory with residual"),
        (x, x, "shares memory"),
        (lower, x, "residual_out shares memory with x"),
        (residual, x, "shares memory"),
        (lower[:2], None, "out has shape"),
        (lower.float(), None, "out has dtype"),
    ):
        message = message_of(
            (ValueError, TypeError),
            lambda out=out, residual_out=residual_out: c.all_reduce_add_rms_norm(
                x, residual, weight, 1e-6, out=out, residual_out=residual_out
            ),
        )
        assert text in message, message
    # The same memory by another name may be overwritten.
    results = c.all_reduce_add_rms_norm(x, residual, weight, 1e-6, out=x.view_as(x))
    BASE.compare(c, *results)
    c.check()


@needs_library
@on(cpu=(2,), gpu=(2,))
def test_kinds_take_turns(rank: int, world_size: int) -> None:
    """More kinds of calls than are kept, and one that comes again and again."""
    c = comm()
    cases = [BASE.but(shape=(rows, 1024)) for rows in range(1, 13)]
    for turn in range(3):
        for case in cases:
            case.but(call=turn).check(c)
            BASE.but(call=turn).check(c)
    with mock.patch.object(c._endpoint.dispatcher, "_find", refuse):
        BASE.check(c)


@on(cpu=(2,), gpu=(2,))
def test_other_tables(rank: int, world_size: int) -> None:
    """What was prepared by a table is not made again when another one decides."""
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


@on(cpu=(2,), gpu=(2,))
def test_closed(rank: int, world_size: int) -> None:
    c = allnorm.Communicator(device=device())
    x, weight = BASE.x(rank), BASE.weight()
    for _ in range(3):
        c.all_reduce_add_rms_norm(x, None, weight, 1e-6)
    c.close()
    text = message_of(
        allnorm.CommunicatorClosedError, lambda: c.all_reduce_add_rms_norm(x, None, weight, 1e-6)
    )
    assert "is closed" in text


def wait_in_vain(rank: int, world_size: int) -> str:
    """A peer stays away from a call that is made without Python, which raises as Python would."""
    c = allnorm.Communicator(device=device(), timeout=datetime.timedelta(seconds=0.5))
    x, residual, weight = inputs_of(BASE, rank)
    for _ in range(3):
        c.all_reduce_add_rms_norm(x, residual, weight, BASE.eps)
    if rank == 1:
        time.sleep(1.5)
        return ""
    with mock.patch.object(c._endpoint.dispatcher, "_find", refuse):
        return message_of(
            allnorm.PeerTimeoutError,
            lambda: c.all_reduce_add_rms_norm(x, residual, weight, BASE.eps),
        )


@needs_library
@on(cpu=(2,))
def test_a_failed_launch_raises(pool: RankPool) -> None:
    assert re.search("rank 1", pool.run(wait_in_vain)[0])


@needs_library
@on(cpu=(2,), gpu=(2,))
def test_references(rank: int, world_size: int) -> None:
    """Nothing is kept of a call, and nothing is given back twice."""
    c = comm()
    call = as_called(BASE.but(quant=allnorm.Fp8PerGroup(128)), rank)
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
    # Some are everywhere: a thousand calls would show, a few objects elsewhere do not.
    assert all(abs(a - b) < 50 for a, b in zip(after, before, strict=True)), (before, after)
    results = make(c, call)
    alive = [weakref.ref(result) for result in results if result is not None]
    del results
    assert not any(reference() is not None for reference in alive)
    c.check()


@functools.cache
def interpreters() -> dict[int, str]:
    """Every CPython here that the package supports, by its minor version."""
    return script("tools/pythons.py").pythons()


@needs_library
@pytest.mark.parametrize("minor", [None, *range(11, 16)])
def test_any_interpreter(minor: int | None) -> None:
    """The same library under other versions, which count references in their own ways."""
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
        *("post_weight", "expert_index", "expert_weights", "shared"),
    )
    numbers = [ctypes.sizeof(_native.Call)] + [getattr(_native.Call, p).offset for p in pointers]
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
    """A communicator leaves with all that it has prepared; its memory is counted elsewhere."""
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
    """Threads may share a communicator in turns, here of calls that are alike: in any order."""
    c = comm()
    x, residual, weight = inputs_of(BASE, rank)
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
    """Who watches sees every call, also while another watches and leaves."""
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
    call = as_called(BASE, rank)  # makes the communicator of other tests, which has the library
    with mock.patch.object(fast_call, "_library", return_value=None):
        assert not fast_call.available()
        c = allnorm.Communicator(device=device())
        for number in range(4):
            BASE.but(call=number).check(c)
            BASE.but(call=number, quant=GROUPS).check(c)
        assert make(c, call) is None
        with fast_call.watched():
            BASE.check(c)
        c.close()


@needs_library
@on(gpu=(2,))
def test_elsewhere(rank: int, world_size: int) -> None:
    """Another current device, unaligned inputs, another stream."""
    c = comm()
    for _ in range(3):
        BASE.check(c)
    call = as_called(BASE, rank)
    x, residual, weight = call.x, call.residual, call.weight
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view_as(x).copy_(x)
    assert make(c, replace(call, source=shifted)) is None
    BASE.compare(c, *c.all_reduce_add_rms_norm(shifted, residual, weight, BASE.eps))
    with torch.cuda.device((device().index + 1) % torch.cuda.device_count()):
        if torch.cuda.current_device() != device().index:
            assert make(c, call) is None
        results = c.all_reduce_add_rms_norm(x, residual, weight, BASE.eps)
    BASE.compare(c, *results)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # the first call there is Python's, which looks at the stream
        BASE.compare(c, *c.all_reduce_add_rms_norm(x, residual, weight, BASE.eps))
    with torch.cuda.stream(stream), mock.patch.object(c._endpoint.dispatcher, "_find", refuse):
        torch.cuda._sleep(1 << 24)
        late = x * 1.0
        results = c.all_reduce_add_rms_norm(late, residual, weight, BASE.eps)
    stream.synchronize()
    BASE.compare(c, *results)
    c.check()
