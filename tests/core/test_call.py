"""Tests the description of a call: all interfaces have the same fields."""

from __future__ import annotations

import dataclasses
import inspect
import pathlib
import re
import types
from typing import Any

import pytest
import torch

import allnorm
import allnorm.functions
import allnorm.ops
from allnorm import names
from allnorm.core import fast_call
from allnorm.core.call import INPUTS, KEYWORDS, MEMORY, PARTS, SLOTS, Call, CallWithInput, Runner
from allnorm.core.operators import OPERATORS, arguments
from allnorm.core.slices import Slices
from allnorm.core.stream_input import NextInput

X = torch.ones(2, 64)
NORM = allnorm.PostNorm(torch.ones(64), 1e-5, 1.0)
CONNECTION = allnorm.HyperConnection(torch.ones(2, 3), torch.ones(2, 3, 3))
NEXT_INPUT = NextInput(
    allnorm.HyperConnectionProjection(*map(torch.ones, (15, 3, 15)), 1e-3, 1e-4, 7, 1.5),  # type: ignore[arg-type]
    *(X[0], 1e-5, 1.0, "vllm"),
)
EXPERTS = allnorm.ExpertSum(
    torch.ones(2, 3, 64), torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.int32), X
)
QUANTS: tuple[Any, ...] = (
    allnorm.Fp8PerGroup(32),
    allnorm.Fp8PerToken(),
    allnorm.MxFp8(),
    allnorm.Fp8PerTensor(torch.ones(1)),
    allnorm.NvFp4(torch.ones(1), "row_major"),
)


def test_a_runner_runs_the_call_of_its_fields() -> None:
    same: Any = types.SimpleNamespace(run=lambda call: call)
    given: Any = {name: object() for name in KEYWORDS} | {"post_norm": NORM}
    given["connection"] = CONNECTION
    assert Runner.call(same, **given).values == tuple(given[name] for name in KEYWORDS)


def test_every_tensor_of_a_call_is_known_by_name() -> None:
    """Checks that PARTS, INPUTS, MEMORY and the properties of Call name the same tensors."""
    kinds = [(kind, parts) for kinds in PARTS.values() for kind, parts in kinds.items()]
    singles = [parts for kind, parts in kinds if kind is not Slices]
    inner = {place for parts in singles for place in parts.values() if place is not None}
    assert inner | {"residual", "weight", *MEMORY} == {*INPUTS, *MEMORY}
    for kind, parts in kinds:
        assert set(parts) == set(inspect.signature(kind).parameters)
    for quant in QUANTS[3:]:
        call = Call(op="all_reduce_add_rms_norm_quant", source=EXPERTS, post_norm=NORM, quant=quant)
        call = dataclasses.replace(call, connection=CONNECTION)
        given = {"source": EXPERTS, "post_norm": NORM, "quant": quant}
        given["connection"] = CONNECTION
        for field, value in given.items():
            for attribute, place in PARTS[field][type(value)].items():
                if place is not None:
                    assert getattr(call, place) is getattr(value, attribute), place


def test_tensors_of_slices_have_slots() -> None:
    x, y, v, w = torch.ones(4, 3, 8).unbind()
    call = Call(op="rms_norm_sharded", source=x, slices=Slices((x, y), (v[0], w[0]), None))
    assert list(call.named) == ["x", "x1", "weight", "weight1"]
    assert set(call.named) < set(SLOTS)
    assert list(map(id, call.named.values())) == list(map(id, call.given[1:]))
    call = dataclasses.replace(call, slices=Slices((x,), (v[0],), (y,)))
    assert call.named["out"] is y
    assert set(Call(op="all_reduce", source=x, out=y).named) == {"x", "out"}


def test_constants_distinguish_calls() -> None:
    """Checks that the constants depend on every field that is not a tensor, and on no tensor."""
    base: dict[str, Any] = {"op": "all_reduce_add_rms_norm_quant", "source": X}
    changes: tuple[dict[str, Any], ...] = (
        *({"quant": quant} for quant in QUANTS),
        {"quant": allnorm.NvFp4(torch.ones(1))},
        {"post_norm": NORM},
        {"post_norm": allnorm.PostNorm(X[0], 1e-6, 1.0)},
        {"post_norm": allnorm.PostNorm(X[0], 1e-5, 0.0)},
        {"source": EXPERTS},
        *({name: 2} for name in ("eps", "weight_bias", "scale", "num_tokens")),
        *({name: "x"} for name in ("op", "numerics", "algorithm")),
        *({name: True} for name in ("residual_sharded", "return_normed")),
        {"gather": False},
    )
    found = [Call(**base | change).constants for change in ({}, *changes)]
    assert len(set(found)) == len(found)
    assert {name for change in changes for name in change} | {
        *("residual", "weight", "prefetch", "slices", "connection", *MEMORY)
    } == set(KEYWORDS)
    for name in ("residual", "weight", "prefetch", *MEMORY):
        assert Call(**base | {name: X}).constants == found[0]


def test_the_library_takes_the_table() -> None:
    """Checks that csrc/python can find each tensor, by its keyword or in the part that holds it."""
    table = fast_call.keywords()
    assert tuple(name for name, *_ in table) == KEYWORDS
    places = [place for _, _, place, _ in table if place is not None]
    assert places == ["x", "residual", "weight", "prefetch", *MEMORY]
    header = pathlib.Path(__file__).parents[2] / "csrc" / "python" / "arguments.h"
    (names_in_c,) = re.findall(
        r"kTensorNames\[kNumTensors\] = {(.*?)}", header.read_text(), re.DOTALL
    )
    assert tuple(re.findall(r'"(\w+)"', names_in_c)) == SLOTS


def test_operators_are_the_public_calls() -> None:
    assert tuple(OPERATORS) == names.OPS
    assert tuple(n for n, row in OPERATORS.items() if row.is_collective) == names.COLLECTIVES
    for name in OPERATORS:
        method = getattr(allnorm.Communicator, name, None) or getattr(allnorm, name)
        parameters = set(inspect.signature(method).parameters)
        known = {*KEYWORDS, "x", "residual_shard", "normed_out", "self", "tensors", "weights"}
        known |= {"projection"} if OPERATORS[name].makes_input else set()
        assert parameters <= known, name


@pytest.mark.parametrize("name", names.COLLECTIVES)
def test_functions_have_the_parameters_of_methods(name: str) -> None:
    method = inspect.signature(getattr(allnorm.Communicator, name)).parameters
    function = dict(inspect.signature(getattr(allnorm, name)).parameters)
    assert function.pop("group").kind is inspect.Parameter.KEYWORD_ONLY
    assert list(function.values()) == list(method.values())[1:]


def call_has_norm(name: str) -> bool:
    return Call(op=name, source=X, connection=CONNECTION).has_norm


@pytest.mark.parametrize("name", [n for n, row in OPERATORS.items() if not row.takes_lists])
@pytest.mark.parametrize("update", [False, True])
def test_operator_arguments_preserve_a_call(name: str, update: bool) -> None:
    """Checks that converting a Call to operator arguments and back loses nothing."""
    row = OPERATORS[name]
    specs = QUANTS if row.is_quantized else (None,)
    kind = CallWithInput if row.makes_input else Call
    for quant in specs:
        op = name.removesuffix("_input")
        given: dict[str, Any] = {"op": op, "source": X, "algorithm": "auto"}
        if name == "all_gather_rows":
            given |= {"num_tokens": 7}
        elif op == "all_reduce_hyper_connection":
            given |= {"residual": X, "connection": CONNECTION}
            given |= {"source": EXPERTS} if update else {}
            given |= {"next_input": NEXT_INPUT} if row.makes_input else {}
        elif name not in ("all_reduce", "quantize"):
            given |= {"residual": X, "weight": X[0], "eps": 1e-3, "weight_bias": -0.0}
            given |= {"numerics": "vllm"}
        if "post_weight" in {parameter.name for parameter in row.parameters} and update:
            given |= {"source": EXPERTS, "post_norm": NORM, "scale": 0.5}
        if row.is_quantized:
            given |= {"quant": quant, "return_normed": name != "quantize"}
        if row.is_collective and call_has_norm(name):
            given |= {"residual_sharded": True, "algorithm": "two_shot"}
        call = kind(**given)
        passed = arguments(call, "a group", 3)
        operator = getattr(torch.ops.allnorm, name).default
        assert len(passed) <= len(operator._schema.arguments)
        again = row.pass_on(kind, *passed)
        assert again.constants == call.constants
        if isinstance(call, CallWithInput):
            same, operands = call.next_input.operands, again.next_input.operands
            assert all(operands[name] is same[name] for name in same)
        assert all(a is b for a, b in zip(again.tensors, call.tensors, strict=True))
        named = dict(zip(row.positions, passed, strict=False))
        assert named.get("comm_name", "") == ("a group" if row.is_collective else "")
        assert named.get("residual_rows") == (3 if "residual_sharded" in given else None)


def test_wrong_post_norms_are_refused() -> None:
    wrong: Any = X[0]
    with pytest.raises(TypeError, match=r"expected an allnorm\.PostNorm"):
        Call(op="all_reduce_add_rms_norm", source=X, post_norm=wrong)
    positional: Any = Call
    with pytest.raises(TypeError):
        positional("all_reduce", X)
