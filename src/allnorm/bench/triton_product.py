"""A row-parallel linear in Triton that lets what follows begin early; imported where GPUs are.

A kernel of programmatic dependent launch begins while the one in front of it runs, and waits for
its end before it reads anything (`griddepcontrol.wait`). It begins when that one says so, or ends;
products of cuBLAS only end. This one says so as soon as it has its own input, so that the start of
a fused call behind it is not waited for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_OUT, _IN = 32, 128  # features of a tile
MOST_TOKENS = 64
"""Of more, the products of PyTorch are much faster."""


@triton.jit
def _linear(  # type: ignore[no-untyped-def]
    x,
    weight,
    out,
    num_tokens,
    out_features,
    in_features,
    TOKENS: tl.constexpr,  # noqa: N803
    OUT: tl.constexpr,  # noqa: N803
    IN: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
):
    """`out = x @ weight.T` of one block of tokens and one of features of the output."""
    if IS_DEPENDENT:
        # x is what the kernel before has written. From here on the one behind may begin.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    rows = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    columns = tl.program_id(0) * OUT + tl.arange(0, OUT)
    inner = tl.arange(0, IN)
    x_rows = x + rows[:, None] * in_features + inner[None, :]
    weight_rows = weight + columns[None, :] * in_features + inner[:, None]
    total = tl.zeros((TOKENS, OUT), tl.float32)
    for _ in range(in_features // IN):
        part = tl.load(x_rows, mask=rows[:, None] < num_tokens, other=0.0)
        total += tl.dot(part, tl.load(weight_rows))
        x_rows += IN
        weight_rows += IN
    at = out + rows[:, None] * out_features + columns[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=rows[:, None] < num_tokens)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    is_dependent: bool,
) -> torch.Tensor:
    """`x @ weight.T`, summed in float32.

    Args:
        x: [num_tokens, in_features], contiguous, of 16 bits; in_features a multiple of 128.
        weight: [out_features, in_features], likewise; out_features a multiple of 32.
        out: [num_tokens, out_features], where the result goes; None: a new tensor.
        is_dependent: it begins before the kernel in front of it has ended, waits for that, and lets
            the one behind begin. That needs compute capability 9.0 or later.

    Safe in CUDA graphs for numbers of tokens that it has been called with.

    Raises:
        ValueError: a shape that it has no tiles for.
    """
    (num_tokens, in_features), out_features = x.shape, weight.shape[0]
    if in_features % _IN or out_features % _OUT:
        raise ValueError(
            f"a product of {in_features} by {out_features} features: expected multiples of {_IN} "
            f"and {_OUT}"
        )
    if out is None:
        out = x.new_empty(num_tokens, out_features)
    tokens = min(MOST_TOKENS, max(16, triton.next_power_of_2(num_tokens)))
    grid = (out_features // _OUT, triton.cdiv(num_tokens, tokens))
    _linear[grid](
        *(x, weight, out, num_tokens, out_features, in_features),
        TOKENS=tokens,
        OUT=_OUT,
        IN=_IN,
        IS_DEPENDENT=is_dependent,
        num_warps=4,
        num_stages=5,
        launch_pdl=is_dependent,
    )
    return out
