"""The calls of a Case that are no norms of whole rows: of slices of rows, and of residual streams.

Both take the same tensors as a norm. Their further arguments follow from the contents of each row,
so that a result from a wrong row differs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

import allnorm
from allnorm import reference
from allnorm.reference.sharded_norm import sum_of_squares
from allnorm.testing.inputs import random_projection

# ---- rms_norm_sharded ----------------------------------------------------------------------------


def slice_sizes(hidden_size: int) -> list[int]:
    """Returns the columns of the slices of "rms_norm_sharded": of q, and fewer of k."""
    fewer = hidden_size // 4 // 8 * 8
    return [hidden_size - fewer, fewer] if fewer else [hidden_size]


def squares_of(x: torch.Tensor) -> torch.Tensor:
    """Returns a rank's sums of squares of the slices of each row, [num_tokens, slices]."""
    return torch.stack([sum_of_squares(part) for part in x.split(slice_sizes(x.shape[-1]), -1)], -1)


def norm_slices(
    comm: allnorm.Communicator,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_bias: float,
    numerics: str,
    algorithm: str,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Runs `rms_norm_sharded` of the slices of `x`, into those of `out`; returns all of them."""
    sizes = slice_sizes(x.shape[-1])
    results = comm.rms_norm_sharded(
        *(x.split(sizes, -1), weight.split(sizes), eps, weight_bias),
        None if out is None else out.split(sizes, -1),
        numerics=numerics,
        algorithm=algorithm,
    )
    return torch.cat(results, -1)


# ---- all_reduce_hyper_connection -----------------------------------------------------------------


def streams_of(residual: torch.Tensor, streams: int) -> torch.Tensor:
    """Returns residual streams, [..., streams, hidden_size]: each row, rotated by a column each."""
    return torch.stack([residual.roll(i, -1) for i in range(streams)], -2)


def connection_of(residual: torch.Tensor, streams: int) -> allnorm.HyperConnection:
    """Returns coefficients: the first elements of each row, of at least `streams` * 9."""
    post, mix, _ = residual.float().tensor_split([streams, streams + streams**2], -1)
    return allnorm.HyperConnection(post.contiguous(), mix.unflatten(-1, (streams, streams)))


def mix_streams(
    comm: allnorm.Communicator,
    x: torch.Tensor | allnorm.ExpertSum,
    residual: torch.Tensor,
    streams: int,
    algorithm: str,
    in_place: bool = False,
    residual_out: torch.Tensor | None = None,
    next_norm: dict[str, Any] | None = None,
) -> Any:
    """Runs `all_reduce_hyper_connection` of the streams that `residual` describes.

    With `in_place`, the result overwrites the streams. With `next_norm`, the arguments of a norm,
    runs `all_reduce_hyper_connection_input`, and returns all its results by name.
    """
    given, connection = streams_of(residual, streams), connection_of(residual, streams)
    out = given if in_place else residual_out
    if next_norm is None:
        return comm.all_reduce_hyper_connection(
            *(x, given, connection), algorithm=algorithm, residual_out=out
        )
    projection = _projection(streams, residual.shape[-1], residual.device)
    normed, mixed, made = comm.all_reduce_hyper_connection_input(
        *(x, given, connection, projection),
        **next_norm,
        algorithm=algorithm,
        residual_out=out,
    )
    return {"residual_out": mixed, "normed": normed, "post": made.post, "mix": made.mix}


def expected_streams(reduced: torch.Tensor, residual: torch.Tensor, streams: int) -> torch.Tensor:
    """Returns the reference's result of `mix_streams`; `reduced` is the sum over the ranks."""
    given, connection = streams_of(residual, streams), connection_of(residual, streams)
    return reference.all_reduce_hyper_connection([reduced], given, connection)


@functools.cache  # also because captured calls keep using its memory
def _projection(
    streams: int, hidden_size: int, device: torch.device
) -> allnorm.HyperConnectionProjection:
    generator = torch.Generator().manual_seed(streams * (streams + 2) * streams * hidden_size)
    return random_projection(generator, streams, hidden_size, device)


def next_input(
    make: Callable[..., Any], streams: torch.Tensor, *norm: Any, **options: Any
) -> dict[str, torch.Tensor]:
    """Returns the next layer's normed input and coefficients by name.

    `make` is `hyper_connection_input` of allnorm or of the reference. `norm` and `options` are its
    arguments after the projection.
    """
    projection = _projection(*streams.shape[-2:], streams.device)
    normed, connection = make(streams, projection, *norm, **options)
    return {"normed": normed, "post": connection.post, "mix": connection.mix}
