"""Chooses the native library for a type of device."""

from __future__ import annotations

from allnorm.core import _native


def library(device_type: str, world_size: int | None = None) -> _native.Library:
    """Returns the library that serves torch's devices of a type, "cpu" or "cuda".

    Args:
        device_type: the type of the device; torch for ROCm calls AMD GPUs "cuda".
        world_size: number of ranks of the communicator that will use it; None: no communicator.

    Raises:
        UnsupportedError: the devices are AMD GPUs, and the preview is not open.
        NativeLibraryError: the library is not installed, or cannot be loaded.
    """
    if device_type == "cuda" and _native.gpu_backend() == "hip":
        from allnorm.core import hip  # not imported above, to save time

        hip.check_open(world_size)
        return _native.library("hip")
    return _native.library(device_type)
