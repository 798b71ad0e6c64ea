"""Tests that the internal torch functions that calls use return the same as public ones."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from rank_helpers import Case, device, on

import allnorm
from allnorm.core import fast_call, shortcuts
from allnorm.core.dispatch import Dispatcher

make = functools.partial(torch.empty_strided, dtype=torch.bfloat16)

OTHERS = {
    "fewer rows": make((2, 8), (16, 1)),
    "no rows": make((0, 8), (16, 1)),
    "wider": make((3, 16), (16, 1)),
    "other row stride": make((3, 8), (8, 1)),
    "strided columns": make((3, 8), (16, 2)),
    "one more dimension": make((1, 3, 8), (48, 16, 1)),
    "float16": make((3, 8), (16, 1), dtype=torch.float16),
    "float32": make((3, 8), (16, 1), dtype=torch.float32),
    "meta": make((3, 8), (16, 1), device="meta"),
    "no tensor": None,
    "a list": [[1.0] * 8] * 3,
}


@pytest.fixture(params=[True, False], ids=["torch has them", "torch has none"])
def guards(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    shortcuts._guards_hold.cache_clear()
    if not request.param:
        monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", lambda *a, **k: 1 / 0)
    yield request.param
    shortcuts._guards_hold.cache_clear()


def test_this_torch_has_both() -> None:
    """Without these functions, calls would be slower than documented."""
    assert shortcuts._guards_hold()
    assert shortcuts._fast_new("cpu") is not None


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("place", range(3))
def test_alike_detects_every_difference(guards: bool, name: str, place: int) -> None:
    tensors = [make((3, 8), (16, 1)) for _ in range(3)]
    check = shortcuts.alike(tensors)
    assert check(*[make((3, 8), (16, 1)) for _ in range(3)]) is guards
    tensors[place] = OTHERS[name]
    assert check(*tensors) is False


def wrong_answers() -> dict[str, Any]:
    class Accepts:
        def __init__(self, *tensors: Any, **sizes: Any) -> None: ...

        def check(self, *tensors: Any) -> bool:
            return True

    class Refuses(Accepts):
        def check(self, *tensors: Any) -> bool:
            return False

    return {"accepts all": Accepts, "accepts none": Refuses}


@pytest.mark.parametrize("name", wrong_answers())
def test_guards_with_wrong_answers_are_not_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", wrong_answers()[name])
    shortcuts._guards_hold.cache_clear()
    try:
        assert not shortcuts._guards_hold()
        assert shortcuts.alike([make((3, 8), (8, 1))])(make((3, 8), (8, 1))) is False
    finally:
        shortcuts._guards_hold.cache_clear()


@pytest.mark.parametrize("found", ["fast", "none", "of a different dtype"])
def test_fast_empty(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if found != "fast":
        wrong = _wrong_new if found == "of a different dtype" else None
        monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_cpu", wrong)
    shortcuts._fast_new.cache_clear()
    try:
        new = shortcuts.fast_empty(torch.device("cpu"))
        assert (new is not None) == (found == "fast"), "a function with wrong results is not used"
        for shape, stride in (((3, 8), (8, 1)), ((3, 8), (1, 4)), ((0, 8), (8, 1)), ((5,), (1,))):
            for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.int32) if new else ():
                made = new(shape, stride, dtype)
                assert (tuple(made.shape), made.stride(), made.dtype) == (shape, stride, dtype)
                assert made.device.type == "cpu"
                assert not made.requires_grad
    finally:
        shortcuts._fast_new.cache_clear()


def _wrong_new(shape: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=torch.float64)


# ---- calls ---------------------------------------------------------------------------------------


@pytest.mark.skipif(not fast_call.available(), reason="built without Python's headers")
@on(cpu=(2,), gpu=(2,))
def test_c_dispatches_repeated_calls(rank: int, world_size: int) -> None:
    """Counts calls that Python dispatches, because timing the host path would be unreliable."""
    counts = []
    make = Dispatcher.run

    def counting(dispatcher: Dispatcher, call: Any) -> Any:
        counts[-1] += 1
        return make(dispatcher, call)

    cases = (
        Case(shape=(2, 64)),
        Case(shape=(2, 64), quant=allnorm.Fp8PerGroup(32)),
        Case(shape=(2, 64), quant=allnorm.Fp8PerTensor(torch.tensor([0.5]))),
        Case(shape=(3, 64), quant=allnorm.Fp8PerGroup(32, "column_major_tma")),
    )
    with (
        allnorm.Communicator(device=device()) as c,
        mock.patch.object(Dispatcher, "run", counting),
    ):
        for case in cases:
            x, arguments = case.x(rank), case.call_arguments(c)
            for _ in range(6):
                counts.append(0)
                case.method(c)(x.clone(), **arguments)
                c.all_reduce(x)
    # The first three cases have the same all_reduce; the last case has one of a different shape.
    assert counts == [2, 2, 0, 0, 0, 0, *[1, 1, 0, 0, 0, 0] * 2, 2, 2, 0, 0, 0, 0]
