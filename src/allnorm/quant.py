"""Quantization of normed rows: the specs that a caller passes, and the results."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from allnorm.errors import UnsupportedError
from allnorm.names import (
    GROUP_SIZES,
    NVFP4_LAYOUTS,
    QUANTS,
    SCALE_FORMATS,
    SCALE_LAYOUTS,
    SWIZZLED,
    check_choice,
)

DTYPE = torch.float8_e4m3fn

_PACKED_PER_WORD = 4  # scales per word of the packed format
_TMA_ALIGN_ROWS = 4  # columns start at multiples of 16 bytes, as a TMA descriptor requires
# Rows and groups per tile in the swizzled layout.
TILE_ROWS, TILE_GROUPS = 128, 4
NVFP4_GROUP_SIZE = 16
# The values of the eight unsigned codes of e2m1.
E2M1_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Fp8PerGroup:
    """One scale per `group_size` consecutive columns of each row.

    Args:
        group_size: 16, 32, 64, 128, 256 or 512; must divide hidden_size.
        scale_layout: layout of the scales `[T, hidden_size / group_size]`, where T is the number of
            rows: "row_major" (contiguous), "column_major" (strides `(1, T)`), or
            "column_major_tma" (strides `(1, ceil4(T))`, as DeepGEMM reads them; padding rows are
            zero). `Fp8PerGroup(32, scale_format="ue8m0")` also supports "swizzled_128x4", see
            `MxFp8`.
        scale_format: "float32"; "ue8m0", rounded up to a power of two and stored in float32; or
            "ue8m0_packed", the exponents of four groups in an int32, the first in the lowest byte:
            `[T, ceil(hidden_size / group_size / 4)]`. "ue8m0_packed" supports only
            "column_major_tma", which is then the default layout.

    Raises:
        TypeError: group_size is not an int.
        ValueError: a value is not one of these, or the layout and format do not go together:
            "ue8m0_packed" with "column_major", or "swizzled_128x4" without 32 and "ue8m0".
    """

    group_size: int = 128
    scale_layout: str = "row_major"
    scale_format: str = "float32"
    kind: ClassVar[str] = "per_group"

    def __post_init__(self) -> None:
        if isinstance(self.group_size, bool) or not isinstance(self.group_size, int):
            raise TypeError(f"group_size={self.group_size!r}: expected an int.")
        check_choice("group_size", self.group_size, GROUP_SIZES)
        check_choice("scale_layout", self.scale_layout, SCALE_LAYOUTS)
        check_choice("scale_format", self.scale_format, SCALE_FORMATS)
        if self.scale_layout == SWIZZLED and (self.group_size, self.scale_format) != (32, "ue8m0"):
            raise ValueError(
                f"scale_layout={SWIZZLED!r} with group_size={self.group_size} and "
                f"scale_format={self.scale_format!r}: expected 32 and 'ue8m0', which is MXFP8. "
                "Pass allnorm.MxFp8()."
            )
        if self.scale_format != "ue8m0_packed":
            return
        if self.scale_layout == "row_major":  # the default, so the caller passed no layout
            object.__setattr__(self, "scale_layout", "column_major_tma")
        elif self.scale_layout != "column_major_tma":
            raise ValueError(
                f"scale_format='ue8m0_packed' with scale_layout={self.scale_layout!r}: packed "
                "scales exist in one layout only. Pass scale_layout='column_major_tma'."
            )


def MxFp8() -> Fp8PerGroup:  # noqa: N802  # named like the other specs
    """Returns the spec of MXFP8: `Fp8PerGroup(32, "swizzled_128x4", "ue8m0")`.

    The scales are the biased exponents of powers of two, uint8, in tiles of 128 rows by 4 groups,
    the layout of Blackwell's GEMMs: `[ceil(T / 128), ceil(G / 4), 32, 4, 4]` flattened, where a row
    has G groups. The scale of row m and group k is in tile `m // 128 * ceil(G / 4) + k // 4`, at
    index `tile * 512 + m % 32 * 16 + m % 128 // 32 * 4 + k % 4`. Every call zeroes the padding.
    torch's GEMMs take `scale.view(torch.float8_e8m0fnu)`.
    """
    return Fp8PerGroup(32, SWIZZLED, "ue8m0")


@dataclass(frozen=True)
class Fp8PerToken:
    """One float32 scale per row, `[T, 1]`."""

    kind: ClassVar[str] = "per_token"


@dataclass(frozen=True, eq=False, repr=False)
class Fp8PerTensor:
    """One scale for the whole tensor, given by the caller; values are divided by it.

    Two specs are equal if and only if they hold the same tensor.

    Args:
        scale: float32, one element, on the device of the input. The kernel reads it, so a replay of
            a CUDA graph uses its current value.

    Raises:
        TypeError: `scale` is not a float32 tensor.
        ValueError: `scale` does not have one element.
    """

    scale: torch.Tensor
    kind: ClassVar[str] = "per_tensor"

    def __post_init__(self) -> None:
        _check_given("scale", self.scale)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fp8PerTensor) and self.scale is other.scale

    def __hash__(self) -> int:
        return id(self.scale)

    def __repr__(self) -> str:
        # Without the value, which would have to be copied from the device.
        return f"Fp8PerTensor(scale=<{tuple(self.scale.shape)} on {self.scale.device}>)"


@dataclass(frozen=True, eq=False, repr=False)
class NvFp4:
    """NVFP4: e2m1 elements, one e4m3 scale per 16 elements, and one global scale.

    Quantized rows are uint8 `[..., hidden_size / 2]`, with two elements per byte, the first in the
    low half. Two specs are equal if they hold the same tensor and have the same layout.

    Args:
        global_scale: float32, one element, on the device of the input. Scales are multiplied by it
            before they are rounded to e4m3; usually `448 * 6 / amax` from calibration. The kernel
            reads it, so a replay of a CUDA graph uses its current value. The value of an element is
            `e2m1 * scale / global_scale`.
        scale_layout: layout of the float8_e4m3fn scales: "swizzled_128x4", flat, as in `MxFp8` with
            16 columns per group; or "row_major", `[T, hidden_size / 16]`.

    Raises:
        TypeError: `global_scale` is not a float32 tensor.
        ValueError: `global_scale` does not have one element, or the layout is unknown.
    """

    global_scale: torch.Tensor
    scale_layout: str = "swizzled_128x4"
    kind: ClassVar[str] = "nvfp4"

    def __post_init__(self) -> None:
        _check_given("global_scale", self.global_scale)
        check_choice("scale_layout", self.scale_layout, NVFP4_LAYOUTS)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, NvFp4)
            and self.global_scale is other.global_scale
            and self.scale_layout == other.scale_layout
        )

    def __hash__(self) -> int:
        return hash((id(self.global_scale), self.scale_layout))

    def __repr__(self) -> str:
        shape, device = tuple(self.global_scale.shape), self.global_scale.device
        return f"NvFp4(global_scale=<{shape} on {device}>, scale_layout={self.scale_layout!r})"


def _check_given(name: str, scale: object) -> None:
    """Raises unless `scale` is a float32 tensor of one element."""
    if not isinstance(scale, torch.Tensor):
        raise TypeError(
            f"{name} is a {type(scale).__name__}: expected a float32 tensor of one "
            "element. Pass torch.tensor([value], device=...)."
        )
    if scale.is_nested or scale.layout is not torch.strided:
        what = "nested" if scale.is_nested else str(scale.layout)
        raise TypeError(f"{name} has layout {what}: expected a dense tensor of one element.")
    if scale.dtype != torch.float32:
        raise TypeError(f"{name} has dtype {scale.dtype}: expected float32. Convert it.")
    if scale.numel() != 1:
        raise ValueError(
            f"{name} has shape {tuple(scale.shape)}: expected one element, for all rows."
        )


Quant = Fp8PerGroup | Fp8PerToken | Fp8PerTensor | NvFp4
DEFAULT_QUANT = Fp8PerGroup(128)


class QuantizedNorm(NamedTuple):
    """The results of a quantized call.

    Attributes:
        quantized: quantized rows, float8_e4m3fn in the shape of `x`; for `NvFp4` uint8 of half the
            width. Contiguous unless preallocated.
        scale: scales in the layout of the spec; for `Fp8PerTensor` the given tensor.
        residual: the new residual, unquantized.
        normed: the normed rows before quantization, in the dtype of `x`; None unless requested.
    """

    quantized: torch.Tensor
    scale: torch.Tensor
    residual: torch.Tensor
    normed: torch.Tensor | None = None


class ScaleGeometry(NamedTuple):
    """The memory layout of a result's scales.

    Attributes:
        shape: shape of the scale tensor: rows and words per row; swizzled: bytes.
        stride: strides of the tensor, in elements.
        dtype: float32; int32 for packed scales; uint8 or float8_e4m3fn for bytes.
        padded: whether padding follows the last row, up to a multiple of four rows.
        tiles: tiles per row of tiles in the swizzled layout; 0 in other layouts.
        rows: number of quantized rows, in the swizzled layout; 0 in other layouts.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    padded: bool = False
    tiles: int = 0
    rows: int = 0

    @property
    def padding_rows(self) -> int:
        """The number of padding rows, which are zero, after the last row."""
        if self.tiles:
            return -self.rows % TILE_ROWS
        return self.stride[1] - self.shape[0] if self.padded else 0

    def empty(self, device: torch.device) -> torch.Tensor:
        """Allocates an uninitialized tensor of this layout, including its padding."""
        shape, stride, dtype, padded, _, _ = self
        if not padded:
            return torch.empty_strided(shape, stride, dtype=dtype, device=device)
        memory = torch.empty_strided((stride[1], shape[1]), stride, dtype=dtype, device=device)
        return memory.as_strided(shape, stride)

    def with_padding(self, scale: torch.Tensor) -> torch.Tensor:
        """Returns the memory of `scale`, including the padding rows after it."""
        if not self.padded or not self.padding_rows:
            return scale
        rows, words = self.shape
        return scale.as_strided((rows + self.padding_rows, words), self.stride)


def check_quant(quant: object) -> None:
    """Raises TypeError unless `quant` is one of the specs."""
    if not isinstance(quant, Quant):
        raise TypeError(
            f"quant={quant!r}: expected an allnorm.NvFp4, MxFp8(), Fp8PerGroup, Fp8PerToken or "
            "Fp8PerTensor. For 16-bit results call the method without _quant."
        )


def check_hidden_size(quant: Quant, hidden_size: int) -> None:
    """Raises UnsupportedError unless rows with this many columns consist of whole groups."""
    if isinstance(quant, NvFp4) and hidden_size % NVFP4_GROUP_SIZE:
        raise UnsupportedError(
            f"hidden_size {hidden_size} is not a multiple of 16: a row of NVFP4 must consist of "
            "whole groups. Pass Fp8PerToken."
        )
    if isinstance(quant, Fp8PerGroup) and hidden_size % quant.group_size:
        fitting = [str(size) for size in GROUP_SIZES if hidden_size % size == 0]
        remedy = f"group_size={' or '.join(fitting)}" if fitting else "Fp8PerToken"
        raise UnsupportedError(
            f"hidden_size {hidden_size} is not a multiple of group_size={quant.group_size}: a row "
            f"must consist of whole groups. Pass {remedy}."
        )


def quantized_dtype(quant: Quant) -> torch.dtype:
    """Returns the element dtype of quantized rows."""
    return torch.uint8 if isinstance(quant, NvFp4) else DTYPE


def quantized_shape(
    quant: Quant, shape: tuple[int, ...] | torch.Size
) -> tuple[int, ...] | torch.Size:
    """Returns the shape of quantized rows for rows of this shape."""
    if isinstance(quant, NvFp4):
        return (*shape[:-1], shape[-1] // 2)
    return shape


def is_swizzled(quant: object) -> bool:
    """Returns whether a spec's scales are stored in tiles."""
    return getattr(quant, "scale_layout", "") == SWIZZLED


def scale_geometry(quant: Quant, num_tokens: int, hidden_size: int) -> ScaleGeometry | None:
    """Returns the scale layout for `num_tokens` rows; None if scales are not a result.

    Args:
        quant: the spec.
        num_tokens: rows, T; may be symbolic.
        hidden_size: columns, a multiple of the group size.
    """
    if isinstance(quant, Fp8PerTensor):
        return None
    if isinstance(quant, Fp8PerToken):
        return ScaleGeometry((num_tokens, 1), (1, 1), torch.float32)
    if quant.scale_layout == SWIZZLED:
        return _swizzled(quant, num_tokens, hidden_size)
    if isinstance(quant, NvFp4):
        groups = hidden_size // NVFP4_GROUP_SIZE
        return ScaleGeometry((num_tokens, groups), (groups, 1), DTYPE)
    words, dtype = hidden_size // quant.group_size, torch.float32
    if quant.scale_format == "ue8m0_packed":
        words, dtype = -(-words // _PACKED_PER_WORD), torch.int32
    shape = (num_tokens, words)
    if quant.scale_layout == "row_major":
        return ScaleGeometry(shape, (words, 1), dtype)
    if quant.scale_layout == "column_major":
        return ScaleGeometry(shape, (1, num_tokens), dtype)
    column = (num_tokens + _TMA_ALIGN_ROWS - 1) // _TMA_ALIGN_ROWS * _TMA_ALIGN_ROWS
    return ScaleGeometry(shape, (1, column), dtype, padded=True)


def _swizzled(quant: Fp8PerGroup | NvFp4, num_tokens: int, hidden_size: int) -> ScaleGeometry:
    """Returns the layout for scales in consecutive tiles of 128 rows by 4 groups."""
    if isinstance(quant, Fp8PerGroup):
        groups, dtype = hidden_size // quant.group_size, torch.uint8
    else:
        groups, dtype = hidden_size // NVFP4_GROUP_SIZE, DTYPE
    tiles = -(-groups // TILE_GROUPS)
    # Written as a sum, so that no branch depends on a symbolic number of rows.
    num_bytes = (num_tokens + TILE_ROWS - 1) // TILE_ROWS * tiles * TILE_ROWS * TILE_GROUPS
    return ScaleGeometry((num_bytes,), (1,), dtype, tiles=tiles, rows=num_tokens)


def swizzled_rows(scale: torch.Tensor, tiles: int) -> torch.Tensor:
    """Copies tiled scales into rows and groups, padding included.

    Args:
        scale: flat tensor with one byte per element.
        tiles: tiles per row of tiles.

    Returns:
        uint8 `[128 * n, 4 * tiles]`.
    """
    blocks = scale.view(torch.uint8).view(-1, tiles, 32, 4, TILE_GROUPS)
    return blocks.permute(0, 3, 2, 1, 4).reshape(-1, tiles * TILE_GROUPS)


def swizzle(rows: torch.Tensor) -> torch.Tensor:
    """Copies `[128 * n, 4 * tiles]` scales into flat tiles; inverse of `swizzled_rows`."""
    blocks = rows.view(-1, 4, 32, rows.shape[1] // TILE_GROUPS, TILE_GROUPS)
    return blocks.permute(0, 3, 2, 1, 4).reshape(-1)


def empty_scale(
    quant: Quant, num_tokens: int, hidden_size: int, device: torch.device | str
) -> torch.Tensor:
    """Allocates uninitialized memory to pass as `scale_out`.

    Args:
        quant: the spec, not an Fp8PerTensor.
        num_tokens: number of rows: the product of the leading dimensions of `x`.
        hidden_size: number of columns.
        device: device of the input.

    Raises:
        ValueError: the spec is an Fp8PerTensor, or hidden_size is not a multiple of the group size.
    """
    check_hidden_size(quant, hidden_size)
    geometry = scale_geometry(quant, num_tokens, hidden_size)
    if geometry is None:
        raise ValueError("Fp8PerTensor already has a scale: it needs no scale_out.")
    return geometry.empty(torch.device(device))


# ---- conversion to operator arguments ------------------------------------------------------------

OpArguments = tuple[str, int, str, str, torch.Tensor | None]


def op_arguments(quant: Quant) -> OpArguments:
    """Returns quant_kind, group_size, scale_layout, scale_format and static_scale of a spec."""
    if isinstance(quant, Fp8PerGroup):
        return quant.kind, quant.group_size, quant.scale_layout, quant.scale_format, None
    if isinstance(quant, NvFp4):
        return quant.kind, NVFP4_GROUP_SIZE, quant.scale_layout, "e4m3", quant.global_scale
    static_scale = quant.scale if isinstance(quant, Fp8PerTensor) else None
    return quant.kind, 0, "row_major", "float32", static_scale


def from_op_arguments(
    kind: str, group_size: int, scale_layout: str, scale_format: str, scale: torch.Tensor | None
) -> Quant:
    """Converts an operator's arguments to a spec.

    Raises:
        ValueError, TypeError: the arguments do not describe a spec.
    """
    if kind == Fp8PerGroup.kind:
        return _per_group(group_size, scale_layout, scale_format)
    if kind == Fp8PerTensor.kind:
        return Fp8PerTensor(scale)  # type: ignore[arg-type]  # raises if it is None
    if kind == NvFp4.kind:
        return NvFp4(scale, scale_layout)  # type: ignore[arg-type]  # raises if it is None
    check_choice("quant_kind", kind, QUANTS)
    return Fp8PerToken()


_per_group = functools.cache(Fp8PerGroup)
