"""The table of torch operators: their parameters, defaults and results.

Schemas, implementations and fakes (`allnorm.ops`) and traced calls (core/traced.py) are derived
from this table. The parameters are the fields of a Call, with two exceptions: a communicator is
passed by name, and a value that operators do not support, such as a quantization spec, is passed
as its parts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from allnorm.core import stream_input
from allnorm.core.arguments import Like
from allnorm.core.call import KEYWORDS, Call, CallWithInput
from allnorm.core.slices import Slices
from allnorm.expert_sum import ExpertSum
from allnorm.hyper_connection import HyperConnection, HyperConnectionProjection
from allnorm.post_norm import PostNorm
from allnorm.quant import (
    from_op_arguments,
    op_arguments,
    quantized_dtype,
    quantized_shape,
    scale_geometry,
)

_REQUIRED = object()


# Not a dataclass, which takes 0.3 ms to create at every import of allnorm.
class Parameter:
    """One parameter of an operator; `type` is a type of torch's schema language."""

    def __init__(self, type: str, name: str, default: Any = _REQUIRED) -> None:
        self.type, self.name, self.default = type, name, default

    def __str__(self) -> str:
        if self.default is _REQUIRED:
            return f"{self.type} {self.name}"
        default = f'"{self.default}"' if isinstance(self.default, str) else self.default
        return f"{self.type} {self.name}={default}"


class Operator:
    """One operator.

    Attributes:
        name: name in torch.ops.allnorm, and `op` of a Call.
        parameters: parameters in order.
        results: the call's results in order, each named by the Call field for its preallocated
            memory.
        returns: all results in the syntax of a torch schema.
    """

    def __init__(
        self, name: str, parameters: tuple[Parameter, ...], results: tuple[str, ...], returns: str
    ) -> None:
        self.name, self.parameters, self.results, self.returns = name, parameters, results, returns

    @property
    def schema(self) -> str:
        """The torch schema."""
        return f"{self.name}({', '.join(map(str, self.parameters))}) -> {self.returns}"

    @functools.cached_property
    def is_collective(self) -> bool:
        """Returns whether the operator involves all ranks."""
        return _COMM_NAME in self.parameters

    @functools.cached_property
    def is_quantized(self) -> bool:
        """Returns whether quantized rows are a result."""
        return "quantized_out" in self.results

    @functools.cached_property
    def takes_lists(self) -> bool:
        """Returns whether the operator takes and returns lists of tensors."""
        return self.parameters[0].type == "Tensor[]"

    @functools.cached_property
    def makes_input(self) -> bool:
        """Returns whether the next layer's input is a result; then the receiver takes it too."""
        return "fn" in self.positions

    @functools.cached_property
    def positions(self) -> dict[str, int]:
        """The positions of the parameters, keyed by name."""
        return {parameter.name: index for index, parameter in enumerate(self.parameters)}

    @functools.cached_property
    def pass_on(self) -> Callable[..., Any]:
        """Takes a receiver and the operator's arguments; passes the Call's fields to the receiver.

        The receiver takes them by keyword. The function is generated, because explicit keywords
        cost less per call than a dict of them.
        """
        parameters = (
            name if default is _REQUIRED else f"{name}={default!r}"
            for name, default in ((p.name, p.default) for p in self.parameters)
        )
        own = {name: name for name in self.positions} | {"source": self.parameters[0].name}
        if "experts" in own:
            own["source"] = _SOURCE
        if "post_weight" in own:
            own["post_norm"] = _POST_NORM
        if "post" in own:
            own["connection"] = "HyperConnection(post, mix)"
        op = self.name
        if self.makes_input:
            op = "all_reduce_hyper_connection"
            own = {name: own[name] for name in ("source", "residual", "algorithm", "connection")}
            own["next_input"] = _NEXT_INPUT
        if self.is_quantized:
            own["quant"] = _QUANT_SPEC
        if self.takes_lists:
            own |= {
                "source": "tensors[0]",
                "slices": "Slices(tuple(tensors), tuple(weights), None)",
            }
        fields = (f"{name}={own[name]}" for name in (*KEYWORDS, "next_input") if name in own)
        head = f"lambda receive, {', '.join(parameters)}"
        function: Callable[..., Any] = eval(
            f"{head}: receive(op={op!r}, {', '.join(fields)})", dict(_CLASSES)
        )
        return function

    def fake(self, *given: Any) -> Any:
        """Returns results with the right shapes, dtypes and strides, from the arguments alone.

        The call itself checks whether the shapes of its arguments match.
        """
        if self.makes_input:
            call = self.pass_on(CallWithInput, *given)
            streams = _fake(call, "residual_out", None)
            normed, post, mix = stream_input.allocate(streams, call.next_input.operands["weight"])
            return normed, streams, post, mix
        call = self.pass_on(Call, *given)
        if call.slices is not None:
            return [x.new_empty(x.shape) for x in call.slices.tensors]
        residual_rows = dict(zip(self.positions, given, strict=False)).get("residual_rows")
        results = tuple(_fake(call, field, residual_rows) for field in self.results)
        return results if len(results) > 1 else results[0]


def arguments(call: Call, comm_name: str, residual_rows: int | None) -> tuple[Any, ...]:
    """Returns the arguments of a call's operator.

    `residual_rows` is the number of this rank's rows, if a sharded residual is not given.
    """
    values: dict[str, Any] = {name: getattr(call, name) for name in _COPIED}
    values |= {"x": call.x, "shard": call.x, "comm_name": comm_name, "residual_rows": residual_rows}
    if call.quant is not None:
        values |= dict(zip(_QUANT_NAMES, op_arguments(call.quant), strict=True))
    for name in _FLOATS:
        if not isinstance(values[name], float | torch.SymFloat):
            values[name] = float(values[name])
    updates = call.post_norm is not None or call.experts or call.scale != 1
    has_rare = updates or call.prefetch is not None or not call.gather
    op = call.op
    if isinstance(call, CallWithInput):
        op += "_input"
        values |= call.next_input.operands
    return tuple(values[name] for name in _argument_names(op, has_rare))


def _argument_names(op: str, has_rare: bool) -> tuple[str, ...]:
    """Returns the names of an operator's arguments; without the rare ones, which come last."""
    names = [parameter.name for parameter in OPERATORS[op].parameters]
    while not has_rare and names[-1] in _RARE:
        names.pop()
    return tuple(names)


def results_of(op: str) -> tuple[str, ...]:
    """Returns an operator's results, each named by the Call field for its preallocated memory."""
    return OPERATORS[op].results


# Dynamo then treats the results of both functions as constants, and does not guard the table.
_argument_names._dynamo_marked_constant = True  # type: ignore[attr-defined]
results_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def has_result(call: Call, field: str) -> bool:
    """Returns whether a call has this result; otherwise its operator returns an empty tensor."""
    if field == "out" and call.has_norm:
        return call.return_normed if call.quant is not None else call.weight is not None
    return field != "scale_out" or call.writes_scale


def result_like(call: Call, field: str, residual_rows: int | None) -> Like:
    """Returns the shape, dtype and device of a result other than scales.

    `residual_rows`, this rank's rows of a sharded residual, may be symbolic. It must not occur in
    an error message, because formatting it would specialize the graph to one number.
    """
    x = call.x
    if call.connection is not None:
        assert call.residual is not None
        return Like(call.residual.shape, call.residual.dtype, x.device, "that of residual")
    if call.op == "all_gather_rows":
        source = "num_tokens rows as wide as residual_shard"
        return Like((call.num_tokens, x.shape[-1]), x.dtype, x.device, source)
    dtype = call.residual_dtype if field == "residual_out" else x.dtype
    shape, source = call.shape, "[num_tokens, hidden_size]" if call.experts else "that of x"
    if residual_rows is not None and (field == "residual_out" or not call.gather):
        source = "this rank's rows, as row_shard() gives them"
        shape = (residual_rows, x.shape[-1])
    if field == "quantized_out":
        assert call.quant is not None
        narrow = tuple(quantized_shape(call.quant, shape))
        return Like(narrow, quantized_dtype(call.quant), x.device, source)
    return Like(shape, dtype, x.device, source)


def _fake(call: Call, field: str, residual_rows: int | None) -> torch.Tensor:
    x = call.x
    if not has_result(call, field):
        return x.new_empty(0, dtype=torch.float32 if field == "scale_out" else x.dtype)
    if call.residual_sharded and call.residual is not None:
        residual_rows = call.residual.shape[0]
    if call.residual_sharded and residual_rows is None:
        raise ValueError(
            "residual_sharded without a residual, traced: expected residual_rows, the number of "
            "this rank's rows, hi - lo of row_shard()."
        )
    rows = residual_rows if call.residual_sharded else None
    if field == "scale_out":
        assert call.quant is not None
        count = call.rows if call.gather or rows is None else rows
        geometry = scale_geometry(call.quant, count, x.shape[-1])
        assert geometry is not None
        return geometry.empty(x.device)
    like = result_like(call, field, rows)
    return x.new_empty(like.shape, dtype=like.dtype)


# Expressions for the Call fields that operators take as separate parts.
_SOURCE = "ExpertSum(x, expert_weights, expert_index, shared) if experts else x"
_POST_NORM = "None if post_weight is None else PostNorm(post_weight, post_eps, post_weight_bias)"
_NEXT_INPUT = (
    "NextInput(HyperConnectionProjection(fn, scale, base, stream_eps, hc_eps, iterations, "
    "post_scale), weight, eps, weight_bias, numerics)"
)
_QUANT_SPEC = "from_op_arguments(quant_kind, group_size, scale_layout, scale_format, static_scale)"
_CLASSES = {
    "Slices": Slices,
    "ExpertSum": ExpertSum,
    "HyperConnection": HyperConnection,
    "HyperConnectionProjection": HyperConnectionProjection,
    "NextInput": stream_input.NextInput,
    "PostNorm": PostNorm,
    "from_op_arguments": from_op_arguments,
}

_COMM_NAME = Parameter("str", "comm_name")
_ALGORITHM = Parameter("str", "algorithm", "auto")
_X = Parameter("Tensor", "x")
_ROWS = (_X, Parameter("Tensor?", "residual"))
_EPS = Parameter("float", "eps")
_ROUNDING = (Parameter("float", "weight_bias"), Parameter("str", "numerics"))
_QUANT = (
    Parameter("str", "quant_kind"),
    Parameter("int", "group_size"),
    Parameter("str", "scale_layout"),
    Parameter("str", "scale_format"),
    Parameter("Tensor?", "static_scale"),
)
_QUANT_NAMES = tuple(parameter.name for parameter in _QUANT)
_NORM = (*_ROWS, Parameter("Tensor?", "weight"), _EPS, *_ROUNDING)
_NORM_QUANT = (
    *(*_ROWS, Parameter("Tensor", "weight"), _EPS),
    *(*_QUANT, Parameter("bool", "return_normed"), *_ROUNDING),
)
_AMONG_RANKS = (
    _COMM_NAME,
    Parameter("bool", "residual_sharded", False),
    # Number of this rank's rows of a sharded residual. Traced calls without a residual need it,
    # because a fake does not know the rank.
    Parameter("SymInt?", "residual_rows", None),
    _ALGORITHM,
)
_EXPERTS = (
    Parameter("bool", "experts", False),
    Parameter("Tensor?", "expert_index", None),
    Parameter("Tensor?", "expert_weights", None),
    Parameter("Tensor?", "shared", None),
)
_PROJECTION = tuple(Parameter("Tensor", name) for name in ("fn", "scale", "base"))
_PROJECTION_CONSTANTS = (
    *(Parameter("float", "stream_eps"), Parameter("float", "hc_eps")),
    *(Parameter("int", "iterations"), Parameter("float", "post_scale")),
)
_RESIDUAL_UPDATE = (
    Parameter("Tensor?", "post_weight", None),
    Parameter("float", "post_eps", 0.0),
    Parameter("float", "post_weight_bias", 0.0),
    Parameter("float", "scale", 1.0),
    *_EXPERTS,
)
_PREFETCH = Parameter("Tensor?", "prefetch", None)
_GATHER = Parameter("bool", "gather", True)
_RARE = frozenset(parameter.name for parameter in (*_RESIDUAL_UPDATE, _PREFETCH, _GATHER))
_FLOATS = ("eps", "weight_bias", "post_eps", "post_weight_bias", "scale")
# The parameters that are fields or properties of a Call.
_COPIED = (
    *(name for name in KEYWORDS if name not in ("op", "source", "quant", "slices", "connection")),
    *("post", "mix"),
    *(name for name in _RARE if name not in KEYWORDS),
)
_QUANTIZED = (("quantized_out", "scale_out"), "(Tensor quantized, Tensor scale)")
_TWO = (("out", "residual_out"), "(Tensor, Tensor)")
_FOUR = (
    ("quantized_out", "scale_out", "residual_out", "out"),
    "(Tensor quantized, Tensor scale, Tensor residual, Tensor normed)",
)
OPERATORS = {
    operator.name: operator
    for operator in (
        Operator("all_reduce", (_X, _COMM_NAME, _ALGORITHM), ("out",), "Tensor"),
        Operator(
            "all_reduce_add_rms_norm",
            (*_NORM, *_AMONG_RANKS, *_RESIDUAL_UPDATE, _PREFETCH, _GATHER),
            *_TWO,
        ),
        Operator(
            "all_reduce_add_rms_norm_quant",
            (*_NORM_QUANT, *_AMONG_RANKS, *_RESIDUAL_UPDATE, _PREFETCH, _GATHER),
            *_FOUR,
        ),
        Operator(
            "all_gather_rows",
            (
                Parameter("Tensor", "shard"),
                Parameter("SymInt", "num_tokens"),
                *(_COMM_NAME, _ALGORITHM),
            ),
            ("out",),
            "Tensor",
        ),
        Operator(
            "rms_norm_sharded",
            (
                *(Parameter("Tensor[]", "tensors"), Parameter("Tensor[]", "weights"), _EPS),
                *(*_ROUNDING, _COMM_NAME, _ALGORITHM),
            ),
            ("out",),
            "Tensor[]",
        ),
        Operator(
            "all_reduce_hyper_connection",
            (
                *(_X, Parameter("Tensor", "residual"), Parameter("Tensor", "post")),
                *(Parameter("Tensor", "mix"), _COMM_NAME, _ALGORITHM, *_EXPERTS),
            ),
            ("residual_out",),
            "Tensor",
        ),
        Operator(
            "all_reduce_hyper_connection_input",
            (
                *(_X, Parameter("Tensor", "residual"), Parameter("Tensor", "post")),
                *(Parameter("Tensor", "mix"), *_PROJECTION, Parameter("Tensor", "weight"), _EPS),
                *(*_ROUNDING, *_PROJECTION_CONSTANTS, _COMM_NAME, _ALGORITHM, *_EXPERTS),
            ),
            ("residual_out",),
            "(Tensor normed, Tensor residual, Tensor post, Tensor mix)",
        ),
        Operator("add_rms_norm", (*_NORM, *_RESIDUAL_UPDATE), *_TWO),
        Operator("add_rms_norm_quant", (*_NORM_QUANT, *_RESIDUAL_UPDATE), *_FOUR),
        Operator("quantize", (_X, *_QUANT), *_QUANTIZED),
    )
}
"""The operators, keyed by name; each is a public call."""
