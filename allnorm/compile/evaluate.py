"""From a node to the expression that it computes, with the roundings that PyTorch makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from allnorm.compile.expressions import Algebra, Value, number_of
from allnorm.compile.shapes import FLOATS, FP8, Shapes, elems, same_shape, static_size
from allnorm.compile.vocabulary import argument, module_of, operation


class NotUnderstood(Exception):  # noqa: N818 - not an error: the node stays opaque
    """A node that the pass does not understand; the text, if any, goes into the report."""


class Evaluator:
    """Evaluates single nodes.

    Args:
        algebra: where expressions are made.
        shapes: of the graph.
        held: the expression that a node's tensor holds now.
        parameter: the expression of a parameter of a called module, by its path.
    """

    def __init__(
        self,
        algebra: Algebra,
        shapes: Shapes,
        held: Callable[[Node], Value],
        parameter: Callable[[str, Tensor], Value],
    ) -> None:
        self._algebra = algebra
        self._shapes = shapes
        self._held = held
        self._parameter = parameter

    def evaluate(self, node: Node) -> Value:
        """What the node computes: of a call in place, what its first argument holds then."""
        out = self._out(node)
        dtype = None if out is None else out.dtype
        try:
            if node.op == "call_module":
                return self._module(node)
            rule = _RULES.get(operation(node))
            if rule is not None:
                return rule(self, node)
            note = ""
        except NotUnderstood as reason:
            note = str(reason)
        inputs = tuple(self._held(argument) for argument in node.all_input_nodes)
        return self._algebra.opaque(inputs, dtype, note)

    # ---- operands -------------------------------------------------------------------------------

    def _out(self, node: Node) -> Tensor | None:
        """The result; a call in place may have none of its own."""
        out = self._shapes.of(node)
        if out is None and operation(node) and node.args and isinstance(node.args[0], Node):
            out = self._shapes.of(node.args[0]) if node.op == "call_method" else None
        return out

    def _float_out(self, node: Node) -> Tensor:
        out = self._out(node)
        if out is None:
            raise NotUnderstood
        if out.dtype not in FLOATS:
            raise NotUnderstood(f"{node} is {out.dtype}: {_EXPECTED_DTYPES}")
        return out

    def _tensor(self, operand: Any, node: Node) -> tuple[Value, Tensor]:
        """A tensor operand in float32 arithmetic."""
        tensor = self._shapes.of(operand) if isinstance(operand, Node) else None
        if tensor is None:
            raise NotUnderstood
        if tensor.dtype not in FLOATS:
            raise NotUnderstood(f"{node} computes with {tensor.dtype}: {_EXPECTED_DTYPES}")
        return self._algebra.up(self._held(operand)), tensor

    def _operand(self, operand: Any, node: Node, out: Tensor) -> Value:
        """An operand that broadcasts along rows or along columns, or a number."""
        if isinstance(operand, int | float) and not isinstance(operand, bool):
            return self._algebra.const(float(operand))
        value, tensor = self._tensor(operand, node)
        if tensor.dim() == 0 and tensor.dtype != out.dtype:
            raise NotUnderstood(f"{node} computes with the scalar tensor {operand}")
        if not _broadcasts(tensor.shape, out.shape, column=value.column):
            raise NotUnderstood(
                f"{node} broadcasts {operand} of shape {_text(tensor.shape)} to {_text(out.shape)}"
            )
        return value

    # ---- rules ----------------------------------------------------------------------------------

    def _binary(self, node: Node) -> Value:
        out = self._float_out(node)
        op = operation(node)
        if argument(node, 2, "alpha", default=1) != 1:
            raise NotUnderstood(f"{node} scales its second operand by alpha")
        if node.kwargs.get("rounding_mode") is not None:
            raise NotUnderstood(f"{node} rounds the quotient to an integer")
        a = self._operand(argument(node, 0, "input", "self"), node, out)
        b = self._operand(argument(node, 1, "other", "exponent"), node, out)
        if getattr(node.target, "__name__", node.target) in ("__rtruediv__", "__rpow__"):
            raise NotUnderstood
        return self._algebra.round(self._algebra.binary(op, a, b), out.dtype)

    def _unary(self, node: Node) -> Value:
        out = self._float_out(node)
        a, _ = self._tensor(argument(node, 0, "input", "self"), node)
        return self._algebra.round(self._algebra.unary(operation(node), a), out.dtype)

    def _reduce_row(self, node: Node) -> Value:
        """`mean`, `sum` or `amax` over the last dimension."""
        return self._over_last(operation(node), node, self._float_out(node))

    def _over_last(self, op: str, node: Node, out: Tensor) -> Value:
        a, tensor = self._tensor(argument(node, 0, "input", "self"), node)
        dims = argument(node, 1, "dim", "axis")
        dims = [dims] if isinstance(dims, int) else dims
        if not isinstance(dims, list | tuple) or len(dims) != 1 or not isinstance(dims[0], int):
            raise NotUnderstood(f"{node} takes the {op} over dimensions {dims}: {_EXPECTED_DIM}")
        if dims[0] % max(1, tensor.dim()) != tensor.dim() - 1:
            raise NotUnderstood(f"{node} takes the {op} over dimension {dims[0]}: {_EXPECTED_DIM}")
        size = static_size(tensor.shape[-1])
        if size is None:
            raise NotUnderstood(f"{node} takes the {op} over a dimension of unknown size")
        return self._algebra.round(self._algebra.over_last(op, a, size), out.dtype)

    def _cast(self, node: Node) -> Value:
        source = argument(node, 0, "input", "self", "a")
        a, tensor = self._tensor(source, node)
        out = self._out(node)
        if out is None or out.dtype != FP8:
            out = self._float_out(node)
        if out.device != tensor.device:
            raise NotUnderstood(f"{node} moves {source} to {out.device}")
        if out.dtype == tensor.dtype:
            return self._held(source)
        return self._algebra.round(a, out.dtype)

    def _same(self, node: Node) -> Value:
        return self._held(_node(argument(node, 0, "input", "self", "tensor")))

    def _view(self, node: Node) -> Value:
        source = _node(argument(node, 0, "input", "self"))
        value, before, after = self._held(source), self._shapes.of(source), self._shapes.of(node)
        if before is None or after is None or before.dtype != after.dtype:
            raise NotUnderstood
        if value.column or (
            before.dim() and after.dim() and same_shape(before.shape[-1:], after.shape[-1:])
        ):
            return value
        note = f"{node} changes the last dimension: {_text(before.shape)} to {_text(after.shape)}"
        sizes = [
            static_size(tensor.shape[-1]) if tensor.dim() else None for tensor in (before, after)
        ]
        if sizes[0] is None or sizes[1] is None:
            raise NotUnderstood(note)
        viewed = self._algebra.rows(value, sizes[0], sizes[1])
        if viewed.op == "rows":
            viewed.note = viewed.note or note
        return viewed

    def _clamp(self, node: Node) -> Value:
        """`clamp`, `clamp_min`, `clamp_max`, and `maximum` or `minimum` with a constant."""
        out = self._float_out(node)
        a, _ = self._tensor(argument(node, 0, "input", "self"), node)
        op = operation(node)
        first = argument(node, 1, "min", "max", "other") if op != "clamp" else None
        low = argument(node, 1, "min") if op == "clamp" else first
        high = argument(node, 2, "max") if op == "clamp" else first
        bounds = [self._bound(bound, node, out) for bound in (low, high)]
        if op in ("clamp_min", "maximum"):
            bounds[1] = None
        elif op in ("clamp_max", "minimum"):
            bounds[0] = None
        return self._algebra.round(self._algebra.clamp(a, *bounds), out.dtype)

    def _bound(self, bound: Any, node: Node, out: Tensor) -> float | None:
        if bound is None:
            return None
        number = number_of(self._operand(bound, node, out))
        if number is None:
            raise NotUnderstood(f"{node} clamps to a tensor")
        return number

    def _max(self, node: Node) -> Value:
        """`max` along a dimension, which returns indices too."""
        if not isinstance(self._shapes.any_of(node), tuple | list):
            raise NotUnderstood
        values = self._shapes.any_of(node)[0]
        greatest = self._over_last("amax", node, values)
        return self._algebra.make(
            "tuple", (greatest, self._algebra.opaque((greatest,), torch.int64)), node, None
        )

    def _constant(self, node: Node) -> Value:
        """`torch.tensor(number)`, `aten.full([], number)`."""
        out = self._out(node)
        number = node.args[1] if operation(node) == "full" and len(node.args) > 1 else node.args[0]
        if (
            out is None
            or out.dim()
            or out.dtype != torch.float32
            or isinstance(number, bool)
            or not isinstance(number, int | float)
        ):
            raise NotUnderstood
        return self._algebra.const(float(number))

    def _copy(self, node: Node) -> Value:
        """`copy_(target, source)`: what the target holds then."""
        target, source = (
            _node(argument(node, 0, "self", "input")),
            argument(node, 1, "src", "other"),
        )
        a, tensor = self._tensor(source, node)
        into = self._shapes.of(target)
        if into is None or not same_shape(into.shape, tensor.shape) or into.dtype not in FLOATS:
            raise NotUnderstood
        if into.dtype == tensor.dtype:
            return self._held(_node(source))
        return self._algebra.round(a, into.dtype)

    def _dropout(self, node: Node) -> Value:
        if argument(node, 2, "training", "train", default=True) is not False:
            raise NotUnderstood(f"{node} drops elements at random")
        return self._same(node)

    def _getitem(self, node: Node) -> Value:
        source, index = node.args
        value = self._held(_node(source))
        if value.op == "tuple" and isinstance(index, int) and index < len(value.args):
            return value.args[index]
        taken = self._shapes.of(_node(source)) is not None
        raise NotUnderstood(f"{node} takes a part of {source}" if taken else "")

    def _layer_norm(self, node: Node) -> Value:
        raise NotUnderstood(f"{node} is a layer norm, which subtracts the mean")

    def _rms_norm(self, node: Node) -> Value:
        weight = argument(node, 2, "weight")
        value = None if weight is None else self._tensor(weight, node)[0]
        shape = argument(node, 1, "normalized_shape")
        normed = self._norm(node, shape, value, argument(node, 3, "eps"))
        if isinstance(self._shapes.any_of(node), tuple | list):  # aten._fused_rms_norm
            rstd = self._algebra.opaque((normed,), torch.float32)
            return self._algebra.make("tuple", (normed, rstd), None, None)
        return normed

    def _norm(self, node: Node, shape: Any, gain: Value | None, eps: Any) -> Value:
        """`F.rms_norm` as PyTorch computes it: in float32, rounded once, after the weight."""
        z, tensor = self._tensor(argument(node, 0, "input", "self"), node)
        shape = [shape] if isinstance(shape, int) else list(shape)
        if len(shape) != 1:
            raise NotUnderstood(f"{node} is over {len(shape)} dimensions: {_EXPECTED_DIM}")
        size = static_size(shape[0])
        if size is None:
            raise NotUnderstood(f"{node} is over a dimension of unknown size")
        if eps is None:
            eps = torch.finfo(torch.float32).eps  # of the dtype that it computes in, on every input
        if not isinstance(eps, int | float):
            raise NotUnderstood(f"{node} has an eps that is no number")
        make = self._algebra
        mean = make.over_last("mean", make.unary("square", z), size)
        rstd = make.unary("rsqrt", make.binary("add", mean, make.const(float(eps))))
        product = make.binary("mul", z, rstd)
        if gain is not None:
            product = make.binary("mul", product, gain)
        return make.round(product, tensor.dtype)

    def _module(self, node: Node) -> Value:
        module = module_of(node)
        if isinstance(module, torch.nn.Identity):
            return self._same(node)
        if isinstance(module, torch.nn.Dropout) and not module.training:
            return self._same(node)
        if isinstance(module, torch.nn.LayerNorm):
            self._layer_norm(node)
        if type(module) is not torch.nn.RMSNorm:
            raise NotUnderstood
        gain = None
        if module.weight is not None:
            gain = self._algebra.up(self._parameter(f"{node.target}.weight", module.weight))
        return self._norm(node, module.normalized_shape, gain, module.eps)


_RULES: dict[str, Callable[[Evaluator, Node], Value]] = {
    **dict.fromkeys(("add", "mul", "div", "pow"), Evaluator._binary),
    **dict.fromkeys(("square", "rsqrt", "sqrt", "reciprocal", "abs"), Evaluator._unary),
    **dict.fromkeys(("mean", "sum", "amax"), Evaluator._reduce_row),
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max", "maximum", "minimum"), Evaluator._clamp),
    **dict.fromkeys(("tensor", "full"), Evaluator._constant),
    "max": Evaluator._max,
    "cast": Evaluator._cast,
    "same": Evaluator._same,
    "wait": Evaluator._same,
    "view": Evaluator._view,
    "copy": Evaluator._copy,
    "dropout": Evaluator._dropout,
    "getitem": Evaluator._getitem,
    "layer_norm": Evaluator._layer_norm,
    "rms_norm": Evaluator._rms_norm,
}
_EXPECTED_DTYPES = "expected float32, float16 or bfloat16"
_EXPECTED_DIM = "expected the last one"


def _node(value: Any) -> Node:
    if not isinstance(value, Node):
        raise NotUnderstood
    return value


def _text(shape: Any) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def _broadcasts(shape: Any, out: Any, *, column: bool) -> bool:
    """Whether an operand is of the shape of the result, one column of it, or one row."""
    if same_shape(shape, out) or all(static_size(size) == 1 for size in shape):
        return True
    if column:
        return len(shape) == 0 or same_shape(shape, [*out[:-1], 1])
    is_row = len(shape) > 0 and statically_known_true(elems(shape) == shape[-1])
    is_column = len(shape) > 0 and same_shape(shape, [*out[:-1], 1])
    return (is_row and same_shape(shape[-1:], out[-1:])) or is_column
