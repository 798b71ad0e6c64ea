"""One call of a soak: its rows of a tape, its results, how many of their elements are wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import allnorm
from allnorm.testing import describe_difference
from allnorm.testing.bits import as_integers
from allnorm.verify.record import Recorder
from allnorm.verify.stress.kinds import EPS, Kind
from allnorm.verify.stress.tape import Tape

_MAX_DESCRIBED = 20

Results = dict[str, torch.Tensor]


@dataclass
class Called:
    """A call that was made."""

    number: int  # counts the calls of a soak
    where: str  # which communicator, and whether eager or from a graph
    kind: Kind  # what it does
    tape: Tape  # whose rows it took
    row: int  # the first of them
    results: Results  # what it returned, by name; a sharded residual gathered

    def wrong(self) -> torch.Tensor:
        """How many elements do not have the reference's bits; on the device, not waited for.

        No result is NaN: the inputs are finite and small.
        """
        counts = [
            torch.count_nonzero(as_integers(got) != as_integers(self._expected(name)))
            for name, got in self.results.items()
        ]
        return torch.stack(counts).sum()

    def describe(self) -> str:
        """What is wrong, in words: waits for the device."""
        parts = [
            f"{name}: {difference}"
            for name, got in self.results.items()
            if (difference := describe_difference(got, self._expected(name)))
        ]
        return f"call {self.number}, {self.where}, {self.kind}: " + "; ".join(parts)

    @property
    def num_bytes(self) -> int:
        """Of the results."""
        return sum(part.numel() * part.element_size() for part in self.results.values())

    def _expected(self, name: str) -> torch.Tensor:
        return self.tape.expected(self.kind)[name][self.row : self.row + self.kind.num_tokens]


def call(
    comm: allnorm.Communicator, kind: Kind, tape: Tape, row: int, number: int, where: str
) -> Called:
    """Makes a call on the rows of a tape from that row on; on CUDA without waiting for it."""
    x, residual = (part[row : row + kind.num_tokens] for part in (tape.x, tape.residual))
    results = issue(comm, kind, x, residual, tape.weight_of(kind))
    return Called(number, where, kind, tape, row, results)


def record(called: Sequence[Called], recorder: Recorder) -> None:
    """Counts every call, and describes the first ones that are wrong: waits for the device."""
    wrong = torch.stack([one.wrong() for one in called])
    for one, count in zip(called, wrong.tolist(), strict=True):
        failure = f"call {one.number}, {one.kind}: {count} elements wrong" if count else ""
        if count and len(recorder.failures) < _MAX_DESCRIBED:
            failure = one.describe()
        recorder.count(failure)


def issue(
    comm: allnorm.Communicator,
    kind: Kind,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    in_place: bool = False,
) -> Results:
    """Makes the call; on CUDA it returns before the call has run.

    Args:
        comm: the communicator.
        kind: what to do.
        x: [num_tokens, hidden_size], this rank's partial sum.
        residual: likewise, all rows.
        weight: [hidden_size].
        in_place: write the new residual over the old one, and the norm over `x`.

    Returns:
        The results by name; of a sharded residual all rows.
    """
    if kind.op == "all_reduce":
        out = x if in_place else None
        return {"reduced": comm.all_reduce(x, algorithm=kind.algorithm, out=out)}
    lo, hi = comm.row_shard(kind.num_tokens) if kind.sharded else (0, kind.num_tokens)
    own = residual[lo:hi] if kind.has_residual else None
    options: dict[str, Any] = {
        "numerics": kind.numerics,
        "weight_bias": kind.weight_bias,
        "algorithm": kind.algorithm,
        "residual_sharded": kind.sharded,
        "residual_out": own if in_place else None,
    }
    if kind.quant is None:
        options["out"] = x if in_place else None
        normed, summed = comm.all_reduce_add_rms_norm(x, own, weight, EPS, **options)
        results = {"normed": normed, "residual_out": summed}
    else:
        result = comm.all_reduce_add_rms_norm_quant(
            x, own, weight, EPS, kind.quant, kind.return_normed, **options
        )
        results = {"quantized": result.quantized, "residual_out": result.residual}
        if result.normed is not None:
            results["normed"] = result.normed
        if not isinstance(kind.quant, allnorm.Fp8PerTensor):  # there it is what was given
            results["scale"] = result.scale
    if kind.sharded:
        shard = results["residual_out"]
        results["residual_out"] = comm.all_gather_rows(shard, kind.num_tokens)
    return results
