"""Finds the sum over experts before a reduction: step 0 of the numerics page.

The grammar, in float32 arithmetic, where `rows` is [num_tokens, top_k, hidden_size]:

    x     = round(total | add(total, up(shared)))
    total = choices(term)                                  at most two of them
          | add(... add(zeros, term of choice 0) ..., term of the last)
    term  = up(rows) | mul(up(rows), weights)              weights are one column

`choices` is `torch.sum` over the choices. It starts at zero and adds in an unspecified order, so it
is guaranteed to equal step 0 only for at most two choices. If weighted rows are rounded before the
sum, the rounded rows are the `rows`, and `weights` is absent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from allnorm.compile.candidate import Experts, Match, Missed
from allnorm.compile.expressions import Value
from allnorm.compile.values import Values
from allnorm.names import TOP_K


@dataclass(frozen=True)
class _Sum:
    term: Value
    top_k: int
    shared: Value | None = None


def place_experts(values: Values, match: Match) -> str:
    """Makes the call sum the experts' rows, if the reduced tensor is a sum over experts.

    Returns:
        Why the call cannot sum the rows; empty if it can, or if the tensor is not a sum over
        experts.
    """
    candidate = match.candidate
    x, reduced = candidate.reduction.x, candidate.reduced
    if x is None or candidate.is_local or reduced.dtype is None or values.context.written:
        return ""
    try:
        found = _parse(values.held[x], reduced.dtype)
        if found is not None:
            match.experts = _place(values, match, found, reduced.dtype)
    except Missed as missed:
        return f"the sum over experts before it is not fused: {missed}"
    return ""


def _parse(x: Value, dtype: torch.dtype) -> _Sum | None:
    """Returns the sum over choices that a tensor holds; None if it holds no such sum.

    Raises:
        Missed: the tensor holds a similar sum, but one that differs from step 0.
    """
    total = x if dtype == torch.float32 else _without("round", x)
    found = _total(total)
    if found is not None or total.op != "add":
        return found
    for shared in reversed(total.args):
        first = total.other(shared)
        found = _total(first)
        if found is not None:
            given = shared if dtype == torch.float32 else _without("up", shared)
            return _Sum(found.term, found.top_k, given)
        if first.op == "up" and _total(_without("round", first.args[0])) is not None:
            raise Missed("it is rounded before the shared expert is added")
    return None


def _without(op: str, value: Value) -> Value:
    return value.args[0] if value.op == op else value


def _total(value: Value) -> _Sum | None:
    if value.op == "choices":
        if value.attr > 2:
            raise Missed(
                f"PyTorch adds {value.attr} rows in an unspecified order, allnorm in the order of "
                "the choices"
            )
        return _Sum(value.args[0], value.attr)
    terms: list[Value] = []
    while value.op == "add":
        last = next((arg for arg in value.args if _choice(arg) is not None), None)
        if last is None:
            return None
        terms.insert(0, last)
        value = value.other(last)
    choices = [_choice(term) for term in terms]
    if not choices or _without("up", value).op != "zeros":
        return None
    term, (_, top_k) = choices[0] or (None, (0, 0))
    if term is None or choices != [(term, (k, top_k)) for k in range(top_k)]:
        raise Missed("it does not add each choice once, in order")
    return _Sum(term, top_k)


def _choice(value: Value) -> tuple[Any, tuple[int, int]] | None:
    """Returns ((rows, weights), (choice, number of choices)) of a term; None for other values."""
    if value.op == "choice":
        return value.args[0], value.attr
    if value.op != "mul" or any(arg.op != "choice" for arg in value.args):
        return None
    rows, weights = value.args
    if rows.attr != weights.attr:
        raise Missed("a row is multiplied by the weight of a different choice")
    return frozenset((rows.args[0], weights.args[0])), rows.attr


def _place(values: Values, match: Match, found: _Sum, dtype: torch.dtype) -> Experts:
    x = match.candidate.reduction.x
    assert x is not None
    if found.top_k not in TOP_K:
        raise Missed(f"it adds {found.top_k} rows: expected {TOP_K[0]} to {TOP_K[-1]}")
    if match.x is not x or match.view_x is not None or match.lead_x or len(match.shape) != 2:
        raise Missed("the reduced tensor is not a matrix, or the residual has a different shape")
    held = values.held[x]
    readers = [node for node, _ in held.readers if node not in held.definers]
    readers += [node for node, _ in held.questions]
    others = [node for node in readers if node is not match.candidate.reduction.node]
    if others:
        raise Missed(f"{values.name_of(others[0])} reads the sum before it is reduced")
    tokens, hidden_size = match.shape
    factors: Sequence[Value] = (found.term,)
    if not isinstance(found.term, Value):
        factors = tuple(found.term)
    elif found.term.op == "mul":
        factors = found.term.args
    shape = [tokens, found.top_k, hidden_size]
    for rows32 in factors:
        weights = next((factor for factor in factors if factor is not rows32), None)
        rows = rows32 if dtype == torch.float32 else _without("up", rows32)
        node = _holder(values, rows, shape, dtype, x)
        if node is None:
            continue
        weighted = None if weights is None else _weights(values, weights, shape[:2], x)
        shared = None
        if found.shared is not None:
            shared = _holder(values, found.shared, match.shape, dtype, x)
            if shared is None:
                raise Missed(
                    "what is added to the experts' sum is not a tensor of its shape and dtype"
                )
        return Experts(node, found.top_k, weighted, shared)
    raise Missed(f"its rows are not one tensor of shape [num_tokens, {found.top_k}, hidden_size]")


def _weights(values: Values, weights: Value, shape: Sequence[Any], x: Node) -> Node:
    """Returns the node of the weights: [num_tokens, top_k], or [num_tokens, top_k, 1]."""
    node = None
    if weights.op == "rows":
        node = _holder(values, weights.args[0], shape, torch.float32, x)
    node = node or _holder(values, weights, [*shape, 1], torch.float32, x)
    if node is None:
        raise Missed("its weights are not a float32 tensor with one number per row")
    return node


def _holder(
    values: Values, value: Value, shape: Sequence[Any], dtype: torch.dtype, x: Node
) -> Node | None:
    """Returns a node that holds `value` in this shape and dtype, on the device of `x`, or None."""
    like = values.shapes.of(x)
    assert like is not None
    tensors = map(values.shapes.of, value.holders)
    for size in [t.shape[1] for t in tensors if t is not None and t.dim() == len(shape) > 2]:
        if values.shapes.in_example(size) == shape[1]:
            values.shapes.fix(size)
    return values.holder(value, shape, dtype, like.device)
