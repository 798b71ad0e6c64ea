"""Merges norms of rows that are spread over the ranks: one call norms independent tensors.

A graph may reduce the sums of squares of q and of k separately. `rms_norm_sharded` norms both in
one launch, if neither depends on the other's result.

Two reductions are merged only if no other reduction lies between them in the graph. Their call
could otherwise come before that reduction on one rank and after it on a different one, if the
ranks' graphs differ, and both ranks would wait for each other.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from allnorm.compile.candidate import Match, Missed
from allnorm.compile.safety import check_order
from allnorm.compile.sharded import ShardedMatch, check_slices
from allnorm.compile.values import Values
from allnorm.core import _native

_Call = Match | ShardedMatch


def merge(
    values: Values, matches: Sequence[_Call | None], communicators: Sequence[Hashable]
) -> list[_Call | None]:
    """Returns the call of each reduction of a graph; merged reductions have the same call.

    Args:
        values: the graph's expressions.
        matches: each reduction's own call, in graph order; None if the reduction was missed.
        communicators: for each reduction, a value that is equal for the same communicator.
    """
    calls = list(matches)
    for index in range(1, len(calls)):
        first, second = calls[index - 1 : index + 1]
        if not isinstance(first, ShardedMatch) or not isinstance(second, ShardedMatch):
            continue
        if communicators[index - 1] != communicators[index]:
            continue
        others = {id(call): call for call in calls if call is not None}
        del others[id(first)], others[id(second)]
        both = _merged(values, first, second, [*others.values()])
        if both is not None:
            calls = [both if call is first or call is second else call for call in calls]
    return calls


def _merged(
    values: Values, first: ShardedMatch, second: ShardedMatch, others: Sequence[_Call]
) -> ShardedMatch | None:
    """Returns one call that replaces two; None if there is none.

    `others` are the graph's other calls.
    """
    slices = [*first.slices, *second.slices]
    if first.numerics != second.numerics or len(slices) > _native.MAX_SLICES:
        return None
    try:
        check_slices(values, slices, first.world_size)
    except Missed:
        return None
    members = sorted({*first.members, *second.members}, key=values.position.__getitem__)
    numbers = first.numbers | second.numbers
    both = replace(first, slices=slices, members=members, numbers=numbers)
    if not both.served_nodes(values).keys().isdisjoint(both.inputs):
        return None
    return None if check_order(values, both, others, numbers) else both
