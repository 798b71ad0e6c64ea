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


@dataclass(frozen=True, order=True)
class Candidate:
    """What may be fastest."""

    algorithm: str  # by name
    num_blocks: int = 0  # most blocks of a launch; 0: as many as the GPU holds

    def __str__(self) -> str:
        return f"{self.algorithm}, {self.num_blocks} blocks" if self.num_blocks else self.algorithm


Times = Mapping[Candidate, float]
"""Microseconds of those candidates that ran and were right."""


def token_grid(max_tokens: int, factor: int) -> list[int]:
    """1, `factor`, its powers, and at last `max_tokens`."""
    count = math.ceil(math.log(max_tokens, factor) - 1e-9)
    return [*(factor**power for power in range(count)), max_tokens]


def candidates(algorithms: Sequence[str], num_tokens: int, num_sms: int) -> list[Candidate]:
    """What is worth a measurement at so many tokens, on a GPU with `num_sms`; 0 on CPU."""
    found = [Candidate(algorithm) for algorithm in algorithms]
    # With fewer rows than a few waves of blocks there is nothing to limit.
    if num_sms and "two_shot" in algorithms and num_tokens >= 8 * num_sms:
        found += [Candidate("two_shot", waves * num_sms) for waves in (1, 2)]
    return found


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
    """The candidate to take at each measured size: the fastest, or nearly so and taken before."""
    chosen: dict[int, Candidate] = {}
    last: Candidate | None = None
    for num_tokens, found in sorted(times.items()):
        if not found:
            continue
        fastest = min(found, key=lambda candidate: (found[candidate], candidate))
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
        Step(_crossover(kept, a, b, first, second), first.algorithm, first.num_blocks)
        for (a, first), (b, second) in itertools.pairwise(chosen)
        if first != second
    ]
    if chosen:
        last = chosen[-1][1]
        result.append(Step(None, last.algorithm, last.num_blocks))
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
