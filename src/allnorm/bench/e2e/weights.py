"""Random weights of a sharded transformer that do not depend on the number of ranks.

A unit is one key and value head with its query heads, and an equal share of the MLP (or of every
expert) and of the vocabulary. Each unit of a tensor has its own seed, and a rank makes only the
units that it holds.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

import allnorm
from allnorm.bench.e2e.models import Transformer


@dataclass(frozen=True)
class Layer:
    """This rank's part of a decoder layer; matrices are [outputs, inputs].

    With experts, `gate_up` and `down` have one matrix per expert: [num_experts, ., .].
    """

    qkv: Tensor  # outputs: this rank's query heads, then key heads, then value heads
    o: Tensor  # inputs: this rank's query heads; outputs: partial sums of [hidden_size]
    gate_up: Tensor  # outputs: this rank's part of the gate, then of the up projection
    down: Tensor  # inputs: this rank's part of the MLP; outputs: partial sums
    input_norm: Tensor  # [hidden_size], weight of the norm before the attention
    mlp_norm: Tensor  # [hidden_size], weight of the norm before the MLP
    attention_post: allnorm.PostNorm | None  # norm of the attention's result, if any
    mlp_post: allnorm.PostNorm | None  # norm of the MLP's result, if any
    router: Tensor | None  # [num_experts, hidden_size], replicated; None without experts
    # [head_dim], weights of the norms of a query and a key head, without bias; None without norms.
    q_norm: Tensor | None
    k_norm: Tensor | None


@dataclass(frozen=True)
class Weights:
    """This rank's part of a transformer."""

    embedding: Tensor  # [vocab_size, hidden_size], replicated
    layers: tuple[Layer, ...]  # in order
    final_norm: Tensor  # [hidden_size]
    head: Tensor  # [this rank's part of the vocabulary, hidden_size]


def make(
    model: Transformer, rank: int, world_size: int, dtype: torch.dtype, device: torch.device
) -> Weights:
    """Makes this rank's part of the model on the device. Not collective.

    `world_size` must divide the model's number of key and value heads.
    """
    each = model.num_kv_heads // world_size
    source = _Source(model.num_kv_heads, range(rank * each, (rank + 1) * each), dtype, device)
    hidden = model.hidden_size
    layers = tuple(_layer(model, source, f"layer {i}") for i in range(model.num_layers))
    return Weights(
        embedding=source.normal("embedding", model.vocab_size, hidden, 1.0),
        layers=layers,
        final_norm=source.norm("final_norm", hidden, model.weight_bias),
        head=source.rows("head", model.vocab_size, hidden),
    )


def _layer(model: Transformer, source: _Source, name: str) -> Layer:
    hidden, head_dim = model.hidden_size, model.head_dim
    width, kv_width = model.num_heads * head_dim, model.num_kv_heads * head_dim
    heads = ((f"{name} q", width), (f"{name} k", kv_width), (f"{name} v", kv_width))
    inner, count, bias = model.intermediate_size, model.num_experts, model.weight_bias

    def post(part: str) -> allnorm.PostNorm | None:
        if not model.post_norm:
            return None
        return allnorm.PostNorm(source.norm(f"{name} {part}", hidden, bias), model.eps, bias)

    return Layer(
        qkv=torch.cat([source.rows(part, size, hidden) for part, size in heads]),
        o=source.columns(f"{name} o", hidden, width),
        gate_up=torch.cat(
            [source.rows(f"{name} {part}", inner, hidden, count) for part in ("gate", "up")], dim=-2
        ),
        down=source.columns(f"{name} down", hidden, inner, count),
        input_norm=source.norm(f"{name} input_norm", hidden, bias),
        mlp_norm=source.norm(f"{name} mlp_norm", hidden, bias),
        attention_post=post("attention_post"),
        mlp_post=post("mlp_post"),
        router=source.normal(f"{name} router", count, hidden, hidden**-0.5) if count else None,
        q_norm=source.norm(f"{name} q_norm", head_dim) if model.qk_norm else None,
        k_norm=source.norm(f"{name} k_norm", head_dim) if model.qk_norm else None,
    )


class _Source:
    """A generator of tensors from their names; this rank holds `units` of `num_units`."""

    def __init__(
        self, num_units: int, units: range, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._num_units, self._units = num_units, units
        self._dtype, self._device = dtype, device
        self._generator = torch.Generator(device=device)

    def normal(self, name: str, rows: int, columns: int, scale: float) -> Tensor:
        """Returns normally distributed numbers that depend only on the arguments."""
        digest = hashlib.blake2b(name.encode(), digest_size=7).digest()
        self._generator.manual_seed(int.from_bytes(digest, "big"))
        values = torch.empty(rows, columns, dtype=self._dtype, device=self._device)
        return values.normal_(0.0, scale, generator=self._generator)

    def norm(self, name: str, size: int, bias: float = 0.0) -> Tensor:
        """Returns the weight of a norm; weight plus bias is around 1."""
        return (1 + self.normal(name, 1, size, 0.1)[0]) - bias

    def rows(self, name: str, rows: int, columns: int, experts: int = 0) -> Tensor:
        """Returns this rank's rows of a random matrix that keeps the magnitude of normed rows.

        With experts there is one matrix per expert: [experts, rows, columns].
        """
        blocks = self._blocks(name, rows // self._num_units, columns, columns**-0.5, experts)
        return torch.cat(blocks, dim=-2)

    def columns(self, name: str, rows: int, columns: int, experts: int = 0) -> Tensor:
        """Returns this rank's columns of such a matrix, or of one matrix per expert."""
        blocks = self._blocks(name, rows, columns // self._num_units, columns**-0.5, experts)
        return torch.cat(blocks, dim=-1)

    def _blocks(
        self, name: str, rows: int, columns: int, scale: float, experts: int
    ) -> list[Tensor]:
        count = max(1, experts)
        blocks = [self.normal(f"{name} {u}", count * rows, columns, scale) for u in self._units]
        return [block.view(experts, rows, columns) for block in blocks] if experts else blocks
