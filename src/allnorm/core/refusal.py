"""The refusal: the call that a rank makes in place of a call that it refuses.

If all ranks refuse, they exchange refusals and stay in step. A peer that makes any other call
notices at once: no real call looks like a refusal, because a refusal's weight_bias is NaN.
"""

from __future__ import annotations

import math

import torch

from allnorm.core import _native
from allnorm.core.call import Call
from allnorm.core.prepared_call import PreparedCall
from allnorm.policy import Plan

_COLUMNS = 4  # 16 bytes, which every algorithm supports
# The refusal's CallShape: all_reduce_add_rms_norm by one_shot, numerics "vllm", no residual,
# float32. Errors would call a real call of this shape a refusal, with no other consequences.
SHAPE = 2 << 28 | 3 << 24 | _COLUMNS
NUM_TOKENS = 1


class Refusal:
    """A communicator's refusal, with its own tensors on `device`."""

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
        """Makes the call; the peers report how it ends. Collective."""
        inputs = self._prepared.bind(self._call, self._memory)
        library.run(handle, self._prepared.address)
        del inputs


def is_refusal(shape: int, num_tokens: int) -> bool:
    """Returns whether a CallTag announces a refusal."""
    return shape == SHAPE and num_tokens == NUM_TOKENS
