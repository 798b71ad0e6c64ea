"""Hyper-connections: the reduced sum enters several residual streams."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from allnorm.expert_sum import ExpertSum
from allnorm.hyper_connection import HyperConnection
from allnorm.reference.arithmetic import new_tensor
from allnorm.reference.experts import partial_of
from allnorm.reference.norm import all_reduce


def all_reduce_hyper_connection(
    inputs: Sequence[Tensor | ExpertSum],
    residual: Tensor,
    connection: HyperConnection,
    *,
    algorithm: str = "auto",
    residual_out: Tensor | None = None,
    islands: Sequence[Sequence[int]] | None = None,
) -> Tensor:
    """Reduces over ranks, and adds the sum to mixed residual streams.

    Equivalent to ``post[i] * all_reduce(x) + sum(mix[i][j] * residual[j])`` for each new stream i.

    Args:
        inputs: one `x` per rank, in rank order, `[..., hidden_size]`; float32, float16 or bfloat16.
            An `ExpertSum` means the sum of its rows, `[num_tokens, hidden_size]`.
        residual: `[..., streams, hidden_size]`, dtype of `x` or float32; 2 to 8 streams.
        connection: coefficients, float32.
        algorithm: ignored, to match the signature of allnorm's calls; all algorithms are
            bit-identical.
        residual_out: receives the new streams; may be `residual`.
        islands: as in `all_reduce`.

    Returns:
        The new streams, in `residual_out` or a new tensor, with the shape and dtype of `residual`.

    Raises:
        ValueError: a shape or name does not match.
        TypeError: a dtype does not match.
    """
    partials = [partial_of(x) for x in inputs]
    reduced = all_reduce(partials, algorithm=algorithm, islands=islands)
    *leading, hidden_size = reduced.shape
    streams = residual.shape[-2] if residual.dim() > 1 else 0
    post, mix = connection.post, connection.mix
    for name, tensor, shape in (
        ("residual", residual, (*leading, streams, hidden_size)),
        ("post", post, (*leading, streams)),
        ("mix", mix, (*leading, streams, streams)),
    ):
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}: expected {shape}.")
    if not 2 <= streams <= 8:
        raise ValueError(f"{streams} streams: expected 2 to 8.")
    if residual.dtype not in (reduced.dtype, torch.float32):
        raise TypeError(
            f"residual has dtype {residual.dtype}: expected {reduced.dtype} or float32."
        )
    if {post.dtype, mix.dtype} != {torch.float32}:
        raise TypeError(f"post and mix have dtypes {post.dtype} and {mix.dtype}: expected float32.")
    mixed = post.unsqueeze(-1) * reduced.float().unsqueeze(-2)
    for j in range(streams):
        mixed = mixed + mix[..., j].unsqueeze(-1) * residual[..., j : j + 1, :].float()
    result = new_tensor(mixed, residual.dtype)
    return result if residual_out is None else residual_out.copy_(result)
