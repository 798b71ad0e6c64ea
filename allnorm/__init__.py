"""Fused all-reduce + residual add + RMSNorm between tensor-parallel layers, bit for bit."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from allnorm import config, ops, reference
from allnorm._version import __version__
from allnorm.communicator import Communicator
from allnorm.core import _native, fast_call
from allnorm.core.endpoint import Stats
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
from allnorm.functions import (
    all_gather_rows,
    all_reduce,
    all_reduce_add_rms_norm,
    all_reduce_add_rms_norm_quant,
    row_shard,
)
from allnorm.policy import Plan
from allnorm.post_norm import PostNorm
from allnorm.quant import Fp8PerGroup, Fp8PerTensor, Fp8PerToken, QuantizedNorm
from allnorm.tracing import TraceReport, trace

__all__ = [
    "AllnormError",
    "Communicator",
    "CommunicatorClosedError",
    "ConfigurationError",
    "Fp8PerGroup",
    "Fp8PerTensor",
    "Fp8PerToken",
    "NativeLibraryError",
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
    "capabilities",
    "ops",
    "reference",
    "row_shard",
    "trace",
]


def __getattr__(name: str) -> Any:
    """Imports `allnorm.compile` when it is first used: it needs more of torch than the rest."""
    if name == "compile":
        return importlib.import_module("allnorm.compile")
    raise AttributeError(f"module 'allnorm' has no attribute {name!r}")


def capabilities() -> dict[str, Any]:
    """What this installation can do on this machine.

    Returns:
        `version`; `torch` and `cuda` (versions; `cuda` is None for a CPU build of torch);
        `backends`: per backend its build, or the reason why it does not load; `devices`: name and
        compute capability of each visible GPU; `fast_calls`: whether repeated calls are made
        without Python in between; `multicast`: always unused here, with the state of the switches
        that keep other libraries from it.
    """
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
