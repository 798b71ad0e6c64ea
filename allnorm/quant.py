"""How the normed rows are quantised: what a caller asks for, and what comes back."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from allnorm.errors import UnsupportedError
from allnorm.names import GROUP_SIZES, QUANTS, SCALE_FORMATS, SCALE_LAYOUTS

DTYPE = torch.float8_e4m3fn

# Scales to a word of the packed format; rows of a column that a TMA descriptor can address start at
# multiples of 16 bytes.
_PACKED_PER_WORD = 4
_TMA_ALIGN_ROWS = 4


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raises ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(repr, choices))}.")


@dataclass(frozen=True)
class Fp8PerGroup:
    """One scale for each `group_size` consecutive columns of each row.

    Args:
        group_size: 16, 32, 64, 128, 256 or 512; must divide hidden_size.
        scale_layout: of the scales `[T, hidden_size / group_size]`, where T is the number of rows:
            "row_major" (contiguous), "column_major" (strides `(1, T)`), or "column_major_tma"
            (strides `(1, ceil4(T))`, as DeepGEMM reads them; the padding rows are zero).
        scale_format: "float32"; "ue8m0", rounded up to a power of two and kept in float32; or
            "ue8m0_packed", the exponents of four groups in an int32, the first in the lowest byte:
            `[T, ceil(hidden_size / group_size / 4)]`, in "column_major_tma" only, which the layout
            then is where none is given.

    Raises:
        TypeError: group_size is not an int.
        ValueError: another value than these, or "ue8m0_packed" in "column_major".
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
        if self.scale_format != "ue8m0_packed":
            return
        if self.scale_layout == "row_major":  # the default: none was asked for
            object.__setattr__(self, "scale_layout", "column_major_tma")
        elif self.scale_layout != "column_major_tma":
            raise ValueError(
                f"scale_format='ue8m0_packed' with scale_layout={self.scale_layout!r}: packed "
                "scales exist in one layout only. Pass scale_layout='column_major_tma'."
            )


@dataclass(frozen=True)
class Fp8PerToken:
    """One float32 scale a row, `[T, 1]`."""

    kind: ClassVar[str] = "per_token"


@dataclass(frozen=True, eq=False, repr=False)
class Fp8PerTensor:
    """One scale for all, given by the caller: values are divided by it.

    Two of them are equal if they hold the same tensor.

    Args:
        scale: float32, one element, on the device of the input. Read by the kernel, so that a CUDA
            graph's replay sees its new value.

    Raises:
        TypeError: not a float32 tensor.
        ValueError: not one element.
    """

    scale: torch.Tensor
    kind: ClassVar[str] = "per_tensor"

    def __post_init__(self) -> None:
        if not isinstance(self.scale, torch.Tensor):
            raise TypeError(
                f"scale is a {type(self.scale).__name__}: expected a float32 tensor of one "
                "element. Pass torch.tensor([value], device=...)."
            )
        if self.scale.dtype != torch.float32:
            raise TypeError(f"scale has dtype {self.scale.dtype}: expected float32. Convert it.")
        if self.scale.numel() != 1:
            raise ValueError(
                f"scale has shape {tuple(self.scale.shape)}: expected one element, for all rows."
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fp8PerTensor) and self.scale is other.scale

    def __hash__(self) -> int:
        return id(self.scale)

    def __repr__(self) -> str:
        # Its value would have to be fetched from the device.
        return f"Fp8PerTensor(scale=<{tuple(self.scale.shape)} on {self.scale.device}>)"


Quant = Fp8PerGroup | Fp8PerToken | Fp8PerTensor
DEFAULT_QUANT = Fp8PerGroup(128)


class QuantizedNorm(NamedTuple):
    """What a quantising call returns.

    Attributes:
        quantized: float8_e4m3fn, the shape of `x`, contiguous unless preallocated.
        scale: as the spec says; of `Fp8PerTensor` the tensor that was given.
        residual: the new residual, as without quantisation.
        normed: the normed rows before quantisation, in the dtype of `x`; None unless asked for.
    """

    quantized: torch.Tensor
    scale: torch.Tensor
    residual: torch.Tensor
    normed: torch.Tensor | None = None


class ScaleGeometry(NamedTuple):
    """Where the scales of a result lie.

    Attributes:
        shape: of the tensor of scales: rows, words of a row.
        stride: its strides, in words of four bytes.
        dtype: float32, or int32 for packed scales.
        padded: whether memory goes on after the last row, up to a multiple of four rows.
    """

    shape: tuple[int, int]
    stride: tuple[int, int]
    dtype: torch.dtype
    padded: bool = False

    @property
    def padding_rows(self) -> int:
        """Rows of zeros in memory after the last one."""
        return self.stride[1] - self.shape[0] if self.padded else 0

    def empty(self, device: torch.device) -> torch.Tensor:
        """A new tensor of this geometry, with memory for the padding; nothing is written."""
        shape, stride, dtype, padded = self
        if not padded:
            return torch.empty_strided(shape, stride, dtype=dtype, device=device)
        memory = torch.empty_strided((stride[1], shape[1]), stride, dtype=dtype, device=device)
        return memory.as_strided(shape, stride)


def check_quant(quant: object) -> None:
    """Raises TypeError unless `quant` is one of the specs."""
    if not isinstance(quant, Fp8PerGroup | Fp8PerToken | Fp8PerTensor):
        raise TypeError(
            f"quant={quant!r}: expected an allnorm.Fp8PerGroup, Fp8PerToken or Fp8PerTensor. For "
            "16-bit results call the method without _quant."
        )


def check_hidden_size(quant: Quant, hidden_size: int) -> None:
    """Raises UnsupportedError unless rows of that many columns consist of whole groups."""
    if isinstance(quant, Fp8PerGroup) and hidden_size % quant.group_size:
        fitting = [str(size) for size in GROUP_SIZES if hidden_size % size == 0]
        remedy = f"group_size={' or '.join(fitting)}" if fitting else "Fp8PerToken"
        raise UnsupportedError(
            f"hidden_size {hidden_size} is not a multiple of group_size={quant.group_size}: a row "
            f"must consist of whole groups. Pass {remedy}."
        )


def scale_geometry(quant: Quant, num_tokens: int, hidden_size: int) -> ScaleGeometry | None:
    """Where the scales of `num_tokens` rows lie; None if they are not a result.

    Args:
        quant: the spec.
        num_tokens: rows, T; may be symbolic.
        hidden_size: columns, a multiple of the group size.
    """
    if isinstance(quant, Fp8PerTensor):
        return None
    if isinstance(quant, Fp8PerToken):
        return ScaleGeometry((num_tokens, 1), (1, 1), torch.float32)
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


def empty_scale(
    quant: Quant, num_tokens: int, hidden_size: int, device: torch.device | str
) -> torch.Tensor:
    """Memory to pass as `scale_out`; nothing is written.

    Args:
        quant: the spec, not an Fp8PerTensor.
        num_tokens: rows: the product of the leading dimensions of `x`.
        hidden_size: columns.
        device: of the input.

    Raises:
        ValueError: an Fp8PerTensor has a scale already, or the groups do not fit hidden_size.
    """
    check_hidden_size(quant, hidden_size)
    geometry = scale_geometry(quant, num_tokens, hidden_size)
    if geometry is None:
        raise ValueError("Fp8PerTensor has its scale already: no memory is needed for it.")
    return geometry.empty(torch.device(device))


# ---- as arguments of an operator -----------------------------------------------------------------

OpArguments = tuple[str, int, str, str, torch.Tensor | None]


def op_arguments(quant: Quant) -> OpArguments:
    """quant_kind, group_size, scale_layout, scale_format and static_scale: values that trace."""
    if isinstance(quant, Fp8PerGroup):
        return quant.kind, quant.group_size, quant.scale_layout, quant.scale_format, None
    static_scale = quant.scale if isinstance(quant, Fp8PerTensor) else None
    return quant.kind, 0, "row_major", "float32", static_scale


def from_op_arguments(
    kind: str, group_size: int, scale_layout: str, scale_format: str, scale: torch.Tensor | None
) -> Quant:
    """The spec behind the arguments of an operator.

    Raises:
        ValueError, TypeError: there is none.
    """
    if kind == Fp8PerGroup.kind:
        return _per_group(group_size, scale_layout, scale_format)
    if kind == Fp8PerTensor.kind:
        return Fp8PerTensor(scale)  # type: ignore[arg-type]  # says so if there is none
    check_choice("quant_kind", kind, QUANTS)
    return Fp8PerToken()


_per_group = functools.cache(Fp8PerGroup)


def from_op_results(
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    quant: Quant,
    return_normed: bool,
) -> QuantizedNorm:
    """What an operator returned; a tensor of no elements stands for what is no result of it."""
    quantized, scale, residual, normed = results
    if isinstance(quant, Fp8PerTensor):
        scale = quant.scale
    return QuantizedNorm(quantized, scale, residual, normed if return_normed else None)
