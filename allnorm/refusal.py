"""The call that a rank makes instead of one that it refuses and its peers may make.

Ranks that all refuse exchange it with each other and go on in step. A peer that makes any other
call sees at once that this rank does not make it: no call is announced like this one, because its
weight_bias is none that a call may have.
"""

from __future__ import annotations

import math

import torch

from allnorm import _native
from allnorm.arguments import NormArguments
from allnorm.launch import Launch

_COLUMNS = 4  # 16 bytes, which every algorithm takes
# Its CallShape: all_reduce_add_rms_norm by one_shot, numerics "vllm", no residual, float32. A call
# of so few columns that somebody else made is called a refusal in the words of an error, no more.
SHAPE = 2 << 28 | 3 << 24 | _COLUMNS
NUM_TOKENS = 1


class Refusal:
    """A communicator's, with memory of its own.

    Args:
        device: of the communicator.
    """

    def __init__(self, device: torch.device) -> None:
        def row() -> torch.Tensor:
            return torch.zeros(NUM_TOKENS, _COLUMNS, dtype=torch.float32, device=device)

        norm = NormArguments(0.0, math.nan, "vllm")
        self._tensors = (row(), None, row()[0], row(), row())
        x, residual, weight, _, _ = self._tensors
        self._launch = Launch(x, residual, weight, norm, "one_shot")

    def run(self, library: _native.Library, handle: int) -> None:
        """Makes the call; what it ends with is for the peers to tell. Collective."""
        temporaries = self._launch.bind(*self._tensors)
        library.run(handle, self._launch.address)
        del temporaries


def is_refusal(shape: int, num_tokens: int) -> bool:
    """Whether a CallTag announces it."""
    return shape == SHAPE and num_tokens == NUM_TOKENS
