"""Times generations: prefill and every decode step, by CUDA events or by the wall clock."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from allnorm.bench.e2e.generation import Runner
from allnorm.testing import start_together
from allnorm.testing.timing import time_calls, time_steps


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
    if on_gpu:
        torch.cuda.synchronize()
    start_together()
    phases = [runner.prefill, *[runner.step] * (runner.generation.num_tokens - 1)]
    times = time_steps(phases) if on_gpu else time_calls(phases)
    return times[0], times[1:]
