"""Values for the dummy weights that the engines' ranks are started with.

vLLM fills what it has not loaded with numbers from -1e-3 to 1e-3, scales of FP8 too: their products
would be of no size that a model has, or negative. Here an FP8 weight and its scale act like
N(0, 0.02) together, and static scales of activations fit what a norm gives out.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch
from torch import Tensor

STD = 0.02
FP8 = torch.float8_e4m3fn
# FP8 weights are N(0, 8): nearly all normal numbers, and 448 is far away.
FP8_STD = 8.0
WEIGHT_SCALES = ("weight_scale", "weight_scale_inv")
INPUT_SCALE = "input_scale"
# Activations of variance one have few elements beyond 8.
STATIC_SCALE = 8.0 / 448.0


@torch.no_grad()
def fill(model: torch.nn.Module, rank: int, prefix: str = "") -> int:
    """Fills the weights in place, on any device: other values on each rank, but for norms.

    Scales of FP8 become the same everywhere, whatever their shape.

    Returns:
        How many were filled; integer ones are left alone.

    Raises:
        ValueError: there is an FP8 weight without a float32 scale beside it.
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
    """Parameters of floating point, and scales, which may be buffers or attributes by now."""
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
    """In whatever strides; drawn in those of the elements' own order, which normal_ cannot do."""
    values = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
    weight.copy_(values.normal_(0.0, FP8_STD, generator=generator).to(FP8))


def _check_scale(owner: torch.nn.Module, name: str) -> None:
    scales = [getattr(owner, scale, None) for scale in WEIGHT_SCALES]
    if not any(isinstance(scale, Tensor) and scale.dtype == torch.float32 for scale in scales):
        raise ValueError(
            f"{name} is {FP8} without a float32 scale beside it: expected one of "
            f"{', '.join(WEIGHT_SCALES)}"
        )
