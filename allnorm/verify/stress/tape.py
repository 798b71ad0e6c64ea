"""Rows whose results are known before they are needed.

A tape is a tall matrix on each rank. A call takes `num_tokens` rows of it from some row on, its
payload: no kernel runs for that, and two calls that start at other rows differ everywhere. Rows are
independent of each other, so the reference's results for the whole tape, computed once for each
kind of call, hold what any such call must return.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from allnorm.testing.inputs import normal_maker
from allnorm.verify.stress.kinds import Kind

_CHUNK_ELEMS = {"cuda": 1 << 26, "cpu": 1 << 20}  # of one run of the reference, which takes memory
_EXPONENTS = 5  # rows are scaled by powers of two, so that scales and norms differ


@dataclass
class Tape:
    """One rank's rows of a dtype and width, and what becomes of them."""

    x: torch.Tensor  # [num_rows, hidden_size], this rank's partial sums, unlike any other rank's
    reduced: torch.Tensor  # their sum over the ranks, by the reference
    residual: torch.Tensor  # likewise shaped, the same on every rank
    weight: torch.Tensor  # [hidden_size]
    _known: dict[Any, dict[str, torch.Tensor]] = field(default_factory=dict)

    def expected(self, kind: Kind) -> dict[str, torch.Tensor]:
        """The results of such a call on every row, by name."""
        key = kind.result_key()
        if key not in self._known:
            weight = self.weight_of(kind)
            parts = [
                kind.expected(self.reduced[rows], self.residual[rows], weight)
                for rows in self._chunks()
            ]
            self._known[key] = {n: torch.cat([part[n] for part in parts]) for n in parts[0]}
        return self._known[key]

    def weight_of(self, kind: Kind) -> torch.Tensor:
        """The weight in the dtype that the call is given."""
        return self.weight.float() if kind.float32_weight else self.weight

    def _chunks(self) -> list[slice]:
        num_rows, hidden_size = self.x.shape
        step = max(1, _CHUNK_ELEMS[self.x.device.type] // hidden_size)
        return [slice(low, low + step) for low in range(0, num_rows, step)]


def make_tape(
    num_rows: int,
    hidden_size: int,
    dtype: torch.dtype,
    device: torch.device,
    rank: int,
    world_size: int,
    seed: int,
) -> Tape:
    """Makes every rank's rows from the seed, keeps this rank's, and their sum. Not collective.

    Another seed makes another tape; it is the same on every rank.
    """
    normal = normal_maker(seed * 7919, device)  # spread by a prime
    exponents = torch.arange(num_rows, device=device) * 7 % _EXPONENTS - _EXPONENTS // 2
    scale = torch.exp2(exponents.float())[:, None]
    own = total = None
    for source in range(world_size):
        x = (normal(source + 2, num_rows, hidden_size) * scale).to(dtype)
        own = x if source == rank else own
        # In rank order, as reference.all_reduce() sums, without holding all partials at once.
        total = x.float() if total is None else total + x.float()
    assert own is not None
    assert total is not None
    residual = (normal(0, num_rows, hidden_size) * scale).to(dtype)
    weight = (1.0 + 0.1 * normal(1, hidden_size)).to(dtype)
    return Tape(own, total.to(dtype), residual, weight)
