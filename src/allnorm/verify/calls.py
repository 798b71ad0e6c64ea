"""Calls of every kind that the API offers: how one is made, and what it must give."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import allnorm
from allnorm import reference
from allnorm.names import (
    ALGORITHMS,
    GROUP_SIZES,
    NUMERICS,
    NVFP4_LAYOUTS,
    SCALE_LAYOUTS,
    SWIZZLED,
)
from allnorm.quant import Quant, scale_geometry, swizzled_rows
from allnorm.testing import DTYPES

EPS = 1e-5
_LAYOUTS = (
    *itertools.product(
        (layout for layout in SCALE_LAYOUTS if layout != SWIZZLED), ("float32", "ue8m0")
    ),
    ("column_major_tma", "ue8m0_packed"),
)
_ALGORITHM_SHARES = (2, 4, 4, 1)
HIDDEN_SIZES = (120, 512, 2880, 2944, 4096, 7168, 8192)
TOKENS = {
    "cuda": (1, 2, 3, 4, 7, 8, 16, 17, 33, 64, 130, 257, 512, 1024),
    "cpu": (1, 2, 3, 5, 8, 17, 40),
}

Results = dict[str, torch.Tensor]
"""What a call returned, by name: reduced, rows, normed, residual_out, quantized, scale."""


@dataclass(frozen=True)
class Kind:
    """A call without its tensors."""

    op: str  # "norm", "all_reduce" or "all_gather_rows"
    num_tokens: int
    hidden_size: int
    dtype: torch.dtype
    numerics: str = "rounded"
    weight_bias: float = 0.0
    float32_weight: bool = False  # the weight is float32 instead of `dtype`
    has_residual: bool = True
    quant: Any = None  # how the normed rows are quantised, if they are
    return_normed: bool = False  # a quantised call returns the normed rows too
    sharded: bool = False  # each rank holds its own rows of the residual only
    algorithm: str = "auto"
    eps: float = EPS
    post_norm: bool = False  # the sum is normed before the residual is added
    scale: float = 1.0  # and scaled
    second_norm: bool = True  # without one the new residual is the only result
    experts: bool = False  # x is summed from rows of experts

    def result_key(self) -> tuple[Any, ...]:
        """Kinds with the same key give the same results for the same rows."""
        if self.op == "all_reduce":
            return (self.op,)
        # Scales in another layout are the same numbers.
        quant = self.quant
        if isinstance(quant, allnorm.Fp8PerGroup) and quant.scale_layout != SWIZZLED:
            quant = ("per_group", quant.group_size, quant.scale_format)
        elif quant is not None:  # of tiles the bytes lie otherwise, and are others
            quant = (type(quant).__name__, getattr(quant, "scale_layout", ""))
        options = (self.numerics, self.weight_bias, self.float32_weight, self.has_residual)
        change = (self.post_norm, self.scale, self.second_norm)
        return (*options, self.eps, quant, *change)

    def _options(self, weight: torch.Tensor) -> dict[str, Any]:
        """Arguments that the methods and the reference share."""
        options: dict[str, Any] = {"weight_bias": self.weight_bias, "numerics": self.numerics}
        if self.post_norm:
            options["post_norm"] = allnorm.PostNorm(weight, 2 * self.eps, 0.5 - self.weight_bias)
        if self.scale != 1.0:
            options["scale"] = self.scale
        return options

    def expected(
        self, reduced: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> Results:
        """The reference's results for all rows.

        `reduced` is the sum over the ranks, [num_tokens, hidden_size]; `residual` is ignored by a
        kind without one.
        """
        if self.op == "all_reduce":
            return {"reduced": reduced}
        second = weight if self.second_norm else None
        before = residual if self.has_residual else None
        arguments: tuple[Any, ...] = (reduced, before, second, self.eps)
        options = self._options(weight)
        if self.quant is None:
            return _two(*reference.add_rms_norm(*arguments, **options))
        return self._by_name(
            reference.add_rms_norm_quant(*(*arguments, self.quant, True), **options)
        )

    def call(
        self,
        comm: allnorm.Communicator,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        **out: Any,
    ) -> Results:
        """Makes the call on this rank; on CUDA it returns before the call has run.

        `x` is this rank's partial sum, [num_tokens, hidden_size]; `residual` has all rows, of which
        a sharded call takes this rank's. `out` is memory for results, under the names of the
        method.
        """
        lo, hi = comm.row_shard(self.num_tokens) if self.sharded else (0, self.num_tokens)
        if self.op == "all_reduce":
            return {"reduced": comm.all_reduce(x, algorithm=self.algorithm, **out)}
        if self.op == "all_gather_rows":
            lo, hi = comm.row_shard(self.num_tokens)
            return {"rows": comm.all_gather_rows(x[lo:hi].clone(), self.num_tokens, **out)}
        given = _as_experts(x) if self.experts else x
        second = weight if self.second_norm else None
        before = residual[lo:hi] if self.has_residual else None
        arguments: tuple[Any, ...] = (given, before, second, self.eps)
        options: dict[str, Any] = {
            "algorithm": self.algorithm,
            "residual_sharded": self.sharded,
            **self._options(weight),
            **out,
        }
        if self.quant is None:
            return _two(*comm.all_reduce_add_rms_norm(*arguments, **options))
        return self._by_name(
            comm.all_reduce_add_rms_norm_quant(
                *(*arguments, self.quant, self.return_normed), **options
            )
        )

    def _by_name(self, result: allnorm.QuantizedNorm) -> Results:
        found = {"quantized": result.quantized, "residual_out": result.residual}
        if result.normed is not None:
            found["normed"] = result.normed
        if not isinstance(self.quant, allnorm.Fp8PerTensor):  # its scale is an argument
            found["scale"] = self._by_rows(result)
        return found

    def _by_rows(self, result: allnorm.QuantizedNorm) -> torch.Tensor:
        """The scales, one row of them after the other; of tiles with those that no group has."""
        geometry = scale_geometry(self.quant, result.quantized.shape[0], self.hidden_size)
        if geometry is None or not geometry.tiles:
            return result.scale
        return swizzled_rows(result.scale, geometry.tiles)[: result.quantized.shape[0]]

    def __str__(self) -> str:
        words = [self.op, f"{self.num_tokens}x{self.hidden_size}", str(self.dtype)[6:]]
        if self.op == "norm":
            words += [self.numerics] + ["with residual"] * self.has_residual
            words += [str(self.quant)] * (self.quant is not None) + ["sharded"] * self.sharded
            words += ["post norm"] * self.post_norm + [f"scale {self.scale}"] * (self.scale != 1.0)
            words += ["no second norm"] * (not self.second_norm) + ["experts"] * self.experts
        return " ".join([*words, self.algorithm])


def _two(normed: torch.Tensor | None, summed: torch.Tensor) -> Results:
    found = {"residual_out": summed}
    return found if normed is None else {"normed": normed, **found}


def _as_experts(x: torch.Tensor) -> allnorm.ExpertSum:
    """Choices whose sum is `x` again, bit for bit, of numbers that can be halved."""
    token = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
    index = torch.stack((token, torch.full_like(token, -1), token), dim=1)
    weights = torch.full(index.shape, 0.5, device=x.device)
    return allnorm.ExpertSum(x, weights, index)


def issue(
    comm: allnorm.Communicator,
    kind: Kind,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    in_place: bool = False,
) -> Results:
    """Makes the call, and gathers the rows of a sharded residual.

    With `in_place` the new residual overwrites the old one, and the norm or the sum overwrites `x`.
    """
    out: dict[str, torch.Tensor | None] = {}
    if in_place and kind.quant is None and kind.second_norm and not kind.experts:
        out["out"] = x
    if in_place and kind.op == "norm":
        lo, hi = comm.row_shard(kind.num_tokens) if kind.sharded else (0, kind.num_tokens)
        out["residual_out"] = residual[lo:hi] if kind.has_residual else None
    results = kind.call(comm, x, residual, weight, **out)
    if kind.sharded:
        shard = results["residual_out"]
        results["residual_out"] = comm.all_gather_rows(shard, kind.num_tokens)
    return results


def specs(hidden_size: int, device: torch.device) -> list[Quant]:
    """Every way to quantise rows of that many columns."""
    fitting = [size for size in GROUP_SIZES if hidden_size % size == 0]
    groups = [allnorm.Fp8PerGroup(size, *names) for size in fitting for names in _LAYOUTS]
    static = allnorm.Fp8PerTensor(torch.full((1,), 0.03, device=device))
    blocks: list[Quant] = [allnorm.MxFp8()] if hidden_size % 32 == 0 else []
    if hidden_size % 16 == 0:
        given = torch.full((1,), 600.0, device=device)
        blocks += [allnorm.NvFp4(given, layout) for layout in NVFP4_LAYOUTS]
    return [*blocks, *groups, allnorm.Fp8PerToken(), static]


def random_kind(rng: random.Random, device: torch.device, max_elems: int) -> Kind:
    """A kind drawn from everything that the API offers; `rng` is in the same state on all ranks."""
    hidden_size = rng.choice(HIDDEN_SIZES)
    fitting = [t for t in TOKENS[device.type] if t * hidden_size <= max_elems]
    norm = rng.random() < 0.85
    quant = rng.choice(specs(hidden_size, device)) if norm and rng.random() < 0.45 else None
    return Kind(
        op="norm" if norm else "all_reduce",
        num_tokens=rng.choice(fitting),
        hidden_size=hidden_size,
        dtype=DTYPES[rng.choice(list(DTYPES))],
        numerics=rng.choice(NUMERICS),
        weight_bias=float(rng.random() < 0.2),
        float32_weight=rng.random() < 0.2,
        has_residual=rng.random() < 0.85,
        quant=quant,
        return_normed=rng.random() < 0.3,
        sharded=norm and rng.random() < 0.35,
        algorithm=rng.choices(("auto", *ALGORITHMS), _ALGORITHM_SHARES)[0],
        **(_random_change(rng, quant is None) if norm else {}),
    )


def _random_change(rng: random.Random, may_end_with_sum: bool) -> dict[str, Any]:
    """What happens before the residual is added, in two kinds of five."""
    post_norm = rng.random() < 0.25
    return {
        "post_norm": post_norm,
        "scale": 0.22 if rng.random() < 0.12 else 1.0,
        "second_norm": not (post_norm and may_end_with_sum and rng.random() < 0.4),
        "experts": rng.random() < 0.12,
    }


CHANGES: tuple[dict[str, Any], ...] = (
    {"post_norm": True},
    {"post_norm": True, "second_norm": False},
    {"scale": 0.22},
    {"post_norm": True, "scale": -1.5, "experts": True},
    {"experts": True},
)
"""One of each, as fields of a Kind."""


def algorithms(kind: Kind, comms: Sequence[allnorm.Communicator]) -> set[str]:
    """What would run such a call; "unfused" where the algorithm that it names cannot."""
    return {_algorithm(kind, comm) for comm in comms}


def _algorithm(kind: Kind, comm: allnorm.Communicator) -> str:
    try:
        plan = comm.plan(
            *(kind.num_tokens, kind.hidden_size, kind.dtype, kind.quant, kind.sharded),
            return_normed=kind.return_normed and kind.quant is not None,
            algorithm=kind.algorithm,
        )
    except allnorm.UnsupportedError:
        return "unfused"
    return plan.algorithm
