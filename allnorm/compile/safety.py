"""What makes a replacement wrong although the arithmetic is right: other readers, writes, order."""

from __future__ import annotations

from torch.fx import Node

from allnorm.compile.candidate import Match
from allnorm.compile.expressions import Value
from allnorm.compile.shapes import same_shape
from allnorm.compile.values import Values


def depends_on(node: Node, reduction: Node, position: dict[Node, int]) -> bool:
    """Whether a node is computed from a reduction, through memory or not."""
    pending, seen = [node], {node}
    while pending:
        current = pending.pop()
        if current is reduction:
            return True
        for source in current.all_input_nodes:
            if source not in seen and position[source] >= position[reduction]:
                seen.add(source)
                pending.append(source)
    return False


def check_escapes(values: Values, match: Match) -> str:
    """Who else needs what the fused call does not return. Empty if nobody.

    The call returns the normed tensor and the rounded sum. Whatever else is computed from the
    reduced tensor must end in the call, or the reduction would have to be done twice.
    """
    candidate = match.candidate
    for node in match.inputs:
        if depends_on(node, candidate.reduction.node, values.position):
            return f"{node}, an input of the fused call, is computed from the reduced tensor"
    for value in values.others_of(candidate.reduction.node):
        if value.readers:
            return f"another result of {candidate.reduction.node} is used by {value.readers[0][0]}"
    served = set(candidate.served)
    members = set(match.members)
    # What is computed from the reduced tensor, and where it left the way to the norm.
    left: dict[Value, tuple[Value, Node, Node] | None] = {}
    pending = [] if candidate.reduced in served else [candidate.reduced]
    for value in pending:
        for reader, source in value.readers:
            defined = values.defines.get(reader, [])
            if any(result in served for result in defined):
                continue
            first = left.get(value) or (None if reader in members else (value, source, reader))
            if reader.op == "output" or values.writes_outside(reader):
                return _escape(values, match, *(first or (value, source, reader)))
            for result in defined:
                if result not in left:
                    left[result] = first
                    pending.append(result)
    return _side_effects(values, match)


def _escape(values: Values, match: Match, value: Value, source: Node, reader: Node) -> str:
    candidate = match.candidate
    user = str(reader)
    if reader.op == "output":
        user = "the output of the graph"
    elif reader.all_input_nodes and values.writes_outside(reader):
        user = f"{reader}, which stores it in memory that is seen outside the graph"
    if value is candidate.reduced:
        return (
            f"the reduced tensor itself is needed too, by {user}: with a residual the fused call "
            "returns only the sum with it"
        )
    if value in (candidate.sum32, candidate.norm.product, candidate.norm.rstd):
        return (
            f"{source} is needed unrounded, by {user}: the fused call returns the rounded sum and "
            "the normed tensor only"
        )
    return (
        f"{source}, computed from the reduced tensor, is needed too, by {user}: with the residual "
        "the fused call returns only the sum and the normed tensor"
    )


def _side_effects(values: Values, match: Match) -> str:
    """Memory that the graph writes in place, and that others see in another way."""
    candidate = match.candidate
    kept = set(candidate.values)
    for node in match.members:
        if values.writes_of(node) and not values.writes_outside(node):
            for value in values.defines[node]:
                if value not in kept and value.readers:
                    return f"{value.readers[0][0]} reads memory that {node} overwrites"
    for value in candidate.served:
        for holder in value.holders:
            tensor, since = values.shapes.of(holder), values.held_since(holder, value)
            own = since is None or since == values.position[holder]
            if tensor is None or own or same_shape(tensor.shape, match.shape):
                continue
            users = [user for user in holder.users if values.position[user] > (since or 0)]
            if users:
                return f"{users[0]} reads {holder}, which sees the result in another shape"
    return ""


def check_positions(values: Values, match: Match) -> str:
    """Places the call behind its inputs, and before everybody who reads its results."""
    candidate, position = match.candidate, values.position
    match.after = max(position[candidate.reduction.node] - 1, *(position[n] for n in match.inputs))
    goes = {
        node
        for node in match.members
        if not values.writes_outside(node) and not values.is_separate(node, match.shape)
    }
    for value in candidate.served:
        readers = [reader for reader, _ in value.readers]
        for reader in [*readers, *filter(values.writes_outside, value.definers)]:
            if position[reader] <= match.after and reader not in goes:
                late = max(match.inputs, key=position.__getitem__)
                return f"{reader} needs the result before {late}, an input of the call, is ready"
    return ""


def check_writes(values: Values, match: Match) -> str:
    """Writes to any of the memory involved while the call replaces what reads and writes it."""
    candidate, shapes = match.candidate, values.shapes
    members = set(match.members)
    related = {shapes.storage(node): node for node in (*match.members, *match.inputs)}
    for value in candidate.values:
        related.update({shapes.storage(node): node for node in value.holders})
    begin = values.position[candidate.reduction.node]
    results_at = (values.position[value.definers[0]] for value in candidate.served)
    end = max(match.after, *results_at)
    results = [
        {
            shapes.storage(source)
            for reader, source in value.readers
            if reader not in members and not values.is_separate(source, match.shape)
        }
        for value in candidate.served
    ]
    for write in values.writes:
        if write.node in members or write.position < begin:
            continue
        if write.position <= end and write.storage in related:
            return (
                f"{write.node} writes to the memory of {related[write.storage]} between the "
                "reduction and the norm"
            )
        if any(write.storage in memory and len(memory) > 1 for memory in results):
            return f"{write.node} writes later to one of several tensors that hold the result"
    return ""
