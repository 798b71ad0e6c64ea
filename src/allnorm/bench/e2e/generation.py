"""Greedy generation of a batch: prefill, then token by token, without host synchronization."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import allnorm
from allnorm.bench.arms import gather_into
from allnorm.bench.e2e.models import Transformer
from allnorm.bench.e2e.sites import Arm, Partial, Site
from allnorm.bench.e2e.weights import Layer, Weights
from allnorm.testing import capture

Linear = Callable[[Tensor, Tensor], Tensor]
Attend = Callable[[int, Layer, Tensor], Tensor]

_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_WARM_UP_STEPS = 2


def row_parallel(product: str) -> Linear:
    """Returns the linear layer before a reduction with a name of `models.PRODUCTS`.

    Raises:
        ImportError: the name needs Triton, which is not installed.
    """
    if product == "torch":
        return F.linear
    from allnorm.bench import triton_product

    def linear(x: Tensor, weight: Tensor) -> Tensor:
        if x.shape[0] > triton_product.MOST_TOKENS:
            return F.linear(x, weight)
        return triton_product.linear(x, weight, is_dependent=product == "dependent")

    return linear


class Generation:
    """A batch of prompts, and the buffers for its tokens.

    Collective: every rank creates it with the same arguments, except its own weights.

    Args:
        model: dimensions of the model.
        weights: this rank's part of the weights.
        prompts: [batch_size, length] int64, on the device of the weights, equal on every rank.
        num_tokens: number of tokens to generate; the prefill generates the first one.
        product: GEMM before reductions, of `models.PRODUCTS`.

    Attributes:
        logits: [batch_size, this rank's part of the vocabulary], logits of the latest token.
        token: [batch_size] int64, the latest tokens, which are the next input.
        outputs: [batch_size, num_tokens] int64, the generated tokens.
        batch_size: number of prompts.
        num_tokens: number of tokens to generate.
    """

    def __init__(
        self,
        model: Transformer,
        weights: Weights,
        prompts: Tensor,
        num_tokens: int,
        product: str = "torch",
    ) -> None:
        self._model, self._weights, self._prompts = model, weights, prompts
        self.batch_size, self._length = prompts.shape
        self.num_tokens = num_tokens
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        head, device = weights.head, prompts.device
        self._attention = Attention(
            model, self._world_size, self.batch_size, self._length + num_tokens, head.dtype, device
        )
        shape = (self.batch_size, head.shape[0])
        self.logits = torch.zeros(shape, dtype=head.dtype, device=device)
        self.token = torch.zeros(self.batch_size, dtype=torch.int64, device=device)
        shape = (self.batch_size, num_tokens)
        self.outputs = torch.zeros(shape, dtype=torch.int64, device=device)
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        self._linear = row_parallel(product)
        self._mlp = Experts(model, device) if model.num_experts else Mlp(model, self._linear)

    def reset(self) -> None:
        """Clears the cache, which may hold NaN from an earlier generation of a wrong arm."""
        self._attention.clear()

    def prefill(self, site: Site) -> None:
        """Runs the prompts and generates the first token of each. Collective."""
        self._step.zero_()
        self._attention.position.fill_(self._length - 1)
        with self._kernels():
            rows = self._forward(self._prompts.flatten(), self._attention.prefill, site)
        self._emit(rows.view(self.batch_size, self._length, -1)[:, -1])

    def decode(self, site: Site) -> None:
        """Generates the next token of each sequence. Collective; a CUDA graph can capture it."""
        self._attention.begin_decode()
        with self._kernels():
            rows = self._forward(self.token, self._attention.decode, site)
        self._emit(rows)

    def _kernels(self) -> AbstractContextManager[Any]:
        """Selects PyTorch's own attention kernels, which need no plan and are equal in all arms."""
        if self.token.device.type != "cuda":
            return nullcontext()
        return sdpa_kernel(_KERNELS)

    def _forward(self, tokens: Tensor, attend: Attend, site: Site) -> Tensor:
        """Returns the normed rows [tokens, hidden_size] before the head."""
        weights, layers = self._weights, self._weights.layers
        after = [layer.input_norm for layer in layers[1:]] + [weights.final_norm]
        embedded, model = F.embedding(tokens, weights.embedding), self._model
        normed, residual = allnorm.add_rms_norm(
            embedded, None, layers[0].input_norm, model.eps, weight_bias=model.weight_bias
        )
        for index, layer in enumerate(layers):
            attended = attend(index, layer, F.linear(normed, layer.qkv))
            x = self._linear(attended, layer.o)
            normed, residual = site(x, residual, layer.mlp_norm, layer.attention_post)
            returned = self._mlp(layer, normed)
            normed, residual = site(returned, residual, after[index], layer.mlp_post)
        return normed

    def _emit(self, rows: Tensor) -> None:
        self.logits.copy_(F.linear(rows, self._weights.head))
        self.token.copy_(self._most_likely())
        self.outputs.index_copy_(1, self._step, self.token[:, None])
        self._step += 1
        self._attention.position += 1

    def _most_likely(self) -> Tensor:
        """Returns the most likely tokens [batch_size]; ties go to the first, on every rank."""
        largest, index = self.logits.float().max(dim=-1)
        index = index + self._rank * self.logits.shape[1]
        # float32 is exact for integers up to 2**24, which exceeds every vocabulary.
        own = torch.stack([largest, index.float()])
        ranks = torch.empty(
            (self._world_size, *own.shape), dtype=torch.float32, device=self.token.device
        )
        gather_into(ranks.view(-1, self.batch_size), own)
        owner = ranks[:, 0].argmax(dim=0, keepdim=True)
        return ranks[:, 1].gather(0, owner)[0].to(torch.int64)


class Runner:
    """An arm on a batch; with `captured` its decode step is a CUDA graph.

    The constructor is collective: it runs both phases once. Several runners may share a generation
    if they run one at a time.
    """

    def __init__(self, generation: Generation, arm: Arm, captured: bool) -> None:
        self.generation, self._arm, self._site = generation, arm, arm.site
        self._graph: torch.cuda.CUDAGraph | None = None
        if captured:
            self._capture()

    def prefill(self) -> None:
        """Runs the prompts and generates the first token. Collective."""
        self.generation.prefill(self._site)

    def step(self) -> None:
        """Generates the next token. Collective."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self.generation.decode(self._site)

    def _capture(self) -> None:
        self.prefill()
        for _ in range(min(_WARM_UP_STEPS, self.generation.num_tokens - 1)):
            self.generation.decode(self._site)
        with capture(self._arm.capturing()) as self._graph:
            self.generation.decode(self._site)


# ---- the MLP ------------------------------------------------------------------------------------


class Mlp:
    """The gate, up and down projections of a dense layer. Not collective."""

    def __init__(self, model: Transformer, linear: Linear = F.linear) -> None:
        self._gelu, self._linear = model.activation == "gelu", linear

    def __call__(self, layer: Layer, normed: Tensor) -> Partial:
        """Returns this rank's partial sums [tokens, hidden_size]."""
        return self._linear(self.gated(F.linear(normed, layer.gate_up)), layer.down)

    def gated(self, gate_up: Tensor) -> Tensor:
        """Multiplies the activated gate half of each row by the other half."""
        gate, up = gate_up.chunk(2, dim=-1)
        return (F.gelu(gate, approximate="tanh") if self._gelu else F.silu(gate)) * up


class Experts(Mlp):
    """An MLP of experts: the router chooses `top_k` experts per token. Not collective.

    Every rank has a part of each expert, hence a row per choice. Tokens are sorted by expert, as in
    serving engines, without host synchronization.
    """

    def __init__(self, model: Transformer, device: torch.device) -> None:
        super().__init__(model)
        self._top_k = model.top_k
        self._names = torch.arange(model.num_experts, device=device)

    def __call__(self, layer: Layer, normed: Tensor) -> Partial:
        """Returns the rows of the experts, sorted by expert, and the index of each token's rows."""
        assert layer.router is not None
        preferred = F.linear(normed, layer.router).float().softmax(dim=-1)
        weights, chosen = preferred.topk(self._top_k, dim=-1)
        experts, order = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(experts, self._names, right=True, out_int32=True)
        places = torch.arange(order.shape[0], dtype=torch.int32, device=order.device)
        index = torch.empty_like(places).scatter_(0, order, places).view_as(chosen)
        rows = normed.index_select(0, order // self._top_k)
        inner = self.gated(F.grouped_mm(rows, layer.gate_up.mT, offs=ends))
        rows = F.grouped_mm(inner, layer.down.mT, offs=ends)
        return allnorm.ExpertSum(rows, weights / weights.sum(dim=-1, keepdim=True), index)


# ---- attention ----------------------------------------------------------------------------------

_CACHE_GRANULE = 64  # in tokens; kernels with a mask require aligned rows


class Attention:
    """Grouped-query attention with rotary embedding and a key-value cache.

    All sequences have the same length, at most `max_tokens` including the output. Each rank holds
    an equal part of the heads. Not collective.

    Attributes:
        position: [1] int64, position of the next decoded token; the caller advances it.
    """

    def __init__(
        self,
        model: Transformer,
        world_size: int,
        batch_size: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._kv, self._dim = model.num_kv_heads // world_size, model.head_dim
        self._q = self._kv * model.queries_per_kv
        self._eps = model.eps
        length = -(-max_tokens // _CACHE_GRANULE) * _CACHE_GRANULE
        self._cache = torch.zeros(
            (model.num_layers, batch_size, 2 * self._kv, length, self._dim),
            dtype=dtype,
            device=device,
        )
        self._turns = self._make_turns(length, model.rope_theta, device)
        self._places = torch.arange(length, device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self._turn = self._turns[:1]
        self._mask = torch.zeros((1, 1, 1, length), dtype=dtype, device=device)

    def clear(self) -> None:
        """Zeroes the cache, because a masked NaN would stay a NaN when multiplied by 0."""
        self._cache.zero_()

    def prefill(self, index: int, layer: Layer, qkv: Tensor) -> Tensor:
        """Attends causally within prompts and stores their keys and values.

        `qkv` is [batch_size * length, heads * head_dim], sequence by sequence. The result has the
        same layout, with the query heads only.
        """
        batch_size = self._cache.shape[1]
        heads = self._heads(layer, qkv, batch_size)
        turned = self._rotate(heads, self._turns[: heads.shape[1]]).transpose(1, 2)
        queries, stored = turned[:, : self._q], turned[:, self._q :]
        self._cache[index, :, :, : heads.shape[1]].copy_(stored)
        out = F.scaled_dot_product_attention(
            queries, stored[:, : self._kv], stored[:, self._kv :], is_causal=True, enable_gqa=True
        )
        return out.transpose(1, 2).reshape(qkv.shape[0], -1)

    def begin_decode(self) -> None:
        """Prepares rotation and mask of the tokens at `position`, which all layers share."""
        self._turn = self._turns.index_select(0, self.position)
        self._mask = torch.zeros_like(self._mask).masked_fill_(
            self._places > self.position, -torch.inf
        )

    def decode(self, index: int, layer: Layer, qkv: Tensor) -> Tensor:
        """Stores one token per sequence at `position` and attends to it and all earlier tokens.

        `qkv` is [batch_size, heads * head_dim]. The result has the same layout, with the query
        heads only.
        """
        batch_size = qkv.shape[0]
        turned = self._rotate(self._heads(layer, qkv, batch_size), self._turn).transpose(1, 2)
        cache = self._cache[index]
        cache.index_copy_(2, self.position, turned[:, self._q :])
        # Query heads of a key head become queries of one head, so keys need not be repeated.
        queries = turned[:, : self._q].reshape(batch_size, self._kv, -1, self._dim)
        mask = self._mask.expand(batch_size, self._kv, queries.shape[2], -1)
        out = F.scaled_dot_product_attention(
            queries, cache[:, : self._kv], cache[:, self._kv :], attn_mask=mask
        )
        return out.reshape(batch_size, -1)

    def _heads(self, layer: Layer, qkv: Tensor, batch_size: int) -> Tensor:
        """Returns heads [batch_size, length, heads, head_dim]; norms queries and keys if needed."""
        heads = qkv.view(batch_size, -1, self._q + 2 * self._kv, self._dim)
        if layer.q_norm is None:
            return heads
        queries, keys, values = heads.split([self._q, self._kv, self._kv], dim=2)
        queries = F.rms_norm(queries, (self._dim,), layer.q_norm, self._eps)
        keys = F.rms_norm(keys, (self._dim,), layer.k_norm, self._eps)
        return torch.cat([queries, keys, values], dim=2)

    @staticmethod
    def _rotate(heads: Tensor, turns: Tensor) -> Tensor:
        """Multiplies pairs of neighbors, as complex numbers in float32, by [length, heads, .]."""
        pairs = torch.view_as_complex(heads.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * turns).flatten(-2).to(heads.dtype)

    def _make_turns(self, length: int, theta: float, device: torch.device) -> Tensor:
        """Returns rotations [length, heads, head_dim / 2] complex64; 1 for value heads.

        Including the value heads lets one kernel rotate all heads and one store keys and values.
        """
        exponents = torch.arange(0, self._dim, 2, device=device, dtype=torch.float64) / self._dim
        angles = torch.outer(torch.arange(length, device=device).double(), theta**-exponents)
        turns = torch.ones(
            (length, self._q + 2 * self._kv, self._dim // 2), dtype=torch.complex64, device=device
        )
        turns[:, : self._q + self._kv] = torch.polar(torch.ones_like(angles), angles)[:, None]
        return turns
