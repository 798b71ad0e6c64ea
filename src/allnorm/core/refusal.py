"""The call that a rank makes instead of one that it refuses and its peers may make.

Ranks that all refuse exchange it with each other and go on in step. A peer that makes any other
call sees at once that this rank does not make it: no call is announced like this one, because its
weight_bias is none that a call may have.
"""

from __future__ import annotations

import math

import torch

from allnorm.core import _native
from allnorm.core.call import Call
from allnorm.core.prepared_call import PreparedCall
from allnorm.policy import Plan

_COLUMNS = 4  # 16 bytes, which every algorithm takes
# Its CallShape: all_reduce_add_rms_norm by one_shot, numerics "vllm", no residual, float32. A real
# call of this shape would be misnamed in the text of an error, and nothing else.
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

        self._call = Call(
            op="all_reduce_add_rms_norm",
            source=row(),
            weight=row()[0],
            weight_bias=math.nan,
            numerics="vllm",
        )
        self._memory = {"out": row(), "residual_out": row()}
        self._prepared = PreparedCall(self._call, Plan("one_shot", "a refusal", 1))

    def run(self, library: _native.Library, handle: int) -> None:
        """Makes the call; what it ends with is for the peers to tell. Collective."""
        inputs = self._prepared.bind(self._call, self._memory)
        library.run(handle, self._prepared.address)
        del inputs


def is_refusal(shape: int, num_tokens: int) -> bool:
    """Whether a CallTag announces it."""
    return shape == SHAPE and num_tokens == NUM_TOKENS
