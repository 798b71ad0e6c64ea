"""The `Call` class: the one place that defines the arguments of a call."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec

import torch
from torch import Tensor

from allnorm.core._native import MAX_SLICES
from allnorm.core.slices import Slices, slot
from allnorm.expert_sum import ExpertSum
from allnorm.hyper_connection import HyperConnection
from allnorm.post_norm import PostNorm
from allnorm.quant import Fp8PerTensor, NvFp4, Quant


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Call:
    """One call, as its caller made it; only the types of `source` and `post_norm` are checked.

    To add an argument, add a field here; the keywords of `Runner.call` follow from the fields. A
    tensor, or a value that holds tensors, also needs a line in INPUTS or MEMORY, one in PARTS, and
    a name in csrc/python/arguments.h (in the order of SLOTS).
    """

    op: str  # name of an operator in core.operators.OPERATORS
    source: Tensor | ExpertSum  # [..., hidden_size]; for all_gather_rows this rank's rows
    # Same shape as the sum; if sharded, this rank's rows. Same dtype, or float32.
    residual: Tensor | None = None
    weight: Tensor | None = None  # [hidden_size]; None: no norm after the residual add
    eps: float = 0.0
    weight_bias: float = 0.0
    numerics: str = "rounded"  # rounding mode
    algorithm: str = "auto"  # requested algorithm
    residual_sharded: bool = False  # whether `residual` has only this rank's rows
    gather: bool = True  # False: the results have only this rank's rows, like a sharded residual
    post_norm: PostNorm | None = None  # norm applied to the sum before the residual add
    scale: float = 1.0  # factor of the reduced sum, or of its post norm
    quant: Quant | None = None  # spec of the quantization
    return_normed: bool = False  # whether to return normed rows as well as quantized ones
    num_tokens: int = 0  # number of rows to gather; 0 for other calls
    prefetch: Tensor | None = None  # the next kernel's weight: a hint, never read by the call
    out: Tensor | None = None  # preallocated result in the dtype of `x`
    residual_out: Tensor | None = None  # preallocated new residual
    quantized_out: Tensor | None = None  # preallocated quantized rows
    scale_out: Tensor | None = None  # preallocated scales
    slices: Slices | None = None  # tensors of rms_norm_sharded; the first one is `source` too
    # Coefficients of a hyper-connection; `residual` is then [..., streams, hidden_size].
    connection: HyperConnection | None = None

    def __post_init__(self) -> None:
        if self.post_norm is not None and not isinstance(self.post_norm, PostNorm):
            raise TypeError(f"post_norm={self.post_norm!r}: expected an allnorm.PostNorm or None.")
        if (
            self.op == "all_reduce_hyper_connection"
            and type(self.connection) is not HyperConnection
        ):
            raise TypeError(f"connection={self.connection!r}: expected an allnorm.HyperConnection.")
        if type(self.source) is ExpertSum and not (
            self.has_norm or self.op == "all_reduce_hyper_connection"
        ):
            names = {"all_gather_rows": "residual_shard", "rms_norm_sharded": "tensors[0]"}
            name = names.get(self.op, "x")
            raise TypeError(f"{name} is a ExpertSum: expected a torch.Tensor.")

    # ---- tensors --------------------------------------------------------------------------------

    @property
    def x(self) -> Tensor:
        """The input rows: [..., hidden_size], or the rows of an ExpertSum."""
        return self.source.rows if type(self.source) is ExpertSum else self.source  # type: ignore[return-value]

    @property
    def static_scale(self) -> Tensor | None:
        """The scale of an Fp8PerTensor, or the global scale of an NvFp4."""
        if type(self.quant) is Fp8PerTensor:
            return self.quant.scale
        return self.quant.global_scale if type(self.quant) is NvFp4 else None

    @property
    def post_weight(self) -> Tensor | None:
        """The weight of the post norm."""
        return None if self.post_norm is None else self.post_norm.weight

    @property
    def expert_index(self) -> Tensor | None:
        """The index of an ExpertSum: the row of each choice."""
        return self.source.index if type(self.source) is ExpertSum else None

    @property
    def expert_weights(self) -> Tensor | None:
        """The weights of an ExpertSum: one per choice."""
        return self.source.weights if type(self.source) is ExpertSum else None

    @property
    def shared(self) -> Tensor | None:
        """The shared expert's partial sums in an ExpertSum."""
        return self.source.shared if type(self.source) is ExpertSum else None

    @property
    def post(self) -> Tensor | None:
        """The factors of the sum in a hyper-connection."""
        return None if self.connection is None else self.connection.post

    @property
    def mix(self) -> Tensor | None:
        """The factors of the residual streams in a hyper-connection."""
        return None if self.connection is None else self.connection.mix

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The input tensors, in the order of INPUTS."""
        return tuple(getattr(self, name) for name in INPUTS)

    @property
    def memory(self) -> tuple[Any, ...]:
        """The preallocated results, in the order of MEMORY."""
        return self.out, self.residual_out, self.quantized_out, self.scale_out

    @property
    def tensors(self) -> tuple[Any, ...]:
        """All tensors, in the order of TENSORS; None for each that the call does not have."""
        return (*self.inputs, self.prefetch, *self.memory)

    @property
    def named(self) -> dict[str, Tensor]:
        """The tensors that the call has, keyed by the names in SLOTS."""
        if self.slices is not None:
            return self.slices.named
        pairs = zip(TENSORS, self.tensors, strict=True)
        return {name: tensor for name, tensor in pairs if tensor is not None}

    @property
    def given(self) -> list[Tensor]:
        """The tensors that the call has."""
        found = [tensor for tensor in self.tensors if tensor is not None]
        return found if self.slices is None else [*found, *self.slices.given]

    @property
    def written(self) -> list[Tensor]:
        """The preallocated results that the call has."""
        outs = () if self.slices is None else self.slices.outs or ()
        return [tensor for tensor in (*self.memory, *outs) if tensor is not None]

    # ---- constants ------------------------------------------------------------------------------

    @property
    def constants(self) -> tuple[Any, ...]:
        """All values except tensors; for a spec that holds a tensor, only its type and layout."""
        spec: Any = self.quant
        layout = getattr(spec, "scale_layout", None) if type(spec) is NvFp4 else None
        if type(spec) in (Fp8PerTensor, NvFp4):
            spec = type(spec)
        return (
            *(self.op, self.algorithm, self.eps, self.weight_bias, self.numerics),
            *(self.residual_sharded, self.gather, spec, layout, self.return_normed),
            self.num_tokens,
            *(self.post_eps, self.post_weight_bias, self.scale, self.experts),
        )

    @property
    def values(self) -> tuple[Any, ...]:
        """The values of all fields, in order."""
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
        """Returns whether `x` is an ExpertSum."""
        return type(self.source) is ExpertSum

    # ---- derived values -------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        """The number of rows of all ranks together."""
        return self.num_tokens if self.op == "all_gather_rows" else math.prod(self.shape[:-1])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of this rank's partial sums, after the rows of experts are summed."""
        if not self.experts:
            return self.x.shape
        per_token = self.x if self.expert_index is None else self.expert_index
        return per_token.shape[0], self.x.shape[-1]

    @property
    def top_k(self) -> int:
        """The number of experts per token; 0 without an ExpertSum."""
        if not self.experts:
            return 0
        return (self.x if self.expert_index is None else self.expert_index).shape[1]

    @property
    def has_norm(self) -> bool:
        """Returns whether a sum is normed: a final norm, a post norm, or both."""
        return self.op.removesuffix("_quant").endswith("add_rms_norm")

    @property
    def has_float32_residual(self) -> bool:
        """Returns whether the residual is float32, and `x` is not."""
        wide = getattr(self.residual, "dtype", None) is torch.float32
        return wide and self.x.dtype is not torch.float32

    @property
    def residual_dtype(self) -> torch.dtype:
        """The dtype of the new residual."""
        return torch.float32 if self.has_float32_residual else self.x.dtype

    @property
    def is_quantized(self) -> bool:
        """Returns whether quantized rows are a result."""
        return self.op == "quantize" or self.op.endswith("_quant")

    @property
    def writes_scale(self) -> bool:
        """Returns whether scales are a result."""
        return self.is_quantized and not isinstance(self.quant, Fp8PerTensor)

    @property
    def owns_rows(self) -> bool:
        """Returns whether rows have owners."""
        return self.residual_sharded or self.op == "all_gather_rows"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CallWithInput(Call):
    """A call of all_reduce_hyper_connection that is followed by the next layer's input.

    `next_input` is no argument of the call: the input may also be made after it.
    """

    next_input: Any = None  # a core.stream_input.NextInput


KEYWORDS = tuple(field.name for field in dataclasses.fields(Call))
INPUTS = (
    *("x", "residual", "weight", "static_scale"),
    *("post_weight", "expert_index", "expert_weights", "shared", "post", "mix"),
)
MEMORY = ("out", "residual_out", "quantized_out", "scale_out")
TENSORS = (*INPUTS, "prefetch", *MEMORY)
SLOTS = tuple(
    slot(name, number)
    for name in TENSORS
    for number in range(MAX_SLICES if name in ("x", "weight", "out") else 1)
)
"""Names of tensors in csrc/python/arguments.h, in that order; x1 is the second slice's x."""
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
    "connection": {HyperConnection: {"post": "post", "mix": "mix"}},
    "slices": {Slices: {"tensors": "xs", "weights": "weights", "outs": "outs"}},
    "quant": {
        Fp8PerTensor: {"scale": "static_scale"},
        NvFp4: {"global_scale": "static_scale", "scale_layout": None},
    },
}
"""Values that hold tensors, keyed by field and type. Maps their parts to names of tensors.

xs, weights and outs are tuples with one tensor per slice: kTuples in csrc/python/arguments.h.
"""


_Fields = ParamSpec("_Fields")


def _method(kind: Callable[_Fields, Call]) -> Callable[Concatenate[Any, _Fields], Any]:
    """Returns a method with a Call's parameters that creates the Call and runs it."""

    def call(self: Any, /, *arguments: _Fields.args, **fields: _Fields.kwargs) -> Any:
        return self.run(Call(*arguments, **fields))  # type: ignore[arg-type]  # for Dynamo

    return call


class Runner(abc.ABC):
    """Runs calls of a communicator, or of one rank alone."""

    call = _method(Call)
    """Runs the Call with these fields; returns its results, one tensor or a tuple.

    A Dispatcher replaces this method with a C function that takes the same keywords (csrc/python).
    It is fastest if they are in field order. It runs repeated calls without creating a Call.
    """

    @abc.abstractmethod
    def run(self, call: Call) -> Any:
        """Runs a call."""

    @abc.abstractmethod
    def call_with_input(self, *, next_input: Any, **fields: Any) -> tuple[Tensor, Tensor, Any]:
        """Runs the Call with these fields, and makes the next layer's input.

        Returns `(normed, streams, connection)`. `next_input` is as in CallWithInput.
        """
