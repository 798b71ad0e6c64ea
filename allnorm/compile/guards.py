"""What a rewritten graph checks whenever it runs, because it was taken as given.

The functions stand in graphs as calls. Whoever traces such a graph runs them on fake tensors, of
which they only ask what the graph was made for.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP
from torch.fx.node import has_side_effect


def check_inputs(
    tensors: Sequence[Tensor],
    sizes: Sequence[Sequence[int | str] | None],
    rule: str,
    symbols: Sequence[str],
    written: int,
) -> None:
    """Raises unless the inputs of a graph are as those that it was made for.

    Args:
        tensors: its inputs, those that it writes first.
        sizes: of each: a number, or the name of a size that is equal wherever it stands; None if
            whoever traced the graph sees to it.
        rule: what else must hold of these sizes, as PyTorch writes its guards.
        symbols: the names whose sizes `rule` calls t0, t1, ...
        written: so many of the tensors must share no memory with any other.

    Raises:
        ValueError: with what is different.
    """
    bound: dict[str, int] = {}
    for index, (tensor, expected) in enumerate(zip(tensors, sizes, strict=True)):
        if expected is None:
            continue
        same = tensor.dim() == len(expected)
        for size, name in zip(tensor.shape, expected, strict=False):
            same = same and size == (
                bound.setdefault(name, size) if isinstance(name, str) else name
            )
        if not same:
            raise ValueError(
                f"input {index} of a graph that allnorm fused is of shape {tuple(tensor.shape)}; "
                f"expected {tuple(expected)}, as when it was fused. Fuse the graph again for these."
            )
    if rule and not eval(_compiled(rule), SYMPY_INTERP, {"L": _sizes(bound, tuple(symbols))}):
        raise ValueError(
            f"a graph that allnorm fused is called with sizes {bound}, for which its tracer would "
            "have made another one. Fuse the graph again for these."
        )
    for index in range(written):
        for other in range(index + 1, len(tensors)):
            if _overlap(tensors[index], tensors[other]):
                raise ValueError(
                    "a graph that allnorm fused writes to an input that shares memory with another "
                    "one: it was fused for inputs that do not. Pass copies, or fuse a graph of "
                    "inputs that share memory."
                )


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


def check_shape(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """The tensor, if it is of this shape.

    Raises:
        ValueError: it is not.
    """
    check_inputs((tensor,), (shape,), "", (), 0)
    return tensor


has_side_effect(check_inputs)
has_side_effect(check_values)


@functools.lru_cache(256)
def _compiled(rule: str) -> Any:
    return compile(rule, "<guards of a graph>", "eval")


def _sizes(bound: dict[str, int], symbols: tuple[str, ...]) -> dict[str, int]:
    return {f"t{i}": bound[name] for i, name in enumerate(symbols)}


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
