"""Makes the real vLLM importable without CUDA, with a fake platform.

Import this module before any vLLM module. vLLM's Python code is real. The operators of its C
extension are fakes that cannot be called.
"""

from __future__ import annotations

# ruff: noqa: E402 - the fakes must exist before vLLM is imported
import sys
import types
from typing import Any

import torch
from torch._ops import _OpNamespace


class _Named:
    """A fake C extension operator, which has overloads and can be compared."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, overload: str) -> Any:
        if overload.startswith("__"):
            raise AttributeError(overload)
        made = _Named(f"{self._name}.{overload}")
        setattr(self, overload, made)
        return made

    def __call__(self, *_: Any) -> bool:
        return False  # vLLM calls queries such as "does this GPU support ..." at import

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Named) and other._name == self._name

    def __hash__(self) -> int:
        return hash(self._name)


_EXTENSIONS = ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch", "vllm._C")
_NAMESPACES = ("_C", "_moe_C", "_C_cache_ops", "_vllm_fa2_C", "_vllm_fa3_C")
_FLASH_ATTENTION = ("vllm.vllm_flash_attn", "vllm.vllm_flash_attn.flash_attn_interface")
_real_getattr = _OpNamespace.__getattr__


def _getattr(namespace: Any, name: str) -> Any:
    try:
        return _real_getattr(namespace, name)
    except AttributeError:
        if namespace.name in _NAMESPACES and not name.startswith("__"):
            return _Named(f"{namespace.name}::{name}")
        raise


def _of_flash_attention(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *args, **kwargs: None


for _name in _EXTENSIONS:
    sys.modules[_name] = types.ModuleType(_name)
for _name in _FLASH_ATTENTION:
    sys.modules[_name] = types.ModuleType(_name)
    sys.modules[_name].__getattr__ = _of_flash_attention  # type: ignore[method-assign]
    sys.modules[_name].__path__ = []

import vllm.platforms
from vllm.platforms.cuda import CudaPlatformBase
from vllm.platforms.interface import DeviceCapability


class Platform(CudaPlatformBase):
    """A fake platform with an H200; tensors and vLLM's operators are on the CPU."""

    dispatch_key = "CPU"

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        return DeviceCapability(9, 0)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "none"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return 141 << 30

    @classmethod
    def is_fully_connected(cls, physical_device_ids: list[int]) -> bool:
        return True

    @classmethod
    def device_count(cls) -> int:
        return 8

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return f"{DeviceCommunicatorBase.__module__}.{DeviceCommunicatorBase.__name__}"


vllm.platforms._current_platform = Platform()
import vllm._custom_ops  # registers fakes for the operators that exist before _getattr is set
from vllm.distributed.device_communicators.base_device_communicator import (
    DeviceCommunicatorBase,
)

_OpNamespace.__getattr__ = _getattr  # type: ignore[method-assign]
assert not torch.cuda.is_available()


def naive_mxfp8() -> bool:
    """Returns whether vLLM's PyTorch code for MXFP8 omits e4m3's upper eight powers of two.

    vLLM does not use that code on Blackwell, where FlashInfer quantizes.
    """
    from vllm.model_executor.layers.quantization.utils import mxfp8_utils

    one = torch.full((1, 32), 448.0)
    return bool((mxfp8_utils._mxfp8_e4m3_quantize_torch(one)[1] != 127).any())
