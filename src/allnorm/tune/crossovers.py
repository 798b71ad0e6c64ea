"""Crossovers between candidates: which sizes to measure, and which candidate wins where.

This module does not measure. Ranks that have the same times therefore make the same decisions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from allnorm.policy import Step

# A candidate must be faster by this share to replace the previous one. Smaller differences are
# noise, and would make a table switch back and forth.
TOLERANCE = 0.02
# Two sizes that differ by at most this factor are not bisected further.
_CLOSE = 1.2
_MAX_BISECTIONS = 24
# Numbers of blocks per row to try, and the limits of a block's share of the row: 2 to 16 warps with
# 16 bytes per thread.
_CLUSTER_SIZES = (1, 2, 4, 8)
_LEAST_BLOCK_BYTES, _MOST_BLOCK_BYTES = 1024, 8192


@dataclass(frozen=True, order=True)
class Candidate:
    """An algorithm and launch geometry to measure."""

    algorithm: str  # name of the algorithm
    num_blocks: int = 0  # maximum blocks per launch; 0: as many as the GPU can run
    cluster_size: int = 0  # blocks per row; 0: the library chooses

    def __str__(self) -> str:
        parts = [self.algorithm]
        parts += [f"{self.num_blocks} blocks"] if self.num_blocks else []
        parts += [f"{self.cluster_size} per row"] if self.cluster_size else []
        return ", ".join(parts)

    @classmethod
    def of(cls, step: Step) -> Candidate:
        """Returns the candidate that a step uses."""
        return cls(step.algorithm, step.num_blocks, step.cluster_size)

    def step(self, max_tokens: int | None) -> Step:
        """Returns the step that uses this candidate for up to `max_tokens` tokens."""
        return Step(max_tokens, self.algorithm, self.num_blocks, self.cluster_size)


Times = Mapping[Candidate, float]
"""Maps each candidate that ran with correct results to its microseconds."""


def token_grid(max_tokens: int, factor: int) -> list[int]:
    """Returns 1, the powers of `factor` below `max_tokens`, and `max_tokens`."""
    count = math.ceil(math.log(max_tokens, factor) - 1e-9)
    return [*(factor**power for power in range(count)), max_tokens]


def candidates(
    algorithms: Sequence[str], num_tokens: int, num_sms: int, row_bytes: int = 0
) -> list[Candidate]:
    """Returns the candidates to measure; `num_sms` is the number of SMs, 0 on CPU."""
    found = [Candidate(algorithm) for algorithm in algorithms]
    if num_sms:
        fused = [algorithm for algorithm in algorithms if algorithm != "unfused"]
        sizes = [s for s in _CLUSTER_SIZES if _spreads(s, num_tokens, num_sms, row_bytes)]
        found += [Candidate(algorithm, 0, size) for algorithm in fused for size in sizes]
    # With fewer rows, a launch does not have enough blocks for a limit to matter.
    if num_sms and "two_shot" in algorithms and num_tokens >= 8 * num_sms:
        found += [Candidate("two_shot", waves * num_sms) for waves in (1, 2)]
    return found


def _spreads(cluster_size: int, num_tokens: int, num_sms: int, row_bytes: int) -> bool:
    """Returns whether that many blocks per row suit the block size and the number of SMs."""
    block_bytes = row_bytes / cluster_size
    fits = _LEAST_BLOCK_BYTES <= block_bytes <= _MOST_BLOCK_BYTES
    return fits and cluster_size * num_tokens <= num_sms


def search(measure: Callable[[int], Times], grid: Sequence[int]) -> dict[int, Times]:
    """Measures a grid of sizes, then bisects every crossover.

    `measure` returns the times at a number of tokens and is called once per number. Both the grid
    and the result are ascending.
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
    """Returns the candidate to use at each measured size.

    Among candidates within TOLERANCE of the fastest, it prefers the previous size's candidate, then
    the fastest algorithm with the default launch geometry.
    """
    chosen: dict[int, Candidate] = {}
    last: Candidate | None = None
    for num_tokens, found in sorted(times.items()):
        if not found:
            continue
        fastest = min(found, key=lambda candidate: (found[candidate], candidate))
        # The default geometry adapts to sizes between the measured ones.
        plain = Candidate(fastest.algorithm)
        if found.get(plain, math.inf) <= found[fastest] * (1 + TOLERANCE):
            fastest = plain
        if last is None or not found.get(last, math.inf) <= found[fastest] * (1 + TOLERANCE):
            last = fastest
        chosen[num_tokens] = last
    return chosen


def leave_out(times: Mapping[int, Times], without: Iterable[Candidate]) -> dict[int, Times]:
    """Returns the times without the given candidates' times."""
    excluded = set(without)
    return {
        num_tokens: {c: us for c, us in found.items() if c not in excluded}
        for num_tokens, found in times.items()
    }


def link_rate(times: Mapping[float, float]) -> float:
    """Returns the link rate with the shortest time; 0 if none improves by more than noise.

    `times` maps rates to microseconds; rate 0 means unpaced.
    """
    if not times:
        return 0.0
    best = min(times, key=lambda rate: (times[rate], rate))
    return best if times[best] * (1 + TOLERANCE) < times.get(0.0, math.inf) else 0.0


def steps(times: Mapping[int, Times], without: Iterable[Candidate] = ()) -> tuple[Step, ...]:
    """Returns the steps of a curve; empty if nothing was measured.

    Candidates in `without` had a wrong result at some size and are therefore not used at any size.
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
    """Returns the largest number of tokens, from `a` to `b` - 1, at which to use `first`.

    If both candidates were timed at both ends, it interpolates the log of their time ratio over the
    log of the number of tokens, and returns the zero crossing.
    """
    try:
        at_a = math.log(times[a][first] / times[a][second])
        at_b = math.log(times[b][first] / times[b][second])
    except KeyError:
        return a
    if not at_a < 0 < at_b:  # one of them won only because it was nearly as fast
        return a
    middle = a * (b / a) ** (at_a / (at_a - at_b))
    return max(a, min(b - 1, int(middle)))


def _widest_gap(times: Mapping[int, Times]) -> tuple[int, int] | None:
    """Returns the most distant neighboring sizes with different winners; None if all are close."""
    pairs = itertools.pairwise(winners(times).items())
    gaps = [(a, b) for (a, first), (b, second) in pairs if first != second]
    gaps = [(a, b) for a, b in gaps if b - a > 1 and b > a * _CLOSE]
    return max(gaps, key=lambda gap: (gap[1] / gap[0], gap), default=None)
