"""A call: the one description of it, in its caller's words and by keyword."""

from __future__ import annotations

import abc
import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from allnorm.expert_sum import ExpertSum
from allnorm.post_norm import PostNorm
from allnorm.quant import Fp8PerTensor, NvFp4, Quant


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Call:
    """One call, as it was made; nothing is checked yet but the types of what has parts.

    A new argument of calls gets a field here and a keyword in `Runner.call`. If it is a tensor, or
    has parts that are, it also gets a line in INPUTS or MEMORY, one in PARTS, and a name in
    csrc/python/arguments.h.

    Attributes:
        op: the name of one of core.operators.OPERATORS.
        source: [..., hidden_size], or an ExpertSum; of all_gather_rows this rank's rows.
        residual: like the sum, or this rank's rows of it, or None.
        weight: [hidden_size], or None without a norm after the residual.
        eps: of the norm.
        weight_bias: of the norm.
        numerics: rounding mode.
        algorithm: what was asked for.
        residual_sharded: whether each rank holds its own rows of the residual only.
        post_norm: the norm of the sum before the residual is added, or None.
        scale: what the reduced sum, or its post norm, is multiplied by.
        quant: how normed rows are quantized, or None.
        return_normed: whether normed rows are wanted as well as quantized ones.
        num_tokens: rows to gather; of other calls 0.
        out: preallocated memory for the result in the dtype of `x`, or None.
        residual_out: memory for the new residual.
        quantized_out: memory for the quantized rows.
        scale_out: memory for their scales.
    """

    op: str
    source: Tensor | ExpertSum
    residual: Tensor | None = None
    weight: Tensor | None = None
    eps: float = 0.0
    weight_bias: float = 0.0
    numerics: str = "rounded"
    algorithm: str = "auto"
    residual_sharded: bool = False
    post_norm: PostNorm | None = None
    scale: float = 1.0
    quant: Quant | None = None
    return_normed: bool = False
    num_tokens: int = 0
    out: Tensor | None = None
    residual_out: Tensor | None = None
    quantized_out: Tensor | None = None
    scale_out: Tensor | None = None

    def __post_init__(self) -> None:
        if self.post_norm is not None and not isinstance(self.post_norm, PostNorm):
            raise TypeError(f"post_norm={self.post_norm!r}: expected an allnorm.PostNorm or None.")
        if type(self.source) is ExpertSum and not self.has_norm:
            name = "x" if self.op == "all_reduce" else "residual_shard"
            raise TypeError(f"{name} is a ExpertSum: expected a torch.Tensor.")

    # ---- tensors --------------------------------------------------------------------------------

    @property
    def x(self) -> Tensor:
        """The rows that are read: [..., hidden_size], or those of an ExpertSum."""
        return self.source.rows if type(self.source) is ExpertSum else self.source  # type: ignore[return-value]

    @property
    def static_scale(self) -> Tensor | None:
        """The scale of an Fp8PerTensor, or the global one of an NvFp4."""
        if type(self.quant) is Fp8PerTensor:
            return self.quant.scale
        return self.quant.global_scale if type(self.quant) is NvFp4 else None

    @property
    def post_weight(self) -> Tensor | None:
        """The weight of the post norm."""
        return None if self.post_norm is None else self.post_norm.weight

    @property
    def expert_index(self) -> Tensor | None:
        """The row of each choice, of an ExpertSum."""
        return self.source.index if type(self.source) is ExpertSum else None

    @property
    def expert_weights(self) -> Tensor | None:
        """The weight of each choice, of an ExpertSum."""
        return self.source.weights if type(self.source) is ExpertSum else None

    @property
    def shared(self) -> Tensor | None:
        """This rank's partial of the shared expert, of an ExpertSum."""
        return self.source.shared if type(self.source) is ExpertSum else None

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The tensors that are read, in the order of INPUTS."""
        return tuple(getattr(self, name) for name in INPUTS)

    @property
    def memory(self) -> tuple[Any, ...]:
        """The tensors that are written, where they are preallocated, in the order of MEMORY."""
        return self.out, self.residual_out, self.quantized_out, self.scale_out

    @property
    def tensors(self) -> tuple[Any, ...]:
        """All of these, None for those that the call does not have."""
        return self.inputs + self.memory

    @property
    def given(self) -> list[Tensor]:
        """All tensors of the call."""
        return [tensor for tensor in self.tensors if tensor is not None]

    # ---- constants ------------------------------------------------------------------------------

    @property
    def constants(self) -> tuple[Any, ...]:
        """Everything but tensors. Of a spec that holds one, its type and layout."""
        spec: Any = self.quant
        layout = getattr(spec, "scale_layout", None) if type(spec) is NvFp4 else None
        if type(spec) in (Fp8PerTensor, NvFp4):
            spec = type(spec)
        return (
            *(self.op, self.algorithm, self.eps, self.weight_bias, self.numerics),
            *(self.residual_sharded, spec, layout, self.return_normed, self.num_tokens),
            *(self.post_eps, self.post_weight_bias, self.scale, self.experts),
        )

    @property
    def values(self) -> tuple[Any, ...]:
        """The fields, in their order."""
        return tuple(getattr(self, name) for name in KEYWORDS)

    @property
    def post_eps(self) -> float:
        """The eps of the post norm; 0.0 without one."""
        return 0.0 if self.post_norm is None else self.post_norm.eps

    @property
    def post_weight_bias(self) -> float:
        """The weight_bias of the post norm; 0.0 without one."""
        return 0.0 if self.post_norm is None else self.post_norm.weight_bias

    @property
    def experts(self) -> bool:
        """Whether `x` is what experts return."""
        return type(self.source) is ExpertSum

    # ---- what follows from them -----------------------------------------------------------------

    @property
    def rows(self) -> int:
        """How many rows the ranks hold together."""
        return self.num_tokens if self.op == "all_gather_rows" else math.prod(self.shape[:-1])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of this rank's partial sums: of `x`, unless experts' rows are summed first."""
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
        return self.op.endswith("_quant") and not isinstance(self.quant, Fp8PerTensor)

    @property
    def owns_rows(self) -> bool:
        """Whether rows belong to ranks."""
        return self.residual_sharded or self.op == "all_gather_rows"


KEYWORDS = tuple(field.name for field in dataclasses.fields(Call))
INPUTS = (
    *("x", "residual", "weight", "static_scale"),
    *("post_weight", "expert_index", "expert_weights", "shared"),
)
MEMORY = ("out", "residual_out", "quantized_out", "scale_out")
PARTS: dict[str, dict[type, dict[str, str | None]]] = {
    "source": {
        ExpertSum: {
            "rows": "x",
            "index": "expert_index",
            "weights": "expert_weights",
            "shared": "shared",
        }
    },
    "post_norm": {PostNorm: {"weight": "post_weight", "eps": None, "weight_bias": None}},
    "quant": {
        Fp8PerTensor: {"scale": "static_scale"},
        NvFp4: {"global_scale": "static_scale", "scale_layout": None},
    },
}
"""The parts of values that hold tensors, by field and type: which tensor of the call each is."""


class Runner(abc.ABC):
    """Runs calls: those of a communicator, or of one rank alone, in one way."""

    def call(
        self,
        *,
        op: str,
        source: Tensor | ExpertSum,
        residual: Tensor | None = None,
        weight: Tensor | None = None,
        eps: float = 0.0,
        weight_bias: float = 0.0,
        numerics: str = "rounded",
        algorithm: str = "auto",
        residual_sharded: bool = False,
        post_norm: PostNorm | None = None,
        scale: float = 1.0,
        quant: Quant | None = None,
        return_normed: bool = False,
        num_tokens: int = 0,
        out: Tensor | None = None,
        residual_out: Tensor | None = None,
        quantized_out: Tensor | None = None,
        scale_out: Tensor | None = None,
    ) -> Any:
        """Runs the Call of these fields; returns its results, one tensor or a tuple of them.

        A Dispatcher replaces this method by a C function that takes the same keywords
        (csrc/python), fastest in this order; it runs repeated calls without making a Call.
        """
        return self.run(
            Call(
                op=op,
                source=source,
                residual=residual,
                weight=weight,
                eps=eps,
                weight_bias=weight_bias,
                numerics=numerics,
                algorithm=algorithm,
                residual_sharded=residual_sharded,
                post_norm=post_norm,
                scale=scale,
                quant=quant,
                return_normed=return_normed,
                num_tokens=num_tokens,
                out=out,
                residual_out=residual_out,
                quantized_out=quantized_out,
                scale_out=scale_out,
            )
        )

    @abc.abstractmethod
    def run(self, call: Call) -> Any:
        """Runs a call."""
