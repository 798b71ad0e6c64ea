"""The context that every check receives, and the record of its results."""

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

_MAX_FAILURES = 5  # maximum descriptions per check


@dataclass(frozen=True)
class Job:
    """The settings of a run, equal on every rank."""

    device: str  # "cuda" or "cpu"
    seed: int  # seed of the sample, its order and all inputs
    full: bool  # every combination instead of a random sample
    seconds: float  # time limit of the sample of combinations
    stress: int  # number of calls of the ordering soak; 0: none
    shapes: tuple[tuple[int, int], ...] = ()  # (num_tokens, hidden_size): run only these calls
    repeat: int = 0  # number of calls of each of `shapes`
    only: tuple[str, ...] = ()  # run only checks with one of these words in the name; empty: all
    shared_gpus: bool = False  # multiple ranks share a GPU, with gloo instead of NCCL
    threads: float = 0.0  # seconds of the multi-threaded soak; 0: none
    island_size: int = 0  # consecutive ranks per island; 0: islands are detected
    proves: bool = False  # the run may open the preview for AMD GPUs, to make its proof


@dataclass(frozen=True)
class Context:
    """The communicator and the settings of a check."""

    comm: allnorm.Communicator
    job: Job
    rng: random.Random  # in the same state on all ranks

    @property
    def exchanges_over_gloo(self) -> bool:
        """Returns whether islands exchange through host memory, which a graph cannot capture."""
        return self.job.shared_gpus and len(self.comm.islands) > 1

    def batch(self, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> Batch:
        """Returns new inputs of a shape."""
        seed = self.rng.randrange(1 << 31)
        comm = self.comm
        return make_batch(num_tokens, hidden_size, dtype, comm.device, comm.world_size, seed)

    def reduce(self, xs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the reference's sum of all ranks' rows."""
        return reference.all_reduce(xs, islands=self.comm.islands)

    def algorithms(self, *shape: Any) -> list[str]:
        """Returns the algorithms that can run a shape, the first arguments of `comm.plan`."""
        return [algorithm for algorithm in REQUESTS if self._can_run(algorithm, *shape)]

    def _can_run(self, algorithm: str, *shape: Any) -> bool:
        try:
            plan = self.comm.plan(*shape, algorithm=algorithm)
        except allnorm.UnsupportedError:
            return False
        # One rank computes the same with every algorithm.
        return algorithm in ("auto", plan.algorithm)

    def run(self, batch: Batch, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the fused call on this rank's inputs of a batch."""
        x = batch.xs[self.comm.rank]
        return self.comm.all_reduce_add_rms_norm(x, batch.residual, batch.weight, EPS, **options)


@dataclass
class Recorder:
    """The cases of one check. Every rank records the same cases in the same order."""

    name: str  # name of the check
    cases: int = 0  # number of cases so far
    # Number and error of each case that failed on this rank.
    failures: list[tuple[int, str]] = field(default_factory=list)
    # Case number of each digest, and the digest of one of this rank's results.
    digests: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    note: str = ""  # shown next to the result
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
        """Counts a case, which fails unless every tensor has the expected bits.

        With `digest`, the ranks' results are compared with each other too. Do not use it for
        results with NaN, because payloads may differ.
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
        """Counts a case, which failed if `failure` is not empty."""
        if failure:
            self.failures.append((self.cases, failure))
        self.cases += 1

    def finish(self) -> dict[str, Any]:
        """Returns the check's record over all ranks, equal on every rank. Collective."""
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
    """Returns a hash of bits and positions. Asynchronous."""
    flat = as_integers(tensor).flatten().to(torch.int64)
    position = torch.arange(1, flat.numel() + 1, device=flat.device)
    return (flat * (position * 0x9E3779B1 + 1)).sum()
