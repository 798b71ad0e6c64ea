"""A benchmark case: one shape, the inputs of all ranks, and the reference's results."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import allnorm
from allnorm import reference
from allnorm.bench.modes import Mode, Shape, quant_of
from allnorm.quant import Quant, check_hidden_size
from allnorm.testing import DTYPES, Batch, make_batch

NUM_SETS = 2  # buffer sets, used in rotation


@dataclass(frozen=True)
class Outcome:
    """The result of one call."""

    residual: Tensor  # the new residual, or this rank's rows of it
    normed: Tensor | None = None  # [num_tokens, hidden_size], in the dtype of the input
    quantized: Tensor | None = None  # float8_e4m3fn, in the shape of `normed`
    scale: Tensor | None = None  # scales in the layout of the spec
    # The row range that `residual` covers, and if not `gathered` all other parts; None: all rows.
    rows: tuple[int, int] | None = None
    gathered: bool = True  # whether the other parts cover all rows


@dataclass(frozen=True)
class Case:
    """One shape's inputs and reference results, computed once for all modes and arms."""

    shape: Shape  # num_tokens, hidden_size and the constants of the norm
    rank: int  # this rank
    world_size: int  # number of ranks
    dtype: torch.dtype  # dtype of all tensors
    device: torch.device  # device of all tensors
    numerics: str  # rounding mode of allnorm's calls
    batches: tuple[Batch, ...]  # the inputs of all ranks, for each buffer set
    # The reference's normed rows and new residual, for each buffer set.
    expected: tuple[tuple[Tensor, Tensor], ...]
    post_norm: allnorm.PostNorm | None = None  # norm of the reduced sum
    # All ranks' expert sums, which replace the partial sums, for each buffer set; () for none.
    experts: tuple[tuple[allnorm.ExpertSum, ...], ...] = ()
    islands: Any = None  # the islands, in the form that `allnorm.reference` takes
    seed: int = 0  # seed of the inputs
    original: Case | None = None  # the case whose residuals were changed to float32
    _changed: dict[tuple[Any, ...], Case] = field(default_factory=dict)
    _specs: dict[str, Quant | None] = field(default_factory=dict)
    _quantized: dict[str, tuple[tuple[Tensor, Tensor], ...]] = field(default_factory=dict)

    def of(self, mode: Mode) -> Case:
        """Returns the case with the mode's post norm, experts, float32 residual or slices.

        The inputs of a sharded norm are slices of one tensor, as a GEMM for q and k writes them.
        """
        key = mode.post_norm, mode.experts, mode.float32_residual, mode.slices
        if not any(key):
            return self
        if key not in self._changed:
            self._changed[key] = _change(self, mode)
        return self._changed[key]

    @functools.cached_property
    def xs(self) -> list[Any]:
        """This rank's partial sums, or the expert sums that replace them, for each buffer set."""
        return [each[self.rank] for each in self.experts or (b.xs for b in self.batches)]

    def checksums(self) -> list[int]:
        """Returns checksums of the inputs, to detect an arm that overwrites them."""
        words = torch.int16
        given = [x.rows if isinstance(x, allnorm.ExpertSum) else x for x in self.xs]
        read = [*given, *(part for b in self.batches for part in (b.residual, b.weight))]
        return [int(tensor.view(words).sum(dtype=torch.int64)) for tensor in read]

    def spec(self, quant: str) -> Quant | None:
        """Returns the quantization spec with that name; calls of this shape share one object."""
        if quant not in self._specs:
            self._specs[quant] = quant_of(quant, self.device)
        return self._specs[quant]

    def quantized(self, quant: str) -> tuple[tuple[Tensor, Tensor], ...]:
        """Returns the reference's quantized rows and scales, per buffer set."""
        if quant not in self._quantized:
            self._quantized[quant] = tuple(
                self.quantized_rows(quant, index, None) for index in range(len(self.expected))
            )
        return self._quantized[quant]

    def quantized_rows(
        self, quant: str, index: int, rows: tuple[int, int] | None
    ) -> tuple[Tensor, Tensor]:
        """Returns the reference's quantized rows of a range and their scales; None: all rows."""
        spec, normed = self.spec(quant), self.expected[index][0]
        assert spec is not None
        return reference.quantize(normed[slice(*rows)] if rows else normed, spec)

    def options(self, mode: Mode) -> dict[str, Any]:
        """Returns the keyword arguments of allnorm's calls, including quantization options."""
        options: dict[str, Any] = {
            "weight_bias": self.shape.weight_bias,
            "numerics": self.numerics,
            **({"post_norm": self.post_norm} if self.post_norm else {}),
        }
        spec = self.spec(mode.quant)
        return options | ({"quant": spec, "return_normed": mode.return_normed} if spec else {})

    def rest(self, rows: slice = slice(None)) -> list[tuple[Tensor, Tensor, float]]:
        """Returns the residual (or some rows of it), weight and eps of a call, per buffer set."""
        return [(batch.residual[rows], batch.weight, self.shape.eps) for batch in self.batches]

    def unbiased_weights(self) -> list[Tensor]:
        """Returns the weights plus their bias, for norms without a bias, per buffer set."""
        bias = self.shape.weight_bias
        return [batch.weight + bias if bias else batch.weight for batch in self.batches]

    def obstacle(self, quant: str) -> str:
        """Returns why rows of this width cannot be quantized with the spec; "" if they can."""
        spec = self.spec(quant)
        try:
            if spec is not None:
                check_hidden_size(spec, self.shape.hidden_size)
        except allnorm.UnsupportedError:
            return f"hidden_size {self.shape.hidden_size} is not a multiple of the group size"
        return ""


def _change(case: Case, mode: Mode) -> Case:
    """Returns a case with the same inputs, changed as the mode needs them."""
    if mode.slices:
        return _of_slices(case, mode.slices)
    if mode.float32_residual:
        plain = case.of(replace(mode, float32_residual=False))
        return _with_expected(
            replace(plain, batches=tuple(map(_float32_residual, plain.batches)), original=plain)
        )
    shape, norm, experts = case.shape, None, mode.experts
    if mode.post_norm:
        weight = case.batches[0].weight.flip(0).contiguous()
        norm = allnorm.PostNorm(weight, shape.eps, shape.weight_bias)
    sums = tuple(
        tuple(_experts(x, experts, NUM_SETS * rank + number) for rank, x in enumerate(batch.xs))
        for number, batch in enumerate(case.batches if experts else ())
    )
    return _with_expected(replace(case, post_norm=norm, experts=sums))


def _float32_residual(batch: Batch) -> Batch:
    """Returns the batch with a float32 residual that no 16-bit number equals."""
    residual = batch.residual.float()
    return replace(batch, residual=residual + residual.roll(1, -1) / 1024)


def _of_slices(case: Case, count: int) -> Case:
    """Returns a case of `rms_norm_sharded`; its partial sums hold the slices side by side.

    Arms check their results themselves, so that there are no expected ones.
    """
    shape, size = case.shape, count * case.shape.hidden_size
    place = (shape.num_tokens, size, case.dtype, case.device, case.world_size)
    batches = tuple(
        make_batch(*place, case.seed * NUM_SETS + i, shape.weight_bias) for i in range(NUM_SETS)
    )
    return replace(case, batches=batches, expected=(), _changed={}, _specs={}, _quantized={})


def _with_expected(case: Case) -> Case:
    """Returns a case with the reference's results."""
    options = case.options(Mode()) | {"islands": case.islands}
    inputs: list[Any] = list(case.experts) or [batch.xs for batch in case.batches]
    expected = tuple(
        reference.all_reduce_add_rms_norm(xs, *rest, **options)
        for xs, rest in zip(inputs, case.rest(), strict=True)
    )
    return replace(case, expected=expected, _changed={}, _specs={}, _quantized={})


def _experts(shared: Tensor, top_k: int, seed: int) -> allnorm.ExpertSum:
    """Creates expert rows in random order, as a grouped GEMM writes them; all rows are local."""
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
    """Creates a case with different inputs in each buffer set and on each rank.

    `seed` and `islands` must be equal on every rank. `islands` has the form that
    `allnorm.reference` takes.
    """
    size = (shape.num_tokens, shape.hidden_size, DTYPES[dtype], device, world_size)
    batches = tuple(
        make_batch(*size, seed * NUM_SETS + i, shape.weight_bias) for i in range(NUM_SETS)
    )
    place = (rank, world_size, DTYPES[dtype], device)
    return _with_expected(Case(shape, *place, numerics, batches, (), islands=islands, seed=seed))
