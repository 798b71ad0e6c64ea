"""Tests a framework's custom operators, which the pass fuses through their decompositions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_helpers import comm, on
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from allnorm.compile import FusionReport, fuse
from allnorm.testing import assert_same_bits

from .helpers import (
    FP8,
    HIDDEN,
    TOKENS,
    Inputs,
    assert_close_norm,
    cast,
    fused_calls,
    nodes_calling,
)

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


def quantize_groups(input: Any, q: Any, s: Any, group: int) -> Any:
    y = input.float().view(*input.shape[:-1], input.shape[-1] // group, group)
    scale = y.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448.0
    return cast(y / scale).view(input.shape), scale.squeeze(-1)


def quantize_statically(input: Any, q: Any, s: Any) -> Any:
    return cast(input.float() / s)


def store_groups(input: Any, q: Any, s: Any, group: int) -> None:
    for target, result in zip((q, s), quantize_groups(input, q, s, group), strict=True):
        target.copy_(result)


def store_statically(input: Any, q: Any, s: Any) -> None:
    q.copy_(quantize_statically(input, q, s))


_library = torch.library.Library("framework", "DEF")
_OPERATORS = {
    "all_reduce(Tensor x, str group) -> Tensor": (reduce_, lambda x, group: torch.empty_like(x)),
    "norm(Tensor x, Tensor weight, float eps) -> Tensor": (norm, norm),
    "add_norm(Tensor x, Tensor r, Tensor w, float eps) -> (Tensor, Tensor)": (add_norm, add_norm),
    "add_norm_and_more(Tensor x, Tensor r, Tensor w, float eps) -> (Tensor, Tensor, Tensor)": (
        add_norm_and_more,
        add_norm_and_more,
    ),
    "scale_(Tensor(a!) x, Tensor factor) -> ()": (scale_, lambda x, factor: None),
    "groups(Tensor input, Tensor(a!) q, Tensor(b!) s, int group) -> ()": (
        store_groups,
        lambda *_: None,
    ),
    "static(Tensor input, Tensor(a!) q, Tensor s) -> ()": (store_statically, lambda *_: None),
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
    rank: int, function: Any, tokens: int = TOKENS, **arguments: Any
) -> tuple[GraphModule, FusionReport, list[Any], list[Any]]:
    """Fuses a function's graph; returns it, the report, its results and the unfused results."""
    inputs = Inputs(shape=(tokens, HIDDEN)).make(rank)
    module = make_fx(function, tracing_mode="fake")(*inputs)
    with torch.no_grad():
        expected = module(*inputs)
        settings = {"all_reduce_ops": ["framework::all_reduce"], "decompositions": TABLE}
        report = fuse(module, None, comm(), **(settings | arguments))
        module.graph.lint()
        actual = module(*inputs)
    return module, report, list(actual), list(expected)


def normed_after(reduced, residual, weight):
    return ops.add_norm(ops.all_reduce(reduced, "tp"), residual, weight, EPS)


def first_layer(x, residual, weight):
    reduced = ops.all_reduce(x, "tp")
    return ops.norm(reduced, weight, EPS), reduced


def two_layers(x, residual, weight):
    normed, residual = normed_after(x, residual, weight)
    return normed_after(normed * 2, residual, weight)


FUSED = {
    "plain": (normed_after, ["vllm"]),
    "last layer": (lambda x, r, w: normed_after(x, r, w)[:1], ["vllm"]),
    "first layer": (first_layer, ["transformers"]),
    "gemma": (lambda x, r, w: normed_after(x, r, w.float() + 1.0), ["unrounded"]),
    "two layers": (two_layers, ["vllm", "vllm"]),
}


@on(cpu=(2,))
@pytest.mark.parametrize("name", FUSED)
def test_norms_of_a_framework(rank: int, world_size: int, name: str) -> None:
    function, numerics = FUSED[name]
    module, report, actual, expected = fuse_and_run(rank, function)
    assert [site.numerics for site in report.sites] == numerics, str(report)
    assert not nodes_calling(module, "framework")
    assert len(fused_calls(module)) == len(numerics)
    if function is two_layers:  # the second layer's inputs differ slightly
        torch.testing.assert_close(actual[0].float(), expected[0].float(), rtol=0.05, atol=0.05)
        return
    assert_close_norm(actual[0], expected[0], name)
    for mine, theirs in zip(actual[1:], expected[1:], strict=True):
        assert_same_bits(mine, theirs, name)


# ---- what is not fused, and why ------------------------------------------------------------------


def third_result(x, residual, weight):
    return ops.add_norm_and_more(ops.all_reduce(x, "tp"), residual, weight, EPS)


def changes_its_argument(x, residual, weight):
    reduced = ops.all_reduce(x, "tp")
    _, reduced = auto_functionalized(ops.scale_.default, x=reduced, factor=weight)
    return ops.norm(reduced, weight, EPS), reduced


def _raises(*args: Any) -> Any:
    raise NotImplementedError("by an unknown kernel")


def _writes(x: Any, weight: Any, eps: float) -> Any:
    return x.mul_(weight)


REFUSED = {
    "group 'tp', the communicator over ep": (normed_after, {"all_reduce_groups": ["ep"]}),
    "is also used by": (third_result, {}),
    "its result is used by": (normed_after, {"decompositions": {}}),
    "its result is used by auto_functionalized": (changes_its_argument, {}),
    "by an unknown kernel": (normed_after, {"decompositions": {"framework::add_norm": _raises}}),
    "changes its arguments": (first_layer, {"decompositions": {"framework::norm": _writes}}),
}


@on(cpu=(2,))
@pytest.mark.parametrize("reason", REFUSED)
def test_unfused(rank: int, world_size: int, reason: str) -> None:
    function, arguments = REFUSED[reason]
    _, report, actual, expected = fuse_and_run(rank, function, **arguments)
    for mine, theirs in zip(actual, expected, strict=True):
        assert_same_bits(mine, theirs, reason)
    (site,) = report.missed
    assert reason in str(site.reason)


@on(cpu=(2,))
def test_mutating_operators_in_their_wrapper(rank: int, world_size: int) -> None:
    """Tests a mutating operator in its functional wrapper, with a decomposition."""
    table = TABLE | {"framework::scale_": scaled}
    module, report, actual, expected = fuse_and_run(
        rank, scales_before_the_norm, decompositions=table
    )
    assert [site.numerics for site in report.sites] == ["transformers"], str(report)
    for mine, theirs in zip(actual, expected, strict=True):
        assert_close_norm(mine, theirs, "scaled")
    assert nodes_calling(module, "auto_functionalized")  # it reads the normed tensor


def scales_before_the_norm(x, residual, weight):
    normed = ops.norm(ops.all_reduce(x, "tp"), weight, EPS)
    _, scaled = auto_functionalized(ops.scale_.default, x=normed, factor=weight)
    return (scaled,)


# ---- quantization by operators that store their results ------------------------------------------


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


@on(cpu=(2,))
@pytest.mark.parametrize(
    ("layout", "quant", "note"),
    [
        ("row_major", "per_group 128", ""),
        ("column_major", "per_group 128", ""),
        ("column_major_tma", "per_group 128", ""),
        ("static", "per_tensor", ""),
        ("padded", None, "a layout allnorm does not write"),
    ],
)
def test_operators_that_store_fp8(
    rank: int, world_size: int, layout: str, quant: str | None, note: str
) -> None:
    module, report, actual, expected = fuse_and_run(
        rank, quantized_layer(layout), tokens=26, decompositions=TABLE | QUANTS
    )
    (site,) = report.fused
    assert site.quant == quant
    assert note in site.note if note else not site.note
    assert_same_bits(actual[1], expected[1], "the sum")
    different = actual[0].view(torch.uint8) != expected[0].view(torch.uint8)
    assert float(different.float().mean()) < 0.01
    if layout != "static":
        assert actual[2].stride() == expected[2].stride()
        torch.testing.assert_close(actual[2], expected[2], rtol=0.01, atol=0)
    assert bool(nodes_calling(module, "auto_functionalized")) == (quant is None)
