"""Tests the hint `prefetch`: it changes no result, and reaches the C call with its size."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from rank_helpers import Case, device, message_of, on

import allnorm
from allnorm import policy
from allnorm.core import dispatch, tensors
from allnorm.policy import Plan, Traits

CASE = Case((5, 2048))
QUANTIZED = CASE.but(quant=allnorm.Fp8PerGroup(128))
BYTES = 4096


def weights() -> dict[str, torch.Tensor]:
    """Returns weights of every kind that a GEMM reads."""
    whole = torch.ones(64, 256, device=device())
    return {
        "a matrix": whole,
        "its transpose": whole.t(),
        "its columns": whole[:, ::3],
        "its last element": whole[63, 255:],
        "expanded": whole[:1].expand(64, 256),
        "no elements": whole[:0],
        "a scalar": torch.tensor(1.0, device=device()),
        "bytes": torch.ones(5000, dtype=torch.uint8, device=device())[3:],
        "float8": torch.ones(64, 64, device=device()).to(torch.float8_e4m3fn),
        "a parameter": torch.nn.Parameter(whole, requires_grad=False),
        "freed": freed(),
    }


def freed() -> torch.Tensor:
    tensor = torch.ones(64, device=device())
    tensor.untyped_storage().resize_(0)
    return tensor


@on(cpu=(1, 2, 3), gpu=(1, 2))
@pytest.mark.parametrize("algorithm", ["auto", "two_shot", "unfused"])
def test_results_are_the_same(rank: int, world_size: int, algorithm: str) -> None:
    with allnorm.Communicator(device=device()) as c:
        for case in (CASE, QUANTIZED):
            for call, weight in enumerate([*weights().values(), None]):
                mine = weight if (rank + call) % 2 else None  # ranks may differ
                for repeat in range(3):  # the third call runs in C
                    each = case.but(call=3 * call + repeat, algorithm=algorithm)
                    each.compare(c, *each.run(c, prefetch=mine))
        assert c.check() is None


@on(cpu=(2,), gpu=(2,))
def test_results_are_the_same_in_compiled_code(rank: int, world_size: int) -> None:
    with allnorm.Communicator(device=device()) as c:
        weight = torch.ones(64, 256, device=device())

        @torch.compile(fullgraph=True)
        def layer(x: Any, residual: Any, gain: Any, weight: Any) -> Any:
            return c.all_reduce_add_rms_norm(x, residual, gain, 1e-6, prefetch=weight.t())

        given = CASE.call_arguments(c)
        CASE.compare(c, *layer(CASE.x(rank), given["residual"], given["weight"], weight))


class EngineWeight(torch.nn.Parameter):
    """A weight like those of vLLM: a subclass with a function of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


@on(cpu=(2,), gpu=(2,))
def test_an_operator_refuses_no_subclass_first(rank: int, world_size: int) -> None:
    """Each refused and repeated call would cost more than the call."""
    hint = EngineWeight(torch.ones(64, 256, device=device()), requires_grad=False)
    operator = torch.ops.allnorm.all_reduce_add_rms_norm
    refuse = mock.patch.object(tensors, "_refuse_type", side_effect=AssertionError("refused"))
    with allnorm.Communicator(device=device()) as c, refuse:
        given = CASE.call_arguments(c)
        for _ in range(3):
            results = operator(
                *(CASE.x(rank), given["residual"], given["weight"], 1e-6, 0.0, "rounded", c.name),
                prefetch=hint,
            )
            CASE.compare(c, *results)


@on(cpu=(2,))
def test_the_call_gets_the_address_and_the_size(rank: int, world_size: int) -> None:
    with allnorm.Communicator(device=device()) as c:
        choose = c._endpoint.choose
        plan = Plan("one_shot", "a test", 1, prefetch_bytes=BYTES)
        c._endpoint.choose = lambda call: plan  # type: ignore[method-assign]
        for name, weight in weights().items():
            c._dispatcher.forget()
            CASE.compare(c, *CASE.run(c, prefetch=weight))
            found = c._dispatcher.prepared_calls()[-1].native
            span = 0 if name in ("no elements", "freed") else _span(weight)
            assert found.prefetch_bytes == min(BYTES, span), name
            assert span == 0 or found.prefetch == weight.data_ptr(), name
        c._endpoint.choose = choose  # type: ignore[method-assign]


def _span(weight: torch.Tensor) -> int:
    """Returns the bytes from a tensor's first element to its last, by enumerating all of them."""
    flat = weight.as_strided(weight.shape, weight.stride(), 0)
    numbers = torch.arange(10**5).as_strided(flat.shape, flat.stride())
    return (int(numbers.max()) + 1) * weight.element_size()


@on(cpu=(2,))
def test_wrong_hints_are_refused_by_all(rank: int, world_size: int) -> None:
    for wrong, words in (
        (3.0, "expected a torch.Tensor"),
        (torch.ones(4, device="meta"), "expected cpu"),
        (torch.ones(4, 4).to_sparse(), "expected a dense one"),
    ):
        with allnorm.Communicator(device=device(), timeout=60) as c:
            hint: Any = wrong if rank == 0 else None
            text = message_of(Exception, lambda: CASE.run(c, prefetch=hint))  # noqa: B023
            assert "prefetch" in text, text
            assert words in text, text


def plan(backend: str, tokens: int, requested: str = "auto", most: int | None = 32) -> Plan:
    rows = {"one_shot": 10_000, "two_shot": 10_000}
    traits = Traits(backend, 2, tables=(policy.Table("a test", {}, 0.0, most),))
    return policy.choose(traits, tokens, 4096, 2, rows, requested)


def test_amounts() -> None:
    assert plan("cuda", 1).prefetch_bytes > 0
    assert plan("cuda", 32).prefetch_bytes > 0
    for case in (("cuda", 33), ("cuda", 1, "two_shot"), ("cuda", 1, "unfused"), ("cpu", 1)):
        assert plan(*case).prefetch_bytes == 0
    assert plan("cuda", 1, most=None).prefetch_bytes == 0, "by default"
    assert dispatch._LOCAL_PLAN.prefetch_bytes == 0


@on(cpu=(2,), gpu=(2,))
def test_prefetch_bytes_is_the_plans(rank: int, world_size: int) -> None:
    with allnorm.Communicator(device=device()) as c:
        for tokens, columns in ((0, 4096), (1, 4096), (32, 8192), (4096, 4096)):
            want = c.plan(tokens, columns, torch.float16).prefetch_bytes
            assert c.prefetch_bytes(tokens, columns, torch.float16) == want
        with pytest.raises(TypeError, match="hidden_size"):
            c.prefetch_bytes(1, "4096")  # type: ignore[arg-type]
