"""Represents quantization to MXFP8 and NVFP4 in a graph as operators that the pass recognizes.

Graphs do not compute e2m1 in plain arithmetic: frameworks have custom operators for it. A caller of
`fuse` maps such an operator to `block_scaled` in `decompositions`. The framework's operator is then
traced as two operators that the pass recognizes: `blocks`, for both results together, and `part`,
for each of the two results.
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
    """Declares, in the `decompositions` of `fuse`, an operator that quantizes to MXFP8 or NVFP4.

    This function can only be traced. The pass trusts the caller: it fuses the site even if the
    operator's results are not bit-identical to the results that the numerics page defines.

    Args:
        y: [..., hidden_size], float32, float16 or bfloat16.
        quant: `allnorm.MxFp8()` or an `allnorm.NvFp4`.
        quantized: a tensor with the shape and dtype in which the operator returns the rows, such as
            its output argument; its elements are not read. None: allnorm's own shape and dtype.
        scale: the same for the scales; contiguous. Any dtype is allowed, because the bytes are the
            same.

    Returns:
        Tensors that represent the quantized rows and the scales.

    Raises:
        TypeError: `quant` is neither of these.
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
