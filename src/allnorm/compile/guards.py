"""Checks of the fusion's assumptions. A rewritten graph makes them each time it runs.

A tracer may run these functions on fake tensors. They therefore only query sizes, and compare only
the memory of real tensors.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP, ShapeEnv
from torch.fx.node import has_side_effect


def check_inputs(
    tensors: Sequence[Tensor], written: int, sized: Sequence[Tensor], rule: str
) -> None:
    """Raises ValueError unless a graph's inputs meet the fusion's assumptions.

    Args:
        tensors: the inputs; the inputs that the graph writes come first.
        written: number of inputs that the graph writes. They must not share memory with any other
            input.
        sized: the inputs whose sizes are checked.
        rule: the conditions on their `sizes_of`, written as PyTorch guards in which the sizes are
            L['t0'], L['t1'], ...
    """
    sizes = {f"t{index}": size for index, size in enumerate(sizes_of(sized))}
    if rule and not eval(_compiled(rule), SYMPY_INTERP, {"L": sizes}):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in sized)
        raise ValueError(
            f"a graph that allnorm fused was called with inputs of shapes {shapes}, for which it "
            "was not fused. Fuse the graph again with such inputs."
        )
    for index in range(written):
        for other in range(index + 1, len(tensors)):
            if _overlap(tensors[index], tensors[other]):
                raise ValueError(
                    "a graph that allnorm fused writes to an input that shares memory with another "
                    "input, but it was fused for inputs that do not. Pass a copy, or fuse the "
                    "graph again with example inputs that share memory."
                )


def sizes_of(tensors: Sequence[Tensor]) -> list[Any]:
    """Returns each tensor's number of dimensions followed by its sizes."""
    return [size for tensor in tensors for size in (tensor.dim(), *tensor.shape)]


def rule_of(
    env: ShapeEnv, sizes: Sequence[Any], *, bounds: bool, known: list[Any] | None = None
) -> str:
    """Returns the conditions on the `sizes_of` inputs, written as PyTorch guards.

    If `bounds`, they forbid size 1 where the example's size was not 1. `known` has the guards to
    express; None means all of the environment's guards.
    """
    rule = env.produce_guards_expression(sizes, guards=known, ignore_static=False) or ""
    parts = [part for part in rule.split(" and ") if bounds or not _LOWER_BOUND.fullmatch(part)]
    return " and ".join(parts)


def rule_of_tracer(sizes: Sequence[Any]) -> str:
    """Returns the guards on the `sizes_of` inputs that a graph's tracer relied on.

    A graph from `make_fx` does not check them. It may be correct even if they do not hold, because
    operators take sizes from their arguments. A fused graph may then be wrong, because the pass
    compared shapes under these guards. Guards on other symbols are the tracer's responsibility.
    """
    symbolic = [size.node for size in sizes if isinstance(size, torch.SymInt)]
    if not symbolic:
        return ""
    env: ShapeEnv = symbolic[0].shape_env
    symbols = {symbol for node in symbolic for symbol in node.expr.free_symbols}
    known = [guard for guard in env.guards if guard.expr.free_symbols <= symbols]
    return rule_of(env, sizes, bounds=False, known=known)


_LOWER_BOUND = re.compile(r"2 <= L\['t\d+'\]")


def check_values(values: Sequence[Any], expected: Sequence[Any]) -> None:
    """Raises ValueError if a graph computes numbers that differ from a fused call's constants."""
    for value, wanted in zip(values, expected, strict=True):
        if (tuple(value) if isinstance(value, torch.Size | list) else value) != wanted:
            raise ValueError(
                f"a graph that allnorm fused computed {value}, but its fused call was made for "
                f"{wanted}. Fuse the graph again with such inputs."
            )


has_side_effect(check_inputs)
has_side_effect(check_values)


@functools.lru_cache(256)
def _compiled(rule: str) -> Any:
    return compile(rule, "<guards of a graph>", "eval")


def _overlap(a: Tensor, b: Tensor) -> bool:
    if isinstance(a, FakeTensor) or isinstance(b, FakeTensor) or not a.numel() or not b.numel():
        return False
    if torch._is_functional_tensor(a) or torch._is_functional_tensor(b):
        return False
    is_apart = a.data_ptr() >= _end(b) or b.data_ptr() >= _end(a)
    return a.device == b.device and not is_apart


def _end(tensor: Tensor) -> int:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return tensor.data_ptr() + (last + 1) * tensor.element_size()
