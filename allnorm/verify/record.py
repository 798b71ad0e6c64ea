"""What a check found, on this rank and on all of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from allnorm.testing import describe_difference, gather
from allnorm.testing.bits import as_integers

_MAX_FAILURES = 5  # described per check


@dataclass
class Recorder:
    """The cases of one check. Every rank records the same cases in the same order."""

    name: str  # of the check
    cases: int = 0  # how many were compared so far
    # Number of the case and what was wrong with it, this rank's.
    failures: list[tuple[int, str]] = field(default_factory=list)
    # Per case that has one, its number and a digest of this rank's results.
    digests: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    note: str = ""  # said beside the result
    figures: dict[str, Any] = field(default_factory=dict)  # more of it, for the JSON row
    _began: float = field(default_factory=time.monotonic)

    def compare(
        self,
        case: str,
        got: Sequence[torch.Tensor],
        expected: Sequence[torch.Tensor],
        names: Sequence[str] = ("normed", "residual_out"),
        digest: bool = True,
    ) -> None:
        """Counts a case; it fails unless every tensor has the expected bits.

        With `digest` the ranks' results are compared with each other too; not where they hold NaN,
        whose payload is free.
        """
        wrong = [
            f"{name}: {difference}"
            for name, value, wanted in zip(names, got, expected, strict=False)
            if (difference := describe_difference(value, wanted))
        ]
        self.count(f"{case}: {'; '.join(wrong)}" if wrong else "")
        if digest:
            self.digests += [(self.cases - 1, _digest(value)) for value in got]

    def count(self, failure: str) -> None:
        """Counts a case; it fails if `failure` says something."""
        if failure:
            self.failures.append((self.cases, failure))
        self.cases += 1

    def finish(self) -> dict[str, Any]:
        """What all ranks found together, the same on every rank. Collective."""
        values = torch.stack([d for _, d in self.digests]).tolist() if self.digests else []
        found: dict[int, str] = {}
        for rank, failures in enumerate(gather(self.failures)):
            for case, text in failures:
                found.setdefault(case, f"rank {rank}: {text}")
        digests = gather(values)
        for rank, values in enumerate(digests):
            for (case, _), value, first in zip(self.digests, values, digests[0], strict=False):
                if value != first:
                    found.setdefault(case, f"ranks 0 and {rank} hold different bits")
        return {
            "check": self.name,
            "cases": self.cases,
            "failures": len(found),
            "seconds": time.monotonic() - self._began,
            "details": [text for _, text in sorted(found.items())][:_MAX_FAILURES],
            "note": self.note,
            **self.figures,
        }


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    """A number that other bits, or the same ones elsewhere, most likely change. Asynchronous."""
    flat = as_integers(tensor).flatten().to(torch.int64)
    position = torch.arange(1, flat.numel() + 1, device=flat.device)
    return (flat * (position * 0x9E3779B1 + 1)).sum()
