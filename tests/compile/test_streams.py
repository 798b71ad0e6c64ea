"""Tests graphs in which the reduced sum enters several residual streams, which are mixed."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from rank_helpers import comm, on
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.fx import GraphModule, Interpreter, Node, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

import allnorm
from allnorm import reference
from allnorm.compile import FusionReport, fuse
from allnorm.testing import assert_same_bits, rank_input, shared_input, ulp_distance

from .helpers import check_missed, nodes_calling, reduce
from .test_inductor import inductor_caches

bf16, float32 = torch.bfloat16, torch.float32
HIDDEN = 256


@dataclasses.dataclass(frozen=True)
class Inputs:
    """A graph's arguments: x, streams, post, mix. `kind` is the dtype of the streams."""

    leading: tuple[int, ...] = (6,)
    dtype: torch.dtype = bf16
    kind: torch.dtype = bf16
    streams: int = 4
    factors: torch.dtype = float32

    def make(self, rank: int) -> list[Tensor]:
        leading, n = self.leading, self.streams
        given = [
            ((*leading, n, HIDDEN), self.kind, "residual"),
            ((*leading, n), self.factors, "post"),
            ((*leading, n, n), self.factors, "mix"),
        ]
        x = rank_input((*leading, HIDDEN), self.dtype, rank)
        return [x, *(shared_input(*each) for each in given)]


WIDE = Inputs(kind=float32)
ALL_FLOAT32 = Inputs(dtype=float32, kind=float32)
BATCH = Inputs(leading=(2, 3))


def injected(x: Any, post: Any) -> Any:
    return post.unsqueeze(-1) * x.unsqueeze(-2)


def published(x: Any, r: Any, post: Any, mix: Any) -> Any:
    """Mixes as DeepSeek's own code does; there `mix[..., j, i]` is the factor of stream j."""
    total = injected(reduce(x), post) + torch.sum(mix.unsqueeze(-1) * r.unsqueeze(-2), dim=-3)
    return total.to(r.dtype)


def multiplied(x: Any, r: Any, post: Any, mix: Any) -> Any:
    total = post[..., None] * reduce(x)[..., None, :].float() + mix @ r.float()
    return total.to(r.dtype)


def transposed(x: Any, r: Any, post: Any, mix: Any) -> Any:
    """Mixes as DeepSeek-V4 in transformers does, in float32."""
    mixed = torch.matmul(mix.transpose(-1, -2), r.float())
    return (injected(reduce(x).float(), post) + mixed).to(r.dtype)


def transposed_property(x: Any, r: Any, post: Any, mix: Any) -> Any:
    return (mix.mT @ r.float() + injected(reduce(x).float(), post)).to(r.dtype)


def summed_last(x: Any, r: Any, post: Any, mix: Any) -> Any:
    mixed = (mix[..., None] * r[..., None, :, :]).sum(-2)
    return (mixed + reduce(x).unsqueeze(-2) * post.unsqueeze(-1)).type_as(r)


def batched(x: Any, r: Any, post: Any, mix: Any) -> Any:
    mixed = torch.bmm(mix.permute(0, 2, 1), r.float())
    return (torch.bmm(post.unsqueeze(2), reduce(x).unsqueeze(1).float()) + mixed).to(r.dtype)


def einsums(x: Any, r: Any, post: Any, mix: Any) -> Any:
    mixed = torch.einsum("tij,tjd->tid", mix, r.float())
    return (torch.einsum("...i,...d->...id", post, reduce(x).float()) + mixed).to(r.dtype)


def einsum_transposed(x: Any, r: Any, post: Any, mix: Any) -> Any:
    mixed = torch.einsum("...jd, ...ji -> ...id", r.float(), mix)
    return (injected(reduce(x).float(), post) + mixed).to(r.dtype)


def flattened(x: Any, r: Any, post: Any, mix: Any) -> Any:
    """Mixes all tokens of a batch by one bmm, as AOTAutograd records a matmul."""
    count, streams = r.shape[0] * r.shape[1], r.shape[2]
    mixed = torch.bmm(mix.view(count, streams, streams), r.float().view(count, streams, HIDDEN))
    injection = injected(reduce(x).float(), post)
    return (injection + mixed.view(r.shape)).to(r.dtype)


def widened(x: Any, r: Any, post: Any, mix: Any) -> Any:
    wide = reduce(x).float().unsqueeze(-2).expand(-1, r.shape[1], -1)
    return (wide * post.unsqueeze(-1) + mix @ r.float()).to(r.dtype)


def rounded_factors(x: Any, r: Any, post: Any, mix: Any) -> Any:
    """Rounds the factors, which are then the call's factors, and computes in float32."""
    post, mix = post.to(bf16), mix.to(bf16)
    total = injected(reduce(x).float(), post.float()) + mix.float().transpose(-1, -2) @ r.float()
    return total.to(r.dtype)


def in_place(x: Any, r: Any, post: Any, mix: Any) -> Any:
    total = injected(reduce(x).float(), post)
    total += mix.transpose(-1, -2) @ r.float()
    r.copy_(total)
    return r


def kept_in_float32(x: Any, r: Any, post: Any, mix: Any) -> Any:
    """Keeps streams in float32 from here on."""
    return injected(reduce(x), post) + mix.transpose(-1, -2) @ r.float()


def layers(x: Any, r: Any, post: Any, mix: Any) -> Any:
    for _ in range(2):
        r = transposed(x, r, post, mix)
        x = (r.float().mean(-2) * 0.5).to(x.dtype)
    return r


# The forms that multiply the old stream i by mix[..., i, j]; in the others it is stream j.
SWAPPED = {published, transposed, transposed_property, batched, einsum_transposed}
SWAPPED |= {rounded_factors, in_place, kept_in_float32}
FORMS: dict[str, tuple[Callable[..., Any], Inputs]] = {
    f"{form.__name__}-{name}": (form, inputs)
    for form in (published, multiplied, transposed, summed_last)
    for name, inputs in {
        "rows": Inputs(),
        "batch": BATCH,
        "float32_streams": WIDE,
        "float32": ALL_FLOAT32,
        "float16": Inputs(dtype=torch.float16, kind=torch.float16, streams=2),
        "one_token": Inputs(leading=(1,), streams=3),
    }.items()
} | {
    form.__name__: (form, inputs)
    for form, inputs in (
        (transposed_property, Inputs(streams=8)),
        (batched, Inputs()),
        (einsums, Inputs()),
        (einsum_transposed, BATCH),
        (flattened, BATCH),
        (widened, Inputs()),
        (rounded_factors, BATCH),
        (in_place, Inputs()),
        (kept_in_float32, Inputs()),
    )
}


def assert_close(actual: Tensor, expected: Tensor, inputs: Inputs, what: str) -> None:
    """Compares streams whose float32 terms were added in different orders."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), what
    torch.testing.assert_close(actual.float(), expected.float(), rtol=2.0**-7, atol=4e-6)
    if actual.dtype != float32:
        assert float((ulp_distance(actual, expected) > 0).float().mean()) < 0.005, what


def wanted(fn: Any, inputs: Inputs, ranks: int) -> Tensor:
    """Returns the reference's result for a form of one layer."""
    xs = [inputs.make(rank)[0] for rank in range(ranks)]
    _, r, post, mix = inputs.make(0)
    if fn is rounded_factors:
        post, mix = post.to(bf16).float(), mix.to(bf16).float()
    if fn is kept_in_float32:
        r = r.float()
    connection = allnorm.HyperConnection(post, mix.mT if fn in SWAPPED else mix)
    return reference.all_reduce_hyper_connection(xs, r, connection)


def fused(module: GraphModule, given: list[Tensor], sites: int = 1, **options: Any) -> Any:
    """Fuses a graph, checks the report, and returns the result."""
    report = fuse(module, [t.clone() for t in given], comm(), **options)
    module.graph.lint()
    assert [site.boundary for site in report.fused] == [
        f"{given[1].shape[-2]} residual streams"
    ] * (sites), str(report)
    assert not report.missed, str(report)
    assert {site.numerics for site in report.fused} == {""}
    assert len(nodes_calling(module, "all_reduce_hyper_connection")) == sites
    assert not nodes_calling(module, "_c10d_functional"), module.graph
    with torch.no_grad():
        return module(*[t.clone() for t in given])


def long(*names: str, short: tuple[str, ...] = ()) -> list[Any]:
    """Returns parameters of a test: those that are not `short` run only in the long tests."""
    return [pytest.param(n, marks=() if n in short else pytest.mark.long) for n in names]


@on(cpu=(2,))
@pytest.mark.parametrize("name", long(*FORMS, short=("published-rows", "transposed-batch")))
def test_forms(rank: int, world_size: int, name: str) -> None:
    fn, inputs = FORMS[name]
    given = inputs.make(rank)
    expected = symbolic_trace(fn)(*[t.clone() for t in given])
    actual = fused(symbolic_trace(fn), given)
    assert_close(actual, expected, inputs, name)
    assert_same_bits(actual, wanted(fn, inputs, world_size), name)


@on(cpu=(2,))
@pytest.mark.parametrize("tracer", long("make_fx", "dynamo", "aot"))
def test_tracers(rank: int, world_size: int, tracer: str) -> None:
    for fn, inputs in ((published, BATCH), (transposed, BATCH), (einsums, Inputs())):
        given = inputs.make(rank)
        if tracer == "make_fx":
            actual = fused(make_fx(fn)(*given), given)
        else:
            reports: list[FusionReport] = []
            actual = compiled(fn, tracer == "aot", reports)(*given)
            assert [len(report.fused) for report in reports] == [1], str(reports[0])
        assert_same_bits(actual, wanted(fn, inputs, world_size), fn.__name__)


def compiled(fn: Any, is_late: bool, reports: list[FusionReport], **options: Any) -> Any:
    """Compiles a function to its fused graph from Dynamo or, if `is_late`, from AOTAutograd."""

    def compiler(module: GraphModule, given: Any) -> Any:
        reports.append(fuse(module, None, comm(), **options))
        return make_boxed_func(module.forward) if is_late else module.forward

    torch._dynamo.reset()
    fast = torch.compile(fn, backend=aot_autograd(fw_compiler=compiler) if is_late else compiler)

    def run(*given: Any, **named: Any) -> Any:
        with torch.no_grad():
            result = fast(*given, **named)
        torch._dynamo.reset()
        return result

    return run


@pytest.mark.long
@on(cpu=(2,))
def test_inductor(rank: int, world_size: int) -> None:
    for fn in (published, transposed):
        given = BATCH.make(rank)
        fusion = allnorm.compile.inductor_pass(comm())
        with inductor_caches(), torch.no_grad():
            fast = torch.compile(fn, options={"post_grad_custom_post_pass": fusion})
            actual = fast(*given)
        assert [len(report.fused) for report in fusion.reports] == [1], str(fusion.reports[0])
        assert_same_bits(actual, wanted(fn, BATCH, world_size), fn.__name__)


@pytest.mark.long
@on(cpu=(2,))
def test_layers_and_other_sizes(rank: int, world_size: int) -> None:
    """A fused graph runs with other numbers of tokens, but not of streams."""
    module, given = symbolic_trace(layers), Inputs().make(rank)
    assert_close(fused(module, given, 2), layers(*given), Inputs(), "layers")
    for count in (1, 9):
        inputs = Inputs(leading=(count,))
        given = inputs.make(rank)
        assert_close(module(*given), layers(*given), inputs, f"{count} tokens")
    with pytest.raises(ValueError, match="Fuse the graph again"):
        module(*Inputs(streams=2).make(rank))


# ---- what is missed ------------------------------------------------------------------------------


def as_in_transformers(x: Any, r: Any, post: Any, mix: Any) -> Any:
    mixed = torch.matmul(mix.to(bf16).transpose(-1, -2), r)
    return injected(reduce(x), post.to(bf16)) + mixed


def rounded_mix(x: Any, r: Any, post: Any, mix: Any) -> Any:
    return (injected(reduce(x), post) + (mix.to(bf16) @ r)).to(r.dtype)


def unmixed(x: Any, r: Any, post: Any, mix: Any) -> Any:
    """Adds to the streams as HY-V4 in transformers does."""
    return (injected(reduce(x).float(), post) + r.float()).to(r.dtype)


def other_summand(x: Any, r: Any, post: Any, mix: Any) -> Any:
    return (injected(reduce(x), post) + torch.relu(r)[:, :, :1]).to(r.dtype)


def not_rounded(x: Any, r: Any, post: Any, mix: Any) -> Any:
    return injected(reduce(x), post) + (mix.unsqueeze(-1) * r.unsqueeze(-3)).sum(-2)


def sum_is_read(x: Any, r: Any, post: Any, mix: Any) -> Any:
    reduced = reduce(x)
    return (injected(reduced, post) + mix @ r.float()).to(r.dtype), reduced


def unrounded_is_read(x: Any, r: Any, post: Any, mix: Any) -> Any:
    total = injected(reduce(x), post) + (mix.unsqueeze(-1) * r.unsqueeze(-3)).sum(-2)
    return total.to(r.dtype), total.abs().amax()


def streams_from_the_sum(x: Any, r: Any, post: Any, mix: Any) -> Any:
    reduced = reduce(x)
    streams = torch.relu(reduced).unsqueeze(-2) + r
    return (injected(reduced, post) + mix @ streams.float()).to(r.dtype)


def unused(x: Any, r: Any, post: Any, mix: Any) -> Any:
    total = (injected(reduce(x), post) + mix @ r.float()).to(r.dtype)
    _ = total * 2
    return x


def one_matrix(x: Any, r: Any, post: Any, mix: Any) -> Any:
    """Mixes the streams of all tokens by one matrix."""
    return (injected(reduce(x), post) + mix[0] @ r.float()).to(r.dtype)


def of_other_tokens(x: Any, r: Any, post: Any, mix: Any) -> Any:
    """Has the streams as one batch, and `x` as two."""
    total = injected(reduce(x.view(2, 3, HIDDEN)), post.view(2, 3, 4)) + (mix @ r.float()).view(
        2, 3, 4, HIDDEN
    )
    return total.to(r.dtype)


MISSED: dict[str, tuple[Callable[..., Any], Inputs, str]] = {
    fn.__name__: (fn, inputs, reason)
    for fn, inputs, reason in (
        (as_in_transformers, Inputs(), "rounds a part of the new streams to torch.bfloat16"),
        (rounded_mix, Inputs(), "rounds a part of the new streams to torch.bfloat16"),
        (unmixed, Inputs(), "adds residual streams that are not mixed"),
        (other_summand, Inputs(), "is not a sum of streams, each times one number per token"),
        (one_matrix, Inputs(), "is not a sum of streams, each times one number per token"),
        (of_other_tokens, Inputs(), "has leading dimensions other than those of the new streams"),
        (not_rounded, Inputs(), "is not rounded to torch.bfloat16, the dtype of the old streams"),
        (sum_is_read, Inputs(), "the reduced tensor itself is also used"),
        (unrounded_is_read, Inputs(), "uses the unrounded add"),
        (streams_from_the_sum, Inputs(), "an input of the streams' sum, is computed from"),
        (unused, Inputs(), "the result of .* is not used"),
    )
} | {
    "one_stream": (multiplied, Inputs(streams=1), "takes a part of"),
    "nine_streams": (multiplied, Inputs(streams=9), "adds to 9 residual streams: expected 2 to 8"),
}


@on(cpu=(2,))
@pytest.mark.parametrize("name", long(*MISSED, short=("as_in_transformers",)))
def test_missed(rank: int, world_size: int, name: str) -> None:
    fn, inputs, reason = MISSED[name]
    check_missed(symbolic_trace(fn), inputs.make(rank), reason, communicator=comm())


@on(cpu=(2,))
@pytest.mark.parametrize("name", long("as_in_transformers", "rounded_mix", short=("rounded_mix",)))
def test_approximate(rank: int, world_size: int, name: str) -> None:
    """Tests that parts that the graph rounds are added without rounding, where that is allowed."""
    fn, inputs, _ = MISSED[name]
    given = inputs.make(rank)
    expected = symbolic_trace(fn)(*given)
    actual = fused(symbolic_trace(fn), given, approximate_streams=True)
    _, r, post, mix = given
    if fn is as_in_transformers:
        post, mix = post.to(bf16).float(), mix.to(bf16).float().mT
    else:
        mix = mix.to(bf16).float()
    xs = [inputs.make(other)[0] for other in range(world_size)]
    connection = allnorm.HyperConnection(post, mix)
    assert_same_bits(actual, reference.all_reduce_hyper_connection(xs, r, connection), name)
    parts = xs[0].float().abs().amax() * 2 + r.float().abs().amax() * 4
    assert float((actual.float() - expected.float()).abs().max()) <= float(parts) * 2.0**-8


# ---- models --------------------------------------------------------------------------------------


class RowParallel(torch.nn.Module):
    """A linear layer that holds this rank's columns of a weight, and reduces its output."""

    reduces = True

    def __init__(self, whole: torch.nn.Linear) -> None:
        super().__init__()
        width = whole.in_features // dist.get_world_size()
        self.columns = slice(width * dist.get_rank(), width * (dist.get_rank() + 1))
        self.weight = torch.nn.Parameter(whole.weight[:, self.columns].clone())

    def forward(self, x: Tensor) -> Tensor:
        partial = F.linear(x[..., self.columns], self.weight)
        return funcol.all_reduce(partial, "sum", dist.group.WORLD) if self.reduces else partial


def deepseek_v4(dtype: torch.dtype) -> Any:
    """Returns a tiny model of transformers with two layers, whose attention is sharded."""
    transformers = pytest.importorskip("transformers")
    layers = 2
    config = transformers.AutoConfig.for_model(
        "deepseek_v4",
        vocab_size=96,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        head_dim=32,
        q_lora_rank=32,
        num_experts_per_tok=2,
        n_routed_experts=4,
        layer_types=["sliding_attention"] * layers,
        mlp_layer_types=["moe"] * layers,
        sliding_window=16,
        o_groups=2,
        o_lora_rank=16,
        max_position_embeddings=256,
        pad_token_id=0,
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for layer in model.model.layers:
        layer.self_attn.o_b_proj = RowParallel(layer.self_attn.o_b_proj)
    return model


@pytest.mark.long
@on(cpu=(2,))
def test_deepseek_v4(rank: int, world_size: int) -> None:
    """Tests a tiny DeepSeek-V4 of transformers in float32: the streams are mixed in the calls."""
    model = deepseek_v4(float32)
    tokens = torch.arange(14).view(2, 7)
    with torch.no_grad():
        expected = model(tokens, use_cache=False).logits
        reports: list[FusionReport] = []
        for layer in model.model.layers:
            layer.forward = compiled(layer.forward, True, reports)
        actual = model(tokens, use_cache=False).logits
    assert [site.boundary for report in reports for site in report.fused] == [
        "4 residual streams"
    ] * 2
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


class Run(Interpreter):
    """A run of a graph that keeps what each node computed.

    The nodes in `given` compute their own values, but the nodes after them read the given values.
    """

    def __init__(self, module: GraphModule, given: dict[str, Tensor]) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.given, self.own = given, dict[str, Any]()

    def run_node(self, n: Node) -> Any:
        self.own[n.name] = super().run_node(n)
        return self.given.get(n.name, self.own[n.name])


def ulp(x: Tensor) -> Tensor:
    """Returns the unit in the last place of bfloat16 numbers: 2**-7 of the power of two below."""
    return torch.ldexp(torch.ones(()), torch.frexp(x.float()).exponent - 8)


class Twin:
    """A layer's graph, unfused and fused. Every run compares both; `sites` counts the comparisons.

    The reports are those of the graph without `approximate_streams` and with it.
    """

    def __init__(self, module: GraphModule) -> None:
        self.unfused, self.fused, self.sites = copy.deepcopy(module), module, 0
        self.reports = [
            fuse(copy.deepcopy(module), None, comm()),
            fuse(module, None, comm(), approximate_streams=True),
        ]

    def __call__(self, *given: Any) -> Any:
        operator: Any = torch.ops.allnorm.all_reduce_hyper_connection.default
        fused = Run(self.fused, {})
        results = fused.run(*given)
        calls = self.fused.graph.find_nodes(op="call_function", target=operator)
        sites = self.reports[1].fused
        found = {
            site.nodes[-1]: fused.own[call.name] for site, call in zip(sites, calls, strict=True)
        }
        unfused = Run(self.unfused, found)
        expected = unfused.run(*given)
        for mine, theirs in zip(results, expected, strict=True):
            assert_same_bits(mine, theirs, "the layer after the call")
        for node in self.unfused.graph.nodes:
            if node.name in found:
                parts = [unfused.own[part.name] for part in node.args]
                call = calls[self.sites % len(calls)]
                arguments = [fused.own[part.name] for part in call.args[:4]]
                compare(found[node.name], unfused.own[node.name], parts, arguments)
                self.sites += 1
        return results


def compare(actual: Tensor, expected: Tensor, parts: list[Tensor], given: list[Tensor]) -> None:
    """Compares a call's new streams with those of a graph that rounds both parts of them.

    The graph rounds the product, the mixed streams and their sum, the call only the sum: four
    roundings, each of at most half a unit in the last place. In float32, the two differ by the
    roundings of four products and four sums of the call, and of as many and the product's in the
    graph, each of at most 2**-24 of the sum of all terms' magnitudes.
    """
    x, r, post, mix = given
    xs: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(xs, x)
    connection = allnorm.HyperConnection(post, mix)
    assert_same_bits(actual, reference.all_reduce_hyper_connection(xs, r, connection), "reference")
    reduced = torch.stack(xs).float().sum(0)
    terms = (injected(reduced, post).abs() + mix.abs() @ r.float().abs()) * 2.0**-24
    roundings = sum(ulp(each) for each in (*parts, actual, expected)) / 2
    assert bool(((actual.float() - expected.float()).abs() <= roundings + 18 * terms).all())
    assert not torch.equal(actual, expected), "the graph rounds as the call does"


@pytest.mark.long
@on(cpu=(2,))
def test_deepseek_v4_in_16_bits(rank: int, world_size: int) -> None:
    """Tests a tiny DeepSeek-V4 of transformers in bfloat16, which rounds parts of its streams.

    Each layer's fused graph computes what the unfused graph computes from the call's results, and
    these differ from the unfused graph's own only by roundings.
    """
    model, twins = deepseek_v4(bf16), list[Twin]()

    def compiler(module: GraphModule, given: Any) -> Any:
        twins.append(Twin(module))
        return make_boxed_func(twins[-1])

    with torch.no_grad():
        for layer in model.model.layers:
            layer.forward = torch.compile(layer.forward, backend=aot_autograd(fw_compiler=compiler))
        torch._dynamo.reset()
        model(torch.arange(14).view(2, 7), use_cache=False)
        torch._dynamo.reset()
    assert [twin.sites for twin in twins] == [1, 1]
    for exact, approximate in (twin.reports for twin in twins):
        assert not exact.fused
        (missed,) = exact.missed
        assert missed.dtype == bf16
        assert re.search(
            r"^mul_\d+ rounds a part of the new streams to torch.bfloat16: the fused call computes "
            "in float32 and rounds once. Pass approximate_streams=True to fuse it$",
            str(missed.reason),
        )
        (site,) = approximate.sites
        assert (site.fused, site.boundary, site.numerics) == (True, "4 residual streams", "")
        assert (site.nodes[0], site.dtype) == (missed.nodes[0], bf16)
