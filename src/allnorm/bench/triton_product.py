"""A row-parallel linear layer in Triton that triggers its dependent launch early.

Import only with a GPU. With programmatic dependent launch, a kernel starts while the previous one
runs, and waits for its end (`griddepcontrol.wait`) before it reads anything. It starts when the
previous kernel triggers the launch or ends. cuBLAS GEMMs never trigger it. This kernel triggers it
as soon as its own input is complete, which hides the startup time of the fused call that follows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_OUT, _IN = 32, 128  # output and input features per tile
MOST_TOKENS = 64
"""With more tokens, PyTorch's GEMMs are much faster."""


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
    """Computes one tile of `out = x @ weight.T`."""
    if IS_DEPENDENT:
        # Waits for the previous kernel, which writes x; then the next kernel may start.
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
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None, *, is_dependent: bool
) -> torch.Tensor:
    """Returns `x @ weight.T`, accumulated in float32.

    Args:
        x: [num_tokens, in_features], contiguous, 16 bits; in_features a multiple of 128.
        weight: [out_features, in_features], contiguous, 16 bits; out_features a multiple of 32.
        out: [num_tokens, out_features], memory for the result; None: a new tensor.
        is_dependent: whether to use programmatic dependent launch: start before the previous kernel
            has ended, wait for its end, and trigger the next launch. Needs compute capability 9.0
            or later.

    A CUDA graph can capture it for any number of tokens for which it has already been called.

    Raises:
        ValueError: the shape does not divide into tiles.
    """
    (num_tokens, in_features), out_features = x.shape, weight.shape[0]
    if in_features % _IN or out_features % _OUT:
        raise ValueError(
            f"{in_features} input and {out_features} output features: expected multiples of {_IN} "
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
