"""Measures up to how many rows a call should prefetch the weight of the next GEMM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import allnorm
from allnorm.bench import layers
from allnorm.bench.layers import ChainTimes

TOKENS = (1, 8, 16, 32, 64)
_LAYERS = 4
# A gain or loss of less than this many us per call is noise between quiet runs
# (docs/performance.md).
_NOISE_US = 0.1


@dataclass(frozen=True)
class PrefetchTimes:
    """The times of chains of layers with and without prefetch, equal on every rank."""

    chains: tuple[ChainTimes, ...] = ()

    @property
    def tokens(self) -> int | None:
        """The maximum rows of a call that prefetches; 0: none does; None: not measured."""
        return most_tokens(self.chains) if self.chains else None

    @property
    def errors(self) -> Iterator[str]:
        """The errors in the chains' results."""
        for chain in self.chains:
            for arm, error in chain.errors.items():
                if error:
                    yield f"{arm} of {chain.model} with {chain.num_tokens} rows: {error}"

    def rows(self, world_size: int) -> Iterator[dict[str, Any]]:
        """Yields the results rows; `chosen` in those that the table will follow."""
        most = self.tokens or 0
        for chain in self.chains:
            for row in chain.rows(world_size):
                ahead = row["arm"] == "prefetch:on"
                yield {**row, "chosen": ahead == (chain.num_tokens <= most)}


def measure(
    comm: allnorm.Communicator, models: Sequence[str], dtype: str, device: str, seconds: float
) -> PrefetchTimes:
    """Times chains of these models with a communicator, whose tables it keeps. Collective."""
    if not models:
        return PrefetchTimes()
    job = layers.Job(tuple(models), TOKENS, dtype, device, layers=_LAYERS, seconds=seconds)
    return PrefetchTimes(tuple(layers.time_chains(comm, job)))


def most_tokens(chains: Sequence[ChainTimes]) -> int:
    """Returns up to how many rows calls prefetch: no measured size may lose by it.

    At each number of rows no model may lose time, and one must gain. Larger sizes than the first
    that fails are not considered. A wrong result switches prefetch off.
    """
    if any(error for chain in chains for error in chain.errors.values()):
        return 0
    most = 0
    for tokens in sorted({chain.num_tokens for chain in chains}):
        gains = [chain.gain_us for chain in chains if chain.num_tokens == tokens]
        # Not "any is lower": a comparison with NaN, of a chain without times, must fail.
        if not (min(gains) >= -_NOISE_US and max(gains) >= _NOISE_US):
            break
        most = tokens
    return most


def describe(tokens: int | None) -> str:
    """Describes the choice of a table."""
    if tokens is None:
        return "not measured"
    return f"up to {tokens} rows" if tokens else "off"
