"""Random weights of a sharded transformer: the model is the same for any number of ranks.

A unit is one key and value head with its query heads, and the equal part of the MLP and of the
vocabulary. Every tensor is made unit by unit, each from a seed of its own, and a rank makes the
units that it holds.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from allnorm.bench.e2e.models import Transformer


@dataclass(frozen=True)
class Layer:
    """One decoder layer as one rank holds it; matrices are [outputs, inputs]."""

    qkv: torch.Tensor  # to this rank's query heads, then key heads, then value heads
    o: torch.Tensor  # from this rank's query heads to a partial sum of [hidden_size]
    gate_up: torch.Tensor  # to this rank's part of the gate, then of the up projection
    down: torch.Tensor  # from this rank's part of the MLP to a partial sum of [hidden_size]
    input_norm: torch.Tensor  # [hidden_size], of the norm before the attention
    mlp_norm: torch.Tensor  # [hidden_size], of the norm before the MLP
    q_norm: torch.Tensor | None  # [head_dim], of the norm of a query head; None without one
    k_norm: torch.Tensor | None  # [head_dim], of the norm of a key head; None without one


@dataclass(frozen=True)
class Weights:
    """A transformer as one rank holds it."""

    embedding: torch.Tensor  # [vocab_size, hidden_size], whole
    layers: tuple[Layer, ...]  # in order
    final_norm: torch.Tensor  # [hidden_size]
    head: torch.Tensor  # [this rank's part of the vocabulary, hidden_size]


def make(
    model: Transformer, rank: int, world_size: int, dtype: torch.dtype, device: torch.device
) -> Weights:
    """This rank's part of the model, made on the device. Not collective.

    `world_size` divides the model's number of key and value heads.
    """
    each = model.num_kv_heads // world_size
    source = _Source(model.num_kv_heads, range(rank * each, (rank + 1) * each), dtype, device)
    hidden = model.hidden_size
    layers = tuple(_layer(model, source, f"layer {i}") for i in range(model.num_layers))
    return Weights(
        embedding=source.normal("embedding", model.vocab_size, hidden, 1.0),
        layers=layers,
        final_norm=source.norm("final_norm", hidden),
        head=source.rows("head", model.vocab_size, hidden),
    )


def _layer(model: Transformer, source: _Source, name: str) -> Layer:
    hidden, head_dim = model.hidden_size, model.head_dim
    width, kv_width = model.num_heads * head_dim, model.num_kv_heads * head_dim
    heads = ((f"{name} q", width), (f"{name} k", kv_width), (f"{name} v", kv_width))
    inner = model.intermediate_size
    return Layer(
        qkv=torch.cat([source.rows(part, size, hidden) for part, size in heads]),
        o=source.columns(f"{name} o", hidden, width),
        gate_up=torch.cat(
            [source.rows(f"{name} {part}", inner, hidden) for part in ("gate", "up")]
        ),
        down=source.columns(f"{name} down", hidden, inner),
        input_norm=source.norm(f"{name} input_norm", hidden),
        mlp_norm=source.norm(f"{name} mlp_norm", hidden),
        q_norm=source.norm(f"{name} q_norm", head_dim) if model.qk_norm else None,
        k_norm=source.norm(f"{name} k_norm", head_dim) if model.qk_norm else None,
    )


class _Source:
    """Makes tensors from their names; this rank holds the `units` of `num_units`."""

    def __init__(
        self, num_units: int, units: range, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._num_units, self._units = num_units, units
        self._dtype, self._device = dtype, device
        self._generator = torch.Generator(device=device)

    def normal(self, name: str, rows: int, columns: int, scale: float) -> torch.Tensor:
        """Normal random numbers, a function of the arguments."""
        digest = hashlib.blake2b(name.encode(), digest_size=7).digest()
        self._generator.manual_seed(int.from_bytes(digest, "big"))
        values = torch.empty(rows, columns, dtype=self._dtype, device=self._device)
        return values.normal_(0.0, scale, generator=self._generator)

    def norm(self, name: str, size: int) -> torch.Tensor:
        """The weight of a norm, around 1."""
        return 1 + self.normal(name, 1, size, 0.1)[0]

    def rows(self, name: str, rows: int, columns: int) -> torch.Tensor:
        """This rank's rows of a random matrix that keeps the magnitude of normalised rows."""
        return torch.cat(self._blocks(name, rows // self._num_units, columns, columns**-0.5))

    def columns(self, name: str, rows: int, columns: int) -> torch.Tensor:
        """This rank's columns of such a matrix."""
        blocks = self._blocks(name, rows, columns // self._num_units, columns**-0.5)
        return torch.cat(blocks, dim=1)

    def _blocks(self, name: str, rows: int, columns: int, scale: float) -> list[torch.Tensor]:
        return [self.normal(f"{name} {unit}", rows, columns, scale) for unit in self._units]
