"""MXFP8 and NVFP4 among the operators of a graph, as one operation that is known by its name.

No graph writes e2m1 out in arithmetic: a framework quantises by an operator of its own. A caller of
`fuse` says in `decompositions` that it computes `block_scaled`, which is traced as operators of
names that the pass knows: `blocks` for both results, and `part` for each of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from allnorm.quant import (
    Fp8PerGroup,
    NvFp4,
    Quant,
    empty_scale,
    is_swizzled,
    op_arguments,
    quantized_dtype,
    quantized_shape,
)

_library = torch.library.Library("allnorm_compile", "FRAGMENT")
_library.define(
    "blocks(Tensor y, Tensor? global_scale, str kind, int group_size, str scale_layout, "
    "str scale_format) -> Tensor"
)
_library.define("part(Tensor blocks, int index, Tensor like) -> Tensor")
torch.library.register_fake("allnorm_compile::blocks", lambda y, *_: torch.empty_like(y))
torch.library.register_fake("allnorm_compile::part", lambda _, i, like: torch.empty_like(like))


def block_scaled(
    y: Tensor, quant: Quant, quantized: Tensor | None = None, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What an operator computes that quantises to MXFP8 or NVFP4, for `decompositions` of `fuse`.

    It can only be traced. The caller vouches for the operator: a site is fused whether or not the
    operator computes the very bits of the numerics page.

    Args:
        y: [..., hidden_size], float32, float16 or bfloat16.
        quant: `allnorm.MxFp8()` or an `allnorm.NvFp4`.
        quantized: of the shape and dtype in which the operator returns the rows, such as what it
            stores them in; not read. None: as allnorm returns them.
        scale: the same for the scales, contiguous, of any dtype: the bytes are the same.

    Returns:
        What stands for both results.

    Raises:
        TypeError: another spec.
        NotImplementedError: `quantized` holds more or fewer elements than `y`.
        UnsupportedError: a row of `y` does not consist of whole groups.
    """
    if not isinstance(quant, NvFp4) and not (isinstance(quant, Fp8PerGroup) and is_swizzled(quant)):
        raise TypeError(f"quant={quant!r}: expected allnorm.MxFp8() or an allnorm.NvFp4.")
    shape = quantized_shape(quant, y.shape)
    if quantized is None:
        quantized = torch.empty(shape, dtype=quantized_dtype(quant), device=y.device)
    elif quantized.shape[-1] != shape[-1]:
        raise NotImplementedError(
            f"its rows are padded to {quantized.shape[-1]} elements from {shape[-1]}"
        )
    if scale is None:
        scale = empty_scale(quant, y.numel() // y.shape[-1], y.shape[-1], y.device)
    *spec, given = op_arguments(quant)
    operators = torch.ops.allnorm_compile
    blocks = operators.blocks.default(y, given, *spec)
    return operators.part.default(blocks, 0, quantized), operators.part.default(blocks, 1, scale)
