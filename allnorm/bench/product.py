"""What stands before a call in a model: a matrix product that writes its input."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from allnorm.bench.arms import Arm
from allnorm.bench.case import NUM_SETS, Case
from allnorm.bench.clock import Samples
from allnorm.testing import copy_all
from allnorm.testing.timing import percentile

_ALONE = "the product alone"


class Product:
    """A product `[num_tokens, columns] @ [columns, hidden_size]` in front of every call.

    It leaves little in the caches of what a call reads beside its input, and nothing of the launch
    overlaps the call before. Two matrices take turns, so that wide ones are not in the caches
    themselves.

    Args:
        case: whose partial sums it writes. They have other values until `restore`.
        columns: of what is multiplied; the bytes of a matrix are `columns` times those of a row.
    """

    def __init__(self, case: Case, columns: int) -> None:
        self._xs = case.xs
        self._kept = [x.clone() for x in case.xs]
        options: dict[str, Any] = {"dtype": case.dtype, "device": case.device}
        self._left = torch.randn(case.num_rows, columns, **options) / columns
        self._right = [
            torch.randn(columns, case.shape.hidden_size, **options) for _ in range(NUM_SETS)
        ]
        # The library behind it allocates at its first product, which no CUDA graph can capture.
        for index in range(NUM_SETS):
            self._multiply(index)
        self.restore()

    def before(self, arm: Arm) -> Arm:
        """The same arm, each call behind a product."""

        def call(index: int) -> Any:
            self._multiply(index)
            return arm.call(index)

        return replace(arm, call=call)

    def alone(self) -> Arm:
        """An arm of nothing else."""
        return Arm(_ALONE, self._multiply, lambda result: result)

    @staticmethod
    def take_off(samples: Samples) -> tuple[Samples, float]:
        """Every arm's times beyond the product's median, and that."""
        alone = percentile(samples[_ALONE], 50)
        beyond = {
            name: [value - alone for value in values]
            for name, values in samples.items()
            if name != _ALONE
        }
        return beyond, alone

    def restore(self) -> None:
        """Gives the partial sums back their values."""
        copy_all(self._xs, self._kept)

    def _multiply(self, index: int) -> None:
        torch.mm(self._left, self._right[index], out=self._xs[index])
