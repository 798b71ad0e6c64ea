"""Rules that evaluate the vocabulary's operations to expressions, one per operation.

A rule takes the operands and a node. It raises NotUnderstood if no expression describes the result.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from allnorm.compile.expressions import NotUnderstood, Value, number_of
from allnorm.compile.operands import Operands
from allnorm.compile.shapes import FLOATS, FP8, HALF, same_shape, static_size
from allnorm.compile.vocabulary import argument, module_of, operation, plain_module, plain_name

_EXPECTED_DIM = "expected the last one"
_ZEROS = ("0", "0.0", "False")  # not -0.0


def _input(node: Node) -> Any:
    return argument(node, 0, "input", "self", "a", "tensor")


# ---- arithmetic ----------------------------------------------------------------------------------


def _binary(e: Operands, node: Node) -> Value:
    out = e.out(node)
    if argument(node, 2, "alpha", default=1) != 1:
        raise NotUnderstood(f"{node} scales its second operand by alpha")
    if node.kwargs.get("rounding_mode") is not None:
        raise NotUnderstood(f"{node} rounds the quotient to an integer")
    a = e.operand(_input(node), node, out)
    b = e.operand(argument(node, 1, "other", "exponent"), node, out)
    return e.algebra.round(e.algebra.binary(operation(node), a, b), out.dtype)


def _unary(e: Operands, node: Node) -> Value:
    out = e.out(node)
    a, _ = e.tensor(_input(node), node)
    return e.algebra.round(e.algebra.unary(operation(node), a), out.dtype)


def _over_row(e: Operands, node: Node) -> Value:
    """Evaluates `mean`, `sum` or `amax` over the last dimension."""
    return _reduce_row(e, node, operation(node), e.out(node))


def _max(e: Operands, node: Node) -> Value:
    """Evaluates `max` over a dimension, which also returns indices."""
    results = e.shapes.any_of(node)
    if not isinstance(results, tuple | list) or results[0].dtype not in FLOATS:
        raise NotUnderstood
    greatest = _reduce_row(e, node, "amax", results[0])
    indices = e.algebra.opaque((greatest,), torch.int64)
    return e.algebra.make("tuple", (greatest, indices), node, None)


def _reduce_row(e: Operands, node: Node, op: str, out: Tensor) -> Value:
    a, tensor = e.tensor(_input(node), node)
    dims = argument(node, 1, "dim", "axis")
    dims = [dims] if isinstance(dims, int) else dims
    if not isinstance(dims, list | tuple) or len(dims) != 1 or not isinstance(dims[0], int):
        raise NotUnderstood(f"{node} takes the {op} over dimensions {dims}: {_EXPECTED_DIM}")
    place = dims[0] % max(1, tensor.dim())
    if op == "sum" and tensor.dim() > 2 and place == tensor.dim() - 2:
        top_k = e.shapes.in_example(tensor.shape[place])
        if top_k is not None and argument(node, 2, "keepdim", default=False) is False:
            return e.algebra.round(e.algebra.make("choices", (a,), top_k), out.dtype)
    if place != tensor.dim() - 1:
        raise NotUnderstood(f"{node} takes the {op} over dimension {dims[0]}: {_EXPECTED_DIM}")
    size = static_size(tensor.shape[-1])
    if size is None:
        raise NotUnderstood(f"{node} takes the {op} over a dimension of unknown size")
    return e.algebra.round(e.algebra.make(op, (a,), size), out.dtype)


def _clamp(e: Operands, node: Node) -> Value:
    """Evaluates `clamp`, `clamp_min`, `clamp_max`, and `maximum` or `minimum` with a constant."""
    out = e.out(node)
    a, _ = e.tensor(_input(node), node)
    op = operation(node)
    if op == "clamp":
        low, high = argument(node, 1, "min"), argument(node, 2, "max")
    else:
        bound = argument(node, 1, "min", "max", "other")
        low, high = (bound, None) if op in ("clamp_min", "maximum") else (None, bound)
    bounds = [None if b is None else number_of(e.operand(b, node, out)) for b in (low, high)]
    if (low is not None and bounds[0] is None) or (high is not None and bounds[1] is None):
        raise NotUnderstood(f"{node} clamps to a tensor: expected numbers as bounds")
    return e.algebra.round(e.algebra.clamp(a, *bounds), out.dtype)


def _constant(e: Operands, node: Node) -> Value:
    """Evaluates `torch.tensor(number)`, `aten.full([], number)` and tensors of zeros."""
    out, op = e.out(node), operation(node)
    number = argument(node, 1, "fill_value") if op == "full" else argument(node, 0, "data", "s")
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if op == "zeros" or (op == "full" and out.dim() and str(number) in _ZEROS):
        return e.algebra.make("zeros", (), None, out.dtype)
    if not is_number or out.dim() or out.dtype != torch.float32:
        raise NotUnderstood
    return e.algebra.const(float(number))


# ---- conversions, copies, views ------------------------------------------------------------------


def _cast(e: Operands, node: Node) -> Value:
    source = _input(node)
    a, tensor = e.tensor(source, node)
    out = e.shapes.of(node)
    if out is None or out.dtype != FP8:
        out = e.out(node)
    if out.device != tensor.device:
        raise NotUnderstood(f"{node} moves {source} to {out.device}")
    return e.held(source) if out.dtype == tensor.dtype else e.algebra.round(a, out.dtype)


def _same(e: Operands, node: Node) -> Value:
    return e.held(e.node(_input(node)))


def _copy(e: Operands, node: Node) -> Value:
    """Evaluates `copy(target, source)`: the source converted to the target's dtype."""
    source = e.node(argument(node, 1, "src", "other"))
    a, tensor = e.tensor(source, node)
    into = e.shapes.of(e.node(_input(node)))
    if into is None or not same_shape(into.shape, tensor.shape) or into.dtype not in FLOATS:
        raise NotUnderstood
    return e.held(source) if into.dtype == tensor.dtype else e.algebra.round(a, into.dtype)


def _view(e: Operands, node: Node) -> Value:
    source = e.node(_input(node))
    value, before, after = e.held(source), e.shapes.of(source), e.shapes.of(node)
    if before is None or after is None or before.dtype != after.dtype:
        raise NotUnderstood
    if value.column or (
        before.dim() and after.dim() and same_shape(before.shape[-1:], after.shape[-1:])
    ):
        return value
    note = f"{node} changes the last dimension: {list(before.shape)} to {list(after.shape)}"
    size, new_size = (static_size(t.shape[-1]) if t.dim() else None for t in (before, after))
    if size is None or new_size is None:
        raise NotUnderstood(note)
    viewed = e.algebra.rows(value, size, new_size)
    if viewed.op == "rows":
        viewed.note = viewed.note or note
    return viewed


def _dropout(e: Operands, node: Node) -> Value:
    drops = argument(node, 2, "training", "train", default=True) is not False
    if drops and argument(node, 1, "p", default=0.5) != 0:
        raise NotUnderstood(f"{node} drops elements at random")
    return _same(e, node)


def _select(e: Operands, node: Node) -> Value:
    dim, index = argument(node, 1, "dim"), argument(node, 2, "index")
    return _column(e, node, dim, index) or _row(e, node, dim, index)


def _slice(e: Operands, node: Node) -> Value:
    """Evaluates a slice that is a column, or a whole dimension, as tracers record it for `x[:]`."""
    start, end = argument(node, 2, "start"), argument(node, 3, "end")
    step = argument(node, 4, "step", default=1)
    if start in (None, 0) and step == 1 and end in (None, sys.maxsize):
        return _same(e, node)
    found = _column(e, node, argument(node, 1, "dim", default=0), slice(start, end, step))
    if found is None:
        raise NotUnderstood
    return found


def _column(e: Operands, node: Node, dim: Any, index: Any) -> Value | None:
    """Evaluates an index into the last dimension that takes one column; None for others."""
    source = e.node(_input(node))
    tensor = e.shapes.of(source)
    width = None if tensor is None or not tensor.dim() else static_size(tensor.shape[-1])
    if tensor is None or width is None or dim not in (-1, tensor.dim() - 1):
        return None
    parts = (index.start, index.stop, index.step) if isinstance(index, slice) else (index,)
    if not all(part is None or isinstance(part, int) for part in parts):
        return None
    if not isinstance(index, slice):
        index = slice(index, index + 1 or None)
    taken, held = range(width)[index], e.held(source)
    if held.column:  # its views may have any shape
        return held if len(taken) == width == 1 else None
    return e.algebra.column(held, taken[0]) if len(taken) == 1 else None


def _pieces(e: Operands, node: Node) -> Value:
    """Evaluates a split of rows into single columns."""
    source, results = e.node(_input(node)), e.shapes.any_of(node)
    place = 1 if plain_name(node) == "unbind" else 2
    dim = argument(node, place, "dim", default=0)
    columns = [_column(e, node, dim, i) for i in range(len(results or ()))]
    tensor = e.shapes.of(source)
    found = tuple(column for column in columns if column is not None)
    if tensor is None or not found or len(found) != static_size(tensor.shape[-1]):
        raise NotUnderstood
    return e.algebra.make("tuple", found, node, None)


def _side_by_side(e: Operands, node: Node) -> Value:
    """Evaluates `cat` or `stack` of columns along the last dimension."""
    tensors, dim = argument(node, 0, "tensors"), argument(node, 1, "dim", "axis", default=0)
    out = e.out(node)
    if not isinstance(tensors, list | tuple) or dim not in (-1, out.dim() - 1):
        raise NotUnderstood
    nodes = [e.node(tensor) for tensor in tensors]
    values = tuple(e.held(one) if out.dtype in HALF else e.tensor(one, node)[0] for one in nodes)
    if len(values) != static_size(out.shape[-1]) or not all(value.column for value in values):
        raise NotUnderstood
    shapes = [e.out(one).shape for one in nodes]
    if operation(node) == "cat" and any(static_size(shape[-1]) != 1 for shape in shapes):
        raise NotUnderstood
    return e.algebra.make("columns", values, None, out.dtype)


def _row(e: Operands, node: Node, dim: Any, index: Any) -> Value:
    """Evaluates `select(1, index)` of a three-dimensional tensor: one of each token's rows."""
    source = e.node(_input(node))
    tensor = e.shapes.of(source)
    count = None
    if tensor is not None and tensor.dim() == 3 and dim in (1, -2) and isinstance(index, int):
        count = e.shapes.in_example(tensor.shape[1])
    if count is None:
        raise NotUnderstood(f"{node} takes a part of {source}")
    return e.algebra.choice(e.held(source), (index % count, count))


def _getitem(e: Operands, node: Node) -> Value:
    source = e.node(node.args[0])
    index: Any = node.args[1]
    value = e.held(source)
    if isinstance(index, tuple) and len(index) == 2:
        if index[0] is Ellipsis and index[1] is None:
            return _view(e, node)
        tensor = e.shapes.of(source)
        if index[0] is Ellipsis or (tensor is not None and tensor.dim() == 2):
            found = _column(e, node, -1, index[1]) if index[0] in (..., slice(None)) else None
            if found is not None:
                return found
        if index[0] == slice(None):
            return _row(e, node, 1, index[1])
    if value.op == "tuple" and isinstance(index, int) and index < len(value.args):
        return value.args[index]
    raise NotUnderstood("" if e.shapes.of(source) is None else f"{node} takes a part of {source}")


# ---- norms ---------------------------------------------------------------------------------------


def _layer_norm(e: Operands, node: Node) -> Value:
    raise NotUnderstood(f"{node} is a layer norm, which subtracts the mean")


def _rms_norm(e: Operands, node: Node) -> Value:
    weight = argument(node, 2, "weight")
    gain = None if weight is None else e.tensor(weight, node)[0]
    shape = argument(node, 1, "normalized_shape")
    normed = _norm(e, node, shape, gain, argument(node, 3, "eps"))
    if not isinstance(e.shapes.any_of(node), tuple | list):
        return normed
    rstd = e.algebra.opaque((normed,), torch.float32)  # the second result of _fused_rms_norm
    return e.algebra.make("tuple", (normed, rstd), node, None)


def _norm(e: Operands, node: Node, shape: Any, gain: Value | None, eps: Any) -> Value:
    """Evaluates `F.rms_norm` like PyTorch: in float32, with a single rounding after the weight."""
    z, tensor = e.tensor(_input(node), node)
    shape = e.shapes.any_of(shape) if isinstance(shape, Node) else shape
    sizes = list(shape) if isinstance(shape, tuple | list) else [shape]
    if len(sizes) != 1:
        raise NotUnderstood(f"{node} norms over {len(sizes)} dimensions: {_EXPECTED_DIM}")
    size = static_size(e.shapes.any_of(sizes[0]) if isinstance(sizes[0], Node) else sizes[0])
    if size is None:
        raise NotUnderstood(f"{node} norms over a dimension of unknown size")
    if eps is None:
        eps = torch.finfo(torch.float32).eps  # PyTorch's default
    e.check_known(eps, node)
    if not isinstance(eps, int | float):
        raise NotUnderstood(f"{node} has an eps that is not a number")
    make = e.algebra
    mean = make.make("mean", (make.unary("square", z),), size)
    rstd = make.unary("rsqrt", make.binary("add", mean, make.const(float(eps))))
    product = make.binary("mul", z, rstd)
    if gain is not None:
        product = make.binary("mul", product, gain)
    return make.round(product, tensor.dtype)


# ---- quantization in blocks ----------------------------------------------------------------------


def _blocks(e: Operands, node: Node) -> Value:
    """Evaluates rows quantized to MXFP8 or NVFP4, together with their scales."""
    y, given, *spec = node.args
    rows, _ = e.tensor(y, node)
    operands = (rows,) if given is None else (rows, e.held(e.node(given)))
    return e.algebra.make("blocks", operands, tuple(spec), None)


def _part(e: Operands, node: Node) -> Value:
    """Evaluates one part of `blocks`: the quantized rows or the scales."""
    blocks, index, _ = node.args
    out = e.shapes.of(node)
    if out is None:
        raise NotUnderstood
    return e.algebra.make("part", (e.held(e.node(blocks)),), (index, out.dtype), out.dtype)


# ---- modules -------------------------------------------------------------------------------------


def _called(node: Node) -> Any:
    """Returns the called module. Raises if it may compute something different from its class."""
    module: Any = module_of(node)
    problem = plain_module(module)
    if problem:
        raise NotUnderstood(f"{node} calls a module that {problem}")
    return module


def _rms_norm_module(e: Operands, node: Node) -> Value:
    module, gain = _called(node), None
    if module.weight is not None:
        if module.weight.dtype not in FLOATS:
            raise NotUnderstood(f"{node} has a weight of {module.weight.dtype}")
        gain = e.algebra.up(e.parameter(f"{node.target}.weight", module.weight))
    return _norm(e, node, module.normalized_shape, gain, module.eps)


def _dropout_module(e: Operands, node: Node) -> Value:
    module = _called(node)
    if module.training and module.p != 0:
        raise NotUnderstood(f"{node} drops elements at random")
    return _same(e, node)


def _identity_module(e: Operands, node: Node) -> Value:
    _called(node)
    return _same(e, node)


Rule = Callable[[Operands, Node], Value]
RULES: dict[str, Rule] = {
    **dict.fromkeys(("add", "mul", "div", "pow"), _binary),
    **dict.fromkeys(("square", "rsqrt", "sqrt", "reciprocal", "abs"), _unary),
    **dict.fromkeys(("mean", "sum", "amax"), _over_row),
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max", "maximum", "minimum"), _clamp),
    **dict.fromkeys(("tensor", "full", "zeros"), _constant),
    **dict.fromkeys(("same", "wait"), _same),
    "blocks": _blocks,
    "part": _part,
    "select": _select,
    "slice": _slice,
    "pieces": _pieces,
    **dict.fromkeys(("cat", "stack"), _side_by_side),
    "max": _max,
    "cast": _cast,
    "copy": _copy,
    "view": _view,
    "dropout": _dropout,
    "getitem": _getitem,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
}
MODULES: dict[type, Rule] = {
    torch.nn.RMSNorm: _rms_norm_module,
    torch.nn.LayerNorm: _layer_norm,
    torch.nn.Dropout: _dropout_module,
    torch.nn.Identity: _identity_module,
}
