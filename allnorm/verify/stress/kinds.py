"""What a call of the soak looks like, apart from its rows."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import allnorm
from allnorm import reference
from allnorm.names import GROUP_SIZES, NUMERICS, REQUESTS, SCALE_LAYOUTS
from allnorm.quant import Quant
from allnorm.testing import DTYPES

EPS = 1e-5
_LAYOUTS = (
    *itertools.product(SCALE_LAYOUTS, ("float32", "ue8m0")),
    ("column_major_tma", "ue8m0_packed"),
)
_ALGORITHM_SHARES = (2, 4, 4, 1)
HIDDEN_SIZES = (120, 512, 2880, 2944, 4096, 7168, 8192)
TOKENS = {
    "cuda": (1, 2, 3, 4, 7, 8, 16, 17, 33, 64, 130, 257, 512, 1024),
    "cpu": (1, 2, 3, 5, 8, 17, 40),
}


@dataclass(frozen=True)
class Kind:
    """A call without its rows."""

    op: str  # "all_reduce" or "norm"
    num_tokens: int  # rows of a call
    hidden_size: int  # columns
    dtype: torch.dtype  # of the rows
    numerics: str = "rounded"  # rounding mode
    weight_bias: float = 0.0  # added to the weight
    float32_weight: bool = False  # whether the weight is float32 instead of `dtype`
    has_residual: bool = True  # whether a residual is added
    quant: Any = None  # how the normed rows are quantised, if they are
    return_normed: bool = False  # whether a quantised call returns the normed rows too
    # Whether this rank holds its rows of the residual only, and gathers all afterwards.
    sharded: bool = False
    algorithm: str = "auto"  # how it runs

    def result_key(self) -> tuple[Any, ...]:
        """Kinds with the same key give the same results for the same rows."""
        if self.op == "all_reduce":
            return (self.op,)
        # A spec of float32 scales in another layout holds the same numbers.
        quant = self.quant
        if isinstance(quant, allnorm.Fp8PerGroup):
            quant = ("per_group", quant.group_size, quant.scale_format)
        elif quant is not None:
            quant = type(quant).__name__
        return self.numerics, self.weight_bias, self.float32_weight, self.has_residual, quant

    def expected(
        self, reduced: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """The reference's results by name.

        Args:
            reduced: the sum over the ranks, [num_tokens, hidden_size].
            residual: likewise, all rows; taken if there is one.
            weight: [hidden_size].
        """
        if self.op == "all_reduce":
            return {"reduced": reduced}
        arguments = (reduced, residual if self.has_residual else None, weight, EPS)
        options: dict[str, Any] = {"weight_bias": self.weight_bias, "numerics": self.numerics}
        if self.quant is None:
            normed, summed = reference.add_rms_norm(*arguments, **options)
            return {"normed": normed, "residual_out": summed}
        out = reference.add_rms_norm_quant(*arguments, self.quant, True, **options)
        assert out.normed is not None
        parts = {"quantized": out.quantized, "residual_out": out.residual, "normed": out.normed}
        static = isinstance(self.quant, allnorm.Fp8PerTensor)  # there it is what was given
        return parts if static else parts | {"scale": out.scale}

    def __str__(self) -> str:
        words = [self.op, f"{self.num_tokens}x{self.hidden_size}", str(self.dtype)[6:]]
        if self.op == "norm":
            words += [self.numerics] + ["with residual"] * self.has_residual
            words += [str(self.quant)] * (self.quant is not None) + ["sharded"] * self.sharded
        return " ".join([*words, self.algorithm])


def specs(hidden_size: int, device: torch.device) -> list[Quant]:
    """Every way to quantise rows of that many columns."""
    fitting = [size for size in GROUP_SIZES if hidden_size % size == 0]
    groups = [allnorm.Fp8PerGroup(size, *names) for size in fitting for names in _LAYOUTS]
    static = allnorm.Fp8PerTensor(torch.full((1,), 0.03, device=device))
    return [*groups, allnorm.Fp8PerToken(), static]


def random_kind(rng: random.Random, device: torch.device, max_elems: int) -> Kind:
    """A kind drawn from everything that the API offers.

    Args:
        rng: gives all ranks the same numbers.
        device: where it will run.
        max_elems: of one call.
    """
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
        algorithm=rng.choices(REQUESTS, _ALGORITHM_SHARES)[0],
    )


def algorithms(kind: Kind, comms: Sequence[allnorm.Communicator]) -> set[str]:
    """What would run such a call; "unfused" where the algorithm that it names cannot."""
    return {
        comm.plan(
            *(kind.num_tokens, kind.hidden_size, kind.dtype, kind.quant, kind.sharded),
            return_normed=kind.return_normed and kind.quant is not None,
            algorithm=kind.algorithm,
        ).algorithm
        for comm in comms
    }
