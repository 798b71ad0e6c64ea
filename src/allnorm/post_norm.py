"""The post norm: a norm of the reduced sum before the residual is added."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class PostNorm:
    """RMSNorm of the reduced sum, before the residual add: step 1c of the numerics page.

    Args:
        weight: `[hidden_size]`, dtype of `x` or float32.
        eps: added to the mean square, rounded to float32.
        weight_bias: added to the weight in float32 (1.0 for Gemma).
    """

    weight: Tensor
    eps: float
    weight_bias: float = 0.0
