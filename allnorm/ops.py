"""The torch operators: schemas, implementations and fakes.

Functional: they return new tensors and alias nothing. A communicator is passed by its name, since
an operator's arguments must be traceable.
"""

from __future__ import annotations

import torch

from allnorm.communicator import communicator
from allnorm.local import add_rms_norm

_library = torch.library.Library("allnorm", "DEF")
_library.define("all_reduce(Tensor x, str comm_name) -> Tensor")
_library.define(
    "all_reduce_add_rms_norm(Tensor x, Tensor? residual, Tensor weight, float eps, "
    "float weight_bias, str numerics, str comm_name) -> (Tensor, Tensor)"
)
_library.define(
    "add_rms_norm(Tensor x, Tensor? residual, Tensor weight, float eps, float weight_bias, "
    "str numerics) -> (Tensor, Tensor)"
)


def _all_reduce(x: torch.Tensor, comm_name: str) -> torch.Tensor:
    return communicator(comm_name).all_reduce(x)


def _all_reduce_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    weight_bias: float,
    numerics: str,
    comm_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    return communicator(comm_name).all_reduce_add_rms_norm(
        x, residual, weight, eps, weight_bias=weight_bias, numerics=numerics
    )


def _add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    weight_bias: float,
    numerics: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    return add_rms_norm(x, residual, weight, eps, weight_bias=weight_bias, numerics=numerics)


for _key in ("CPU", "CUDA"):
    _library.impl("all_reduce", _all_reduce, _key)
    _library.impl("all_reduce_add_rms_norm", _all_reduce_add_rms_norm, _key)
    _library.impl("add_rms_norm", _add_rms_norm, _key)


@torch.library.register_fake("allnorm::all_reduce", lib=_library)
def _(x: torch.Tensor, comm_name: str) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.library.register_fake("allnorm::all_reduce_add_rms_norm", lib=_library)
def _(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    weight_bias: float,
    numerics: str,
    comm_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.empty(x.shape, dtype=x.dtype, device=x.device),
        torch.empty(x.shape, dtype=x.dtype, device=x.device),
    )


@torch.library.register_fake("allnorm::add_rms_norm", lib=_library)
def _(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    weight_bias: float,
    numerics: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.empty(x.shape, dtype=x.dtype, device=x.device),
        torch.empty(x.shape, dtype=x.dtype, device=x.device),
    )
