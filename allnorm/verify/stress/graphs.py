"""CUDA graphs of a soak: captured once, replayed in any order with other rows each time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

import allnorm
from allnorm.testing import capture
from allnorm.verify.stress.calls import Called, Results, issue
from allnorm.verify.stress.kinds import Kind
from allnorm.verify.stress.tape import Tape


@dataclass
class _Captured:
    """One call in a graph: where it reads, where it writes."""

    comm: allnorm.Communicator
    kind: Kind
    tape: Tape
    x: torch.Tensor
    residual: torch.Tensor
    in_place: bool
    results: Results


class Graph:
    """A graph of several calls on several communicators.

    Args:
        calls: communicator, kind, tape, and whether results overwrite the inputs; in this order.
    """

    def __init__(self, calls: Sequence[tuple[allnorm.Communicator, Kind, Tape, bool]]) -> None:
        self.calls = [
            _Captured(
                *(comm, kind, tape),
                torch.zeros_like(tape.x[: kind.num_tokens]),
                torch.zeros_like(tape.residual[: kind.num_tokens]),
                in_place,
                {},
            )
            for comm, kind, tape, in_place in calls
        ]
        self._weights = [call.tape.weight_of(call.kind) for call in self.calls]  # must live
        self._issue()  # loads the kernels, which no capture allows
        with capture() as self._graph:
            self._issue()

    def replay(self, number: int, rows: Sequence[int], where: str) -> list[Called]:
        """Replays it on those rows of the tapes; keeps copies of the results. Never waits.

        Args:
            number: of the first call.
            rows: the first row of each call.
            where: said of the calls.
        """
        for call, row in zip(self.calls, rows, strict=True):
            call.x.copy_(call.tape.x[row : row + call.kind.num_tokens])
            call.residual.copy_(call.tape.residual[row : row + call.kind.num_tokens])
        self._graph.replay()
        return [
            Called(
                number + index,
                f"{where}, call {index} of {len(rows)}",
                call.kind,
                call.tape,
                row,
                {name: part.clone() for name, part in call.results.items()},
            )
            for index, (call, row) in enumerate(zip(self.calls, rows, strict=True))
        ]

    def _issue(self) -> None:
        for call, weight in zip(self.calls, self._weights, strict=True):
            call.results = issue(call.comm, call.kind, call.x, call.residual, weight, call.in_place)
