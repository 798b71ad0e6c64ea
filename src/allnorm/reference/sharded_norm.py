"""RMSNorm of rows that are spread over the ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from allnorm.names import NUMERICS, REQUESTS, check_choice
from allnorm.reference.arithmetic import DTYPES, float32, new_tensor, sqrt, square_sum

_PACK_BYTES = 16


def rms_norm_sharded(
    tensors: Sequence[Sequence[Tensor]],
    weights: Sequence[Sequence[Tensor]],
    eps: float,
    weight_bias: float = 0.0,
    out: Sequence[Sequence[Tensor]] | None = None,
    *,
    numerics: str | None = "rounded",
    algorithm: str = "auto",
) -> list[list[Tensor]]:
    """Applies RMSNorm to the rows whose slices the ranks hold.

    Equivalent to norming the concatenation of all ranks' slices, up to the order of the sums.

    Args:
        tensors: all ranks' tensors: `tensors[rank][i]` is that rank's slice `[..., local_size]` of
            tensor i; float32, float16 or bfloat16. For each i, shapes and dtypes are equal.
        weights: `weights[rank][i]` is that rank's slice of weight i, `[local_size]`, dtype of the
            tensors or float32.
        eps: added to the mean square, rounded to float32.
        weight_bias: added to the weights in float32.
        out: all ranks' memory for the results, like `tensors`.
        numerics: "rounded", "unrounded", "transformers" or "vllm"; None is "rounded".
        algorithm: ignored, to match the signature of allnorm's calls; all algorithms are
            bit-identical.

    Returns:
        All ranks' normed slices, in the shape and dtype of the tensors.

    Raises:
        ValueError: a shape, a length or a name does not match.
        TypeError: a dtype does not match.
    """
    check_choice("algorithm", algorithm, REQUESTS)
    mode = "rounded" if numerics is None else numerics
    check_choice("numerics", mode, NUMERICS)
    _check(tensors, weights)
    results: list[list[Tensor]] = [[] for _ in tensors]
    for i in range(len(tensors[0])):
        slices = [rank[i] for rank in tensors]
        total = sum_of_squares(slices[0])
        for x in slices[1:]:
            total = total + sum_of_squares(x)
        for rank, x in enumerate(slices):
            gains = weights[rank][i]
            normed = normed_slice(x, total, len(slices), gains, eps, weight_bias, mode)
            results[rank].append(normed if out is None else out[rank][i].copy_(normed))
    return results


def sum_of_squares(x: Tensor) -> Tensor:
    """Returns a rank's sum of squares of each row, float32."""
    return square_sum(x.float(), _PACK_BYTES // x.element_size())


def normed_slice(
    x: Tensor,
    total: Tensor,
    world_size: int,
    weight: Tensor,
    eps: float,
    weight_bias: float,
    numerics: str,
) -> Tensor:
    """Returns a rank's slice, normed by the sums of squares of all ranks' slices (`total`)."""
    count = float32(x.shape[-1] * world_size, total)
    rstd = (float32(1.0, total) / sqrt(total / count + float32(eps, total))).unsqueeze(-1)
    y = x.float() * rstd
    if numerics in ("transformers", "vllm"):
        y = new_tensor(y, x.dtype).float()
    return new_tensor(y * (float32(weight_bias, total) + weight.float()), x.dtype)


def _check(tensors: Sequence[Sequence[Tensor]], weights: Sequence[Sequence[Tensor]]) -> None:
    if not tensors or len(weights) != len(tensors):
        raise ValueError(f"{len(tensors)} ranks, {len(weights)} ranks' weights: expected as many.")
    for rank, (own, gains) in enumerate(zip(tensors, weights, strict=True)):
        if not own or len(own) != len(tensors[0]) or len(gains) != len(own):
            raise ValueError(
                f"rank {rank} has {len(own)} tensors and {len(gains)} weights: expected "
                f"{len(tensors[0])} of each."
            )
        for i, (x, weight) in enumerate(zip(own, gains, strict=True)):
            if x.dtype not in DTYPES or x.dtype != tensors[0][0].dtype:
                raise TypeError(f"tensors[{rank}][{i}] has dtype {x.dtype}: expected one of all.")
            if x.shape != tensors[0][i].shape:
                raise ValueError(
                    f"tensors[{rank}][{i}] has shape {tuple(x.shape)}: expected "
                    f"{tuple(tensors[0][i].shape)}."
                )
            if weight.shape != x.shape[-1:]:
                raise ValueError(
                    f"weights[{rank}][{i}] has shape {tuple(weight.shape)}: expected "
                    f"{tuple(x.shape[-1:])}."
                )
