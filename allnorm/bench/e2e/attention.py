"""Attention of one rank over a preallocated cache, in eager prefill and in captured decode."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from allnorm.bench.e2e.models import Transformer
from allnorm.bench.e2e.weights import Layer

_CACHE_GRANULE = 64  # tokens; kernels that take a mask want its rows aligned


class Attention:
    """Rotary embedding, the cache of keys and values, and grouped-query attention.

    All sequences have the same length, up to `max_tokens` with the output. Each rank holds an equal
    part of the heads. Not collective.

    Attributes:
        position: [1] int64, where decoded tokens go; the caller advances it.
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
        """Zeroes the cache: what is masked out is multiplied by 0, which leaves a NaN a NaN."""
        self._cache.zero_()

    def prefill(self, index: int, layer: Layer, qkv: torch.Tensor) -> torch.Tensor:
        """Attends causally within prompts and stores their keys and values.

        Args:
            index: of the layer.
            layer: its weights.
            qkv: [batch_size * length, heads * head_dim], sequence by sequence.

        Returns:
            [batch_size * length, query heads * head_dim].
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
        """Prepares what all layers share for the tokens at `position`."""
        self._turn = self._turns.index_select(0, self.position)
        self._mask = torch.zeros_like(self._mask).masked_fill_(
            self._places > self.position, -torch.inf
        )

    def decode(self, index: int, layer: Layer, qkv: torch.Tensor) -> torch.Tensor:
        """Stores one token of each sequence at `position` and attends to all before it.

        Args:
            index: of the layer.
            layer: its weights.
            qkv: [batch_size, heads * head_dim].

        Returns:
            [batch_size, query heads * head_dim].
        """
        batch_size = qkv.shape[0]
        turned = self._rotate(self._heads(layer, qkv, batch_size), self._turn).transpose(1, 2)
        cache = self._cache[index]
        cache.index_copy_(2, self.position, turned[:, self._q :])
        # The query heads of a key head stand as queries of one head: nothing is repeated.
        queries = turned[:, : self._q].reshape(batch_size, self._kv, -1, self._dim)
        mask = self._mask.expand(batch_size, self._kv, queries.shape[2], -1)
        out = F.scaled_dot_product_attention(
            queries, cache[:, : self._kv], cache[:, self._kv :], attn_mask=mask
        )
        return out.reshape(batch_size, -1)

    def _heads(self, layer: Layer, qkv: torch.Tensor, batch_size: int) -> torch.Tensor:
        """[batch_size, length, heads, head_dim], queries and keys normalised if the model does."""
        heads = qkv.view(batch_size, -1, self._q + 2 * self._kv, self._dim)
        if layer.q_norm is None:
            return heads
        queries, keys, values = heads.split([self._q, self._kv, self._kv], dim=2)
        queries = F.rms_norm(queries, (self._dim,), layer.q_norm, self._eps)
        keys = F.rms_norm(keys, (self._dim,), layer.k_norm, self._eps)
        return torch.cat([queries, keys, values], dim=2)

    @staticmethod
    def _rotate(heads: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """Multiplies pairs of neighbours, as complex numbers in float32, by [length, heads, .]."""
        pairs = torch.view_as_complex(heads.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * turns).flatten(-2).to(heads.dtype)

    def _make_turns(self, length: int, theta: float, device: torch.device) -> torch.Tensor:
        """[length, heads, head_dim / 2] complex64; value heads are multiplied by 1.

        So one kernel turns all heads, and one stores keys and values.
        """
        exponents = torch.arange(0, self._dim, 2, device=device, dtype=torch.float64) / self._dim
        angles = torch.outer(torch.arange(length, device=device).double(), theta**-exponents)
        turns = torch.ones(
            (length, self._q + 2 * self._kv, self._dim // 2), dtype=torch.complex64, device=device
        )
        turns[:, : self._q + self._kv] = torch.polar(torch.ones_like(angles), angles)[:, None]
        return turns
