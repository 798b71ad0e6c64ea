"""Times generations: prefill and every decode step, by CUDA events or by the wall clock."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from allnorm.cli.ranks.e2e.generation import Runner
from allnorm.testing.timing import elapsed_us


@dataclass
class Samples:
    """What one arm took on one batch.

    Attributes:
        ttft_us: of every round, until the first tokens.
        steps_us: of every round, each further token.
        outputs: of every round, the tokens, [batch_size, num_tokens] on the CPU.
    """

    ttft_us: list[float] = field(default_factory=list)
    steps_us: list[list[float]] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)


def measure(arms: dict[str, Runner], rounds: int) -> dict[str, Samples]:
    """Times whole generations; the arms take turns, round after round. Collective.

    Args:
        arms: by name; all of them have run before.
        rounds: how often each arm generates everything.
    """
    samples = {name: Samples() for name in arms}
    for _ in range(rounds):
        for name, runner in arms.items():
            runner.generation.reset()
            ttft_us, steps_us = _timed(runner)
            samples[name].ttft_us.append(ttft_us)
            samples[name].steps_us.append(steps_us)
            samples[name].outputs.append(runner.generation.outputs.to("cpu", copy=True))
    return samples


def _timed(runner: Runner) -> tuple[float, list[float]]:
    """One generation: time until the first token, and between the others."""
    on_gpu = runner.generation.token.device.type == "cuda"
    steps = runner.generation.num_tokens - 1
    if on_gpu:
        torch.cuda.synchronize()
    dist.all_reduce(torch.zeros(1))  # start together
    times = _events(runner, steps) if on_gpu else _wall(runner, steps)
    return times[0], list(times[1:])


def _wall(runner: Runner, steps: int) -> Sequence[float]:
    clock = time.perf_counter_ns
    marks = [clock()]
    runner.prefill()
    marks.append(clock())
    for _ in range(steps):
        runner.step()
        marks.append(clock())
    return [(end - begin) / 1e3 for begin, end in itertools.pairwise(marks)]


def _events(runner: Runner, steps: int) -> Sequence[float]:
    """The host runs ahead of the GPU in the decode, as it does in an engine without a scheduler."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 2)]
    events[0].record()
    runner.prefill()
    events[1].record()
    for event in events[2:]:
        runner.step()
        event.record()
    events[-1].synchronize()
    return elapsed_us(events)
