"""How arms are timed: calls by the wall clock on CPUs, replays of CUDA graphs on GPUs.

Arms take turns, round after round, so that what changes in the machine hits all of them alike. A
matrix product may stand in front of every call, as in a model; its own time is then taken off.

Ranks start a replay up to some ten microseconds apart, and who is first waits in its first call.
In a chain the slowest rank's median counts. Behind a product ranks' times are put together replay
by replay (`over_ranks`): the shortest of them where ranks wait for each other, else the longest.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import allnorm
from allnorm.bench.arms import Arm
from allnorm.bench.case import NUM_SETS, Case
from allnorm.testing import calls_per_graph, copy_all, gather, start_together
from allnorm.testing.timing import (
    calls_that_fit,
    capture_turns,
    percentile,
    time_calls,
    time_steps,
)

Samples = dict[str, list[float]]
"""Microseconds per call, by the name of the arm."""

_CUDA_ROUNDS = 9
_REPLAYS_PER_ROUND = 3
_WARM_UP_REPLAYS = 2
_CPU_ROUNDS = 10
_CPU_CALLS = (5, 1000)  # least and most timed calls of an arm
_CPU_WARM_UP = 2  # beside the checked calls
_EAGER_CALLS = 200
_ALONE = "the product alone"


def _sets(arm: Arm) -> list[Callable[[], object]]:
    return [partial(arm.call, index) for index in range(NUM_SETS)]


def _calls(arm: Arm, number: int) -> Iterator[Callable[[], object]]:
    """Calls over the buffer sets in turn."""
    return itertools.islice(itertools.cycle(_sets(arm)), number)


def time_cpu(arms: Sequence[Arm], seconds: float) -> Samples:
    """Wall time of every call; each arm, known to run, for about `seconds`. Collective."""
    samples: Samples = {arm.name: [] for arm in arms}
    calls = [calls_that_fit(_calls(arm, _CPU_WARM_UP), seconds, *_CPU_CALLS) for arm in arms]
    for turn in range(_CPU_ROUNDS):
        for arm, number in zip(arms, calls, strict=True):
            arm.reset()
            start_together()
            in_this_turn = len(range(turn, number, _CPU_ROUNDS))
            samples[arm.name] += time_calls(_calls(arm, in_this_turn))
    return samples


def capture(arm: Arm, num_tokens: int) -> torch.cuda.CUDAGraph:
    """A graph of calls of an arm that has been called before; warm afterwards. Collective."""
    arm.reset()
    graph = capture_turns(_sets(arm), num_tokens, _WARM_UP_REPLAYS, arm.capturing())
    torch.cuda.synchronize()
    return graph


def time_cuda(
    arms: Sequence[tuple[Arm, torch.cuda.CUDAGraph]], num_tokens: int, rounds: int = _CUDA_ROUNDS
) -> Samples:
    """Time per call of replays of what `capture` made of each arm. Collective.

    Each has its turn in every round, with three timed replays. The order is another one in each
    round, the same on all ranks: what an arm leaves behind, a GPU that has slowed down above all,
    is not always the same arm's burden.
    """
    samples: Samples = {arm.name: [] for arm, _ in arms}
    calls = calls_per_graph(num_tokens)
    for turn in range(rounds):
        for arm, graph in random.Random(turn).sample(arms, len(arms)):
            with _naming(arm):
                arm.reset()
                # Untimed: aligns the ranks and keeps the GPU busy while the host launches the next.
                graph.replay()
                times_us = time_steps([graph.replay] * _REPLAYS_PER_ROUND)
            samples[arm.name] += [us / calls for us in times_us]
    return samples


def time_eager(arm: Arm, synchronize: Callable[[], None]) -> dict[str, float]:
    """Calls one after the other without a graph. Collective.

    The arm has been called before; `synchronize` waits for the device.

    Returns:
        `host_us`: the median time that enqueuing a call takes the host; `eager_us`: time per call
        until all of them are done.
    """
    arm.reset()
    synchronize()
    start_together()
    samples: list[float] = []

    def calls() -> None:
        samples.extend(time_calls(_calls(arm, _EAGER_CALLS)))
        synchronize()

    with _naming(arm):
        whole_us = time_calls([calls])[0]
    return {"host_us": percentile(samples, 50), "eager_us": whole_us / _EAGER_CALLS}


@contextlib.contextmanager
def _naming(arm: Arm) -> Iterator[None]:
    """Names the arm in an error: after a kernel that failed a process can do no more on its GPU."""
    try:
        yield
    except Exception as error:
        error.add_note(f"while {arm.name} was timed")
        raise


def over_ranks(arm: Arm) -> str:
    """How ranks' times of a replay behind a product are put together: "shortest" or "longest"."""
    return "shortest" if arm.in_step else "longest"


def together(samples: Samples, arms: Iterable[Arm]) -> Samples:
    """Of all ranks' times of each replay, or call, the one that counts. Collective.

    `samples` are this rank's; the result is the same on every rank.
    """
    ranks = gather(samples)
    return {
        arm.name: [
            (min if arm.in_step else max)(times)
            for times in zip(*(rank[arm.name] for rank in ranks), strict=True)
        ]
        for arm in arms
        if arm.name in samples
    }


class Product:
    """A linear layer of `columns` input features in front of every call.

    It writes the partial sums of a case, or the shared expert's part of them, which have other
    values until `restore`. Its weights lie as a layer's do, [hidden_size, columns]: for those the
    library behind it has other kernels than for their transpose, which end otherwise. It leaves
    little in the caches of what a call reads beside its input, and nothing of the launch overlaps
    the call before. Two layers take turns, so that wide ones are not in the caches themselves.
    """

    def __init__(self, case: Case, columns: int) -> None:
        self._xs: list[Any] = [x.shared if isinstance(x, allnorm.ExpertSum) else x for x in case.xs]
        self._kept = [x.clone() for x in self._xs]
        options: dict[str, Any] = {"dtype": case.dtype, "device": case.device}
        self._left = torch.randn(case.num_rows, columns, **options) / columns
        self._weights = [
            torch.randn(case.shape.hidden_size, columns, **options) for _ in range(NUM_SETS)
        ]
        # The library behind it allocates at its first product, which no CUDA graph can capture.
        for index in range(NUM_SETS):
            self._multiply(index)
        self.restore()

    def before(self, arm: Arm) -> Arm:
        """The same arm, each call behind a product."""

        def call(index: int) -> Any:
            self._multiply(index)
            return arm.call(index)

        return replace(arm, call=call)

    def alone(self) -> Arm:
        """An arm that makes the product and no call."""
        return Arm(_ALONE, self._multiply, lambda result: result, in_step=False)

    @staticmethod
    def take_off(samples: Samples) -> tuple[Samples, float]:
        """Every arm's times, of all ranks, beyond the product's median, and that median."""
        alone = percentile(samples[_ALONE], 50)
        beyond = {
            name: [value - alone for value in values]
            for name, values in samples.items()
            if name != _ALONE
        }
        return beyond, alone

    def restore(self) -> None:
        """Gives the partial sums back their values."""
        copy_all(self._xs, self._kept)

    def _multiply(self, index: int) -> None:
        torch.mm(self._left, self._weights[index].t(), out=self._xs[index])
