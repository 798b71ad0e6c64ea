"""A call: what it is given, and what it asks for."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import Tensor

from allnorm.quant import Fp8PerTensor


class Call(NamedTuple):
    """One call, as it was made; nothing is checked yet.

    Tensors come first, then constants, in the order of csrc/python/prepared.h.

    Attributes:
        x: [..., hidden_size]; of all_gather_rows this rank's rows.
        residual: like `x`, or this rank's rows of it, or None.
        weight: [hidden_size], or None without a norm.
        static_scale: the scale of an Fp8PerTensor, or None.
        out: preallocated memory for the result in the dtype of `x`, or None.
        residual_out: for the new residual.
        quantized_out: for the quantised rows.
        scale_out: for their scales.
        op: one of names.OPS.
        algorithm: what was asked for.
        eps: of the norm.
        weight_bias: of the norm.
        numerics: rounding mode.
        residual_sharded: whether each rank holds its own rows of the residual only.
        quant: how normed rows are quantised: a spec; the class Fp8PerTensor for one with
            `static_scale`, which may be another tensor in every call; or None.
        return_normed: whether normed rows are wanted beside quantised ones.
        num_tokens: rows to gather; of other calls 0.
    """

    x: Tensor
    residual: Tensor | None = None
    weight: Tensor | None = None
    static_scale: Tensor | None = None
    out: Tensor | None = None
    residual_out: Tensor | None = None
    quantized_out: Tensor | None = None
    scale_out: Tensor | None = None
    op: str = "all_reduce"
    algorithm: str = "auto"
    eps: float = 0.0
    weight_bias: float = 0.0
    numerics: str = "rounded"
    residual_sharded: bool = False
    quant: Any = None
    return_normed: bool = False
    num_tokens: int = 0

    @property
    def inputs(self) -> tuple[Tensor | None, ...]:
        """The tensors that are read."""
        return self.x, self.residual, self.weight, self.static_scale

    @property
    def memory(self) -> tuple[Tensor | None, ...]:
        """The tensors that are written, where they are preallocated."""
        return self.out, self.residual_out, self.quantized_out, self.scale_out

    @property
    def given(self) -> list[Tensor]:
        """All tensors of the call."""
        return [tensor for tensor in self.tensors if tensor is not None]

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The fields that are tensors."""
        return *self.inputs, *self.memory

    @property
    def constants(self) -> tuple[Any, ...]:
        """The other fields."""
        return self[NUM_TENSORS:]

    @property
    def rows(self) -> int:
        """How many rows the ranks hold together."""
        return self.num_tokens if self.op == "all_gather_rows" else math.prod(self.x.shape[:-1])

    @property
    def has_norm(self) -> bool:
        """Whether a norm follows the sum."""
        return self.op not in ("all_reduce", "all_gather_rows")

    @property
    def owns_rows(self) -> bool:
        """Whether rows belong to ranks."""
        return self.residual_sharded or self.op == "all_gather_rows"


NUM_TENSORS = 8


def split_scale(quant: Any) -> tuple[Any, Tensor | None]:
    """`quant` and `static_scale` of a Call, from what its caller passed."""
    return (Fp8PerTensor, quant.scale) if type(quant) is Fp8PerTensor else (quant, None)
