"""Wrong arguments of quantizing calls: a clear error, the same on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_helpers import Case, comm, on

import allnorm
from allnorm import quant as quants

from .test_errors import FUSED, Change, H, check_refusals

FP8 = torch.float8_e4m3fn
TMA = allnorm.Fp8PerGroup(16, "column_major_tma")


def fp8(x: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.empty(shape or x.shape, dtype=FP8, device=x.device)


# name: (expected error types, words of the message, changed arguments of a valid call)
QUANTIZED: dict[str, tuple[type[Exception] | tuple[type[Exception], ...], tuple[str, ...], Change]]
QUANTIZED = {name: row for name, row in FUSED.items() if not name.startswith(("out", "residual_"))}
QUANTIZED |= {
    "quant None": (TypeError, ("quant=None", "Fp8PerGroup"), lambda a: {"quant": None}),
    "quant a string": (TypeError, ("quant='fp8'", "Fp8PerToken"), lambda a: {"quant": "fp8"}),
    "quant a list": (TypeError, ("quant=[128]",), lambda a: {"quant": [128]}),
    "quant a class": (TypeError, ("quant=",), lambda a: {"quant": allnorm.Fp8PerToken}),
    "groups not whole": (
        allnorm.UnsupportedError,
        ("64", "group_size=128", "16 or 32 or 64"),
        lambda a: {"quant": allnorm.Fp8PerGroup(128)},
    ),
    "scale on another device": (
        ValueError,
        ("quant.scale", "meta"),
        lambda a: {"quant": allnorm.Fp8PerTensor(torch.ones(1, device="meta"))},
    ),
    "return_normed a number": (
        TypeError,
        ("return_normed=16", "True or False"),
        lambda a: {"return_normed": 16},
    ),
    "out of the dtype of x": (
        TypeError,
        ("quantized_out", "bfloat16", "float8_e4m3fn"),
        lambda a: {"quantized_out": torch.empty_like(a["x"])},
    ),
    "out of another shape": (
        ValueError,
        ("quantized_out", "(2, 128)", "(4, 64)"),
        lambda a: {"quantized_out": fp8(a["x"], 2, 128)},
    ),
    "out not contiguous": (
        ValueError,
        ("quantized_out", "contiguous"),
        lambda a: {"quantized_out": fp8(a["x"], 4, 2 * H)[:, ::2]},
    ),
    "out with one row for all": (
        ValueError,
        ("quantized_out", "distinct"),
        lambda a: {"quantized_out": fp8(a["x"], 1, H).expand(4, H)},
    ),
    "out on another device": (
        ValueError,
        ("quantized_out", "meta"),
        lambda a: {"quantized_out": fp8(a["x"]).to("meta")},
    ),
    "out a number": (TypeError, ("quantized_out", "int"), lambda a: {"quantized_out": 1}),
    "normed_out of another dtype": (
        TypeError,
        ("normed_out", "float8"),
        lambda a: {"normed_out": fp8(a["x"])},
    ),
    "normed_out of another shape": (
        ValueError,
        ("normed_out", "(5, 64)"),
        lambda a: {"normed_out": a["x"].new_empty(5, H)},
    ),
    "residual_out of another shape": (
        ValueError,
        ("residual_out", "(5, 64)"),
        lambda a: {"residual_out": a["x"].new_empty(5, H)},
    ),
    "scale_out a number": (TypeError, ("scale_out", "float"), lambda a: {"scale_out": 1.0}),
    "scale_out of another dtype": (
        TypeError,
        ("scale_out", "bfloat16", "float32"),
        lambda a: {"scale_out": a["x"].new_empty(4, 4)},
    ),
    "scale_out of another shape": (
        ValueError,
        ("scale_out", "(4, 5)", "(4, 4)", "empty_scale"),
        lambda a: {"scale_out": torch.empty(4, 5, device=a["x"].device)},
    ),
    "scale_out of another layout": (
        ValueError,
        ("scale_out", "(1, 4)", "(4, 1)"),
        lambda a: {"scale_out": torch.empty(4, 4, device=a["x"].device).t()},
    ),
    "scale_out on another device": (
        ValueError,
        ("scale_out", "meta"),
        lambda a: {"scale_out": torch.empty(4, 4, device="meta")},
    ),
    "scale_out without padding": (
        ValueError,
        ("scale_out", "padding", "empty_scale"),
        lambda a: {
            "x": a["x"][:3],
            "residual": None,
            "quant": TMA,
            "scale_out": torch.empty_strided((3, 4), (1, 4), device=a["x"].device),
        },
    ),
    "scale_out beside a given scale": (
        ValueError,
        ("scale_out", "Fp8PerTensor"),
        lambda a: {
            "quant": allnorm.Fp8PerTensor(torch.ones(1, device=a["x"].device)),
            "scale_out": torch.empty(1, device=a["x"].device),
        },
    ),
    "out in the memory of x": (
        ValueError,
        ("quantized_out shares memory with x",),
        lambda a: {"quantized_out": a["x"].view(FP8)[:, :H]},
    ),
    "out in the memory of residual_out": (
        ValueError,
        ("quantized_out shares memory with residual_out",),
        lambda a: in_one_place(a, "residual_out"),
    ),
    "out in the memory of scale_out": (
        ValueError,
        ("quantized_out shares memory with scale_out",),
        lambda a: in_one_place(a, "scale_out"),
    ),
    "out in the memory of the scale": (
        ValueError,
        ("quantized_out shares memory with quant.scale",),
        lambda a: in_one_place(a, "quant"),
    ),
    "scale_out in the memory of residual": (
        ValueError,
        ("scale_out shares memory with residual.",),
        lambda a: {"scale_out": a["residual"].view(torch.float32).view(-1)[:16].view(4, 4)},
    ),
    "padding of scale_out in the memory of weight": (
        ValueError,
        ("scale_out shares memory with weight",),
        lambda a: padding_over_weight(a),
    ),
    "normed_out in the memory of residual": (
        ValueError,
        ("normed_out shares memory with residual.",),
        lambda a: {"normed_out": a["residual"]},
    ),
    "normed_out in the memory of residual_out": (
        ValueError,
        ("residual_out shares memory with normed_out",),
        lambda a: dict.fromkeys(("normed_out", "residual_out"), torch.empty_like(a["x"])),
    ),
    "residual_out in the memory of x": (
        ValueError,
        ("residual_out shares memory with x",),
        lambda a: {"residual_out": a["x"]},
    ),
}


def in_one_place(a: dict[str, Any], what: str) -> dict[str, Any]:
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
    scale = memory.as_strided(scale.shape, scale.stride())
    return {
        "x": a["x"][:3],
        "residual": None,
        "quant": TMA,
        "weight": memory[15 : 15 + H],  # the last float is the padding of the last column
        "scale_out": scale,
    }


@on(cpu=(1, 2), gpu=(1, 2))
def test_every_refusal(rank: int, world_size: int) -> None:
    good = Case((4, H), quant=allnorm.Fp8PerGroup(16))
    check_refusals(QUANTIZED, comm().all_reduce_add_rms_norm_quant, good)


devices = pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@devices
def test_refusals_of_the_local_op(where: str) -> None:
    x, w = torch.ones(4, H, device=where), torch.ones(H, device=where)
    for error, words, arguments, more in (
        (TypeError, "quant=None", (x, None, w, 1e-6, None), {}),
        (TypeError, "return_normed", (x, None, w, 1e-6, TMA, 3), {}),
        (allnorm.UnsupportedError, "128", (x, None, w, 1e-6), {}),
        (ValueError, "numerics", (x, None, w, 1e-6, TMA), {"numerics": "exact"}),
        (ValueError, "residual", (x, x[:2], w, 1e-6, TMA), {}),
        (
            ValueError,
            "quant.scale",
            (x, None, w, 1e-6, allnorm.Fp8PerTensor(torch.ones(1, device="meta"))),
            {},
        ),
    ):
        with pytest.raises(error, match=words):
            allnorm.add_rms_norm_quant(*arguments, **more)


@on(gpu=(2, 8))
def test_hidden_size_not_divisible_by_a_pack(rank: int, world_size: int) -> None:
    """A requested algorithm is refused; the default is "unfused", with the same bytes."""
    c = comm()
    spec = allnorm.Fp8PerToken()
    for dtype, hidden_size in ((torch.bfloat16, 4095), (torch.float16, 12), (torch.float32, 6)):
        for sharded in (False, True):
            case = Case((3, hidden_size), dtype, quant=spec, sharded=sharded)
            plan = c.plan(3, hidden_size, dtype, spec, sharded)
            assert plan.algorithm == "unfused"
            case.check(c)
            with pytest.raises(allnorm.UnsupportedError, match=f"{hidden_size}.*unfused"):
                case.but(algorithm="two_shot").run(c)
