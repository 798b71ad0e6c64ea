"""Checks of the arguments of a call, and the tensors' shapes as the kernels see them.

A check looks only at what all ranks pass alike, so that either every rank refuses or none does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from allnorm import _native
from allnorm.errors import UnsupportedError
from allnorm.policy import ALGORITHMS

DTYPES = {
    torch.float32: _native.DTYPE["float32"],
    torch.float16: _native.DTYPE["float16"],
    torch.bfloat16: _native.DTYPE["bfloat16"],
}


@dataclass(frozen=True)
class NormArguments:
    """Everything of a fused call that is not a tensor."""

    eps: float
    weight_bias: float
    numerics: str


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(repr, choices))}.")


def check_algorithm(algorithm: object) -> None:
    """Raises ValueError unless `algorithm` is "auto" or the name of one."""
    check_choice("algorithm", algorithm, ("auto", *ALGORITHMS))


def check_numerics(numerics: object) -> None:
    """Raises ValueError unless `numerics` is one of the four modes."""
    check_choice("numerics", numerics, tuple(_native.NUMERICS))


def check_norm_arguments(arguments: NormArguments) -> None:
    """Raises TypeError or ValueError for an unusable eps, weight_bias or numerics."""
    check_numerics(arguments.numerics)
    for name, value in (("eps", arguments.eps), ("weight_bias", arguments.weight_bias)):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{name}={value!r}: expected a number.")
        if not math.isfinite(value):
            raise ValueError(f"{name}={value!r}: expected a finite number.")
    if arguments.eps < 0:
        raise ValueError(f"eps={arguments.eps!r}: expected a number >= 0.")


def check_input(name: str, x: object, device: torch.device) -> None:
    """Raises unless `x` is a tensor of rows that the kernels read."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}: expected a torch.Tensor.")
    if x.dtype not in DTYPES:
        raise UnsupportedError(
            f"{name} has dtype {x.dtype}: expected float32, float16 or bfloat16. Convert it first."
        )
    check_device(name, x, device)
    if x.dim() < 1 or x.shape[-1] < 1:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}: expected [..., hidden_size] with hidden_size >= 1."
        )
    if x.shape[-1] > _MAX_HIDDEN_SIZE:
        raise UnsupportedError(
            f"{name} has hidden_size {x.shape[-1]}: at most {_MAX_HIDDEN_SIZE} is supported."
        )
    check_last_dim(name, x)


def check_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raises ValueError unless `tensor` is on `device`."""
    if tensor.device != device:
        raise ValueError(
            f"{name} is on {tensor.device}, the communicator on {device}. Move it there, or make "
            "the communicator with device=."
        )


def check_last_dim(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError unless the last dimension is contiguous."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1 and tensor.numel():
        raise ValueError(
            f"{name} has strides {tensor.stride()}: expected a contiguous last dimension. Call "
            f"{name}.contiguous() first."
        )


def check_like(name: str, tensor: object, x: torch.Tensor) -> None:
    """Raises unless `tensor` has the shape, dtype and device of `x` and contiguous rows."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}: expected a torch.Tensor.")
    if tensor.shape != x.shape:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}: expected that of x, {tuple(x.shape)}."
        )
    if tensor.dtype != x.dtype:
        raise TypeError(f"{name} has dtype {tensor.dtype}: expected that of x, {x.dtype}.")
    check_device(name, tensor, x.device)
    check_last_dim(name, tensor)


def check_weight(weight: object, x: torch.Tensor) -> None:
    """Raises unless `weight` is [hidden_size], contiguous, of the dtype of `x` or float32."""
    if not isinstance(weight, torch.Tensor):
        raise TypeError(f"weight is a {type(weight).__name__}: expected a torch.Tensor.")
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}: expected [hidden_size] = [{x.shape[-1]}]."
        )
    if weight.dtype not in (x.dtype, torch.float32):
        raise TypeError(f"weight has dtype {weight.dtype}: expected {x.dtype} or float32.")
    check_device("weight", weight, x.device)
    check_last_dim("weight", weight)


def check_result(name: str, result: torch.Tensor, x: torch.Tensor) -> None:
    """Raises unless a preallocated result can be written row by row."""
    check_like(name, result, x)
    if not result.is_contiguous() and (result.dim() != 2 or 0 in result.stride()):
        raise ValueError(
            f"{name} has shape {tuple(result.shape)} and strides {result.stride()}: expected a "
            "contiguous tensor, or a two-dimensional one with distinct, contiguous rows."
        )


def check_overlap(
    name: str, result: torch.Tensor, others: dict[str, torch.Tensor | None], allowed: str
) -> None:
    """Raises if `result` shares memory with another tensor of the call.

    Only exact identity with the tensor called `allowed` is safe: there each element is read before
    the same thread writes it.
    """
    begin, end = _extent(result)
    for other_name, other in others.items():
        if other is None or not other.numel() or not result.numel():
            continue
        other_begin, other_end = _extent(other)
        if begin >= other_end or other_begin >= end:
            continue
        same = begin == other_begin and result.stride() == other.stride()
        if other_name != allowed or not same:
            raise ValueError(
                f"{name} shares memory with {other_name}. Pass separate memory"
                + (f", or {allowed} itself." if allowed else ".")
            )


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """`x` as [num_tokens, hidden_size]; a view wherever one exists."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    begin = tensor.data_ptr()
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    span = sum((size - 1) * stride for size, stride in dims)
    return begin, begin + (span + 1) * tensor.element_size()


_MAX_HIDDEN_SIZE = (1 << 20) - 1
