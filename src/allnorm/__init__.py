"""Fused all-reduce + residual add + RMSNorm for tensor parallelism, with bit-identical results."""

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
from allnorm.core.local import add_rms_norm, add_rms_norm_quant, quantize
from allnorm.core.stream_input import hyper_connection_input
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
    all_reduce_hyper_connection,
    all_reduce_hyper_connection_input,
    rms_norm_sharded,
    row_shard,
)
from allnorm.hyper_connection import HyperConnection, HyperConnectionProjection
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
    "HyperConnection",
    "HyperConnectionProjection",
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
    "all_reduce_hyper_connection",
    "all_reduce_hyper_connection_input",
    "build_info",
    "capabilities",
    "hyper_connection_input",
    "ops",
    "quantize",
    "reference",
    "rms_norm_sharded",
    "row_shard",
    "trace",
]


# Rarely used names, mapped to their modules, which are imported at first use.
_LATE = {
    "Stats": "allnorm.core.endpoint",
    "TraceReport": "allnorm.tracing",
    "compile": "allnorm.compile",
    "reference": "allnorm.reference",
    "trace": "allnorm.tracing",
}


def __getattr__(name: str) -> Any:
    """Imports a name of `_LATE` at its first use."""
    if name not in _LATE:
        raise AttributeError(f"module 'allnorm' has no attribute {name!r}")
    module = importlib.import_module(_LATE[name])
    return getattr(module, name, module)


def capabilities() -> dict[str, Any]:
    """Returns what this installation supports on this machine.

    Returns:
        `version`; `torch` and `cuda` (versions; `cuda` is None for a CPU build of torch);
        `backends`: the build of each backend, or the error that loading it raises; `devices`: name
        and compute capability of each visible GPU; `fast_calls`: whether repeated calls bypass
        Python; `multicast`: never used here; `switches` are the variables that keep other libraries
        from using it.
    """
    from allnorm import config

    backends: dict[str, Any] = {}
    for backend in ("cpu", _native.gpu_backend()):
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
    """Warns, in one process per machine, if this build cannot use the machine's GPUs."""
    if "cuda" in _native.available_backends() or not torch.version.cuda:
        return
    from allnorm import config, topology  # imported here: slow to load and rarely needed

    if config.local_rank() == 0 and topology.has_gpu_devices():
        warnings.warn(
            "this machine has NVIDIA GPUs, but this build of allnorm supports only the CPU: calls "
            "with CUDA tensors will raise. Install a release wheel, or build allnorm here with "
            "nvcc on PATH: `nvcc --version`, then `pip install --force-reinstall --no-deps .` in "
            "allnorm's source.",
            stacklevel=2,
        )


_warn_of_unused_gpus()
