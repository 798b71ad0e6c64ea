"""What every check is given, and what it records."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import allnorm
from allnorm import reference
from allnorm.names import REQUESTS
from allnorm.testing import (
    Batch,
    describe_difference,
    gather,
    make_batch,
)
from allnorm.testing.bits import as_integers
from allnorm.verify.calls import EPS

_MAX_FAILURES = 5  # described per check


@dataclass(frozen=True)
class Job:
    """What to check; the same on every rank."""

    device: str  # "cuda" or "cpu"
    seed: int  # of the sample, its order and all inputs
    full: bool  # every combination instead of a random sample
    seconds: float  # how long the sample of the combinations may take
    stress: int  # calls of the ordering soak; 0 for none
    shapes: tuple[tuple[int, int], ...] = ()  # (num_tokens, hidden_size): only these calls
    repeat: int = 0  # how often each of `shapes` runs
    only: tuple[str, ...] = ()  # only checks whose names hold one of these words; empty: all
    shared_gpus: bool = False  # several ranks are on one GPU, where gloo stands for NCCL
    threads: float = 0.0  # seconds of the soak of several threads; 0 for none
    island_size: int = 0  # ranks of each island, one after the other; 0: islands are found


@dataclass(frozen=True)
class Context:
    """What a check works with."""

    comm: allnorm.Communicator
    job: Job
    rng: random.Random  # in the same state on all ranks

    @property
    def exchanges_over_gloo(self) -> bool:
        """Whether islands exchange through the host, which no graph can capture."""
        return self.job.shared_gpus and len(self.comm.islands) > 1

    def batch(self, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> Batch:
        """New inputs of that shape."""
        seed = self.rng.randrange(1 << 31)
        comm = self.comm
        return make_batch(num_tokens, hidden_size, dtype, comm.device, comm.world_size, seed)

    def reduce(self, xs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The reference's sum of all ranks' rows."""
        return reference.all_reduce(xs, islands=self.comm.islands)

    def algorithms(self, *shape: Any) -> list[str]:
        """The algorithms that can run that shape, given as the first arguments of `comm.plan`."""
        return [algorithm for algorithm in REQUESTS if self._can_run(algorithm, *shape)]

    def _can_run(self, algorithm: str, *shape: Any) -> bool:
        try:
            plan = self.comm.plan(*shape, algorithm=algorithm)
        except allnorm.UnsupportedError:
            return False
        # One rank computes the same whatever is asked for.
        return algorithm in ("auto", plan.algorithm)

    def run(self, batch: Batch, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The fused call on this rank's part of a batch."""
        x = batch.xs[self.comm.rank]
        return self.comm.all_reduce_add_rms_norm(x, batch.residual, batch.weight, EPS, **options)


@dataclass
class Recorder:
    """The cases of one check. Every rank records the same cases in the same order."""

    name: str  # of the check
    cases: int = 0  # how many were compared so far
    # The number of each case that failed on this rank, and what was wrong.
    failures: list[tuple[int, str]] = field(default_factory=list)
    # The number of a case, and a digest of one of this rank's results.
    digests: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    note: str = ""  # shown beside the result
    figures: dict[str, Any] = field(default_factory=dict)  # further fields of the JSON row
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
        """Counts a case, which failed unless `failure` is empty."""
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


Check = Callable[[Context, Recorder], None]


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    """A number that changes if bits change or swap places, most likely. Asynchronous."""
    flat = as_integers(tensor).flatten().to(torch.int64)
    position = torch.arange(1, flat.numel() + 1, device=flat.device)
    return (flat * (position * 0x9E3779B1 + 1)).sum()
