"""Rows of experts that become a rank's partial sum while they are loaded."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class ExpertSum:
    """The sum of a token's experts on this rank, in place of `x`: step 0 of the numerics page.

    Equivalent to ``(rows.float() * weights.unsqueeze(-1)).sum(1) + shared.float()``, in the order
    of the choices, rounded to the dtype of `rows`.

    Args:
        rows: `[num_tokens, top_k, hidden_size]`, `top_k` 1 to 16; with `index` `[num_rows,
            hidden_size]`, rows in any order, of which only those that are chosen are read.
            float32, float16 or bfloat16.
        weights: `[num_tokens, top_k]`, float32: what each row is multiplied by; None: nothing.
        index: `[num_tokens, top_k]`, int32: the row of `rows` for each choice, -1 where this rank
            has none. Any other number that is no row makes the token NaN.
        shared: `[num_tokens, hidden_size]`, dtype of `rows`: this rank's partial of the shared
            expert, added last; or None.
    """

    rows: Tensor
    weights: Tensor | None = None
    index: Tensor | None = None
    shared: Tensor | None = None
