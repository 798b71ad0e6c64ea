"""Wrong arguments: a clear error, the same on every rank, and the communicator works afterwards."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_helpers import (
    ALGORITHMS,
    Case,
    assert_ranks_agree,
    comm,
    message_of,
    on,
    same_on_every_rank,
)

import allnorm

H = 64

# name: (expected error types, words of the message, changed arguments of a valid call)
Change = Callable[[dict[str, Any]], dict[str, Any]]
FUSED: dict[str, tuple[type[Exception] | tuple[type[Exception], ...], tuple[str, ...], Change]] = {
    "x not a tensor": (TypeError, ("x", "list"), lambda a: {"x": [1.0]}),
    "x None": (TypeError, ("x",), lambda a: {"x": None}),
    "x float64": (
        allnorm.UnsupportedError,
        ("x", "float64", "bfloat16"),
        lambda a: {k: a[k].double() for k in ("x", "residual", "weight")},
    ),
    "x integer": ((TypeError, ValueError), ("x", "int32"), lambda a: {"x": a["x"].int()}),
    "x scalar": (ValueError, ("x", "()"), lambda a: {"x": a["x"][0, 0], "residual": None}),
    "x no columns": (
        ValueError,
        ("x", "(4, 0)"),
        lambda a: {"x": a["x"][:, :0], "residual": None, "weight": a["weight"][:0]},
    ),
    "x columns not contiguous": (
        ValueError,
        ("x", "contiguous"),
        lambda a: {"x": a["x"].repeat(1, 2)[:, ::2]},
    ),
    "x transposed": (
        ValueError,
        ("x", "contiguous"),
        lambda a: {"x": a["x"].t().contiguous().t()},
    ),
    "x on another device": (
        (ValueError, TypeError),
        ("x", "meta"),
        lambda a: {"x": a["x"].to("meta")},
    ),
    "hidden_size too large": (
        ValueError,
        ("hidden_size",),
        lambda a: {
            "x": a["x"].new_zeros(1, 1 << 20),
            "residual": None,
            "weight": a["weight"].new_zeros(1 << 20),
        },
    ),
    "residual not a tensor": (TypeError, ("residual",), lambda a: {"residual": 1.0}),
    "residual of another shape": (
        ValueError,
        ("residual", "(3, 64)", "(4, 64)"),
        lambda a: {"residual": a["residual"][:3]},
    ),
    "residual to be broadcast": (
        ValueError,
        ("residual", "(1, 64)"),
        lambda a: {"residual": a["residual"][:1]},
    ),
    "residual of another dtype": (
        (TypeError, ValueError),
        ("residual", "float32"),
        lambda a: {"residual": a["residual"].float()},
    ),
    "residual on another device": (
        (ValueError, TypeError),
        ("residual", "meta"),
        lambda a: {"residual": a["residual"].to("meta")},
    ),
    "residual not contiguous": (
        ValueError,
        ("residual", "contiguous"),
        lambda a: {"residual": a["residual"].repeat(1, 2)[:, ::2]},
    ),
    "weight None": (TypeError, ("weight",), lambda a: {"weight": None}),
    "weight too short": (
        ValueError,
        ("weight", "(63,)", "64"),
        lambda a: {"weight": a["weight"][:63]},
    ),
    "weight two-dimensional": (ValueError, ("weight",), lambda a: {"weight": a["weight"][None]}),
    "weight of a third dtype": (
        (TypeError, ValueError),
        ("weight", "float16"),
        lambda a: {"weight": a["weight"].half()},
    ),
    "weight on another device": (
        (ValueError, TypeError),
        ("weight", "meta"),
        lambda a: {"weight": a["weight"].to("meta")},
    ),
    "weight not contiguous": (
        ValueError,
        ("weight", "contiguous"),
        lambda a: {"weight": a["weight"].repeat(2)[::2]},
    ),
    "eps negative": (ValueError, ("eps", "-1e-06"), lambda a: {"eps": -1e-6}),
    "eps NaN": (ValueError, ("eps", "nan"), lambda a: {"eps": float("nan")}),
    "eps infinite": (ValueError, ("eps", "inf"), lambda a: {"eps": float("inf")}),
    "eps a string": ((TypeError, ValueError), ("eps",), lambda a: {"eps": "1e-6"}),
    "eps a tensor": ((TypeError, ValueError), ("eps",), lambda a: {"eps": torch.tensor(1e-6)}),
    "weight_bias NaN": (ValueError, ("weight_bias",), lambda a: {"weight_bias": float("nan")}),
    "weight_bias a list": (
        (TypeError, ValueError),
        ("weight_bias",),
        lambda a: {"weight_bias": [1.0]},
    ),
    "numerics unknown": (
        ValueError,
        ("numerics", "'exact'", "rounded", "vllm"),
        lambda a: {"numerics": "exact"},
    ),
    "numerics a number": ((ValueError, TypeError), ("numerics",), lambda a: {"numerics": 3}),
    "algorithm unknown": (
        ValueError,
        ("algorithm", "'ring'", "one_shot", "two_shot", "unfused", "auto"),
        lambda a: {"algorithm": "ring"},
    ),
    "algorithm None": ((ValueError, TypeError), ("algorithm",), lambda a: {"algorithm": None}),
    "out of another shape": (
        ValueError,
        ("out", "(2, 128)"),
        lambda a: {"out": torch.empty_like(a["x"]).view(2, 128)},
    ),
    "out of another dtype": (
        (TypeError, ValueError),
        ("out", "float32"),
        lambda a: {"out": a["x"].float()},
    ),
    "out on another device": (
        (ValueError, TypeError),
        ("out", "meta"),
        lambda a: {"out": a["x"].to("meta")},
    ),
    "out not contiguous": (
        ValueError,
        ("out", "contiguous"),
        lambda a: {"out": a["x"].repeat(1, 2)[:, ::2]},
    ),
    "out with one row for all": (
        ValueError,
        ("out",),
        lambda a: {"out": a["x"].new_empty(1, H).expand(4, H)},
    ),
    "residual_out of another shape": (
        ValueError,
        ("residual_out",),
        lambda a: {"residual_out": a["residual"].new_empty(5, H)},
    ),
    "out a number": (TypeError, ("out",), lambda a: {"out": 1}),
}


def good_arguments() -> dict[str, Any]:
    case = Case((4, H))
    return {"x": case.x(0), **case.norm_arguments()}


def check_refusals(rows: dict[str, Any], call: Callable[..., Any], good: Case) -> None:
    """Checks that the calls of all rows are refused, on all ranks by the same message.

    A valid call follows each refused one.
    """
    for number, (name, (error, words, change)) in enumerate(rows.items()):
        arguments = {**good_arguments(), **({} if good.quant is None else {"quant": good.quant})}
        arguments.update(change(arguments))
        text = message_of(error, lambda a=arguments: call(**a))
        missing = [word for word in words if word not in text]
        assert not missing, f"{name}: {text} does not mention {missing}"
        same_on_every_rank(re.sub(r"cuda:\d", "cuda", text))  # ranks have different GPUs
        good.but(call=number).check(comm())


@on(cpu=(1, 2, 3), gpu=(1, 2))
def test_every_refusal(rank: int, world_size: int) -> None:
    check_refusals(FUSED, comm().all_reduce_add_rms_norm, Case((2, H)))


@on(cpu=(2,), gpu=(2,))
def test_refusals_of_all_reduce_and_plan(rank: int, world_size: int) -> None:
    c = comm()
    x = Case((4, H)).x(rank)
    texts = []
    for error, call in (
        (TypeError, lambda: c.all_reduce(None)),
        (allnorm.UnsupportedError, lambda: c.all_reduce(x.long())),
        (ValueError, lambda: c.all_reduce(x.t())),
        (ValueError, lambda: c.all_reduce(x, algorithm="tree")),
        (ValueError, lambda: c.all_reduce(x, out=x[:2])),
        ((TypeError, ValueError), lambda: c.all_reduce(x, out=x.float())),
        (ValueError, lambda: c.plan(-1, H, torch.bfloat16)),
        (ValueError, lambda: c.plan(1, 0, torch.bfloat16)),
        (ValueError, lambda: c.plan(1, H, torch.float64)),
    ):
        texts.append(message_of(error, call))
    same_on_every_rank(texts)
    Case().check(c)


@on(cpu=(2,), gpu=(2,))
def test_refusals_after_success(rank: int, world_size: int) -> None:
    """Prepared calls do not change how similar wrong calls are refused."""
    c = comm()
    for algorithm, name in itertools.product(ALGORITHMS, FUSED):
        if name.startswith("algorithm"):
            continue
        error, _, change = FUSED[name]
        texts = []
        for repeats in (0, 3):
            arguments = {**good_arguments(), "algorithm": algorithm}
            for _ in range(repeats):
                c.all_reduce_add_rms_norm(**arguments)
            arguments.update(change(arguments))
            texts.append(message_of(error, lambda a=arguments: c.all_reduce_add_rms_norm(**a)))
        assert texts[0] == texts[1]


@pytest.mark.own_gpus
@on(gpu=(2,))
def test_tensors_of_another_gpu(rank: int, world_size: int) -> None:
    c = comm()
    x = Case((4, H)).x(rank)
    other = f"cuda:{(rank + 1) % world_size}"
    for tensor in (x.cpu(), x.to(other)):
        with pytest.raises(ValueError, match="is on"):
            c.all_reduce(tensor)
    assert_ranks_agree(c, *Case().check(c))


@on(gpu=(2, 8))
def test_hidden_size_not_divisible_by_a_pack(rank: int, world_size: int) -> None:
    """A requested algorithm is refused; the default is "unfused", with the same bits."""
    c = comm()
    for dtype, hidden_size in ((torch.bfloat16, 4095), (torch.float16, 12), (torch.float32, 6)):
        plan = c.plan(3, hidden_size, dtype)
        assert plan.algorithm == "unfused"
        assert str(hidden_size) in plan.reason
        Case((3, hidden_size), dtype).check(c)
        for algorithm in ("one_shot", "two_shot"):
            with pytest.raises(allnorm.UnsupportedError, match=f"{hidden_size}.*unfused"):
                Case((3, hidden_size), dtype, algorithm=algorithm).run(c)


@on(cpu=(1,), gpu=(1,))
def test_one_rank_has_nothing_to_exchange(rank: int, world_size: int) -> None:
    c = comm()
    plan = c.plan(3, H, torch.bfloat16)
    assert plan.algorithm == "unfused"
    for algorithm in ("auto", "one_shot", "two_shot", "unfused"):
        for shape in ((3, H), (0, H), (2, 5)):
            Case(shape, algorithm=algorithm).check(c)
