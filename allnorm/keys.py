"""What a prepared call is found again by: the geometry of its tensors, and its constants."""

from __future__ import annotations

from math import copysign
from typing import Any

import torch


def geometry_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """All that decides how a tensor is read, but where it is.

    Raises:
        AttributeError, TypeError: it is no tensor.
    """
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def constants_of(norm: tuple[Any, ...]) -> tuple[Any, ...]:
    """What the norm needs beside tensors, and what tells apart equal ones that are other calls.

    1.0, True and a tensor of them are equal, and so are 0.0 and -0.0. Types come first: there a
    comparison stops, before it asks a tensor.

    Args:
        norm: eps, weight_bias, numerics, residual_sharded, and what quantises, if anything.

    Raises:
        TypeError, ValueError, RuntimeError, OverflowError: eps or weight_bias is no number.
    """
    eps, bias, _, sharded = norm[:4]
    signs = copysign(1.0, eps), copysign(1.0, bias)
    return type(eps), type(bias), type(sharded), type(norm[-1]), signs, norm
