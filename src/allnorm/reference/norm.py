"""Steps 0 to 5: sum over ranks, post norm and scale, residual add, RMSNorm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from allnorm.expert_sum import ExpertSum
from allnorm.islands import check_islands
from allnorm.names import NUMERICS, REQUESTS, check_choice
from allnorm.post_norm import PostNorm
from allnorm.reference.arithmetic import DTYPES, float32, new_tensor, sqrt, square_sum
from allnorm.reference.experts import partial_of
from allnorm.reference.shards import all_gather_rows, split_rows

_PACK_BYTES = 16


def all_reduce(
    inputs: Sequence[Tensor],
    *,
    algorithm: str = "auto",
    out: Tensor | None = None,
    islands: Sequence[Sequence[int]] | None = None,
) -> Tensor:
    """Sums the ranks' inputs in rank order in float32 and rounds once.

    Equivalent to ``sum(x.float() for x in inputs).to(inputs[0].dtype)``. With `islands`, the sums
    of the islands are then added (step 1b).

    Args:
        inputs: one `x` per rank, in rank order; equal shapes `[...]`, equal dtypes (float32,
            float16 or bfloat16), one device.
        algorithm: ignored, to match the signature of allnorm's calls; all algorithms are
            bit-identical.
        out: receives the sum; may be one of the inputs.
        islands: the ranks of each island; every rank occurs once. None: one island.

    Returns:
        The reduced sum, in `out` or a new contiguous tensor, with the shape and dtype of an input.

    Raises:
        ValueError: `inputs` is empty or they differ in shape, dtype or device, or `islands` do not
            contain every rank once.
        TypeError: the dtype is not one of the three, or `islands` has a wrong type.
    """
    check_choice("algorithm", algorithm, REQUESTS)
    _check_inputs(inputs)
    ranks = range(len(inputs))
    found = (tuple(ranks),) if islands is None else check_islands(islands, len(inputs))
    total = _sum([_sum([inputs[rank].float() for rank in island]) for island in found])
    reduced = new_tensor(total, inputs[0].dtype)
    return reduced if out is None else out.copy_(reduced)


def _sum(terms: Sequence[Tensor]) -> Tensor:
    """Sums float32 tensors in order, starting with the first."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def all_reduce_add_rms_norm(
    inputs: Sequence[Tensor | ExpertSum],
    residual: Any,
    weight: Tensor | None,
    eps: float,
    *,
    weight_bias: float = 0.0,
    numerics: str | None = "rounded",
    algorithm: str = "auto",
    residual_sharded: bool = False,
    gather: bool = True,
    out: Any = None,
    residual_out: Any = None,
    post_norm: PostNorm | None = None,
    scale: float = 1.0,
    islands: Sequence[Sequence[int]] | None = None,
) -> tuple[Any, Any]:
    """Reduces over ranks, adds the residual, applies RMSNorm.

    Equivalent to ``residual_out = all_reduce(x) + residual`` and
    ``normed = rms_norm(residual_out, weight, eps)``.

    Args:
        inputs: one `x` per rank, in rank order, `[..., hidden_size]`; float32, float16 or bfloat16.
            An `ExpertSum` means the sum of its rows, `[num_tokens, hidden_size]`.
        residual: shape and dtype of `x`, or float32; None: nothing is added. With
            `residual_sharded`, the list of all ranks' shards, each `[hi - lo, hidden_size]` as in
            `row_shard`.
        weight: `[hidden_size]`, dtype of `x` or float32. With `post_norm` it may be None; then
            there is no second norm, and `normed` is None.
        eps: added to the mean square, rounded to float32.
        weight_bias: added to the weight in float32 (1.0 for Gemma).
        numerics: "rounded", "unrounded", "transformers" or "vllm"; None is "rounded".
        algorithm: ignored, to match the signature of allnorm's calls; all algorithms are
            bit-identical.
        residual_sharded: whether each rank holds only its own rows of the residual.
        gather: False, only with `residual_sharded`: each rank gets only its own rows of `normed`.
        out: receives `normed`; may be one of the inputs. With `gather=False` a list.
        residual_out: receives the new residual; may be `residual`. With `residual_sharded` a list.
        post_norm: norm of the reduced sum before the residual is added.
        scale: factor of the reduced sum, or of its post norm; rounded to float32.
        islands: as in `all_reduce`.

    Returns:
        `(normed, residual_out)`, both in the shape of `x`; `normed` in the dtype of `x`, the other
        in that of the residual. With `residual_sharded`, the second is the list of all ranks'
        shards, and with `gather=False` the first one too.

    Raises:
        ValueError: a shape, device or name does not match, or `gather` is False without
            `residual_sharded`.
        TypeError: a dtype does not match.
    """
    check_choice("algorithm", algorithm, REQUESTS)
    if not gather and not residual_sharded:
        raise ValueError("gather=False without residual_sharded: expected True")
    reduced = all_reduce([partial_of(x) for x in inputs], islands=islands)
    whole = _join(residual, reduced) if residual_sharded else residual
    normed, total = add_rms_norm(
        reduced,
        whole,
        weight,
        eps,
        weight_bias=weight_bias,
        numerics=numerics,
        post_norm=post_norm,
        scale=scale,
    )
    shards = split_rows(total, len(inputs)) if residual_sharded else [total]
    if residual_out is not None:
        stores = list(residual_out) if residual_sharded else [residual_out]
        shards = [store.copy_(shard) for store, shard in zip(stores, shards, strict=True)]
    results = shards if residual_sharded else shards[0]
    if normed is not None and not gather:
        own = split_rows(normed, len(inputs))
        if out is not None:
            own = [store.copy_(rows) for store, rows in zip(out, own, strict=True)]
        return own, results
    return normed if out is None or normed is None else out.copy_(normed), results


def add_rms_norm(
    x: Tensor | ExpertSum,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    *,
    weight_bias: float = 0.0,
    numerics: str | None = "rounded",
    post_norm: PostNorm | None = None,
    scale: float = 1.0,
) -> tuple[Any, Tensor]:
    """Adds the residual to an already reduced `x` and applies RMSNorm: steps 1c to 5.

    Args:
        x: `[..., hidden_size]`, float32, float16 or bfloat16; or an `ExpertSum`, which means the
            sum of its rows.
        residual: shape and dtype of `x`, or float32, in which the sum is then not rounded; None:
            nothing is added.
        weight: `[hidden_size]`, dtype of `x` or float32. With `post_norm` it may be None; then
            there is no second norm, and `normed` is None.
        eps: added to the mean square, rounded to float32.
        weight_bias: added to the weight in float32.
        numerics: "rounded", "unrounded", "transformers" or "vllm"; None is "rounded".
        post_norm: norm of `x` before the residual is added.
        scale: factor of `x`, or of its post norm; rounded to float32.

    Returns:
        `(normed, residual_out)`, both in the shape of `x`; `normed` in the dtype of `x`, the other
        in that of the residual.

    Raises:
        ValueError: a shape, device or name does not match.
        TypeError: a dtype does not match.
    """
    numerics = "rounded" if numerics is None else numerics
    x = partial_of(x)
    _check_norm(x, residual, weight, numerics, post_norm)
    x = _change(x, numerics, post_norm, scale)
    total = _add_residual(x, residual)
    dtype = x.dtype if residual is None else residual.dtype
    residual_out = total.to(dtype)
    if weight is None:
        return None, new_tensor(residual_out, dtype)
    z = residual_out.float() if numerics in ("rounded", "transformers") else total
    normed = _scale(z, _reciprocal_rms(z, eps, x.dtype), _gain(weight, weight_bias), x, numerics)
    return new_tensor(normed, x.dtype), new_tensor(residual_out, dtype)


def _change(x: Tensor, numerics: str, post_norm: PostNorm | None, scale: float) -> Tensor:
    """Applies the post norm to the reduced sum, then the scale: step 1c."""
    if post_norm is not None:
        z = x.float()
        rstd = _reciprocal_rms(z, post_norm.eps, x.dtype)
        gain = _gain(post_norm.weight, post_norm.weight_bias)
        x = new_tensor(_scale(z, rstd, gain, x, numerics), x.dtype)
    return x if scale == 1 else new_tensor(x.float() * float32(scale, x), x.dtype)


def _join(shards: Any, x: Tensor) -> Tensor | None:
    """Joins all ranks' rows of the residual, in the shape of `x`."""
    if shards is None:
        return None
    if isinstance(shards, Tensor):
        raise TypeError("residual is a tensor: expected the list of all ranks' shards")
    return all_gather_rows(shards, x.shape[:-1].numel()).view(x.shape)


def _add_residual(x: Tensor, residual: Tensor | None) -> Tensor:
    """Computes `s = f(A) + f(residual)`: step 2 before rounding."""
    return x.float() if residual is None else x.float() + residual.float()


def _reciprocal_rms(z: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Computes `1 / sqrt(sum / H + eps)`, `[..., 1]`: the end of step 4."""
    hidden_size = float32(z.shape[-1], z)
    mean = square_sum(z, _PACK_BYTES // dtype.itemsize).unsqueeze(-1) / hidden_size
    root = sqrt(mean + float32(eps, z))
    return torch.ones_like(root) / root


def _gain(weight: Tensor, weight_bias: float) -> Tensor:
    """Computes `weight_bias + f(w)` of step 5."""
    return float32(weight_bias, weight) + weight.float()


def _scale(z: Tensor, rstd: Tensor, gain: Tensor, x: Tensor, numerics: str) -> Tensor:
    """Multiplies by the reciprocal RMS and the gain: step 5 before the last rounding."""
    y = z * rstd
    if numerics in ("transformers", "vllm"):
        y = y.to(x.dtype).float()
    return y * gain


def _check_inputs(inputs: Sequence[Tensor]) -> None:
    if not inputs:
        raise ValueError("inputs is empty: expected the input of every rank, in rank order")
    first = inputs[0]
    if first.dtype not in DTYPES:
        raise TypeError(f"x is {first.dtype}: expected float32, float16 or bfloat16")
    for rank, x in enumerate(inputs):
        if (x.shape, x.dtype, x.device) != (first.shape, first.dtype, first.device):
            raise ValueError(
                f"the inputs differ: rank 0 has {_describe(first)}, rank {rank} has {_describe(x)}"
            )


def _check_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    numerics: str,
    post_norm: PostNorm | None,
) -> None:
    check_choice("numerics", numerics, NUMERICS)
    if x.dtype not in DTYPES:
        raise TypeError(f"x is {x.dtype}: expected float32, float16 or bfloat16")
    if x.ndim < 1 or x.shape[-1] < 1:
        raise ValueError(f"x has shape {list(x.shape)}: expected [..., hidden_size]")
    if residual is not None and residual.dtype not in (x.dtype, torch.float32):
        raise TypeError(
            f"residual is {residual.dtype}: expected the dtype of x, {x.dtype}, or float32"
        )
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual has shape {list(residual.shape)}: expected {list(x.shape)}")
    if weight is None and post_norm is None:
        raise ValueError("weight is None: expected a tensor, or a post_norm")
    if weight is not None:
        _check_weight("weight", weight, x)
    if post_norm is not None:
        _check_weight("post_norm.weight", post_norm.weight, x)


def _check_weight(name: str, weight: Tensor, x: Tensor) -> None:
    if weight.dtype not in (x.dtype, torch.float32):
        raise TypeError(f"{name} is {weight.dtype}: expected {x.dtype} or float32")
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"{name} has shape {list(weight.shape)}: expected {list(x.shape[-1:])}")


def _describe(x: Tensor) -> str:
    return f"{list(x.shape)} {x.dtype} on {x.device}"
