"""Bit-for-bit comparison of tensors. Only NaN payloads may differ; -0.0 is not 0.0."""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Returns whether two tensors have equal shapes, dtypes and bits.

    A NaN matches any NaN; -0.0 and 0.0 differ. Strides and devices do not matter.

    Args:
        a: any shape and dtype.
        b: may be on a different device.
    """
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    b = b.to(a.device)
    return torch.equal(as_integers(a), as_integers(b)) or not bool(_differs(a, b).any())


def assert_same_bits(actual: Tensor, expected: Tensor, what: str = "tensor") -> None:
    """Raises unless `same_bits(actual, expected)`.

    Args:
        actual: any shape and dtype.
        expected: may be on a different device.
        what: name of the comparison in the message.

    Raises:
        AssertionError: the tensors differ. The message has the number of different elements, the
            index, values and bits of the first one, and the largest distance in units in the last
            place.
    """
    difference = describe_difference(actual, expected)
    if difference:
        raise AssertionError(f"{what}: {difference}")


def describe_difference(actual: Tensor, expected: Tensor) -> str:
    """Describes how two tensors differ.

    Args:
        actual: any shape and dtype.
        expected: may be on a different device.

    Returns:
        The message of `assert_same_bits`; "" if the tensors have the same bits.
    """
    if same_bits(actual, expected):
        return ""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return (
            f"got {list(actual.shape)} {actual.dtype}, "
            f"expected {list(expected.shape)} {expected.dtype}"
        )
    actual, expected = actual.detach().cpu(), expected.detach().cpu()
    wrong = _differs(actual, expected)
    where = tuple(int(i) for i in wrong.nonzero()[0])
    rows = wrong.reshape(-1, wrong.shape[-1]).any(-1) if wrong.ndim else wrong.reshape(1)
    return (
        f"{int(wrong.sum())} of {wrong.numel()} elements differ, in {int(rows.sum())} of "
        f"{rows.numel()} rows; the first at {list(where)}: got {_show(actual[where])}, expected "
        f"{_show(expected[where])}; largest distance {_largest_distance(actual, expected)}"
    )


def ulp_distance(a: Tensor, b: Tensor) -> Tensor:
    """Returns the distance between elements, counted in representable values.

    The distance between -0.0 and 0.0 is 1.

    Args:
        a: a floating-point dtype of 1, 2 or 4 bytes, without NaN.
        b: the same dtype and shape.

    Returns:
        int64, the shape of `a`.
    """
    return (_ordered(a) - _ordered(b)).abs()


def as_integers(x: Tensor) -> Tensor:
    """Returns the bits of each element, contiguous; dtypes without such a view are unchanged."""
    integer = _INTEGER.get(x.element_size())
    if integer is None or x.dtype.is_complex or x.dtype == torch.bool:
        return x
    return x.contiguous().view(integer)


def _is_nan(x: Tensor) -> Tensor:
    if not x.dtype.is_floating_point:
        return torch.zeros(x.shape, dtype=torch.bool, device=x.device)
    return torch.isnan(x.float() if x.element_size() == 1 else x)


def _differs(a: Tensor, b: Tensor) -> Tensor:
    return (as_integers(a) != as_integers(b)) & ~(_is_nan(a) & _is_nan(b))


def _ordered(x: Tensor) -> Tensor:
    """Maps floating-point values to integers in the same order; negative values start at -1."""
    bits = as_integers(x).to(torch.int64)
    magnitude = bits & ((1 << (8 * x.element_size() - 1)) - 1)
    return torch.where(bits < 0, -1 - magnitude, magnitude)


def _largest_distance(a: Tensor, b: Tensor) -> str:
    if not a.dtype.is_floating_point or a.element_size() > 4:
        return f"{(a.double() - b.double()).abs().max().item():g}"
    nan_a, nan_b = _is_nan(a), _is_nan(b)
    comparable = ~(nan_a | nan_b)
    text = "none"
    if bool(comparable.any()):
        text = f"{int(ulp_distance(a[comparable], b[comparable]).max())} ulp"
    one_sided = int((nan_a ^ nan_b).sum())
    return f"{text}, and {one_sided} NaN on one side only" if one_sided else text


def _show(x: Tensor) -> str:
    bits = int(as_integers(x)) & ((1 << (8 * x.element_size())) - 1)
    return f"{x.item()!r} (0x{bits:0{2 * x.element_size()}x})"
