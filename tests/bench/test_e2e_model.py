"""Tests the transformer of `allnorm e2e`: shards and the key-value cache keep results equal."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import allnorm
from allnorm.bench.e2e import models as e2e_models
from allnorm.bench.e2e import run, sites, weights
from allnorm.bench.e2e.generation import Experts, Generation, Runner
from allnorm.bench.e2e.models import Transformer
from allnorm.bench.e2e.weights import Layer, Weights
from allnorm.testing import RankPool, run_ranks

CPU = torch.device("cpu")
MODELS = ["tiny", "tiny-qk-norm", "tiny-gemma", "tiny-moe"]
BATCH, LENGTH, TOKENS = 3, 7, 5


def prompts(model: Transformer) -> Tensor:
    return torch.randint(model.vocab_size, (BATCH, LENGTH), generator=torch.manual_seed(3))


def generate(rank: int, world_size: int, name: str) -> tuple[Tensor, list[Tensor]]:
    """Returns the tokens, and this rank's part of each step's logits in float32."""
    model = e2e_models.find(name)
    made = weights.make(model, rank, world_size, torch.float32, CPU)
    generation = Generation(model, made, prompts(model), TOKENS)
    with allnorm.Communicator(device=CPU) as comm:
        runner = Runner(generation, sites.make("allnorm", comm, model), captured=False)
        trace = run.trace(runner, TOKENS)
        assert torch.equal(generation.outputs, trace.tokens)
    return trace.tokens, trace.logits


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_generate_the_tokens_of_one_rank(name: str) -> None:
    alone_tokens, alone = run_ranks(generate, 1, args=(name,))[0]
    ranks = run_ranks(generate, 2, args=(name,))
    for tokens, _ in ranks:
        assert torch.equal(tokens, alone_tokens)
    assert len({tuple(row.tolist()) for row in alone_tokens}) == BATCH
    for step, expected in enumerate(alone):
        logits = torch.cat([part[step] for _, part in ranks], dim=-1)
        torch.testing.assert_close(logits, expected, atol=3e-5, rtol=3e-5)


def plain(model: Transformer, w: Weights, tokens: Tensor) -> Tensor:
    """Computes the logits of a sequence's last token with plain code and no cache."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + model.eps) * weight

    def around_one(x: Tensor, weight: Tensor) -> Tensor:
        return norm(x, weight + model.weight_bias)

    def returned(x: Tensor, post: allnorm.PostNorm | None) -> Tensor:
        return around_one(x, post.weight) if post else x

    def mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = F.linear(x, gate_up).chunk(2, -1)
        gate = F.gelu(gate, approximate="tanh") if model.name == "tiny-gemma" else F.silu(gate)
        return F.linear(gate * up, down)

    def experts(x: Tensor, layer: Layer) -> Tensor:
        if layer.router is None:
            return mlp(x, layer.gate_up, layer.down)
        every = [mlp(x, *matrices) for matrices in zip(layer.gate_up, layer.down, strict=True)]
        likely = F.linear(x, layer.router).softmax(-1)
        chosen = likely >= likely.topk(model.top_k, dim=-1).values[:, -1:]
        weights = likely * chosen / (likely * chosen).sum(-1, keepdim=True)
        return torch.einsum("te,eth->th", weights, torch.stack(every))

    def rotate(x: Tensor) -> Tensor:
        angle = torch.arange(len(x))[:, None] * model.rope_theta ** (
            -torch.arange(0, model.head_dim, 2) / model.head_dim
        )
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)

    heads = [model.num_heads, model.num_kv_heads, model.num_kv_heads]
    x = w.embedding[tokens]
    for layer in w.layers:
        qkv = F.linear(around_one(x, layer.input_norm), layer.qkv)
        q, k, v = qkv.view(len(x), -1, model.head_dim).split(heads, dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = norm(q, layer.q_norm), norm(k, layer.k_norm)
        q, k = rotate(q), rotate(k)
        k, v = (t.repeat_interleave(model.queries_per_kv, dim=1) for t in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) / model.head_dim**0.5
        scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
        attended = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1)
        x = x + returned(F.linear(attended, layer.o), layer.attention_post)
        x = x + returned(experts(around_one(x, layer.mlp_norm), layer), layer.mlp_post)
    return F.linear(around_one(x[-1], w.final_norm), w.head)


@pytest.mark.parametrize("name", MODELS)
def test_logits_with_a_cache_equal_recomputed_ones(name: str) -> None:
    model = e2e_models.find(name)
    tokens, logits = run_ranks(generate, 1, args=(name,))[0]
    whole = weights.make(model, 0, 1, torch.float32, CPU)
    sequences = torch.cat([prompts(model), tokens], dim=1)
    for step in range(TOKENS):
        for row, sequence in enumerate(sequences[:, : LENGTH + step]):
            expected = plain(model, whole, sequence)
            torch.testing.assert_close(logits[step][row], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "dtype", "world_size"),
    [
        ("tiny-qk-norm", torch.float32, 4),
        ("tiny-qk-norm", torch.bfloat16, 4),
        ("tiny-moe", torch.bfloat16, 2),  # every rank has a part of every expert
    ],
)
def test_shards_are_parts_of_the_same_weights(
    name: str, dtype: torch.dtype, world_size: int
) -> None:
    model = e2e_models.find(name, num_layers=1)
    whole = weights.make(model, 0, 1, dtype, CPU)
    parts = [weights.make(model, rank, world_size, dtype, CPU) for rank in range(world_size)]
    (layer,), layers = whole.layers, [p.layers[0] for p in parts]
    assert layer.gate_up.shape[-2:] == (2 * model.intermediate_size, model.hidden_size)
    assert torch.equal(torch.cat([p.head for p in parts]), whole.head)
    assert torch.equal(torch.cat([p.o for p in layers], dim=1), layer.o)
    assert torch.equal(torch.cat([p.down for p in layers], dim=-1), layer.down)
    gates, ups = zip(*(p.gate_up.chunk(2, dim=-2) for p in layers), strict=True)
    assert torch.equal(torch.cat([*gates, *ups], dim=-2), layer.gate_up)
    for p in parts:
        assert torch.equal(p.embedding, whole.embedding)
        assert torch.equal(p.layers[0].mlp_norm, layer.mlp_norm)
        if layer.router is not None:
            assert torch.equal(p.layers[0].router, layer.router)


def test_experts_return_one_row_per_choice() -> None:
    """The model has more experts than choices, so some experts have no row."""
    model = e2e_models.find("tiny-moe", num_layers=1)
    (layer,) = weights.make(model, 0, 1, torch.bfloat16, CPU).layers
    normed = torch.randn(3, model.hidden_size, generator=torch.manual_seed(1)).bfloat16()
    found = Experts(model, CPU)(layer, normed)
    assert isinstance(found, allnorm.ExpertSum)
    assert found.index is not None
    assert found.weights is not None
    assert len(normed) * model.top_k < model.num_experts
    assert found.rows.shape == (3 * model.top_k, model.hidden_size)
    assert found.index.flatten().sort().values.tolist() == list(range(3 * model.top_k))
    torch.testing.assert_close(found.weights.sum(-1), torch.ones(3))
    assert (found.weights.diff(dim=-1) <= 0).all()


def test_weights_plus_bias_equal_weights_without_a_bias() -> None:
    """Checks that an arm that adds the bias in advance multiplies by the same numbers."""
    model = e2e_models.find("tiny-gemma", num_layers=1)
    biased, plain = (
        weights.make(replace(model, weight_bias=bias), 0, 1, torch.bfloat16, CPU)
        for bias in (1.0, 0.0)
    )
    assert torch.equal(biased.final_norm + 1, plain.final_norm)
    assert torch.equal(biased.final_norm.float() + 1, plain.final_norm.float())


def graphs(rank: int, world_size: int, name: str) -> None:
    device = torch.device("cuda", rank)
    model = e2e_models.find(name)
    made = weights.make(model, rank, world_size, torch.bfloat16, device)
    generation = Generation(model, made, prompts(model).to(device), TOKENS)
    with allnorm.Communicator(device=device) as comm:
        for arm_name in ("allnorm", "allnorm:unfused", "nccl+torch", "nccl+local", "local"):
            arm = sites.make(arm_name, comm, model)
            eager = run.trace(Runner(generation, arm, captured=False), TOKENS)
            replayed = run.trace(Runner(generation, arm, captured=True), TOKENS)
            assert replayed.finite
            assert run.compare(replayed, eager).equal_steps == TOKENS


@pytest.mark.gpu
@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", MODELS[1:])
def test_replays_of_a_graph_equal_eager_steps(name: str) -> None:
    with RankPool(2, "cuda") as pool:
        pool.run(graphs, name)
