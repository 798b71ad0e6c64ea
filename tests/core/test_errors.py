"""Tests invalid arguments: all ranks raise the same clear error, and calls still work."""

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
from allnorm import quant as quants

H = 64
FP8 = torch.float8_e4m3fn
TMA = allnorm.Fp8PerGroup(16, "column_major_tma")
EITHER = (TypeError, ValueError)
UNSUPPORTED = allnorm.UnsupportedError
META = "meta"

# name: (error types, words in the message, change). A name begins with an argument name, which
# the message must contain too. The change takes the arguments of a valid call, and returns an
# invalid value for that argument, or a dict of multiple arguments.
Row = tuple[Any, tuple[str, ...], Callable[[dict[str, Any]], Any]]


def every_second(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of the same shape with gaps in its last dimension."""
    return tensor.repeat_interleave(2, -1)[..., ::2]


FUSED: dict[str, Row] = {
    "x not a tensor": (TypeError, ("list",), lambda a: [1.0]),
    "x None": (TypeError, (), lambda a: None),
    "x float64": (
        *(UNSUPPORTED, ("float64", "bfloat16")),
        lambda a: {k: a[k].double() for k in ("x", "residual", "weight")},
    ),
    "x integer": (EITHER, ("int32",), lambda a: a["x"].int()),
    "x scalar": (ValueError, ("()",), lambda a: {"x": a["x"][0, 0], "residual": None}),
    "x without columns": (
        *(ValueError, ("(4, 0)",)),
        lambda a: {"x": a["x"][:, :0], "residual": None, "weight": a["weight"][:0]},
    ),
    "x with gaps between columns": (ValueError, ("contiguous",), lambda a: every_second(a["x"])),
    "x transposed": (ValueError, ("contiguous",), lambda a: a["x"].t().contiguous().t()),
    "x on a different device": (EITHER, (META,), lambda a: a["x"].to(META)),
    "hidden_size too large": (
        *(ValueError, ()),
        lambda a: {
            "x": a["x"].new_zeros(1, 1 << 20),
            "residual": None,
            "weight": a["weight"].new_zeros(1 << 20),
        },
    ),
    "residual not a tensor": (TypeError, (), lambda a: 1.0),
    "residual too low": (ValueError, ("(3, 64)", "(4, 64)"), lambda a: a["residual"][:3]),
    "residual to be broadcast": (ValueError, ("(1, 64)",), lambda a: a["residual"][:1]),
    "residual of a different dtype": (EITHER, ("float16",), lambda a: a["residual"].half()),
    "residual on a different device": (EITHER, (META,), lambda a: a["residual"].to(META)),
    "residual with gaps": (ValueError, ("contiguous",), lambda a: every_second(a["residual"])),
    "weight None": (TypeError, (), lambda a: None),
    "weight too short": (ValueError, ("(63,)", "64"), lambda a: a["weight"][:63]),
    "weight two-dimensional": (ValueError, (), lambda a: a["weight"][None]),
    "weight of a third dtype": (EITHER, ("float16",), lambda a: a["weight"].half()),
    "weight on a different device": (EITHER, (META,), lambda a: a["weight"].to(META)),
    "weight with gaps": (ValueError, ("contiguous",), lambda a: every_second(a["weight"])),
    "eps negative": (ValueError, ("-1e-06",), lambda a: -1e-6),
    "eps NaN": (ValueError, ("nan",), lambda a: float("nan")),
    "eps infinite": (ValueError, ("inf",), lambda a: float("inf")),
    "eps a string": (EITHER, (), lambda a: "1e-6"),
    "eps a tensor": (EITHER, (), lambda a: torch.tensor(1e-6)),
    "weight_bias NaN": (ValueError, (), lambda a: float("nan")),
    "weight_bias a list": (EITHER, (), lambda a: [1.0]),
    "numerics unknown": (ValueError, ("'exact'", "rounded", "vllm"), lambda a: "exact"),
    "numerics a number": (EITHER, (), lambda a: 3),
    "algorithm unknown": (ValueError, ("'ring'", *ALGORITHMS), lambda a: "ring"),
    "algorithm None": (EITHER, (), lambda a: None),
    "out of a different shape": (ValueError, ("(2, 128)",), lambda a: a["x"].new_empty(2, 128)),
    "out of a different dtype": (EITHER, ("float32",), lambda a: a["x"].float()),
    "out on a different device": (EITHER, (META,), lambda a: a["x"].to(META)),
    "out with gaps": (ValueError, ("contiguous",), lambda a: every_second(a["x"])),
    "out with one row for all": (ValueError, (), lambda a: a["x"].new_empty(1, H).expand(4, H)),
    "residual_out too high": (ValueError, (), lambda a: a["residual"].new_empty(5, H)),
    "out a number": (TypeError, (), lambda a: 1),
}


def fp8(x: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.empty(shape or x.shape, dtype=FP8, device=x.device)


def scales(x: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.empty(shape, device=x.device)


def in_one_place(a: dict[str, Any], what: str) -> dict[str, Any]:
    """Returns memory for quantized rows that overlaps the argument named `what`."""
    memory = torch.zeros(8 * H, dtype=torch.uint8, device=a["x"].device)
    scale = memory.view(torch.float32)
    out = {"quantized_out": memory[: 4 * H].view(FP8).view(4, H)}
    if what == "residual_out":
        return {**out, "residual_out": memory.view(a["x"].dtype).view(4, H)}
    if what == "quant":
        return {**out, "quant": allnorm.Fp8PerTensor(scale[:1])}
    return {**out, "scale_out": scale[:16].view(4, 4)}


def padding_over_weight(a: dict[str, Any]) -> dict[str, Any]:
    scale = quants.empty_scale(TMA, 3, H, a["x"].device)
    memory = torch.zeros(16 + H, dtype=torch.float32, device=a["x"].device)
    return {
        "x": a["x"][:3],
        "residual": None,
        "quant": TMA,
        "weight": memory[15 : 15 + H],  # the last float is the padding of the last column
        "scale_out": memory.as_strided(scale.shape, scale.stride()),
    }


SHARES = "shares memory with"
QUANTIZED: dict[str, Row] = {
    **{name: row for name, row in FUSED.items() if not name.startswith(("out", "residual_"))},
    "quant None": (TypeError, ("quant=None", "Fp8PerGroup"), lambda a: None),
    "quant a string": (TypeError, ("quant='fp8'", "Fp8PerToken"), lambda a: "fp8"),
    "quant a list": (TypeError, ("quant=[128]",), lambda a: [128]),
    "quant a class": (TypeError, ("quant=",), lambda a: allnorm.Fp8PerToken),
    "group_size too large": (
        *(UNSUPPORTED, ("64", "group_size=128", "16 or 32 or 64")),
        lambda a: {"quant": allnorm.Fp8PerGroup(128)},
    ),
    "quant.scale on a different device": (
        *(ValueError, (META,)),
        lambda a: {"quant": allnorm.Fp8PerTensor(torch.ones(1, device=META))},
    ),
    "return_normed a number": (TypeError, ("=16", "True or False"), lambda a: 16),
    "quantized_out with the dtype of x": (
        *(TypeError, ("bfloat16", "float8_e4m3fn")),
        lambda a: torch.empty_like(a["x"]),
    ),
    "quantized_out too wide": (ValueError, ("(2, 128)", "(4, 64)"), lambda a: fp8(a["x"], 2, 128)),
    "quantized_out with gaps": (
        *(ValueError, ("contiguous",)),
        lambda a: fp8(a["x"], 4, 2 * H)[:, ::2],
    ),
    "quantized_out with one row for all": (
        *(ValueError, ("distinct",)),
        lambda a: fp8(a["x"], 1, H).expand(4, H),
    ),
    "quantized_out on a different device": (ValueError, (META,), lambda a: fp8(a["x"]).to(META)),
    "quantized_out a number": (TypeError, ("int",), lambda a: 1),
    "normed_out of a different dtype": (TypeError, ("float8",), lambda a: fp8(a["x"])),
    "normed_out too high": (ValueError, ("(5, 64)",), lambda a: a["x"].new_empty(5, H)),
    "residual_out too high": (ValueError, ("(5, 64)",), lambda a: a["x"].new_empty(5, H)),
    "scale_out a number": (TypeError, ("float",), lambda a: 1.0),
    "scale_out of a different dtype": (
        *(TypeError, ("bfloat16", "float32")),
        lambda a: a["x"].new_empty(4, 4),
    ),
    "scale_out too wide": (
        *(ValueError, ("(4, 5)", "(4, 4)", "empty_scale")),
        lambda a: scales(a["x"], 4, 5),
    ),
    "scale_out transposed": (
        *(ValueError, ("(1, 4)", "(4, 1)")),
        lambda a: scales(a["x"], 4, 4).t(),
    ),
    "scale_out on a different device": (
        *(ValueError, (META,)),
        lambda a: torch.empty(4, 4, device=META),
    ),
    "scale_out without padding": (
        *(ValueError, ("padding", "empty_scale")),
        lambda a: {
            "x": a["x"][:3],
            "residual": None,
            "quant": TMA,
            "scale_out": torch.empty_strided((3, 4), (1, 4), device=a["x"].device),
        },
    ),
    "scale_out in addition to a given scale": (
        *(ValueError, ("Fp8PerTensor",)),
        lambda a: {
            "quant": allnorm.Fp8PerTensor(scales(a["x"], 1)),
            "scale_out": scales(a["x"], 1),
        },
    ),
    "quantized_out in the memory of x": (
        *(ValueError, (f"{SHARES} x",)),
        lambda a: a["x"].view(FP8)[:, :H],
    ),
    **{
        f"quantized_out in the memory of {other}": (
            *(ValueError, (f"{SHARES} {other}",)),
            lambda a, what=what: in_one_place(a, what),
        )
        for what, other in (
            *(("residual_out", "residual_out"), ("scale_out", "scale_out")),
            ("quant", "quant.scale"),
        )
    },
    "scale_out in the memory of residual": (
        *(ValueError, (f"{SHARES} residual.",)),
        lambda a: a["residual"].view(torch.float32).view(-1)[:16].view(4, 4),
    ),
    "scale_out with padding in the memory of weight": (
        *(ValueError, (f"{SHARES} weight",)),
        padding_over_weight,
    ),
    "normed_out in the memory of residual": (
        *(ValueError, (f"{SHARES} residual.",)),
        lambda a: a["residual"],
    ),
    "residual_out in the memory of normed_out": (
        *(ValueError, (f"{SHARES} normed_out",)),
        lambda a: dict.fromkeys(("normed_out", "residual_out"), torch.empty_like(a["x"])),
    ),
    "residual_out in the memory of x": (ValueError, (f"{SHARES} x",), lambda a: a["x"]),
}


def good_arguments() -> dict[str, Any]:
    case = Case((4, H))
    return {"x": case.x(0), **case.norm_arguments()}


def refused(name: str, row: Row, call: Callable[..., Any], good: dict[str, Any]) -> str:
    """Makes the invalid call that a row describes; returns the error message."""
    error, words, change = row
    argument = name.split()[0]
    value = change(good)
    changed = value if isinstance(value, dict) else {argument: value}
    text = message_of(error, lambda: call(**{**good, **changed}))
    missing = [word for word in (argument, *words) if word not in text]
    assert not missing, f"{name}: {text} does not mention {missing}"
    return text


@on(cpu=(1, 2, 3), gpu=(1, 2))
@pytest.mark.parametrize("quantized", [False, True])
def test_every_refusal(rank: int, world_size: int, quantized: bool) -> None:
    """All ranks must raise the same message. A valid call follows each invalid one."""
    c, quant = comm(), allnorm.Fp8PerGroup(16) if quantized else None
    more = {"quant": quant} if quantized else {}
    call = c.all_reduce_add_rms_norm_quant if quantized else c.all_reduce_add_rms_norm
    for number, (name, row) in enumerate((QUANTIZED if quantized else FUSED).items()):
        text = refused(name, row, call, {**good_arguments(), **more})
        same_on_every_rank(re.sub(r"cuda:\d", "cuda", text))  # ranks have different GPUs
        Case((4, H), quant=quant, call=number).check(c)


@on(cpu=(2,), gpu=(2,))
def test_refusals_after_success(rank: int, world_size: int) -> None:
    """Checks that invalid calls are refused even after a similar valid call is prepared."""
    c = comm()
    for algorithm, (name, row) in itertools.product(ALGORITHMS, FUSED.items()):
        if name.startswith("algorithm"):
            continue
        texts = []
        for repeats in (0, 3):
            arguments = {**good_arguments(), "algorithm": algorithm}
            for _ in range(repeats):
                c.all_reduce_add_rms_norm(**arguments)
            texts.append(refused(name, row, c.all_reduce_add_rms_norm, arguments))
        assert texts[0] == texts[1]


@on(cpu=(2,), gpu=(2,))
def test_refusals_of_all_reduce_and_plan(rank: int, world_size: int) -> None:
    c = comm()
    x = Case((4, H)).x(rank)
    texts = []
    for error, call in (
        (TypeError, lambda: c.all_reduce(None)),
        (UNSUPPORTED, lambda: c.all_reduce(x.long())),
        (ValueError, lambda: c.all_reduce(x.t())),
        (ValueError, lambda: c.all_reduce(x, algorithm="tree")),
        (ValueError, lambda: c.all_reduce(x, out=x[:2])),
        (EITHER, lambda: c.all_reduce(x, out=x.float())),
        (ValueError, lambda: c.plan(-1, H, torch.bfloat16)),
        (ValueError, lambda: c.plan(1, 0, torch.bfloat16)),
        (ValueError, lambda: c.plan(1, H, torch.float64)),
    ):
        texts.append(message_of(error, call))
    same_on_every_rank(texts)
    Case().check(c)


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_refusals_of_the_local_quantizing_op(where: str) -> None:
    x, w = torch.ones(4, H, device=where), torch.ones(H, device=where)
    on_meta = allnorm.Fp8PerTensor(torch.ones(1, device=META))
    for error, words, arguments, more in (
        (TypeError, "quant=None", (x, None, w, 1e-6, None), {}),
        (TypeError, "return_normed", (x, None, w, 1e-6, TMA, 3), {}),
        (UNSUPPORTED, "128", (x, None, w, 1e-6), {}),
        (ValueError, "numerics", (x, None, w, 1e-6, TMA), {"numerics": "exact"}),
        (ValueError, "residual", (x, x[:2], w, 1e-6, TMA), {}),
        (ValueError, "quant.scale", (x, None, w, 1e-6, on_meta), {}),
    ):
        with pytest.raises(error, match=words):
            allnorm.add_rms_norm_quant(*arguments, **more)


@pytest.mark.own_gpus
@on(gpu=(2,))
def test_tensors_of_a_different_gpu(rank: int, world_size: int) -> None:
    c = comm()
    x = Case((4, H)).x(rank)
    other = f"cuda:{(rank + 1) % world_size}"
    for tensor in (x.cpu(), x.to(other)):
        with pytest.raises(ValueError, match="is on"):
            c.all_reduce(tensor)
    assert_ranks_agree(c, *Case().check(c))


@on(gpu=(2, 8))
def test_hidden_size_not_divisible_by_a_pack(rank: int, world_size: int) -> None:
    """Requesting an algorithm raises; the default is "unfused", with bit-identical results."""
    c, widths = comm(), ((torch.bfloat16, 4095), (torch.float16, 12), (torch.float32, 6))
    for (dtype, width), quant, sharded in itertools.product(
        widths, (None, allnorm.Fp8PerToken()), (False, True)
    ):
        case = Case((3, width), dtype, quant=quant, sharded=sharded)
        plan = c.plan(3, width, dtype, quant, sharded)
        assert plan.algorithm == "unfused"
        assert str(width) in plan.reason
        case.check(c)
        for algorithm in ("one_shot", "two_shot")[sharded:]:
            with pytest.raises(UNSUPPORTED, match=f"{width}.*unfused"):
                case.but(algorithm=algorithm).run(c)


@on(cpu=(1,), gpu=(1,))
def test_one_rank_has_nothing_to_exchange(rank: int, world_size: int) -> None:
    c = comm()
    plan = c.plan(3, H, torch.bfloat16)
    assert plan.algorithm == "unfused"
    for algorithm in ("auto", "one_shot", "two_shot", "unfused"):
        for shape in ((3, H), (0, H), (2, 5)):
            Case(shape, algorithm=algorithm).check(c)
