"""The rows of a layer's experts, before they are summed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class ExpertSum:
    """The rows of a mixture of experts, which a call sums while it loads them.

    This rank's partial sum of a token is the float32 sum of weight times row over the token's
    choices, in order, plus `shared`, rounded once (step 0 of the numerics page). Ranks must have
    the same number of tokens; rows, choices, weights and their numbers may differ.

    Args:
        rows: `[num_tokens, top_k, hidden_size]`, or with `index` `[num_rows, hidden_size]`;
            float32, float16 or bfloat16.
        weights: `[num_tokens, top_k]`, float32; None: the rows are already weighted.
        index: `[num_tokens, top_k]`, int32: the row of each choice; -1 if this rank does not have
            it. A token with any other invalid index becomes NaN.
        shared: `[num_tokens, hidden_size]`, dtype of `rows`: this rank's partial sums of the shared
            expert; None: no shared expert.

    `top_k` is 1 to 16. The call checks shapes and dtypes and raises ValueError or TypeError.
    """

    rows: Tensor
    weights: Tensor | None = None
    index: Tensor | None = None
    shared: Tensor | None = None
