"""Tests hostile values for every argument of every public callable.

allnorm must accept each value or raise its own error, not one from a different library. Arguments
are taken from signatures, so new arguments are tried too. A new public callable fails a test until
its valid arguments are listed here.
"""

from __future__ import annotations

import contextlib
import inspect
import pathlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from rank_helpers import comm, message_of, on

import allnorm
from allnorm.testing.rank import device

PACKAGE = str(pathlib.Path(allnorm.__file__).parent)
ROWS, COLUMNS = 4, 128


NAMES = (
    *("Communicator", "Communicator.for_group", "Communicator.plan", "Fp8PerGroup"),
    *("Fp8PerTensor", "NvFp4", "PostNorm", "ExpertSum"),
    *("Communicator.all_reduce", "Communicator.all_reduce_add_rms_norm"),
    *("Communicator.all_reduce_add_rms_norm_quant", "Communicator.all_gather_rows"),
    *(
        "Communicator.row_shard",
        "Communicator.prefetch_bytes",
        "all_reduce",
        "all_reduce_add_rms_norm",
    ),
    *("all_reduce_add_rms_norm_quant", "all_gather_rows", "row_shard"),
    *("add_rms_norm", "add_rms_norm_quant", "Communicator.rms_norm_sharded", "rms_norm_sharded"),
    *("HyperConnection", "Communicator.all_reduce_hyper_connection", "all_reduce_hyper_connection"),
    *("HyperConnectionProjection", "hyper_connection_input", "quantize"),
    "Communicator.all_reduce_hyper_connection_input",
    "all_reduce_hyper_connection_input",
)


class Subclass(torch.Tensor):
    pass


class Empty:
    pass


def hostile() -> dict[str, Any]:
    from torch._subclasses import FakeTensorMode

    tensor = torch.ones(ROWS, COLUMNS)
    return {
        "None": None,
        "object": Empty(),
        "class": Empty,
        "class of a spec": allnorm.Fp8PerTensor,
        "class of a different spec": allnorm.Fp8PerToken,
        "dtype": torch.float16,
        "function": hostile,
        "list": [1.0, 2.0],
        "dict": {"a": 1},
        "array": np.ones((ROWS, COLUMNS), np.float32),
        "array of one": np.ones(1),
        "array of strings": np.array(["auto", "auto"]),
        "numpy float": np.float32(0.5),
        "numpy int": np.int64(3),
        "numpy bool": np.bool_(True),
        "bool": True,
        "text": "bfloat16",
        "empty text": "",
        "surrogate": "\udc80",
        "bytes": b"auto",
        "huge": 10**400,
        "negative": -(2**70),
        "NaN": float("nan"),
        "infinite": float("inf"),
        "complex": 1j,
        "tensor": tensor,
        "scalar tensor": torch.tensor(1.0),
        "no rows": torch.ones(0, COLUMNS),
        "float64": tensor.double(),
        "bool tensor": tensor.bool(),
        "complex tensor": tensor.to(torch.complex64),
        "subclass": tensor.as_subclass(Subclass),
        "meta": tensor.to("meta"),
        "fake": FakeTensorMode().from_tensor(tensor),
        "sparse": tensor.to_sparse(),
        "sparse rows": tensor.to_sparse_csr(),
        "nested": torch.nested.nested_tensor(list(tensor.split(1)), layout=torch.strided),
        "nested parameter": torch.nn.Parameter(torch.nested.nested_tensor([tensor, tensor])),
        "jagged": torch.nested.nested_tensor([tensor, tensor], layout=torch.jagged),
        "opaque": tensor.to_mkldnn(),
        "functional": torch._to_functional_tensor(tensor),
        "quantized": torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8),
        "transposed": torch.ones(COLUMNS, ROWS).t(),
        "expanded": torch.ones(1, 1).expand(ROWS, COLUMNS),
        "wants a gradient": tensor.clone().requires_grad_(),
    }


def calls(c: allnorm.Communicator) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Returns every public callable with valid values of its required arguments."""
    x, weight = torch.ones(ROWS, COLUMNS), torch.ones(COLUMNS)
    norm = {"x": x, "residual": torch.ones_like(x), "weight": weight, "eps": 1e-6}
    factors = {"post": torch.ones(ROWS, 2), "mix": torch.ones(ROWS, 2, 2)}
    streams = {
        "x": x,
        "residual": torch.ones(ROWS, 2, COLUMNS),
        "connection": allnorm.HyperConnection(**factors),
    }
    projection = {
        "fn": torch.ones(8, 2 * COLUMNS),
        "scale": torch.ones(3),
        "base": torch.ones(8),
    }
    inputs = {
        "streams": torch.ones(ROWS, 2, COLUMNS),
        "projection": allnorm.HyperConnectionProjection(**projection),
        "weight": weight,
        "eps": 1e-6,
    }
    good: dict[str, dict[str, Any]] = {
        "all_reduce": {"x": x},
        "all_reduce_add_rms_norm": norm,
        "all_reduce_add_rms_norm_quant": norm,
        "all_gather_rows": {"residual_shard": x, "num_tokens": ROWS},
        "row_shard": {"num_tokens": ROWS},
        "rms_norm_sharded": {"tensors": [x], "weights": [weight], "eps": 1e-6},
        "all_reduce_hyper_connection": streams,
        "all_reduce_hyper_connection_input": streams
        | {name: value for name, value in inputs.items() if name != "streams"},
        "add_rms_norm": norm,
        "add_rms_norm_quant": norm,
        "hyper_connection_input": inputs,
        "quantize": {"x": x, "quant": allnorm.Fp8PerToken()},
    }
    found: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "Communicator": (allnorm.Communicator, {}),
        "Communicator.for_group": (allnorm.Communicator.for_group, {}),
        "Communicator.plan": (c.plan, {"num_tokens": ROWS, "hidden_size": COLUMNS}),
        "Communicator.prefetch_bytes": (
            c.prefetch_bytes,
            {"num_tokens": ROWS, "hidden_size": COLUMNS},
        ),
        "Fp8PerGroup": (allnorm.Fp8PerGroup, {}),
        "Fp8PerTensor": (allnorm.Fp8PerTensor, {"scale": torch.ones(1)}),
        "NvFp4": (allnorm.NvFp4, {"global_scale": torch.ones(1)}),
    }
    for name, arguments in good.items():
        if hasattr(c, name):
            found[f"Communicator.{name}"] = getattr(c, name), arguments
        found[name] = getattr(allnorm, name), arguments

    def of_part(make: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(**arguments: Any) -> Any:
            if name == "connection":
                return c.all_reduce_hyper_connection(**{**streams, name: make(**arguments)})
            if name == "projection":
                return allnorm.hyper_connection_input(**{**inputs, name: make(**arguments)})
            given = {**norm, "residual": None, name: make(**arguments)}
            return c.all_reduce_add_rms_norm(**given)

        call.__signature__ = inspect.signature(make)
        return call

    experts = {"rows": torch.ones(ROWS, 2, COLUMNS)}
    found["PostNorm"] = of_part(allnorm.PostNorm, "post_norm"), {"weight": weight, "eps": 1e-6}
    found["ExpertSum"] = of_part(allnorm.ExpertSum, "x"), experts
    found["HyperConnection"] = of_part(allnorm.HyperConnection, "connection"), factors
    make = allnorm.HyperConnectionProjection
    found["HyperConnectionProjection"] = of_part(make, "projection"), projection
    return found


def arguments_of(call: Callable[..., Any]) -> Iterator[str]:
    for name, parameter in inspect.signature(call).parameters.items():
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            yield name


@on(cpu=(1,))
@pytest.mark.parametrize("name", NAMES)
def test_hostile_values(rank: int, world_size: int, name: str) -> None:
    call, good = calls(comm())[name]
    tried, wrong = 0, []
    for argument in arguments_of(call):
        for kind, value in hostile().items():
            tried += 1
            try:
                made = call(**{**good, argument: value})
                if isinstance(made, allnorm.Communicator) and name == "Communicator":
                    made.close()
            except (allnorm.AllnormError, TypeError, ValueError) as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                if not last.filename.startswith(PACKAGE) or "expected" not in str(error).lower():
                    where = pathlib.Path(last.filename).name
                    wrong.append(f"{argument}={kind}: {type(error).__name__} of {where}: {error}")
            except Exception as error:  # noqa: BLE001 - the test reports it
                wrong.append(f"{argument}={kind}: {type(error).__name__}: {error}")
    assert tried >= len(hostile())
    assert not wrong, "\n".join(wrong)


@on(cpu=(1, 2))
def test_hostile_tensors_in_repeated_calls(rank: int, world_size: int) -> None:
    """Checks that a hostile tensor in a repeated call neither crashes nor breaks the next call."""
    c = comm()
    x, weight = torch.ones(ROWS, COLUMNS), torch.ones(COLUMNS)
    post_norm, experts = allnorm.PostNorm(weight.clone(), 1e-6), torch.ones(ROWS, 2, COLUMNS)
    like = torch.empty_like
    norm = {"residual": like(x), "weight": weight, "eps": 1e-6}
    memory = {"out": like(x), "residual_out": like(x)}
    calls: list[tuple[Callable[..., Any], dict[str, Any]]] = [
        (c.all_reduce, {"x": x, "out": like(x)}),
        (c.all_reduce_add_rms_norm, {"x": x, **norm, **memory, "post_norm": post_norm}),
        (allnorm.add_rms_norm, {"x": x, **norm}),
    ]

    def of_experts(rows: Any, **given: Any) -> Any:
        return c.all_reduce_add_rms_norm(allnorm.ExpertSum(rows), **given)

    calls.append((of_experts, {"rows": experts, **norm}))
    kinds = {kind: value for kind, value in hostile().items() if isinstance(value, torch.Tensor)}
    for call, good in calls:
        for argument in [name for name, value in good.items() if isinstance(value, torch.Tensor)]:
            for value in kinds.values():
                for _ in range(3):
                    call(**good)
                # test_hostile_values checks these errors.
                with contextlib.suppress(Exception):
                    call(**{**good, argument: value})


def test_every_public_callable_is_tried() -> None:
    """Exempt are callables without arguments, result and error types, and `trace`."""
    results = {"Plan", "QuantizedNorm", "Stats", "TraceReport", "trace"}
    public = {name: getattr(allnorm, name) for name in allnorm.__all__}
    methods = inspect.getmembers(allnorm.Communicator, callable)
    public |= {f"Communicator.{name}": f for name, f in methods if not name.startswith("_")}
    expected = {
        name
        for name, value in public.items()
        if callable(value)
        and name not in results
        and not (isinstance(value, type) and issubclass(value, Exception))
        and set(arguments_of(value)) - {"self"}
    }
    assert expected == set(NAMES)


@on(cpu=(1,))
def test_messages_name_what_was_given(rank: int, world_size: int) -> None:
    c, x, weight = comm(), torch.ones(ROWS, COLUMNS), torch.ones(COLUMNS)

    def said(call: Callable[[], Any]) -> str:
        return message_of((TypeError, ValueError), call)

    text = said(lambda: c.all_reduce_add_rms_norm(x, None, weight.double(), 1e-6))
    assert text.count("float32") == 1, text
    assert "torch.dtype" in said(lambda: c.plan(4, 128, "bfloat16"))
    for quant in (allnorm.Fp8PerTensor, allnorm.NvFp4):
        for call in (c.all_reduce_add_rms_norm_quant, allnorm.add_rms_norm_quant):
            text = said(lambda f=call, q=quant: f(x, None, weight, 1e-6, q))
            assert "expected an allnorm.NvFp4" in text, text
    islands: Any = np.zeros((1, 1), int)
    text = said(lambda: allnorm.Communicator(device=device(), islands=islands))
    assert "islands.tolist()" in text, text
    rows = torch.ones(ROWS, 2, COLUMNS)
    out = rows.view(-1, COLUMNS)[:ROWS]
    experts = allnorm.ExpertSum(rows)
    text = said(lambda: c.all_reduce_add_rms_norm(experts, None, weight, 1e-6, out=out))
    assert "out shares memory with rows" in text, text
