"""The tensors of `rms_norm_sharded`: this rank's slices of rows that are spread over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from allnorm.core import _native


class Slices:
    """Tensors, weights and preallocated results of a call, one of each per normed tensor.

    Attributes:
        tensors: inputs, [..., local_size].
        weights: slices of the weights, [local_size].
        outs: preallocated results; None: the call allocates them.
    """

    # Not a dataclass, which takes 0.3 ms to create at every import of allnorm.
    def __init__(
        self, tensors: tuple[Any, ...], weights: tuple[Any, ...], outs: tuple[Any, ...] | None
    ) -> None:
        self.tensors, self.weights, self.outs = tensors, weights, outs

    @classmethod
    def of(cls, tensors: object, weights: object, out: object) -> Slices:
        """Returns the slices of a call as its caller passed them.

        Raises:
            TypeError: an argument is not a list or tuple.
            ValueError: the lengths differ, or are not 1 to 4.
        """
        for name, value in (("tensors", tensors), ("weights", weights), ("out", out)):
            if not isinstance(value, list | tuple) and (value is not None or name != "out"):
                raise TypeError(
                    f"{name} is a {type(value).__name__}: expected a list or tuple of torch.Tensor."
                )
        assert isinstance(tensors, list | tuple)
        assert isinstance(weights, list | tuple)
        count = len(tensors)
        if not 1 <= count <= _native.MAX_SLICES:
            raise ValueError(f"{count} tensors: expected 1 to {_native.MAX_SLICES} in one call.")
        outs = None if out is None else tuple(_sequence(out))
        for name, given in (("weights", weights), ("out", outs)):
            if given is not None and len(given) != count:
                raise ValueError(f"{len(given)} {name}: expected {count}, one for each tensor.")
        return cls(tuple(tensors), tuple(weights), outs)

    @property
    def named(self) -> dict[str, Any]:
        """All tensors that the call has, keyed by their names in csrc/python/arguments.h."""
        parts = ("x", self.tensors), ("weight", self.weights), ("out", self.outs or ())
        return {slot(name, number): t for name, part in parts for number, t in enumerate(part)}

    @property
    def given(self) -> tuple[Any, ...]:
        """All tensors that the call has."""
        return *self.tensors, *self.weights, *(self.outs or ())


def slot(name: str, number: int) -> str:
    """Returns the name of the tensor "x", "weight" or "out" of a slice in csrc/python."""
    return f"{name}{number}" if number else name


def _sequence(value: object) -> Sequence[Tensor]:
    assert isinstance(value, list | tuple)
    return value
