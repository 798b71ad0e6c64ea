"""Compares arms token by token, all of them given the tokens that the reference arm chose.

Left to themselves, two arms that once choose differently go on with different sentences, whose
logits cannot be compared.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from allnorm.bench.e2e.generation import Runner
from allnorm.testing import same_bits

_MAX_BYTES = 4 << 30  # of logits kept for comparisons


@dataclass(frozen=True)
class Trace:
    """What an arm computed on one batch.

    Attributes:
        tokens: [batch_size, steps] int64, what it chose at each step.
        logits: of each step, [batch_size, this rank's part of the vocabulary].
    """

    tokens: torch.Tensor
    logits: list[torch.Tensor]

    @property
    def finite(self) -> bool:
        """Whether all logits are."""
        return all(bool(torch.isfinite(step).all()) for step in self.logits)


@dataclass
class Difference:
    """How the logits of two arms differ on this rank.

    Attributes:
        equal_steps: how many had equal bits.
        largest: the largest difference of a logit.
        mean: of the absolute differences.
        equal_choices: how many tokens are the same.
    """

    equal_steps: int = 0
    largest: float = 0.0
    mean: float = 0.0
    equal_choices: int = 0


def num_steps(runner: Runner, num_traces: int) -> int:
    """How many steps to compare, so that the kept logits of `num_traces` arms fit in memory."""
    logits = runner.generation.logits
    room = _MAX_BYTES // (num_traces * logits.numel() * logits.element_size())
    return int(max(1, min(runner.generation.num_tokens, room)))


def trace(runner: Runner, steps: int, given: torch.Tensor | None = None) -> Trace:
    """Generates and keeps the logits. Collective.

    Args:
        runner: the arm.
        steps: how many tokens.
        given: [batch_size, steps], the tokens to go on with; None: the arm's own.
    """
    generation = runner.generation
    generation.reset()
    tokens, logits = [], []
    for step in range(steps):
        if step:
            runner.step()
        else:
            runner.prefill()
        tokens.append(generation.token.clone())
        logits.append(generation.logits.clone())
        if given is not None:
            generation.token.copy_(given[:, step])
    return Trace(torch.stack(tokens, dim=1), logits)


def compare(own: Trace, other: Trace) -> Difference:
    """How a trace differs from another that was given the same tokens. Not collective."""
    found = Difference(equal_choices=int((own.tokens == other.tokens).sum()))
    for ours, theirs in zip(own.logits, other.logits, strict=True):
        found.equal_steps += same_bits(ours, theirs)
        distance = (ours.float() - theirs.float()).abs()
        found.largest = max(found.largest, float(distance.max()))
        found.mean += float(distance.mean()) / len(own.logits)
    return found
