"""Timing of arms: wall time of calls on CPUs, graph replays on GPUs.

Arms are interleaved round by round, so that changes in the machine's speed affect all of them
equally. A GEMM may run before every call, as in a model; its time is then subtracted.

Ranks start a replay about ten microseconds apart, and the first rank waits in its first call. For a
chain of calls, the slowest rank's median counts. After a GEMM, the ranks' times are combined for
each replay (`over_ranks`): the shortest if ranks wait for each other, otherwise the longest.
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
from allnorm.testing.timing import calls_that_fit, capture_turns, percentile, time_calls, time_steps

Samples = dict[str, list[float]]
"""Maps the name of each arm to its microseconds per call."""

_CUDA_ROUNDS = 9
_REPLAYS_PER_ROUND = 3
_WARM_UP_REPLAYS = 2
_CPU_ROUNDS = 10
_CPU_CALLS = (5, 1000)  # minimum and maximum number of timed calls of an arm
_CPU_WARM_UP = 2  # in addition to the checked calls
_EAGER_CALLS = 200
_ALONE = "the GEMM alone"


def _sets(arm: Arm) -> list[Callable[[], object]]:
    return [partial(arm.call, index) for index in range(NUM_SETS)]


def _calls(arm: Arm, number: int) -> Iterator[Callable[[], object]]:
    """Returns `number` calls that rotate through the buffer sets."""
    return itertools.islice(itertools.cycle(_sets(arm)), number)


def time_cpu(arms: Sequence[Arm], seconds: float) -> Samples:
    """Measures the wall time of calls, for about `seconds` per arm. Collective.

    Every arm must have run before.
    """
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
    """Captures an arm's calls in a graph and warms it up. Collective.

    The arm must have run before.
    """
    arm.reset()
    graph = capture_turns(_sets(arm), num_tokens, _WARM_UP_REPLAYS, arm.capturing())
    torch.cuda.synchronize()
    return graph


def time_cuda(
    arms: Sequence[tuple[Arm, torch.cuda.CUDAGraph]],
    num_tokens: int,
    rounds: int = _CUDA_ROUNDS,
    calls: int = 0,
) -> Samples:
    """Measures the time per call in replays of each arm's graph. Collective.

    A graph has `calls` calls; 0: as many as `capture` captures.

    Each round runs three timed replays of every arm. The order is equal on all ranks and differs
    between rounds, so that an arm that slows the GPU down does not always affect the same arm after
    it.
    """
    samples: Samples = {arm.name: [] for arm, _ in arms}
    calls = calls or calls_per_graph(num_tokens)
    for turn in range(rounds):
        for arm, graph in random.Random(turn).sample(arms, len(arms)):
            with _naming(arm):
                arm.reset()
                # This replay is untimed: it aligns the ranks and keeps the GPU busy during the next
                # launches.
                graph.replay()
                times_us = time_steps([graph.replay] * _REPLAYS_PER_ROUND)
            samples[arm.name] += [us / calls for us in times_us]
    return samples


def time_eager(arm: Arm, synchronize: Callable[[], None]) -> dict[str, float]:
    """Times consecutive calls without a graph. Collective.

    The arm must have run before. `synchronize` waits for the device.

    Returns:
        `host_us`: the median host time to enqueue a call; `eager_us`: time per call until the
        device has finished all calls.
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
    """Adds the arm's name to an error: after a failed kernel the process cannot use the GPU."""
    try:
        yield
    except Exception as error:
        error.add_note(f"while {arm.name} was timed")
        raise


def over_ranks(arm: Arm) -> str:
    """Returns how the ranks' times after a GEMM are combined: "shortest" or "longest"."""
    return "shortest" if arm.in_step else "longest"


def over_all_ranks(samples: Samples, arms: Iterable[Arm]) -> Samples:
    """Combines the ranks' times of each replay (or call), see `over_ranks`. Collective.

    `samples` are this rank's. The result is equal on every rank.
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


class Gemm:
    """A linear layer (GEMM) with `columns` input features that runs before every call.

    It overwrites a case's partial sums, or the shared expert's rows, until `restore` is called; for
    an arm that reads copies of the partial sums (`Arm.inputs`) it writes the copies instead. Its
    weights have the layout of a linear layer, [hidden_size, columns], because the GEMM library runs
    different kernels for the transpose. It evicts most of the call's other inputs from the caches,
    and the call's launch does not overlap the previous call. Two layers alternate, so that even the
    weights of wide layers are not cached.
    """

    def __init__(self, case: Case, columns: int) -> None:
        self._xs: list[Any] = [x.shared if isinstance(x, allnorm.ExpertSum) else x for x in case.xs]
        self._kept = [x.clone() for x in self._xs]
        options: dict[str, Any] = {"dtype": case.dtype, "device": case.device}
        self._left = torch.randn(case.shape.num_tokens, columns, **options) / columns
        hidden_size = self._xs[0].shape[1]
        self._weights = [torch.randn(hidden_size, columns, **options) for _ in range(NUM_SETS)]
        # The GEMM library allocates memory at its first call, which a CUDA graph cannot capture.
        for index in range(NUM_SETS):
            self._multiply(self._xs, index)
        self.restore()

    def before(self, arm: Arm) -> Arm:
        """Returns the arm with a GEMM before each call, which writes what the call reads."""
        written = self._xs if arm.inputs is None else arm.inputs

        def call(index: int) -> Any:
            self._multiply(written, index)
            return arm.call(index)

        return replace(arm, call=call)

    def alone(self) -> Arm:
        """Returns an arm that runs only the GEMM."""
        multiply = partial(self._multiply, self._xs)
        return Arm(_ALONE, multiply, lambda result: result, in_step=False)

    @staticmethod
    def subtract(samples: Samples) -> tuple[Samples, float]:
        """Subtracts the GEMM's median from all arms' times; returns the rest and the median."""
        alone = percentile(samples[_ALONE], 50)
        beyond = {
            name: [value - alone for value in values]
            for name, values in samples.items()
            if name != _ALONE
        }
        return beyond, alone

    def restore(self) -> None:
        """Restores the values of the partial sums."""
        copy_all(self._xs, self._kept)

    def _multiply(self, written: Sequence[torch.Tensor], index: int) -> None:
        torch.mm(self._left, self._weights[index].t(), out=written[index])
