"""Tests custom operators with decompositions: a framework's own norms and groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_helpers import comm, on
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from allnorm.compile import FusionReport, fuse
from allnorm.testing import RankPool, assert_same_bits

from .helpers import Inputs, assert_close_norm, fused_calls, nodes_calling

EPS = 3e-6


def norm(x: Any, weight: Any, eps: float) -> Any:
    z = x.float()
    z = z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + eps)
    return (z.to(weight.dtype) * weight).to(x.dtype)


def add_norm(x: Any, residual: Any, weight: Any, eps: float) -> Any:
    z = x.float() + residual.float()
    normed = z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + eps)
    return (normed.to(weight.dtype) * weight).to(x.dtype), z.to(x.dtype)


def add_norm_and_more(x: Any, residual: Any, weight: Any, eps: float) -> Any:
    normed, total = add_norm(x, residual, weight, eps)
    return normed, total, x.float().square().sum(-1)


def scaled(x: Any, factor: Any) -> Any:
    return x * factor


def scale_(x: Any, factor: Any) -> None:
    x.mul_(factor)


def reduce_(x: Any, group: str) -> Any:
    result = x.clone()
    torch.distributed.all_reduce(result)
    return result


_library = torch.library.Library("framework", "DEF")
_OPERATORS = {
    "all_reduce(Tensor x, str group) -> Tensor": (reduce_, lambda x, group: torch.empty_like(x)),
    "norm(Tensor x, Tensor weight, float eps) -> Tensor": (norm, norm),
    "add_norm(Tensor x, Tensor r, Tensor weight, float eps) -> (Tensor, Tensor)": (
        *(add_norm, add_norm),
    ),
    "add_norm_and_more(Tensor x, Tensor r, Tensor w, float eps) -> (Tensor, Tensor, Tensor)": (
        *(add_norm_and_more, add_norm_and_more),
    ),
    "scale_(Tensor(a!) x, Tensor factor) -> ()": (scale_, lambda x, factor: None),
}
for _schema, (_run, _fake) in _OPERATORS.items():
    _name = _schema.split("(")[0]
    _library.define(_schema)
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"framework::{_name}", _fake, lib=_library)
ops = torch.ops.framework
TABLE = {
    "framework::norm": norm,
    ops.add_norm: add_norm,
    "framework.add_norm_and_more": add_norm_and_more,
}


def fuse_and_run(
    rank: int, function: Any, **arguments: Any
) -> tuple[GraphModule, FusionReport, list[Any], list[Any]]:
    inputs = Inputs().make(rank)
    module = make_fx(function, tracing_mode="fake")(*inputs)
    with torch.no_grad():
        expected = module(*inputs)
        settings = {"all_reduce_ops": ["framework::all_reduce"], "decompositions": TABLE}
        report = fuse(module, None, comm(), **(settings | arguments))
        module.graph.lint()
        actual = module(*inputs)
    return module, report, list(actual), list(expected)


def plain(x, residual, weight):
    return ops.add_norm(ops.all_reduce(x, "tp"), residual, weight, EPS)


def last_layer(x, residual, weight):
    return (ops.add_norm(ops.all_reduce(x, "tp"), residual, weight, EPS)[0],)


def first_layer(x, residual, weight):
    reduced = ops.all_reduce(x, "tp")
    return ops.norm(reduced, weight, EPS), reduced


def gemma(x, residual, weight):
    return ops.add_norm(ops.all_reduce(x, "tp"), residual, weight.float() + 1.0, EPS)


def two_layers(x, residual, weight):
    normed, residual = ops.add_norm(ops.all_reduce(x, "tp"), residual, weight, EPS)
    return ops.add_norm(ops.all_reduce(normed * 2, "tp"), residual, weight, EPS)


FUSED = {
    plain: ["vllm"],
    last_layer: ["vllm"],
    first_layer: ["transformers"],
    gemma: ["unrounded"],
    two_layers: ["vllm", "vllm"],
}


def check(rank: int, world_size: int, name: str) -> None:
    function = globals()[name]
    module, report, actual, expected = fuse_and_run(rank, function)
    assert [site.numerics for site in report.sites] == FUSED[function], str(report)
    assert not nodes_calling(module, "framework")
    assert len(fused_calls(module)) == len(FUSED[function])
    if function is two_layers:  # the inputs of the second one differ already
        torch.testing.assert_close(actual[0].float(), expected[0].float(), rtol=0.05, atol=0.05)
        return
    assert_close_norm(actual[0], expected[0], name)
    for mine, theirs in zip(actual[1:], expected[1:], strict=True):
        assert_same_bits(mine, theirs, name)


@on(cpu=[2])
@pytest.mark.parametrize("function", FUSED, ids=lambda function: function.__name__)
def test_norms_of_a_framework_are_fused(pool: RankPool, function: Any) -> None:
    pool.run(check, function.__name__)


# ---- what is not fused, and why ------------------------------------------------------------------


def another_group(x, residual, weight):
    return ops.add_norm(ops.all_reduce(x, "ep"), residual, weight, EPS)


def third_result(x, residual, weight):
    return ops.add_norm_and_more(ops.all_reduce(x, "tp"), residual, weight, EPS)


def changes_its_argument(x, residual, weight):
    reduced = ops.all_reduce(x, "tp")
    _, reduced = auto_functionalized(ops.scale_.default, x=reduced, factor=weight)
    return ops.norm(reduced, weight, EPS), reduced


def refused(rank: int, world_size: int, name: str, arguments: dict[str, Any]) -> str:
    tables = {
        "no": {},
        "raises": {"framework::add_norm": _raises},
        "writes": {"framework::norm": _writes},
    }
    if "decompositions" in arguments:
        arguments = arguments | {"decompositions": tables[arguments["decompositions"]]}
    _, report, actual, expected = fuse_and_run(rank, globals()[name], **arguments)
    for mine, theirs in zip(actual, expected, strict=True):
        assert_same_bits(mine, theirs, name)
    (site,) = report.missed
    assert site.reason is not None
    return site.reason


def _raises(*args: Any) -> Any:
    raise NotImplementedError("by a kernel that nobody knows")


def _writes(x: Any, weight: Any, eps: float) -> Any:
    return x.mul_(weight)


@on(cpu=[2])
@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("another_group", {"all_reduce_groups": ["tp"]}, "group 'ep', the communicator over tp"),
        ("third_result", {}, "is also used by"),
        ("plain", {"decompositions": "no"}, "its result is used by"),
        ("plain", {"decompositions": "raises"}, "by a kernel that nobody knows"),
        ("first_layer", {"decompositions": "writes"}, "changes its arguments"),
        ("changes_its_argument", {}, "its result is used by"),
    ],
)
def test_what_is_not_understood_stays(
    pool: RankPool, name: str, arguments: dict[str, Any], words: str
) -> None:
    first, second = pool.run(refused, name, arguments)
    assert first == second
    assert words in first


@on(cpu=[2])
def test_mutating_operators_in_their_wrapper(rank: int, world_size: int) -> None:
    """Tests a mutating operator in its functional wrapper, decomposed to the values it stores."""
    table = TABLE | {"framework::scale_": scaled}
    module, report, actual, expected = fuse_and_run(
        rank, scales_before_the_norm, decompositions=table
    )
    assert [site.numerics for site in report.sites] == ["transformers"], str(report)
    for mine, theirs in zip(actual, expected, strict=True):
        assert_close_norm(mine, theirs, "scaled")
    assert nodes_calling(module, "auto_functionalized")  # it needs the normed tensor


def scales_before_the_norm(x, residual, weight):
    normed = ops.norm(ops.all_reduce(x, "tp"), weight, EPS)
    _, scaled = auto_functionalized(ops.scale_.default, x=normed, factor=weight)
    return (scaled,)


# ---- quantization by operators that store their results ------------------------------------------


def quantize_groups(input: Any, q: Any, s: Any, group: int) -> Any:
    y = input.float().view(*input.shape[:-1], input.shape[-1] // group, group)
    scale = y.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448.0
    return (y / scale).clamp(-448.0, 448.0).to(FP8).view(input.shape), scale.squeeze(-1)


def quantize_statically(input: Any, q: Any, s: Any) -> Any:
    return (input.float() / s).clamp(-448.0, 448.0).to(FP8)


def store_groups(input: Any, q: Any, s: Any, group: int) -> None:
    for target, result in zip((q, s), quantize_groups(input, q, s, group), strict=True):
        target.copy_(result)


def store_statically(input: Any, q: Any, s: Any) -> None:
    q.copy_(quantize_statically(input, q, s))


FP8 = torch.float8_e4m3fn
for _name, _changed, _more, _run in (
    ("groups", "Tensor(a!) q, Tensor(b!) s", ", int group", store_groups),
    ("static", "Tensor(a!) q, Tensor s", "", store_statically),
):
    _library.define(f"{_name}(Tensor input, {_changed}{_more}) -> ()")
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"framework::{_name}", lambda *_: None, lib=_library)
QUANTS = {"framework::groups": quantize_groups, "framework::static": quantize_statically}


def scales_in(layout: str, tokens: int, groups: int, device: Any) -> Any:
    stride = {
        "row_major": (groups, 1),
        "column_major": (1, tokens),
        "column_major_tma": (1, (tokens + 3) // 4 * 4),
        "padded": (1, tokens + 64),
    }[layout]
    return torch.empty_strided((tokens, groups), stride, dtype=torch.float32, device=device)


def quantized_layer(layout: str) -> Any:
    def layer(x, residual, weight):
        normed, residual = ops.add_norm(ops.all_reduce(x, "tp"), residual, weight, EPS)
        q = torch.empty(normed.shape, dtype=FP8, device=x.device)
        if layout == "static":
            s = weight[:1].float().abs() + 0.01
            _, q = auto_functionalized(ops.static.default, input=normed, q=q, s=s)
            return q, residual
        s = scales_in(layout, x.shape[0], x.shape[1] // 128, x.device)
        _, q, s = auto_functionalized(ops.groups.default, input=normed, q=q, s=s, group=128)
        return q, residual, s

    return layer


def quantizes(rank: int, world_size: int, layout: str) -> tuple[str | None, str]:
    inputs = Inputs(shape=(26, 512)).make(rank)
    module = make_fx(quantized_layer(layout), tracing_mode="fake")(*inputs)
    with torch.no_grad():
        expected = module(*inputs)
        report = fuse(
            *(module, None, comm()),
            all_reduce_ops=["framework::all_reduce"],
            decompositions=TABLE | QUANTS,
        )
        module.graph.lint()
        actual = module(*inputs)
    (site,) = report.fused
    assert_same_bits(actual[1], expected[1], "the sum")
    different = actual[0].view(torch.uint8) != expected[0].view(torch.uint8)
    assert float(different.float().mean()) < 0.01
    if layout != "static":
        assert actual[2].stride() == expected[2].stride()
        torch.testing.assert_close(actual[2], expected[2], rtol=0.01, atol=0)
    assert bool(nodes_calling(module, "auto_functionalized")) == (site.quant is None)
    return site.quant, site.note


@on(cpu=[2])
@pytest.mark.parametrize("layout", ["row_major", "column_major", "column_major_tma", "static"])
def test_operators_that_store_fp8_are_fused(pool: RankPool, layout: str) -> None:
    kind = "per_tensor" if layout == "static" else "per_group 128"
    assert pool.run(quantizes, layout) == [(kind, "")] * 2


@on(cpu=[2])
def test_scales_in_another_layout_are_left_alone(pool: RankPool) -> None:
    (quant, note), _ = pool.run(quantizes, "padded")
    assert quant is None
    assert "a layout allnorm does not write" in note
