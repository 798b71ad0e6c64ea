"""Step 0: computes a rank's partial sum of each token from the rows of its experts."""

from __future__ import annotations

import torch
from torch import Tensor

from allnorm.expert_sum import ExpertSum
from allnorm.names import TOP_K
from allnorm.reference.arithmetic import DTYPES, new_tensor


def partial_of(x: Tensor | ExpertSum) -> Tensor:
    """Returns a rank's contribution to the reduced sum: `x`, or the sum of its experts."""
    return expert_sum(x) if isinstance(x, ExpertSum) else x


def expert_sum(experts: ExpertSum) -> Tensor:
    """Adds the experts' rows of each token in the order of the choices, the shared expert last.

    Equivalent to ``(rows.float() * weights.unsqueeze(-1)).sum(1) + shared.float()``, rounded to the
    dtype of `rows`.

    Args:
        experts: the experts of one rank.

    Returns:
        A new tensor `[num_tokens, hidden_size]` in the dtype of `rows`. A token is NaN if one of
        its choices is neither -1 nor the index of a row.

    Raises:
        ValueError: a shape or device does not match, or `top_k` is not 1 to 16.
        TypeError: a dtype does not match.
    """
    _check(experts)
    rows, index = experts.rows, experts.index
    if index is None:
        num_tokens, top_k = rows.shape[0], rows.shape[1]
        index = torch.arange(num_tokens * top_k, device=rows.device).view(num_tokens, top_k)
    rows = rows.reshape(-1, rows.shape[-1])
    valid = (index >= 0) & (index < rows.shape[0])
    total = torch.zeros(index.shape[0], rows.shape[-1], dtype=torch.float32, device=rows.device)
    for k in range(index.shape[1]):
        tokens = valid[:, k].nonzero().squeeze(1)
        term = rows[index[tokens, k].long()].float()
        if experts.weights is not None:
            term = experts.weights[tokens, k].unsqueeze(-1) * term
        total[tokens] = total[tokens] + term
    if experts.shared is not None:
        total = total + experts.shared.float()
    total[~(valid | (index == -1)).all(-1)] = torch.nan
    return new_tensor(total, rows.dtype)


def _check(experts: ExpertSum) -> None:
    rows, index = experts.rows, experts.index
    if rows.dtype not in DTYPES:
        raise TypeError(f"rows is {rows.dtype}: expected float32, float16 or bfloat16")
    if index is None:
        if rows.ndim != 3:
            raise ValueError(
                f"rows has shape {list(rows.shape)}: expected [num_tokens, top_k, hidden_size], or "
                "[num_rows, hidden_size] and an index"
            )
        chosen = list(rows.shape[:2])
    else:
        if rows.ndim != 2:
            raise ValueError(
                f"rows has shape {list(rows.shape)}: expected [num_rows, hidden_size] with an index"
            )
        if index.dtype != torch.int32:
            raise TypeError(f"index is {index.dtype}: expected int32")
        if index.ndim != 2:
            raise ValueError(f"index has shape {list(index.shape)}: expected [num_tokens, top_k]")
        chosen = list(index.shape)
    num_tokens, top_k = chosen
    if top_k not in TOP_K:
        raise ValueError(f"top_k is {top_k}: expected {TOP_K[0]} to {TOP_K[-1]}")
    if rows.shape[-1] < 1:
        raise ValueError(f"rows has shape {list(rows.shape)}: expected at least one column")
    _check_tensor("weights", experts.weights, torch.float32, chosen)
    _check_tensor("shared", experts.shared, rows.dtype, [num_tokens, rows.shape[-1]])
    others = {"index": index, "weights": experts.weights, "shared": experts.shared}
    for name, tensor in others.items():
        if tensor is not None and tensor.device != rows.device:
            raise ValueError(f"{name} is on {tensor.device}: expected {rows.device}, as rows")


def _check_tensor(name: str, tensor: Tensor | None, dtype: torch.dtype, shape: list[int]) -> None:
    if tensor is None:
        return
    if tensor.dtype != dtype:
        raise TypeError(f"{name} is {tensor.dtype}: expected {dtype}")
    if list(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {list(tensor.shape)}: expected {shape}")
