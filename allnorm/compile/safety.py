"""What makes a replacement wrong although the arithmetic is right: other readers, order, writes."""

from __future__ import annotations

import torch
from torch.fx import Node

from allnorm.compile.candidate import Match
from allnorm.compile.expressions import Value
from allnorm.compile.shapes import same_shape
from allnorm.compile.values import Values
from allnorm.compile.vocabulary import argument, is_pure, operation, written

_ABOUT_SHAPES = {"shape", "ndim", "size", "dim", "ndimension", "numel", "nelement"}


def check_escapes(values: Values, match: Match) -> str:
    """Who else needs what the fused call does not return. Empty if nobody.

    The call returns the normed tensor and the rounded sum. Whatever else is computed from the
    reduced tensor must end in the call, or the reduction would have to be done twice; or nowhere.
    """
    candidate = match.candidate
    for value in values.others_of(candidate.reduction.node):
        if value.readers:
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
            if reader not in members and not _is_for_nobody(values, reader):
                return _escape(values, match, value, source, reader)
            if reader not in members:
                match.dead.append(reader)
            pending += [result for result in defined if result not in pending]
    for value in candidate.values:
        for question, source in value.questions:
            concerned = value in pending or source in members
            if concerned and not (
                is_answered(values, question) or answer(values, match, question, source)
            ):
                return _escape(values, match, value, source, question)
    return ""


def is_answered(values: Values, question: Node) -> bool:
    """Whether a question is an assertion that is true of the tensor that it is about."""
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
    """Another tensor of which a question has the same answer, ready where the reduction is."""
    name = question.args[1] if question.target is getattr else str(question.target)
    asked = str(name).removeprefix("aten.").removeprefix("sym_").split(".")[0]
    about = values.shapes.of(source)
    for node in (match.candidate.reduction.x, match.x):
        tensor = None if node is None else values.shapes.of(node)
        if node is None or about is None or tensor is None:
            continue
        if values.position[node] > values.position[question]:
            continue
        same_type = tensor.dtype == about.dtype or asked in _ABOUT_SHAPES
        if same_type and tensor.device == about.device and same_shape(tensor.shape, about.shape):
            return node
    return None


def _is_for_nobody(values: Values, node: Node) -> bool:
    """Whether a node could as well not be there."""
    return node.op != "output" and node not in values.reduced and not node.users and is_pure(node)


def _escape(values: Values, match: Match, value: Value, source: Node, reader: Node) -> str:
    candidate, name = match.candidate, values.name_of
    user = name(reader)
    if reader.op == "output":
        user = "the output of the graph"
    elif written(reader):
        user = f"{name(reader)}, which stores it in memory that is seen outside the graph"
    if value is candidate.reduced:
        if values.was_in_place(candidate.reduction.node) and not written(reader):
            return (
                f"{user} reads memory that {name(candidate.reduction.node)} overwrites with the "
                "reduced tensor: with a residual the fused call returns only the sum with it"
            )
        return (
            f"the reduced tensor itself is needed too, by {user}: with a residual the fused call "
            "returns only the sum with it"
        )
    if value in (candidate.sum32, candidate.norm.product, candidate.norm.rstd):
        return (
            f"{name(source)} is needed unrounded, by {user}: the fused call returns the rounded "
            "sum and the normed tensor only"
        )
    return (
        f"{name(source)}, computed from the reduced tensor, is needed too, by {user}: with the "
        "residual the fused call returns only the sum and the normed tensor"
    )


def check_positions(values: Values, match: Match, accepted: list[Match]) -> str:
    """Places the call behind its inputs, and before everybody who reads its results."""
    candidate, position = match.candidate, values.position
    ready = {value: other.after for other in accepted for value in other.candidate.served}
    moved = {node: other.after for other in accepted for node in other.moved}

    def ready_at(node: Node) -> int:
        held = [ready[value] for value in values.held_by(node) if value in ready]
        return max(position[node], moved.get(node, -1), *held)

    late = max(match.inputs, key=ready_at)
    match.after = max(match.begin(values) - 1, ready_at(late))
    goes, members = _vanishing(values, match), set(match.members)
    early = [reader for value in candidate.served for reader, _ in value.readers]
    for reader in early:
        if position[reader] > match.after or reader in goes or reader in match.moved:
            continue
        if reader not in members or values.writes or not is_pure(reader):
            return (
                f"{values.name_of(reader)} needs the result before {values.name_of(late)}, an "
                "input of the call, is ready"
            )
        match.moved.append(reader)
        early += [user for user in reader.users if not values.is_question(user)]
    served = set(candidate.served)
    for other in accepted:
        near = match.begin(values) - 1 <= other.after <= match.after
        if near and any(v in served for node in other.inputs for v in values.held_by(node)):
            name = other.candidate.reduction.node
            return f"{name}, which is fused, needs the result before"
    return ""


def _vanishing(values: Values, match: Match) -> set[Node]:
    """The members that nobody uses once the call stands for them."""
    members = {*match.members, *match.dead}
    replaced = {n for value in match.candidate.served for n in match.handed_over(values, value)}
    stays: set[Node] = set()
    for node in reversed(match.members):
        users = (user for user in node.users if not values.is_question(user))
        if node not in replaced and any(u not in members or u in stays for u in users):
            stays.add(node)
    return members - stays


def check_writes(values: Values, match: Match) -> str:
    """Writes to any of the memory involved while the call replaces what reads it."""
    candidate, shapes = match.candidate, values.shapes
    related = {shapes.storage(node): node for node in (*match.members, *match.inputs)}
    for value in candidate.values:
        related.update({shapes.storage(node): node for node in value.holders})
    begin = match.begin(values)
    end = max(match.after, *(values.position[value.definers[0]] for value in candidate.served))
    for write in values.writes:
        if begin <= write.position <= end and write.storage in related:
            return _between(values, write.node, related[write.storage])
        for value in candidate.served:
            owners = values.owners(value)
            if write.storage in owners and write.position >= begin and len(owners) > 1:
                return f"{write.node} writes later to one of several tensors that hold the result"
    inputs = {shapes.storage(node) for node in match.inputs}
    last = max((value.definers[0] for value in candidate.served), key=values.position.__getitem__)
    for node, target in values.writes_between(
        candidate.reduction.node, last, match.members, candidate.served
    ):
        if shapes.storage(target) in inputs or node in map(values.maker_of, match.inputs):
            return _between(values, node, target)
    return ""


def _between(values: Values, write: Node, of: Node) -> str:
    return (
        f"{values.name_of(write)} writes to the memory of {values.name_of(of)} between the "
        "reduction and the norm"
    )
