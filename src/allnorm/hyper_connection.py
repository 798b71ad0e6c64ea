"""Hyper-connections: coefficients by which residual streams become a layer's input, and mix."""

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


class HyperConnectionProjection(NamedTuple):
    """A layer's learned projection of the residual streams to its coefficients.

    These are the parameters of manifold-constrained hyper-connections (Xie et al., "mHC", 2025) as
    in DeepSeek-V4. With `count = streams * (streams + 2)`, the rows of `fn` give, in this order,
    one coefficient per stream for the layer's input, one per stream for its output, and a matrix
    with one row per old and one column per new stream.

    Attributes:
        fn: `[count, streams * hidden_size]`, float32: the projection. Column `j * hidden_size + k`
            belongs to element k of stream j.
        scale: `[3]`, float32: factors of the three groups of coefficients.
        base: `[count]`, float32: added to the coefficients.
        eps: added to the mean square of a token's streams.
        hc_eps: added to the input's coefficients and to the sums of Sinkhorn's steps.
        iterations: number of Sinkhorn iterations, at least 1.
        post_scale: factor of the output's coefficients.
    """

    fn: Tensor
    scale: Tensor
    base: Tensor
    eps: float = 1e-6
    hc_eps: float = 1e-6
    iterations: int = 20
    post_scale: float = 2.0
