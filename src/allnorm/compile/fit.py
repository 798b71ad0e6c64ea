"""Turns a candidate into a match: finds its input nodes, and checks their shapes and uses."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.fx import Node

from allnorm.compile.candidate import Candidate, Fused, Match, Missed, Weight
from allnorm.compile.expressions import Value
from allnorm.compile.norms import Output, split_gain
from allnorm.compile.quantize import Quantization
from allnorm.compile.safety import check_escapes, check_memory, check_order
from allnorm.compile.shapes import (
    has_contiguous_rows,
    is_contiguous,
    is_row,
    leads_to,
    same_shape,
    static_size,
    storage_of,
)
from allnorm.compile.values import Values
from allnorm.compile.vocabulary import operation


def fit(values: Values, candidate: Candidate, accepted: list[Fused]) -> Match:
    """Returns the fused call for a candidate. Raises Missed, with the reason, if none is possible.

    `accepted` has the matches that were accepted before.
    """
    x = candidate.reduction.x
    if candidate.is_local:
        x = candidate.reduced.definers[0]
    assert x is not None
    scatters = candidate.reduction.scatters
    before = run = _tensor(values, candidate.reduction.node if scatters else x)
    adder = _adder(candidate)
    if adder is not None:
        run = _first_tensor(values, adder)
    if scatters and not same_shape(before.shape, run.shape):
        raise Missed(f"{adder} adds the residual in a shape other than that of the rank's rows")
    for norm in candidate.norms:
        if norm.hidden_size != run.shape[-1]:
            raise Missed(
                f"the norm covers {norm.hidden_size} of the {run.shape[-1]} elements of a row"
            )
    weight = weight_of(values, candidate.reduced, candidate.output, run)
    post_weight = weight_of(values, candidate.reduced, candidate.branch.output, run)
    match = Match(candidate, run.shape, x, None, weight, post_weight)
    if adder is not None:
        _place_residual(values, match, run, adder)
    place_x(values, match, before, run)
    place_results(values, match, run)
    if candidate.quantization is not None:
        _place_quantization(values, match, candidate.quantization, run)
    return complete(values, match, accepted)


def complete(values: Values, match: Match, accepted: list[Fused]) -> Match:
    """Finds the nodes that a match replaces. Raises Missed if replacing them is not safe."""
    candidate = match.candidate
    if values.maker_of(candidate.served[-1].definers[0]) in values.context.differentiated:
        raise Missed(
            "its result needs a gradient, which the fused call does not compute: run under "
            "torch.no_grad(), or fuse after autograd, as inductor_pass does"
        )
    members = set() if candidate.is_local else {candidate.reduction.node}
    for value in candidate.values:
        # Copies of results stay; copies of intermediate values are removed.
        served = value in candidate.served
        members.update(values.computed_by(value) if served else value.definers)
    if candidate.is_local:
        members.discard(match.x)
    match.members = sorted(members, key=values.position.__getitem__)
    for node in match.members:
        unread = [user for user in node.users if operation(user) == "getitem" and not user.users]
        match.dead += [result for result in unread if result not in members]
    if values.shapes.has_real_examples:
        match.numbers = numbers_of(values, match.members)
    problem = (
        check_escapes(values, match)
        or check_memory(values, match)
        or check_order(values, match, accepted)
    )
    if problem:
        raise Missed(problem)
    return match


def numbers_of(values: Values, members: Iterable[Node]) -> dict[Node, object]:
    """Returns the numbers, shapes and dtypes that the graph computes for a match's members."""
    found: dict[Node, object] = {}
    for node in members:
        for source in node.all_input_nodes:
            value = values.shapes.any_of(source)
            if isinstance(value, int | float | torch.dtype | torch.device):
                found[source] = value
            elif isinstance(value, tuple | list) and all(isinstance(v, int) for v in value):
                found[source] = tuple(value)
    return found


def _tensor(values: Values, node: Node) -> Tensor:
    tensor = values.shapes.of(node)
    if tensor is None:
        raise Missed(f"the shape of {node} is unknown: register a fake for the operators before it")
    return tensor


def _first_tensor(values: Values, node: Node) -> Tensor:
    """Returns a node's first result, whose shape decompositions use for the residual add."""
    results = values.shapes.any_of(node)
    if isinstance(results, tuple | list) and results and isinstance(results[0], Tensor):
        return results[0]
    return _tensor(values, node)


def _adder(candidate: Candidate) -> Node | None:
    """Returns the node that adds the residual."""
    if candidate.residual is None:
        return None
    if candidate.sum32.definers:
        return candidate.sum32.definers[0]
    assert candidate.summed is not None
    return candidate.summed.definers[0]


def _place_residual(values: Values, match: Match, run: Tensor, adder: Node) -> None:
    candidate = match.candidate
    assert candidate.residual is not None
    origin = values.reduced[candidate.reduction.node]
    if candidate.residual.derives_from(origin):
        raise Missed(f"{adder} adds a tensor that is itself computed from the reduced tensor")
    like = (candidate.residual, run.shape, candidate.residual.dtype, run.device)
    match.residual = values.holder(*like) or values.holder(*like, leading_ones=True)
    if match.residual is None:
        raise Missed(f"what {adder} adds is not a tensor of the reduced tensor's shape and device")
    match.lead_residual = run.dim() - _tensor(values, match.residual).dim()


def weight_of(values: Values, reduced: Value, output: Output | None, run: Tensor) -> Weight | None:
    """Returns the weight of a norm's result, in rows like those of `run`; None without a result.

    Raises Missed, with the reason, if the result is multiplied by something else, or if that is
    computed from the `reduced` tensor.
    """
    if output is None:
        return None
    gain = output.gain
    if gain is None:
        return Weight(None, -0.0)
    strided = ""
    for value, bias in split_gain(gain):
        path = value.attr if value.op == "leaf" and isinstance(value.attr, str) else ""
        if path and _is_weight(values.parameters[path], run):
            if not has_contiguous_rows(values.parameters[path]):
                strided = _strides(path, values.parameters[path])
                continue
            memory = storage_of(values.parameters[path])
            if memory in values.context.written:
                raise Missed(values.context.written[memory])
            return Weight(path, bias)
        for node in value.holders:
            tensor = values.shapes.of(node)
            if tensor is None or not _is_weight(tensor, run):
                continue
            if value.derives_from(reduced):
                raise Missed(f"the weight, {node}, is computed from the reduced tensor")
            if has_contiguous_rows(tensor):
                return Weight(node, bias)
            strided = strided or _strides(node, tensor)
    raise Missed(
        strided
        or "the normed tensor is multiplied by something other than a weight: expected "
        f"{run.shape[-1]} elements, the same for all rows, on the same device"
    )


def _strides(name: object, tensor: Tensor) -> str:
    return (
        f"the weight, {name}, has strides {tuple(tensor.stride())}: expected a contiguous last "
        "dimension. Call weight.contiguous() first"
    )


def _is_weight(tensor: Tensor, run: Tensor) -> bool:
    return (
        is_row(tensor.shape)
        and tensor.device == run.device
        and same_shape(tensor.shape[-1:], run.shape[-1:])
    )


def place_x(values: Values, match: Match, before: Tensor, run: Tensor) -> None:
    """Finds `x` in the shape that the residual is added in, or a view that returns this shape."""
    if same_shape(before.shape, run.shape):
        return
    if leads_to(before.shape, run.shape):
        match.lead_x = run.dim() - before.dim()
        return
    held = values.held[match.x]
    viewed = values.holder(held, run.shape, held.dtype, run.device)
    if viewed is not None:
        match.x = viewed
    else:
        match.view_x = _view_between(values, match.candidate, before, run)
        for node in match.view_x.all_input_nodes[1:]:
            if values.held[node].derives_from(match.candidate.reduced):
                raise Missed(f"the shape of {match.view_x} is computed from the reduced tensor")


def place_results(values: Values, match: Match, run: Tensor) -> None:
    """Finds the views that convert the results, which have the shape of `run`, to the graph's."""
    candidate, quantization = match.candidate, match.candidate.quantization
    blocks = None  # rows that are quantized in blocks have their own shape
    if quantization is not None and quantization.scale_layout:
        blocks = quantization.quantized
    for value in candidate.served:
        handed_over = match.handed_over(values, value)
        if quantization is not None and value is quantization.scale:
            continue
        _tensor(values, value.definers[0])
        for node in handed_over:
            tensor = values.shapes.of(node)
            if tensor is None:
                continue
            if not is_contiguous(tensor):
                raise Missed(
                    f"{node} has strides {tuple(tensor.stride())}: the results of the fused call "
                    "are contiguous"
                )
            if value is not blocks and not same_shape(tensor.shape, run.shape):
                match.views[node] = _view_between(values, candidate, run, tensor, node)


def _place_quantization(
    values: Values, match: Match, quantization: Quantization, run: Tensor
) -> None:
    quantized = _tensor(values, quantization.quantized.definers[0])
    if quantization.scale_layout and not same_shape(quantized.shape[:-1], run.shape[:-1]):
        before, after = tuple(run.shape[:-1]), tuple(quantized.shape[:-1])
        raise Missed(f"the quantized rows have leading dimensions {after}: expected {before}")
    if quantization.scale is not None:
        made = [_tensor(values, node) for node in values.made_by(quantization.scale)]
        if not all(same_shape(tensor.shape, made[0].shape) for tensor in made):
            raise Missed("the quantization's scale is computed in several shapes: expected one")
        _place_scale(match, quantization, _tensor(values, quantization.scale.definers[0]))
    if quantization.static is not None:
        if quantization.static.derives_from(match.candidate.reduced):
            raise Missed("the quantization's static scale is computed from the reduced tensor")
        match.static_scale = _static_scale(values, quantization.static, run)


def _place_scale(match: Match, quantization: Quantization, scale: Tensor) -> None:
    """Accepts contiguous scales in any shape, and other scales in layouts that allnorm writes."""
    match.scale_layout = quantization.scale_layout or match.scale_layout
    if is_contiguous(scale):
        sizes = [static_size(size) for size in scale.shape]
        if len(match.shape) == 2 and scale.dim() > 0 and scale.shape[0] == match.shape[0]:
            sizes[0] = None  # later calls may have a different number of tokens
        if sizes.count(None) > 1:
            shape = tuple(scale.shape)
            raise Missed(f"the scales have several dimensions of unknown size: {shape}")
        match.scale_shape = [-1 if size is None else size for size in sizes]
        return
    tokens, strides = scale.shape[0], scale.stride()
    is_grouped = quantization.group_size > 0 and not quantization.scale_layout
    is_matrix = is_grouped and scale.dim() == 2 and len(match.shape) == 2
    if is_matrix and same_shape(strides, (1, tokens)):
        match.scale_layout = "column_major"
    elif is_matrix and same_shape(strides, (1, (tokens + 3) // 4 * 4)):
        match.scale_layout = "column_major_tma"
    else:
        raise Missed(f"the scales have strides {tuple(strides)}, a layout allnorm does not write")


def _static_scale(values: Values, static: Value, run: Tensor) -> Node:
    for node in static.holders:
        tensor = values.shapes.of(node)
        if (
            tensor is not None
            and tensor.dtype == torch.float32
            and tensor.device == run.device
            and all(static_size(size) == 1 for size in tensor.shape)
        ):
            return node
    raise Missed("the quantization's static scale is not a float32 tensor of one element")


def _view_between(
    values: Values, candidate: Candidate, before: Tensor, after: Tensor, user: Node | None = None
) -> Node:
    """Returns one of the candidate's views that converts one shape to the other.

    `user` is the node that the viewed result replaces. The view must come before `user`, because it
    must not depend on it.
    """
    end = len(values.position) if user is None else values.position[user]
    regrouped = [user for value in candidate.values for user in value.users if user.op == "rows"]
    for value in (*candidate.values, *regrouped):
        for node in value.holders:
            if operation(node) != "view" or not node.all_input_nodes:
                continue
            if values.position[node] > end:
                continue
            source, result = values.shapes.of(node.all_input_nodes[0]), values.shapes.of(node)
            if (
                source is not None
                and result is not None
                and same_shape(source.shape, before.shape)
                and same_shape(result.shape, after.shape)
            ):
                return node
    raise Missed(f"no single view converts {tuple(before.shape)} to {tuple(after.shape)}")
