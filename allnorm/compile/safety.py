"""What makes a replacement wrong although the arithmetic is right: other readers, writes, order."""

from __future__ import annotations

from torch.fx import Node

from allnorm.compile.candidate import Match
from allnorm.compile.expressions import Value
from allnorm.compile.shapes import same_shape
from allnorm.compile.values import Values, Write


def check_escapes(values: Values, match: Match) -> str:
    """Who else needs what the fused call does not return. Empty if nobody.

    The call returns the normed tensor and the rounded sum. Whatever else is computed from the
    reduced tensor must end in the call, or the reduction would have to be done twice; or nowhere.
    """
    candidate = match.candidate
    for value in values.others_of(candidate.reduction.node):
        if value.readers:
            return f"another result of {candidate.reduction.node} is used by {value.readers[0][0]}"
    served = set(candidate.served)
    if candidate.reduced not in served:
        for writer in filter(values.writes_outside, candidate.reduced.definers):
            return _escape(values, match, candidate.reduced, writer, writer)
    members = set(match.members)
    pending = [] if candidate.reduced in served else [candidate.reduced]
    goes = set() if candidate.reduced in served else set(candidate.reduced.definers)
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
            if reader in members and values.writes_outside(reader):
                return _escape(values, match, value, source, reader)
            if reader not in members:
                match.dead.append(reader)
            goes.add(reader)
            pending += [result for result in defined if result not in pending]
    for node in goes:
        for user in node.users:
            if user not in goes and user not in members:
                return f"{user} writes to the memory of {node}, which the fused call does without"
    return _side_effects(values, match)


def _is_for_nobody(values: Values, node: Node) -> bool:
    """Whether a node could as well not be there."""
    return (
        node.op != "output"
        and node not in values.reduced
        and not node.users
        and not values.writes_outside(node)
        and not any(value.readers for value in values.defines.get(node, []))
    )


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
        if not values.writes_outside(node) and not values.is_kept(node, match.shape)
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
    members = {*match.members, *match.dead}
    related = {shapes.storage(node): node for node in (*match.members, *match.inputs)}
    for value in candidate.values:
        related.update({shapes.storage(node): node for node in value.holders})
    begin = values.position[candidate.reduction.node]
    results_at = (values.position[value.definers[0]] for value in candidate.served)
    end = max(match.after, *results_at)
    for write in values.writes:
        if write.node in members or write.position < begin:
            continue
        if write.position <= end and write.storage in related:
            return (
                f"{write.node} writes to the memory of {related[write.storage]} between the "
                "reduction and the norm"
            )
        for value in candidate.served:
            problem = _write_to_result(values, match, value, write)
            if problem:
                return problem
    return ""


def _write_to_result(values: Values, match: Match, value: Value, write: Write) -> str:
    """Whether a later write to a result can be repeated on the one tensor that stands for it."""
    owners = values.owners(value)
    if write.storage not in owners:
        return ""
    if any(values.position[node] > write.position for node in values.computed_by(value)):
        return f"{write.node} writes to memory in which the same result is computed again"
    members = {*match.members, *match.dead}
    used = {
        storage
        for storage in owners
        for node in values.in_memory(storage)
        if any(user not in members for user in node.users)
    }
    if len(used) > 1:
        return f"{write.node} writes later to one of several tensors that hold the result"
    return ""
