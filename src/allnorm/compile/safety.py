"""Checks that a match is safe: no other readers, no dependency cycles, no writes to its memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch.fx import Node

from allnorm.compile.candidate import Fused, Match
from allnorm.compile.expressions import Value
from allnorm.compile.shapes import same_shape
from allnorm.compile.values import Values
from allnorm.compile.vocabulary import argument, is_pure, operation, written

_ABOUT_SHAPES = {"shape", "ndim", "size", "dim", "ndimension", "numel", "nelement"}


def check_escapes(values: Values, match: Match) -> str:
    """Returns "", or a reason: some node still reads a value that the call removes.

    The call returns only the normed tensor and the rounded sum. Any other value that is computed
    from the reduced tensor must be used only to compute these results, or not at all.
    """
    candidate = match.candidate
    for value in values.results_of(candidate.reduction.node):
        if value.op != "reduced" and value.readers:
            return f"another result of {candidate.reduction.node} is used by {value.readers[0][0]}"
    served, members = set(candidate.served), set(match.members)
    pending = [] if candidate.reduced in served or candidate.is_local else [candidate.reduced]
    for value in pending:
        for reader, source in value.readers:
            defined = values.results_of(reader)
            if any(result in served for result in defined):
                for other in defined:
                    if other.readers and other not in served:
                        return _escape(values, match, other, reader, other.readers[0][0])
                continue
            if reader not in members:
                is_reduction = reader in values.reduced
                if reader.op == "output" or is_reduction or reader.users or not is_pure(reader):
                    return _escape(values, match, value, source, reader)
                match.dead.append(reader)
            pending += [result for result in defined if result not in pending]
    for value in candidate.values:
        for question, source in value.questions:
            concerned = value in pending or source in members
            if concerned and not (
                is_answered(values, question) or answer(values, match, question, source)
            ):
                if operation(question) == "" and question.op != "output":
                    return (
                        f"{values.name_of(question)} queries {values.name_of(source)}, which the "
                        "fused call does not return, and no earlier input of the call gives the "
                        "same answer"
                    )
                return _escape(values, match, value, source, question)
    return ""


def is_answered(values: Values, question: Node) -> bool:
    """Returns whether a query is an assertion about a tensor that is known to hold."""
    if operation(question) or question.target is not torch.ops.aten._assert_tensor_metadata.default:
        return False
    tensor = values.shapes.of(question.all_input_nodes[0])
    dtype = argument(question, 3, "dtype")
    device = question.kwargs.get("device")
    return (
        tensor is not None
        and all(argument(question, i, n) is None for i, n in ((1, "size"), (2, "stride")))
        and dtype in (None, tensor.dtype)
        and (device is None or torch.device(str(device)) == tensor.device)
    )


def answer(values: Values, match: Match, question: Node, source: Node) -> Node | None:
    """Returns one of the call's inputs that answers a query like `source` does, or None."""
    name = question.args[1] if question.target is getattr else str(question.target)
    asked = str(name).removeprefix("aten.").removeprefix("sym_").split(".")[0]
    about = values.shapes.of(source)
    nodes = [match.candidate.reduction.x, match.x]
    scatters = match.candidate.reduction.scatters
    has_other_shape = scatters or match.candidate.streams is not None
    if (match.experts is not None or has_other_shape) and not match.late:
        nodes.insert(0, match.residual)  # the call may replace `x`, or `x` has another shape
    for node in nodes:
        tensor = None if node is None else values.shapes.of(node)
        if node is None or about is None or tensor is None:
            continue
        if values.position[node] > values.position[question]:
            continue  # the input may depend on the answer
        same_type = tensor.dtype == about.dtype or asked in _ABOUT_SHAPES
        if same_type and tensor.device == about.device and same_shape(tensor.shape, about.shape):
            return node
    return None


def _escape(values: Values, match: Match, value: Value, source: Node, reader: Node) -> str:
    candidate, name = match.candidate, values.name_of
    user = name(reader)
    if reader.op == "output":
        user = "the output of the graph"
    elif written(reader):
        user = f"{name(reader)}, which stores it in memory that is visible outside the graph"
    if value is candidate.reduced:
        in_place = values.maker_of(candidate.reduction.node) in values.context.in_place
        if in_place and not written(reader):
            return (
                f"{user} reads memory that {name(candidate.reduction.node)} overwrites with the "
                "reduced tensor, but the fused call returns only its sum with the residual"
            )
        return (
            f"the reduced tensor itself is also used by {user}, but the fused call returns only "
            "its sum with the residual"
        )
    float32 = [value for norm in candidate.norms for value in (norm.product, norm.rstd)]
    if value in (candidate.sum32, *float32):
        return (
            f"{user} uses the unrounded {name(source)}: the fused call returns only the rounded "
            "sum and the normed tensor"
        )
    return (
        f"{name(source)}, computed from the reduced tensor, is also used by {user}: the fused call "
        "returns only the sum with the residual and the normed tensor"
    )


def check_order(
    values: Values, match: Fused, accepted: Sequence[Fused], more: Collection[Node] = ()
) -> str:
    """Returns "", or a reason: one of the call's inputs depends on its result.

    The call needs all of its inputs for each of its results. The nodes that it replaces do not.
    `more` are nodes that must also precede the call.
    """
    position, begin = values.position, values.position[match.reduction.node]
    match.late = any(position[node] > begin and node.op != "get_attr" for node in match.inputs)
    if not match.late and not more and not any(other.late for other in accepted):
        return ""
    calls = {node: other for other in accepted for node in other.served_nodes(values)}
    given = dict.fromkeys((*match.inputs, *more))
    served, seen = match.served_nodes(values), set(given)
    order = [node for node in values.ordered if node not in match.members]
    before = dict(zip(order[1:], order, strict=False))
    pending = [(node, node) for node in given]
    for node, late in pending:
        needed = calls[node].inputs if node in calls else node.all_input_nodes
        for source in [*needed, *([before[node]] if node in before else [])]:
            if source in served:
                return (
                    f"{values.name_of(late)}, an input of the fused call, depends on the call's "
                    f"result through {values.name_of(node)}"
                )
            if source not in seen:
                seen.add(source)
                pending.append((source, late))
    return ""


def check_memory(values: Values, match: Match) -> str:
    """Returns "", or a reason: some node writes to the match's memory."""
    holders = [node for value in match.candidate.values for node in value.holders]
    nodes = (*match.members, *match.inputs, *holders)
    return next(filter(None, map(values.written_by, nodes)), "")
