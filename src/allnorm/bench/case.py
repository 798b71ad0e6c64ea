"""One shape of a benchmark: the inputs of all ranks, and the reference's results."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import allnorm
from allnorm import reference
from allnorm.bench.modes import Mode, Shape, quant_of
from allnorm.quant import Quant, check_hidden_size
from allnorm.testing import DTYPES, Batch, make_batch

NUM_SETS = 2  # rotating buffer sets


@dataclass(frozen=True)
class Outcome:
    """What one call returned."""

    residual: torch.Tensor  # the new residual, or the rows of it that this rank holds
    normed: torch.Tensor | None = None  # [num_tokens, hidden_size], in the dtype of the input
    quantized: torch.Tensor | None = None  # float8_e4m3fn, of the shape of `normed`
    scale: torch.Tensor | None = None  # as the spec says
    # Which rows of the whole `residual` has; None for all of them.
    rows: tuple[int, int] | None = None


@dataclass(frozen=True)
class Case:
    """One shape: its inputs and the reference's results, computed once for all modes and arms."""

    shape: Shape  # num_tokens, hidden_size and the constants of the norm
    rank: int  # this rank
    world_size: int  # number of ranks
    dtype: torch.dtype  # of all tensors
    device: torch.device  # of all tensors
    numerics: str  # rounding mode of what allnorm computes
    batches: tuple[Batch, ...]  # the inputs of all ranks, per buffer set
    # The reference's normed rows and new residual, per buffer set.
    expected: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    post_norm: allnorm.PostNorm | None = None  # of the reduced sum
    # What stands for the partial sums of all ranks, per buffer set; () if nothing does.
    experts: tuple[tuple[allnorm.ExpertSum, ...], ...] = ()
    islands: Any = None  # of the ranks, as `allnorm.reference` takes them
    _changed: dict[tuple[bool, int], Case] = field(default_factory=dict)
    _specs: dict[str, Quant | None] = field(default_factory=dict)
    _quantized: dict[str, tuple[tuple[torch.Tensor, torch.Tensor], ...]] = field(
        default_factory=dict
    )

    def of(self, mode: Mode) -> Case:
        """The case as the mode wants it: with what comes before the residual."""
        key = mode.post_norm, mode.experts
        if mode.is_plain:
            return self
        if key not in self._changed:
            self._changed[key] = _change(self, *key)
        return self._changed[key]

    @functools.cached_property
    def xs(self) -> list[Any]:
        """This rank's partial sum, or what stands for it, per buffer set."""
        return [each[self.rank] for each in self.experts or (b.xs for b in self.batches)]

    def checksums(self) -> list[int]:
        """Checksums of what calls read, to see whether an arm has overwritten it."""
        words = {2: torch.int16, 4: torch.int32}[self.dtype.itemsize]
        given = [x.rows if isinstance(x, allnorm.ExpertSum) else x for x in self.xs]
        read = [*given, *(part for b in self.batches for part in (b.residual, b.weight))]
        return [int(tensor.view(words).sum(dtype=torch.int64)) for tensor in read]

    @property
    def num_rows(self) -> int:
        """Rows of the input."""
        return self.shape.num_tokens

    def spec(self, quant: str) -> Quant | None:
        """The spec of a mode, one object for all calls of this shape."""
        if quant not in self._specs:
            self._specs[quant] = quant_of(quant, self.device)
        return self._specs[quant]

    def quantized(self, quant: str) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        """The reference's quantized rows and scales, per buffer set."""
        if quant not in self._quantized:
            spec = self.spec(quant)
            assert spec is not None
            self._quantized[quant] = tuple(
                reference.quantize(normed, spec) for normed, _ in self.expected
            )
        return self._quantized[quant]

    def options(self, mode: Mode) -> dict[str, Any]:
        """The keyword arguments of allnorm's calls, those that quantise if the mode does."""
        options: dict[str, Any] = {
            "weight_bias": self.shape.weight_bias,
            "numerics": self.numerics,
            **({"post_norm": self.post_norm} if self.post_norm else {}),
        }
        spec = self.spec(mode.quant)
        return options | ({"quant": spec, "return_normed": mode.return_normed} if spec else {})

    def unbiased_weights(self) -> list[torch.Tensor]:
        """The weights with the bias added, for a norm that takes none, per buffer set."""
        bias = self.shape.weight_bias
        return [batch.weight + bias if bias else batch.weight for batch in self.batches]

    def obstacle(self, quant: str) -> str:
        """Why rows of this width cannot be quantised so; "" if they can."""
        spec = self.spec(quant)
        try:
            if spec is not None:
                check_hidden_size(spec, self.shape.hidden_size)
        except allnorm.UnsupportedError:
            return f"hidden_size {self.shape.hidden_size} does not consist of whole groups"
        return ""


def _change(case: Case, post_norm: bool, experts: int) -> Case:
    """A case with the same inputs, and more before the residual."""
    shape, norm = case.shape, None
    if post_norm:
        weight = case.batches[0].weight.flip(0).contiguous()
        norm = allnorm.PostNorm(weight, shape.eps, shape.weight_bias)
    sums = tuple(
        tuple(_experts(x, experts, NUM_SETS * rank + number) for rank, x in enumerate(batch.xs))
        for number, batch in enumerate(case.batches if experts else ())
    )
    options: dict[str, Any] = {
        "weight_bias": shape.weight_bias,
        "numerics": case.numerics,
        "post_norm": norm,
        "islands": case.islands,
    }
    inputs: list[Any] = list(sums) or [batch.xs for batch in case.batches]
    expected = tuple(
        reference.all_reduce_add_rms_norm(xs, b.residual, b.weight, shape.eps, **options)
        for xs, b in zip(inputs, case.batches, strict=True)
    )
    return Case(
        *(shape, case.rank, case.world_size, case.dtype, case.device, case.numerics, case.batches),
        expected,
        norm,
        sums,
        case.islands,
    )


def _experts(shared: torch.Tensor, top_k: int, seed: int) -> allnorm.ExpertSum:
    """Rows of experts in a random order, as they leave a grouped product; all of them are here."""
    num_tokens, hidden_size = shared.shape
    generator = torch.Generator(shared.device).manual_seed(seed)
    make: dict[str, Any] = {"generator": generator, "device": shared.device}
    count = num_tokens * top_k
    rows = torch.randn(count, hidden_size, dtype=shared.dtype, **make)
    index = torch.randperm(count, dtype=torch.int32, **make).view(num_tokens, top_k)
    weights = torch.rand(num_tokens, top_k, **make)
    return allnorm.ExpertSum(rows, weights / weights.sum(1, keepdim=True), index, shared)


def make_case(
    shape: Shape,
    dtype: str,
    numerics: str,
    device: torch.device,
    rank: int,
    world_size: int,
    seed: int,
    islands: Any = None,
) -> Case:
    """Makes the inputs of a shape, different in each buffer set and on each rank, and references.

    `seed` is the same on every rank, and so are `islands`, as `allnorm.reference` takes them.
    """
    options: dict[str, Any] = {
        "weight_bias": shape.weight_bias,
        "numerics": numerics,
        "islands": islands,
    }
    size = (shape.num_tokens, shape.hidden_size, DTYPES[dtype], device, world_size)
    batches = tuple(
        make_batch(*size, seed * NUM_SETS + i, shape.weight_bias) for i in range(NUM_SETS)
    )
    expected = tuple(
        reference.all_reduce_add_rms_norm(b.xs, b.residual, b.weight, shape.eps, **options)
        for b in batches
    )
    case = Case(shape, rank, world_size, DTYPES[dtype], device, numerics, batches, expected)
    return replace(case, islands=islands)
