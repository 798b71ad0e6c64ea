"""A call: what it is given, and what it asks for."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import Tensor

from allnorm.expert_sum import ExpertSum
from allnorm.post_norm import PostNorm
from allnorm.quant import Fp8PerTensor, NvFp4, NvFp4Layout


class Call(NamedTuple):
    """One call, as it was made; nothing is checked yet.

    Tensors come first, then constants, in the order of csrc/python/prepared.h.

    Attributes:
        x: [..., hidden_size]; of all_gather_rows this rank's rows; with `experts` the rows of an
            ExpertSum.
        residual: like `x`, or this rank's rows of it, or None.
        weight: [hidden_size], or None without a norm behind the residual.
        static_scale: the scale of an Fp8PerTensor, the global one of an NvFp4, or None.
        post_weight: the weight of a PostNorm, or None.
        expert_index: of an ExpertSum, or None; like the next two.
        expert_weights: the weight of each choice.
        shared: this rank's partial of the shared expert.
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
        quant: how normed rows are quantised: a spec; the class Fp8PerTensor, or an NvFp4Layout, for
            one with `static_scale`, which may be another tensor in every call; or None.
        return_normed: whether normed rows are wanted beside quantised ones.
        num_tokens: rows to gather; of other calls 0.
        post_eps: of the post norm.
        post_weight_bias: of the post norm.
        scale: what the reduced sum, or its post norm, is multiplied by.
        experts: whether `x` is what experts return.
    """

    x: Tensor
    residual: Tensor | None = None
    weight: Tensor | None = None
    static_scale: Tensor | None = None
    post_weight: Tensor | None = None
    expert_index: Tensor | None = None
    expert_weights: Tensor | None = None
    shared: Tensor | None = None
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
    post_eps: float = 0.0
    post_weight_bias: float = 0.0
    scale: float = 1.0
    experts: bool = False

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The tensors that are read."""
        return self[:NUM_INPUTS]

    @property
    def memory(self) -> tuple[Any, ...]:
        """The tensors that are written, where they are preallocated."""
        return self[NUM_INPUTS:NUM_TENSORS]

    @property
    def given(self) -> list[Tensor]:
        """All tensors of the call."""
        return [tensor for tensor in self.tensors if tensor is not None]

    @property
    def tensors(self) -> tuple[Any, ...]:
        """The fields that are tensors."""
        return self[:NUM_TENSORS]

    @property
    def constants(self) -> tuple[Any, ...]:
        """The other fields."""
        return self[NUM_TENSORS:]

    @property
    def rows(self) -> int:
        """How many rows the ranks hold together."""
        return self.num_tokens if self.op == "all_gather_rows" else math.prod(self.shape[:-1])

    @property
    def shape(self) -> tuple[int, ...]:
        """Of this rank's partial sums: that of `x`, unless experts' rows are summed first."""
        if not self.experts:
            return self.x.shape
        per_token = self.x if self.expert_index is None else self.expert_index
        return per_token.shape[0], self.x.shape[-1]

    @property
    def top_k(self) -> int:
        """How many experts a token has; 0: `x` is not what experts return."""
        if not self.experts:
            return 0
        return (self.x if self.expert_index is None else self.expert_index).shape[1]

    @property
    def has_norm(self) -> bool:
        """Whether it ends with a norm, or with the residual that a norm was added to."""
        return self.op not in ("all_reduce", "all_gather_rows")

    @property
    def writes_scale(self) -> bool:
        """Whether scales are a result."""
        return self.op.endswith("_quant") and self.quant is not Fp8PerTensor

    @property
    def owns_rows(self) -> bool:
        """Whether rows belong to ranks."""
        return self.residual_sharded or self.op == "all_gather_rows"


NUM_INPUTS = Call._fields.index("out")
NUM_TENSORS = Call._fields.index("op")

NO_INPUTS = (None, None, None, None)
"""post_weight, expert_index, expert_weights and shared of a Call without any."""
NO_CHANGE = (0.0, 0.0, 1.0, False)
"""post_eps, post_weight_bias, scale and experts of a Call without any."""


def split_boundary(
    x: Any, post_norm: PostNorm | None, scale: float
) -> tuple[Any, tuple[Tensor | None, ...], tuple[Any, ...]]:
    """Of a Call: x; post_weight to shared; post_eps to experts. From what its caller passed.

    Raises:
        TypeError: `post_norm` is neither a PostNorm nor None.
    """
    experts = type(x) is ExpertSum
    if post_norm is None and not experts and type(scale) is float:
        return x, NO_INPUTS, (NO_CHANGE if scale == 1.0 else (0.0, 0.0, scale, False))
    norm: tuple[Any, ...] = (None, 0.0, 0.0)
    if post_norm is not None:
        if not isinstance(post_norm, PostNorm):
            raise TypeError(f"post_norm={post_norm!r}: expected an allnorm.PostNorm or None.")
        norm = post_norm.weight, post_norm.eps, post_norm.weight_bias
    if not experts:
        return x, (norm[0], None, None, None), (*norm[1:], scale, False)
    return x.rows, (norm[0], x.index, x.weights, x.shared), (*norm[1:], scale, True)


def op_boundary(before: tuple[Tensor | None, ...], change: tuple[Any, ...]) -> tuple[Any, ...]:
    """What `split_boundary` returned, as an operator's last arguments; () for what is usual."""
    if change == NO_CHANGE and all(tensor is None for tensor in before):
        return ()
    return before[0], *change, *before[1:]


def from_op_boundary(
    post_weight: Tensor | None,
    post_eps: float,
    post_weight_bias: float,
    scale: float,
    experts: bool,
    expert_index: Tensor | None,
    expert_weights: Tensor | None,
    shared: Tensor | None,
) -> tuple[tuple[Tensor | None, ...], tuple[Any, ...]]:
    """The other way round."""
    before = post_weight, expert_index, expert_weights, shared
    return before, (post_eps, post_weight_bias, scale, experts)


def split_scale(quant: Any) -> tuple[Any, Tensor | None]:
    """`quant` and `static_scale` of a Call, from what its caller passed."""
    if type(quant) is Fp8PerTensor:
        return Fp8PerTensor, quant.scale
    return (quant.layout, quant.global_scale) if type(quant) is NvFp4 else (quant, None)


def join_scale(quant: Any, static_scale: Tensor | None) -> Any:
    """Returns what the caller passed for `quant`: the inverse of `split_scale`."""
    if quant is Fp8PerTensor and static_scale is not None:
        return Fp8PerTensor(static_scale)
    if type(quant) is NvFp4Layout and static_scale is not None:
        return NvFp4(static_scale, quant.scale_layout)
    return quant
