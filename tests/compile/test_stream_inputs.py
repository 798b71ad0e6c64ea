"""Tests graphs that make the next layer's input from the streams in plain PyTorch."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rank_helpers import comm, on
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import allnorm
from allnorm.compile import FusionReport, fuse
from allnorm.testing import assert_same_bits

from .test_inductor import inductor_caches
from .test_next_inputs import BOTH, EPS, STREAMS, assert_same, called, calls_in, make, mixed
from .test_next_inputs import next_input as by_library
from .test_streams import BATCH, WIDE, Inputs, compiled, deepseek_v4

HC_EPS, ITERATIONS = 1e-6, 3
float32 = torch.float32


def sinkhorn(comb: Any) -> Any:
    comb = comb / (comb.sum(dim=-2, keepdim=True) + HC_EPS)
    for _ in range(ITERATIONS - 1):
        comb = comb / (comb.sum(dim=-1, keepdim=True) + HC_EPS)
        comb = comb / (comb.sum(dim=-2, keepdim=True) + HC_EPS)
    return comb


def unit(streams: Any) -> Any:
    """Norms all streams of a token together, as transformers does."""
    flat = streams.flatten(-2).float()
    return flat * torch.rsqrt(flat.float().square().mean(-1, keepdim=True) + 1e-6).to(float32)


def norm(x: Any, w: Any) -> Any:
    z = x.float()
    return (w * (z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + EPS))).to(x.dtype)


def transformers(streams: Any, fn: Any, scale: Any, base: Any, w: Any) -> Any:
    """Makes the input as DeepSeek-V4 in transformers does."""
    n = streams.shape[-2]
    raw = F.linear(unit(streams), fn.float())
    pre_w, post_w, comb_w = raw.split([n, n, n * n], dim=-1)
    pre_b, post_b, comb_b = base.split([n, n, n * n])
    pre_scale, post_scale, comb_scale = scale.unbind(0)
    comb_w = comb_w.view(*comb_w.shape[:-1], n, n)
    pre = torch.sigmoid(pre_w * pre_scale + pre_b) + HC_EPS
    post = 2 * torch.sigmoid(post_w * post_scale + post_b)
    comb = torch.softmax(comb_w * comb_scale + comb_b.view(n, n), dim=-1) + HC_EPS
    x = (pre.unsqueeze(-1) * streams).sum(dim=-2).to(streams.dtype)
    return norm(x, w), post, sinkhorn(comb)


def functions(streams: Any, fn: Any, scale: Any, base: Any, w: Any) -> Any:
    """Makes the input by the formula of `hyper_connection_input`."""
    n = streams.shape[-2]
    flat = streams.flatten(-2).float()
    flat = F.rms_norm(flat, flat.shape[-1:], eps=1e-6)
    pre, post, mix = F.linear(flat, fn).split([n, n, n * n], -1)
    pre = torch.sigmoid(pre * scale[0] + base[:n]) + HC_EPS
    post = 2.0 * torch.sigmoid(base[n : 2 * n] + post * scale[1])
    logits = (mix * scale[2] + base[2 * n :]).unflatten(-1, (n, n))
    x = (pre.unsqueeze(-1) * streams).sum(-2).to(streams.dtype)
    return F.rms_norm(x, x.shape[-1:], w, EPS), post, sinkhorn(F.softmax(logits, -1) + HC_EPS)


def spelled_out(streams: Any, fn: Any, scale: Any, base: Any, w: Any) -> Any:
    """Takes slices, multiplies by the transposed matrix, and writes the softmax out."""
    n = streams.shape[-2]
    raw = unit(streams) @ fn.t()
    pre = (raw[..., :n] * scale[0:1] + base[0:n]).sigmoid() + HC_EPS
    post = (scale[1] * raw[..., n : 2 * n] + base[n : 2 * n]).sigmoid().mul(2)
    logits = raw[..., 2 * n :].unflatten(-1, (n, n)) * scale[-1] + base[2 * n :].view(n, n)
    powers = torch.exp(logits - logits.amax(-1, keepdim=True))
    comb = powers / powers.sum(-1, keepdim=True) + HC_EPS
    x = (streams.float() * pre[..., None]).sum(-2).to(streams.dtype)
    return norm(x, w), post, sinkhorn(comb)


def variant(**parts: Any) -> Callable[..., Any]:
    """Returns a form that differs from that of transformers in some of its parts."""
    usual: dict[str, Any] = {
        "unit": unit,
        "group": lambda raw, scale, base, n: (
            raw.split([n, n, n * n], -1),
            scale.unbind(0),
            base.split([n, n, n * n]),
        ),
        "gate": torch.sigmoid,
        "softmax": lambda logits: torch.softmax(logits, -1),
        "pre_eps": HC_EPS,
        "sinkhorn": sinkhorn,
        "collapse": lambda pre, streams: (pre.unsqueeze(-1) * streams).sum(-2),
        "norm": norm,
        "more": lambda raw, comb: (),
    }
    chosen = usual | parts

    def form(streams: Any, fn: Any, scale: Any, base: Any, w: Any) -> Any:
        n = streams.shape[-2]
        raw = F.linear(chosen["unit"](streams), fn)
        weights, scales, biases = chosen["group"](raw, scale, base, n)
        pre, post, mix = (a * b for a, b in zip(weights, scales, strict=True))
        pre = chosen["gate"](pre + biases[0]) + chosen["pre_eps"]
        post = 2 * torch.sigmoid(post + biases[1])
        logits = mix.unflatten(-1, (n, n)) + biases[2].view(n, n)
        comb = chosen["sinkhorn"](chosen["softmax"](logits) + HC_EPS)
        x = chosen["collapse"](pre, streams).to(streams.dtype)
        return chosen["norm"](x, w), post, comb, *chosen["more"](raw, comb)

    return form


FORMS = {form.__name__: form for form in (transformers, functions, spelled_out)}
FORMS |= {"late_views": variant()}


def layer(form: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a graph of one layer, which returns the streams too."""

    def graph(x: Any, r: Any, post: Any, mix: Any, *rest: Any) -> Any:
        r = mixed(x, r, post, mix)
        return *form(r, *rest), r

    return graph


def layers(x: Any, r: Any, post: Any, mix: Any, *rest: Any) -> Any:
    """Runs two layers, of which the second one has the coefficients that the first one made."""
    comb = mix.mT
    for _ in range(2):
        r = mixed(x, r, post, comb.transpose(-1, -2))
        x, post, comb = transformers(r, *rest)
        x = x * 0.5
    return x, r, post, comb


def wanted(given: list[Tensor], count: int = 1) -> tuple[Any, ...]:
    """Returns what the library's own calls make: the last layer's input, streams and factors."""
    x, r, post, mix, *rest = given
    for number in range(count):
        x = x * 0.5 if number else x
        r = called(x, r, post, mix)
        x, post, mix = by_library(r, *rest)
    return x, post, mix.mT, r


def check(actual: Any, given: list[Tensor], what: str) -> None:
    """Compares with the library's calls bit for bit, also the strides."""
    expected = wanted(given)
    assert_same(actual, expected, what)
    assert all(result.is_contiguous() for result in actual), what


@on(cpu=(2,))
@pytest.mark.parametrize("name", FORMS)
def test_forms(rank: int, world_size: int, name: str) -> None:
    form = FORMS[name]
    for inputs in (Inputs(), BATCH, WIDE, Inputs(leading=(1,), streams=3)):
        given = make(inputs, rank)
        if inputs is WIDE:
            given[-1] = given[-1].float()  # the result has the weight's dtype
        module = make_fx(layer(form))(*given)
        expected = module(*given)
        report = fuse(module, None, comm(), approximate_streams=True)
        module.graph.lint()
        (site,) = report.sites
        assert site.boundary == f"{inputs.streams} residual streams, next layer's input", str(site)
        assert calls_in(module) == [BOTH]
        actual = module(*given)
        check(actual, given, f"{name}, {inputs}")
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one.float(), other.float(), rtol=2.0**-6, atol=2e-3)


@on(cpu=(2,))
def test_tracers(rank: int, world_size: int) -> None:
    given = make(BATCH, rank)
    for form in (transformers, functions):
        for is_late in (False, True):
            reports: list[FusionReport] = []
            options = {"approximate_streams": True}
            actual = compiled(layer(form), is_late, reports, **options)(*given)
            (site,) = reports[0].sites
            assert site.boundary.endswith("next layer's input"), f"{form.__name__}: {site}"
            check(actual, given, f"{form.__name__}, late: {is_late}")
    reports = []
    x, r, post, comb = compiled(layers, True, reports, approximate_streams=True)(*given)
    assert [site.boundary for site in reports[0].fused] == [
        "4 residual streams, next layer's input"
    ] * 2, str(reports[0])
    normed, *rest = wanted(given, 2)
    assert_same((x, post, comb, r), (normed * 0.5, *rest), "layers")


@on(cpu=(2,))
def test_inductor(rank: int, world_size: int) -> None:
    given = make(BATCH, rank)
    fusion = allnorm.compile.inductor_pass(comm(), approximate_streams=True)
    with inductor_caches(), torch.no_grad():
        fast = torch.compile(layer(transformers), options={"post_grad_custom_post_pass": fusion})
        actual = fast(*given)
    (site,) = fusion.reports[0].sites
    assert site.boundary == "4 residual streams, next layer's input", str(site)
    check(actual, given, "inductor")


# ---- what stays ----------------------------------------------------------------------------------


def rows_first(comb: Any) -> Any:
    comb = comb / (comb.sum(-1, keepdim=True) + HC_EPS)
    return comb / (comb.sum(-2, keepdim=True) + HC_EPS)


def other_eps(comb: Any) -> Any:
    return comb / (comb.sum(-2, keepdim=True) + 1e-5)


def divided_by_rows(comb: Any) -> Any:
    """Divides columns by the sums of rows."""
    return comb / (comb.sum(-1).unsqueeze(-2) + HC_EPS)


def swapped_scales(raw: Any, scale: Any, base: Any, n: int) -> Any:
    scales = scale.unbind(0)
    return (
        raw.split([n, n, n * n], -1),
        (scales[1], scales[0], scales[2]),
        base.split([n, n, n * n]),
    )


def swapped_parts(raw: Any, scale: Any, base: Any, n: int) -> Any:
    a, b, c = raw.split([n, n, n * n], -1)
    return (b, a, c), scale.unbind(0), base.split([n, n, n * n])


def shifted_base(raw: Any, scale: Any, base: Any, n: int) -> Any:
    parts = base[1 : n + 1], base[n : 2 * n], base[2 * n :]
    return raw.split([n, n, n * n], -1), scale.unbind(0), parts


def transposed_logits(raw: Any, scale: Any, base: Any, n: int) -> Any:
    a, b, c = raw.split([n, n, n * n], -1)
    c = c.unflatten(-1, (n, n)).transpose(-1, -2).flatten(-2)
    return (a, b, c), scale.unbind(0), base.split([n, n, n * n])


def flattened_softmax(logits: Any) -> Any:
    return torch.softmax(logits.flatten(-2), -1).view(logits.shape)


def wrongly_shifted(logits: Any) -> Any:
    powers = torch.exp(logits - logits.amax(-1).unsqueeze(-2))
    return powers / powers.sum(-1, keepdim=True)


def without_weight(x: Any, w: Any) -> Any:
    return F.rms_norm(x, x.shape[-1:], None, EPS)


def not_rounded(x: Any, w: Any) -> Any:
    return x * w


COEFFICIENTS, STEPS = "the coefficients are not those of", "the Sinkhorn steps are not those of"
TOTAL, NORM = "the weighted streams are not those of", "the normed streams are not those of"
STAYING: dict[str, tuple[Callable[..., Any], str]] = {
    "swapped_scales": (variant(group=swapped_scales), COEFFICIENTS),
    "swapped_parts": (variant(group=swapped_parts), COEFFICIENTS),
    "shifted_base": (variant(group=shifted_base), COEFFICIENTS),
    "transposed_logits": (variant(group=transposed_logits), COEFFICIENTS),
    "other_gate": (variant(gate=torch.tanh), COEFFICIENTS),
    "other_pre_eps": (variant(pre_eps=1e-3), COEFFICIENTS),
    "softmax_of_columns": (variant(softmax=lambda z: torch.softmax(z, -2)), COEFFICIENTS),
    "flattened_softmax": (variant(softmax=flattened_softmax), COEFFICIENTS),
    "wrongly_shifted": (variant(softmax=wrongly_shifted), COEFFICIENTS),
    "rows_first": (variant(sinkhorn=rows_first), STEPS),
    "other_eps": (variant(sinkhorn=other_eps), STEPS),
    "divided_by_rows": (variant(sinkhorn=divided_by_rows), STEPS),
    "no_steps": (variant(sinkhorn=lambda comb: comb * 1.5), STEPS),
    "mean": (variant(collapse=lambda p, s: (p.unsqueeze(-1) * s).mean(-2)), TOTAL),
    "other_streams": (variant(collapse=lambda p, s: (p.unsqueeze(-1) * s.flip(-2)).sum(-2)), TOTAL),
    "over_hidden": (
        variant(
            collapse=lambda p, s: (p.unsqueeze(-1) * s).sum(-1, keepdim=True).sum(-2) + s[..., 0, :]
        ),
        TOTAL,
    ),
    "without_weight": (variant(norm=without_weight), NORM),
    "no_norm": (variant(norm=not_rounded), NORM),
    "product_is_read": (
        variant(more=lambda raw, comb: (raw,)),
        "from which the next input is made",
    ),
}


@on(cpu=(2,))
@pytest.mark.parametrize("name", STAYING)
def test_staying(rank: int, world_size: int, name: str) -> None:
    """Tests that other computations stay, with their bits, and that the report says why."""
    form, reason = STAYING[name]
    given = make(BATCH, rank)
    module = make_fx(layer(form))(*given)
    report = fuse(module, None, comm(), approximate_streams=True)
    (site,) = report.fused
    assert re.search(f"the next layer's input is not fused: .*{reason}", site.note), str(site)
    assert calls_in(module) == [STREAMS]
    x, r, post, mix, *rest = given
    r = called(x, r, post, mix)
    assert_same(module(*given), (*form(r, *rest), r), name)


def llama(x: Any, w: Any) -> Any:
    """Rounds before it multiplies by the weight, as GLM5-Next in transformers does."""
    z = x.float()
    return w * (z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def gemma(x: Any, w: Any) -> Any:
    return norm(x, 1.0 + w.float())


@on(cpu=(2,))
def test_norms(rank: int, world_size: int) -> None:
    x, r, post, mix, *rest = given = make(BATCH, rank)
    for form, more in (
        (variant(norm=llama), {"numerics": "transformers"}),
        (variant(norm=gemma), {"weight_bias": 1.0}),
    ):
        module = make_fx(layer(form))(*given)
        (site,) = fuse(module, None, comm(), approximate_streams=True).fused
        assert site.boundary.endswith("next layer's input"), str(site)
        streams = called(x, r, post, mix)
        normed, *factors = by_library(streams, *rest, **more)
        assert_same(module(*given), (normed, factors[0], factors[1].mT, streams), str(more))


@on(cpu=(2,))
def test_all_ranks_replace_it_or_none(rank: int, world_size: int) -> None:
    """On rank 1 the graph returns the product too, so that its input cannot be replaced."""
    x, r, post, mix, fn, scale, base, w = make(BATCH, rank)
    width = 72  # ranks decide once per width and plan, and other tests have the same plans
    x, r, fn, w = (each[..., :width].contiguous() for each in (x, r, fn.unflatten(-1, (4, -1)), w))
    given = [x, r, post, mix, fn.flatten(-2), scale, base, w]
    form = variant(more=lambda raw, comb: (raw,)) if rank else variant()
    module = make_fx(layer(form))(*given)
    (site,) = fuse(module, None, comm(), approximate_streams=True).missed
    assert re.search("rank . of the group would fuse it differently", str(site.reason)), str(site)
    assert_same(module(*given)[:3], layer(variant())(*given)[:3], "the graph as it was")


@on(cpu=(2,))
def test_only_if_allowed(rank: int, world_size: int) -> None:
    given = make(BATCH, rank)
    module = make_fx(layer(transformers))(*given)
    (site,) = fuse(module, None, comm()).fused
    assert re.search("would differ in their last bits. Pass approximate_streams=True", site.note)
    assert calls_in(module) == [STREAMS]


@on(cpu=(2,))
def test_no_input(rank: int, world_size: int) -> None:
    """Tests that projections of a different shape, or of other rows, are not mentioned."""
    given = make(BATCH, rank)

    def head(streams: Any, fn: Any, scale: Any, base: Any, w: Any) -> Any:
        """Makes the last layer's output as DeepSeek-V4 does."""
        n = streams.shape[-2]
        pre = torch.sigmoid(F.linear(unit(streams), fn[:n]) * scale[:1] + base[:n]) + HC_EPS
        return ((pre.unsqueeze(-1) * streams).sum(-2).to(streams.dtype),)

    def not_normed(streams: Any, fn: Any, scale: Any, base: Any, w: Any) -> Any:
        return variant(unit=lambda s: s.flatten(-2).float())(streams, fn, scale, base, w)

    for form in (head, not_normed):
        module = make_fx(layer(form))(*given)
        (site,) = fuse(module, None, comm(), approximate_streams=True).fused
        assert not site.note
        assert calls_in(module) == [STREAMS]


@on(cpu=(2,))
@pytest.mark.parametrize("is_late", [False, True])
def test_other_numbers_of_tokens(rank: int, world_size: int, is_late: bool) -> None:
    reports: list[FusionReport] = []

    def compiler(module: GraphModule, _: Any) -> Any:
        reports.append(fuse(module, None, comm(), approximate_streams=True))
        return make_boxed_func(module.forward) if is_late else module.forward

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=compiler) if is_late else compiler
    fast = torch.compile(layer(functions), backend=backend, fullgraph=True)
    for tokens in (6, 5, 9):
        given = make(Inputs(leading=(tokens,)), rank)
        for tensor in given[:4]:
            torch._dynamo.mark_dynamic(tensor, 0)
        with torch.no_grad():
            check(fast(*given), given, f"{tokens} tokens")
    torch._dynamo.reset()
    assert len(reports) == 1
    (site,) = reports[0].sites
    assert site.boundary == "4 residual streams, next layer's input", str(site)


@on(cpu=(2,))
def test_other_shapes(rank: int, world_size: int) -> None:
    given = make(BATCH, rank)
    module = make_fx(layer(lambda r, *rest: transformers(r.flatten(0, 1), *rest)))(*given)
    (site,) = fuse(module, None, comm(), approximate_streams=True).fused
    assert re.search("is not shaped like the streams", site.note), str(site)


# ---- a model -------------------------------------------------------------------------------------


def by_calls(layer: Any, streams: Tensor, input_ids: Any = None, **kwargs: Any) -> Tensor:
    """Runs a layer of DeepSeek-V4 with the library's calls after its attention."""
    post, comb, x = layer.attn_hc(streams)
    layer.self_attn.o_b_proj.reduces = False
    partial, _ = layer.self_attn(layer.input_layernorm(x), **kwargs)
    layer.self_attn.o_b_proj.reduces = True
    dtype = streams.dtype  # in which transformers rounds the coefficients
    factors = [each.to(dtype).float() for each in (post, comb.transpose(-1, -2))]
    connection = allnorm.HyperConnection(*factors)
    streams = comm().all_reduce_hyper_connection(partial, streams, connection)
    hc, weight = layer.ffn_hc, layer.post_attention_layernorm
    projection = allnorm.HyperConnectionProjection(
        *(hc.fn, hc.scale, hc.base, hc.input_norm.eps, hc.hc_eps, hc.hc_sinkhorn_iters, 2.0)
    )
    normed, connection = allnorm.hyper_connection_input(
        streams, projection, weight.weight, weight.variance_epsilon
    )
    comb = connection.mix.mT.contiguous().to(dtype)
    mlp = layer.mlp(normed, input_ids=input_ids)
    return connection.post.to(dtype).unsqueeze(-1) * mlp.unsqueeze(-2) + torch.matmul(
        comb.transpose(-1, -2), streams
    )


@pytest.mark.long
@on(cpu=(2,))
@pytest.mark.parametrize("dtype", [float32, torch.bfloat16], ids=str)
def test_deepseek_v4(rank: int, world_size: int, dtype: torch.dtype) -> None:
    """Tests a tiny DeepSeek-V4 of transformers: each attention is followed by one call.

    Its results are those of the library's calls, bit for bit. Models keep the parameters of their
    hyper-connections and norms in float32.
    """
    model = deepseek_v4(dtype)
    for layer in model.model.layers:
        for part in (layer.attn_hc, layer.ffn_hc, layer.post_attention_layernorm):
            part.float()
    tokens, reports = torch.arange(14).view(2, 7), list[FusionReport]()
    with torch.no_grad():
        expected = model(tokens, use_cache=False).logits
        plain = [layer.forward for layer in model.model.layers]
        for layer in model.model.layers:
            layer.forward = functools.partial(by_calls, layer)
        called = model(tokens, use_cache=False).logits
        for layer, forward in zip(model.model.layers, plain, strict=True):
            layer.forward = compiled(forward, True, reports, approximate_streams=True)
        actual = model(tokens, use_cache=False).logits
    assert [site.boundary for report in reports for site in report.sites] == [
        "4 residual streams, next layer's input"
    ] * 2, str(reports[0])
    assert_same_bits(actual, called, "logits")
    tolerance = 1e-4 if dtype == float32 else 0.1
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
