"""Where one candidate becomes faster than another: which sizes to measure, and what follows.

Nothing here measures, so that every rank that was given the same times decides the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from allnorm.policy import Step

# A candidate that is faster by less than this does not take over: that is the noise of a short
# measurement, and a table that changes back and forth helps nobody.
TOLERANCE = 0.02
# Two sizes this close are not told apart any further.
_CLOSE = 1.2
_MAX_BISECTIONS = 24
# Blocks to a row that are tried, and what one block of them takes of it: two warps to sixteen, of
# 16 bytes a thread.
_CLUSTER_SIZES = (1, 2, 4, 8)
_LEAST_BLOCK_BYTES, _MOST_BLOCK_BYTES = 1024, 8192


@dataclass(frozen=True, order=True)
class Candidate:
    """What may be fastest."""

    algorithm: str  # by name
    num_blocks: int = 0  # most blocks of a launch; 0: as many as the GPU holds
    cluster_size: int = 0  # blocks that share a row; 0: the library chooses

    def __str__(self) -> str:
        parts = [self.algorithm]
        parts += [f"{self.num_blocks} blocks"] if self.num_blocks else []
        parts += [f"{self.cluster_size} to a row"] if self.cluster_size else []
        return ", ".join(parts)

    @classmethod
    def of(cls, step: Step) -> Candidate:
        """What a step takes."""
        return cls(step.algorithm, step.num_blocks, step.cluster_size)

    def step(self, max_tokens: int | None) -> Step:
        """The step that takes it up to so many tokens."""
        return Step(max_tokens, self.algorithm, self.num_blocks, self.cluster_size)


Times = Mapping[Candidate, float]
"""Microseconds of those candidates that ran and were right."""


def token_grid(max_tokens: int, factor: int) -> list[int]:
    """1, `factor`, its powers, and at last `max_tokens`."""
    count = math.ceil(math.log(max_tokens, factor) - 1e-9)
    return [*(factor**power for power in range(count)), max_tokens]


def candidates(
    algorithms: Sequence[str], num_tokens: int, num_sms: int, row_bytes: int = 0
) -> list[Candidate]:
    """What is worth a measurement at so many tokens, on a GPU with `num_sms`; 0 on CPU."""
    found = [Candidate(algorithm) for algorithm in algorithms]
    if num_sms:
        fused = [algorithm for algorithm in algorithms if algorithm != "unfused"]
        sizes = [s for s in _CLUSTER_SIZES if _spreads(s, num_tokens, num_sms, row_bytes)]
        found += [Candidate(algorithm, 0, size) for algorithm in fused for size in sizes]
    # With fewer rows than a few waves of blocks there is nothing to limit.
    if num_sms and "two_shot" in algorithms and num_tokens >= 8 * num_sms:
        found += [Candidate("two_shot", waves * num_sms) for waves in (1, 2)]
    return found


def _spreads(cluster_size: int, num_tokens: int, num_sms: int, row_bytes: int) -> bool:
    """Whether so many blocks hold a row, have two warps of it at least, and an SM for each."""
    block_bytes = row_bytes / cluster_size
    fits = _LEAST_BLOCK_BYTES <= block_bytes <= _MOST_BLOCK_BYTES
    return fits and cluster_size * num_tokens <= num_sms


def search(measure: Callable[[int], Times], grid: Sequence[int]) -> dict[int, Times]:
    """Measures a grid of sizes, then closes in on every crossover.

    `measure` returns the times at so many tokens, and is called once for each number; the grid is
    ascending, as is the result.
    """
    times = {num_tokens: measure(num_tokens) for num_tokens in grid}
    for _ in range(_MAX_BISECTIONS):
        gap = _widest_gap(times)
        if gap is None:
            break
        middle = round(math.sqrt(gap[0] * gap[1]))
        times[middle] = measure(middle)
        times = dict(sorted(times.items()))
    return times


def winners(times: Mapping[int, Times]) -> dict[int, Candidate]:
    """The candidate to take at each measured size: the fastest, or one that is nearly so.

    Of the latter that of the size before, else the same algorithm as the library spreads it.
    """
    chosen: dict[int, Candidate] = {}
    last: Candidate | None = None
    for num_tokens, found in sorted(times.items()):
        if not found:
            continue
        fastest = min(found, key=lambda candidate: (found[candidate], candidate))
        # What the library chooses by itself holds at other sizes too.
        plain = Candidate(fastest.algorithm)
        if found.get(plain, math.inf) <= found[fastest] * (1 + TOLERANCE):
            fastest = plain
        if last is None or not found.get(last, math.inf) <= found[fastest] * (1 + TOLERANCE):
            last = fastest
        chosen[num_tokens] = last
    return chosen


def leave_out(times: Mapping[int, Times], without: Iterable[Candidate]) -> dict[int, Times]:
    """The times but those of some candidates."""
    excluded = set(without)
    return {
        num_tokens: {c: us for c, us in found.items() if c not in excluded}
        for num_tokens, found in times.items()
    }


def link_rate(times: Mapping[float, float]) -> float:
    """The rate at which a call takes least time, 0 if none brings more than noise.

    `times` are microseconds by rate; 0: without one.
    """
    if not times:
        return 0.0
    best = min(times, key=lambda rate: (times[rate], rate))
    return best if times[best] * (1 + TOLERANCE) < times.get(0.0, math.inf) else 0.0


def steps(times: Mapping[int, Times], without: Iterable[Candidate] = ()) -> tuple[Step, ...]:
    """The steps of a curve; none if nothing was measured.

    Candidates in `without` were wrong somewhere, and are therefore used nowhere.
    """
    kept = leave_out(times, without)
    chosen = list(winners(kept).items())
    result = [
        first.step(_crossover(kept, a, b, first, second))
        for (a, first), (b, second) in itertools.pairwise(chosen)
        if first != second
    ]
    if chosen:
        result.append(chosen[-1][1].step(None))
    return tuple(result)


def _crossover(
    times: Mapping[int, Times], a: int, b: int, first: Candidate, second: Candidate
) -> int:
    """The last number of tokens, of a to b - 1, at which `first` is to be taken.

    Where both were timed at both ends: where the logarithm of their ratio, drawn over the logarithm
    of the tokens, is zero.
    """
    try:
        at_a = math.log(times[a][first] / times[a][second])
        at_b = math.log(times[b][first] / times[b][second])
    except KeyError:
        return a
    if not at_a < 0 < at_b:  # one of them was taken for being nearly as fast
        return a
    middle = a * (b / a) ** (at_a / (at_a - at_b))
    return max(a, min(b - 1, int(middle)))


def _widest_gap(times: Mapping[int, Times]) -> tuple[int, int] | None:
    """Neighbouring sizes with different winners, the furthest apart; None if all are close."""
    pairs = itertools.pairwise(winners(times).items())
    gaps = [(a, b) for (a, first), (b, second) in pairs if first != second]
    gaps = [(a, b) for a, b in gaps if b - a > 1 and b > a * _CLOSE]
    return max(gaps, key=lambda gap: (gap[1] / gap[0], gap), default=None)
