"""Fused all-reduce + residual add + RMSNorm between tensor-parallel layers, bit for bit."""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

import torch

from allnorm import ops
from allnorm._version import __version__
from allnorm.communicator import Communicator
from allnorm.core import _native, fast_call
from allnorm.core._native import build_info
from allnorm.core.local import add_rms_norm, add_rms_norm_quant
from allnorm.errors import (
    AllnormError,
    CommunicatorClosedError,
    ConfigurationError,
    NativeLibraryError,
    PeerDiedError,
    PeerDivergedError,
    PeerLeftError,
    PeerTimeoutError,
    UnsupportedError,
)
from allnorm.expert_sum import ExpertSum
from allnorm.functions import (
    all_gather_rows,
    all_reduce,
    all_reduce_add_rms_norm,
    all_reduce_add_rms_norm_quant,
    row_shard,
)
from allnorm.policy import Plan
from allnorm.post_norm import PostNorm
from allnorm.quant import Fp8PerGroup, Fp8PerTensor, Fp8PerToken, MxFp8, NvFp4, QuantizedNorm

if TYPE_CHECKING:
    from allnorm import reference
    from allnorm.core.endpoint import Stats
    from allnorm.tracing import TraceReport, trace

__all__ = [
    "AllnormError",
    "Communicator",
    "CommunicatorClosedError",
    "ConfigurationError",
    "ExpertSum",
    "Fp8PerGroup",
    "Fp8PerTensor",
    "Fp8PerToken",
    "MxFp8",
    "NativeLibraryError",
    "NvFp4",
    "PeerDiedError",
    "PeerDivergedError",
    "PeerLeftError",
    "PeerTimeoutError",
    "Plan",
    "PostNorm",
    "QuantizedNorm",
    "Stats",
    "TraceReport",
    "UnsupportedError",
    "__version__",
    "add_rms_norm",
    "add_rms_norm_quant",
    "all_gather_rows",
    "all_reduce",
    "all_reduce_add_rms_norm",
    "all_reduce_add_rms_norm_quant",
    "build_info",
    "capabilities",
    "ops",
    "reference",
    "row_shard",
    "trace",
]


# What few processes use is imported when it is first asked for.
_LATE = {
    "Stats": "allnorm.core.endpoint",
    "TraceReport": "allnorm.tracing",
    "compile": "allnorm.compile",
    "reference": "allnorm.reference",
    "trace": "allnorm.tracing",
}


def __getattr__(name: str) -> Any:
    """Imports the home of a name in `_LATE`."""
    if name not in _LATE:
        raise AttributeError(f"module 'allnorm' has no attribute {name!r}")
    module = importlib.import_module(_LATE[name])
    return getattr(module, name, module)


def capabilities() -> dict[str, Any]:
    """What this installation can do on this machine.

    Returns:
        `version`; `torch` and `cuda` (versions; `cuda` is None for a CPU build of torch);
        `backends`: per backend its build, or the reason why it does not load; `devices`: name and
        compute capability of each visible GPU; `fast_calls`: whether repeated calls are made
        without Python in between; `multicast`: always unused here, with the state of the switches
        that keep other libraries from it.
    """
    from allnorm import config

    backends: dict[str, Any] = {}
    for backend in ("cpu", "cuda"):
        try:
            backends[backend] = _native.library(backend).build_info()
        except NativeLibraryError as error:
            backends[backend] = {"error": str(error)}
    devices = [
        {
            "name": torch.cuda.get_device_name(index),
            "compute_capability": ".".join(map(str, torch.cuda.get_device_capability(index))),
        }
        for index in range(torch.cuda.device_count())
    ]
    return {
        "version": __version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "backends": backends,
        "devices": devices,
        "fast_calls": fast_call.available(),
        "multicast": {"used": False, "switches": config.multicast_switches()},
    }


def _warn_of_unused_gpus() -> None:
    """Says, in one process of a machine, that this build cannot use the GPUs that are there."""
    if "cuda" in _native.available_backends() or not torch.version.cuda:
        return
    from allnorm import config, topology  # take a while to load, and few builds come here

    if config.local_rank() == 0 and topology.has_gpu_devices():
        warnings.warn(
            "this machine has NVIDIA GPUs, and this build of allnorm is for CPUs alone: calls with "
            "CUDA tensors will raise. Install a wheel of a release, or build it here with CUDA's "
            "compiler on PATH: `nvcc --version`, then `pip install --force-reinstall --no-deps .` "
            "in allnorm's source.",
            stacklevel=2,
        )


_warn_of_unused_gpus()
