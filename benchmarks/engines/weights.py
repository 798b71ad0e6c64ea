"""Realistic values for the dummy weights of engines.

vLLM fills dummy weights, including FP8 scales, with numbers from -1e-3 to 1e-3, which gives
unrealistic or negative scaled weights. Here an FP8 weight times its scale is distributed like
N(0, 0.02), and static activation scales match the output of a norm.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch
from torch import Tensor

STD = 0.02
FP8 = torch.float8_e4m3fn
# FP8 weights are N(0, 8): nearly all are normal numbers, far below 448.
FP8_STD = 8.0
WEIGHT_SCALES = ("weight_scale", "weight_scale_inv")
INPUT_SCALE = "input_scale"
# Activations of variance one rarely exceed 8.
STATIC_SCALE = 8.0 / 448.0


@torch.no_grad()
def fill(model: torch.nn.Module, rank: int, prefix: str = "") -> int:
    """Fills the weights in place, on any device. Each rank differs, except in norm weights.

    FP8 scales are equal everywhere. Integer tensors are unchanged.

    Returns:
        The number of filled tensors.

    Raises:
        ValueError: an FP8 weight has no float32 scale in its module.
    """
    filled = 0
    for owner, name, tensor in _tensors(model):
        attribute = name.rpartition(".")[2]
        if attribute in WEIGHT_SCALES:
            tensor.fill_(STD / FP8_STD)
        elif attribute == INPUT_SCALE:
            tensor.fill_(STATIC_SCALE)
        elif tensor.dtype == FP8:
            _check_scale(owner, name)
            _fill_fp8(tensor, _generator(tensor, f"{prefix}{1 + rank} {name}"))
        elif tensor.element_size() >= 2:
            of_a_norm = tensor.dim() == 1
            generator = _generator(tensor, f"{prefix}{0 if of_a_norm else 1 + rank} {name}")
            if of_a_norm:
                tensor.normal_(1.0, 0.1, generator=generator)
            else:
                tensor.normal_(0.0, STD, generator=generator)
        else:
            continue
        filled += 1
    return filled


def _tensors(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, Tensor]]:
    """Yields floating-point parameters, and scales, which may be buffers or plain attributes."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        found = dict(module.named_parameters(recurse=False))
        for name in (*WEIGHT_SCALES, INPUT_SCALE):
            value = getattr(module, name, None)
            if isinstance(value, Tensor):
                found.setdefault(name, value)
        for name, tensor in found.items():
            if tensor.is_floating_point() and id(tensor) not in seen:
                seen.add(id(tensor))
                yield module, f"{path}.{name}" if path else name, tensor


def _generator(tensor: Tensor, key: str) -> torch.Generator:
    generator = torch.Generator(tensor.device)
    generator.manual_seed(zlib.crc32(key.encode()))
    return generator


def _fill_fp8(weight: Tensor, generator: torch.Generator) -> None:
    """Fills an FP8 weight of any strides; the values do not depend on the strides."""
    values = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
    weight.copy_(values.normal_(0.0, FP8_STD, generator=generator).to(FP8))


def _check_scale(owner: torch.nn.Module, name: str) -> None:
    scales = [getattr(owner, scale, None) for scale in WEIGHT_SCALES]
    if not any(isinstance(scale, Tensor) and scale.dtype == torch.float32 for scale in scales):
        raise ValueError(
            f"{name} is {FP8}, but its module has no float32 scale: expected one of "
            f"{', '.join(WEIGHT_SCALES)}"
        )
