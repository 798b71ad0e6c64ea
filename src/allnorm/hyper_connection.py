"""The coefficients of hyper-connections: how a layer's output enters the residual streams."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


# Not a dataclass, which takes 0.15 ms to create at every import of allnorm.
class HyperConnection(NamedTuple):
    """Coefficients that mix residual streams and add a layer's output: see the numerics page.

    New stream i of a token is `post[i] * sum + mix[i][0] * residual[0] + mix[i][1] * residual[1] +
    ...`, in float32 and in this order, rounded once. `streams` is 2 to 8.

    Attributes:
        post: `[..., streams]`, float32: factors of the reduced sum.
        mix: `[..., streams, streams]`, float32: `mix[..., i, j]` is the factor of residual stream j
            in new stream i.

    The leading dimensions are those of `x`, and the values are the same on every rank. The call
    checks shapes and dtypes and raises ValueError or TypeError.
    """

    post: Tensor
    mix: Tensor
