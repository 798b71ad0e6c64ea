"""What the experts of a layer return, before it is summed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class ExpertSum:
    """The end of a mixture of experts, summed while it is loaded: step 0 of the numerics page.

    This rank's partial sum of a token is the sum over its choices, in order, of weight times row,
    in float32, plus `shared`; rounded once. Ranks may have different rows, choices and weights, and
    different numbers of them; they have the same number of tokens.

    Args:
        rows: `[num_tokens, top_k, hidden_size]`, or with `index` `[num_rows, hidden_size]`;
            float32, float16 or bfloat16.
        weights: `[num_tokens, top_k]`, float32; None: rows are weighted already.
        index: `[num_tokens, top_k]`, int32: the row of each choice, -1 where this rank has none. A
            token with any other number that is no row becomes NaN.
        shared: `[num_tokens, hidden_size]`, dtype of `rows`: this rank's partial of the shared
            expert; None: there is none.

    `top_k` is 1 to 16. Shapes and dtypes are checked by the call: ValueError, TypeError.
    """

    rows: Tensor
    weights: Tensor | None = None
    index: Tensor | None = None
    shared: Tensor | None = None
