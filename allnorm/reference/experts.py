"""Step 0: what experts return, summed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from allnorm.expert_sum import ExpertSum
from allnorm.names import DTYPES as DTYPE_NAMES
from allnorm.reference.arithmetic import new_tensor

_DTYPES = tuple(getattr(torch, name) for name in DTYPE_NAMES)
_MAX_TOP_K = 16


def expert_sum(experts: ExpertSum) -> Tensor:
    """This rank's partial sums: each token's rows times their weights, in order, and `shared`.

    Equivalent to ``(weights[..., None] * rows[index]).sum(1) + shared``, in float32, rounded once.

    Args:
        experts: as the call is given them.

    Returns:
        `[num_tokens, hidden_size]`, dtype of the rows. Tokens with an index that is no row are NaN.

    Raises:
        ValueError: shapes or devices do not fit.
        TypeError: a dtype does not fit.
    """
    rows, index = experts.rows, experts.index
    num_tokens, top_k = _check(experts)
    total = torch.zeros((num_tokens, rows.shape[-1]), dtype=torch.float32, device=rows.device)
    wrong = torch.zeros((num_tokens, 1), dtype=torch.bool, device=rows.device)
    for k in range(top_k):
        if index is None:
            row, there = rows[:, k].float(), ~wrong
        else:
            choice = index[:, k].long()
            row_exists = (choice >= 0) & (choice < rows.shape[0])
            wrong = wrong | (~row_exists & (choice != -1)).unsqueeze(-1)
            there = row_exists.unsqueeze(-1)
            if rows.shape[0] == 0:
                continue
            row = rows[torch.where(row_exists, choice, 0)].float()
        if experts.weights is not None:
            row = experts.weights[:, k : k + 1] * row
        total = torch.where(there, total + row, total)
    if experts.shared is not None:
        total = total + experts.shared.float()
    return new_tensor(total.masked_fill(wrong, torch.nan), rows.dtype)


def summed(x: Any) -> Any:
    """The partial sums that `x` is, or stands for."""
    return expert_sum(x) if isinstance(x, ExpertSum) else x


def _check(experts: ExpertSum) -> tuple[int, int]:
    """num_tokens and top_k."""
    rows, index = experts.rows, experts.index
    if rows.dtype not in _DTYPES:
        raise TypeError(f"rows is {rows.dtype}: expected float32, float16 or bfloat16")
    if rows.dim() != (3 if index is None else 2):
        raise ValueError(
            f"rows has shape {list(rows.shape)}: expected [num_tokens, top_k, hidden_size], with "
            "index [num_rows, hidden_size]"
        )
    if index is not None and index.dim() != 2:
        raise ValueError(f"index has shape {list(index.shape)}: expected [num_tokens, top_k]")
    num_tokens, top_k = (rows if index is None else index).shape[:2]
    if not 1 <= top_k <= _MAX_TOP_K:
        raise ValueError(f"top_k is {top_k}: expected 1 to {_MAX_TOP_K}")
    for name, tensor, shape, dtype in (
        ("index", index, (num_tokens, top_k), torch.int32),
        ("weights", experts.weights, (num_tokens, top_k), torch.float32),
        ("shared", experts.shared, (num_tokens, rows.shape[-1]), rows.dtype),
    ):
        if tensor is None:
            continue
        if tensor.dtype != dtype:
            raise TypeError(f"{name} is {tensor.dtype}: expected {dtype}")
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)}: expected {list(shape)}")
        if tensor.device != rows.device:
            raise ValueError(f"{name} is on {tensor.device}: expected {rows.device}, as rows is")
    return num_tokens, top_k
