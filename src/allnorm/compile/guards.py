"""What a rewritten graph checks whenever it runs, because it was taken as given.

The functions stand in graphs as calls. Whoever traces such a graph runs them on fake tensors, of
which they only ask what the graph was made for.
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
    """Raises unless the inputs of a graph are as those that it was made for.

    Args:
        tensors: its inputs, those that it writes first.
        written: so many of the tensors must share no memory with any other.
        sized: those of which the sizes matter.
        rule: what must hold of their `sizes_of`, as PyTorch writes guards; L['t0'] is one.

    Raises:
        ValueError: with what is different.
    """
    sizes = {f"t{index}": size for index, size in enumerate(sizes_of(sized))}
    if rule and not eval(_compiled(rule), SYMPY_INTERP, {"L": sizes}):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in sized)
        raise ValueError(
            f"a graph that allnorm fused is called with inputs of shapes {shapes}, for which it "
            "was not made. Fuse the graph again for these."
        )
    for index in range(written):
        for other in range(index + 1, len(tensors)):
            if _overlap(tensors[index], tensors[other]):
                raise ValueError(
                    "a graph that allnorm fused writes to an input that shares memory with another "
                    "one: it was fused for inputs that do not. Pass copies, or fuse a graph of "
                    "inputs that share memory."
                )


def sizes_of(tensors: Sequence[Tensor]) -> list[Any]:
    """Dimensions of tensors, behind the number of them."""
    return [size for tensor in tensors for size in (tensor.dim(), *tensor.shape)]


def rule_of(env: ShapeEnv, sizes: Sequence[Any], *, bounds: bool) -> str:
    """Returns what must hold of the `sizes_of` inputs, as PyTorch writes guards.

    Args:
        env: of the symbols among them.
        sizes: of the inputs.
        bounds: whether a size that was not 1 must not become 1.
    """
    rule = env.produce_guards_expression(sizes, ignore_static=False) or ""
    parts = [part for part in rule.split(" and ") if bounds or not _LOWER_BOUND.fullmatch(part)]
    return " and ".join(parts)


def rule_of_tracer(sizes: Sequence[Any]) -> str:
    """Returns the guards on the `sizes_of` inputs that the tracer of a graph relied on.

    `make_fx` checks none of them when its graph runs, and the graph may be right where a guard
    does not hold: an operator takes its sizes from its arguments. The fused graph is not, because
    shapes were compared under these guards. Guards on other symbols are left to the tracer.
    """
    symbolic = [size.node for size in sizes if isinstance(size, torch.SymInt)]
    if not symbolic:
        return ""
    env: ShapeEnv = symbolic[0].shape_env
    symbols = {symbol for node in symbolic for symbol in node.expr.free_symbols}
    known = [guard for guard in env.guards if guard.expr.free_symbols <= symbols]
    rule = env.produce_guards_expression(sizes, guards=known, ignore_static=False) or ""
    return " and ".join(p for p in rule.split(" and ") if not _LOWER_BOUND.fullmatch(p))


_LOWER_BOUND = re.compile(r"2 <= L\['t\d+'\]")


def check_values(values: Sequence[Any], expected: Sequence[Any]) -> None:
    """Raises unless numbers that a graph computes are those that a fused call was made with.

    Raises:
        ValueError: with what is different.
    """
    for value, wanted in zip(values, expected, strict=True):
        if (tuple(value) if isinstance(value, torch.Size | list) else value) != wanted:
            raise ValueError(
                f"a graph that allnorm fused computes {value} where a fused call was made for "
                f"{wanted}. Fuse the graph again for these inputs."
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
    return _first(a) < _end(b) and _first(b) < _end(a) and a.device == b.device


def _first(tensor: Tensor) -> int:
    return tensor.data_ptr()


def _end(tensor: Tensor) -> int:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return tensor.data_ptr() + (last + 1) * tensor.element_size()
