"""What reductions and norms are called in a profile: ranges, operators, kernels."""

from __future__ import annotations

import re

from allnorm.tracing.report import FUSED, NORM, REDUCTION

# Ranges of this package; what follows is `kind|what` or `path|class`.
CALL = "allnorm.call|"
MODULE = "allnorm.module|"

# Operators. What they call in turn (nccl:all_reduce, gloo:all_reduce) is part of them. Functional
# collectives call c10d::allreduce_ where they run, and not where a compiler only traces them.
REDUCTION_OPERATORS = frozenset(
    {
        "c10d::allreduce_",
        *("vllm::all_reduce", "sgl_kernel::all_reduce", "symm_mem::one_shot_all_reduce"),
        *("symm_mem::two_shot_all_reduce_", "symm_mem::multimem_all_reduce_"),
    }
)
# What makes kernels that look like a reduction's, and is none.
OTHER_OPERATORS = frozenset({"c10d::barrier"})
NORM_OPERATORS = frozenset(
    {
        *("aten::rms_norm", "aten::_fused_rms_norm", "_C::rms_norm", "_C::fused_add_rms_norm"),
        *("sgl_kernel::rmsnorm", "sgl_kernel::fused_add_rmsnorm", "vllm_ir::rms_norm"),
    }
)
# A norm written out in a module called something with RMSNorm does one of these.
NORM_ARITHMETIC = frozenset({"aten::rsqrt", "aten::pow", "aten::rms_norm", "aten::_fused_rms_norm"})

# Kernels that belong to no operator, as in a replayed CUDA graph; the first match counts.
_KERNELS = (
    (re.compile(r"allnorm::fused_kernel<.*\bOneShot\b"), FUSED, "one_shot"),
    (re.compile(r"allnorm::fused_kernel<.*\bTwoShot\b"), FUSED, "two_shot"),
    # allnorm::Owned in csrc/cuda/owned_rows.cuh; 2 gathers finished rows.
    (re.compile(r"allnorm::owned_rows_kernel<.*Owned\)0"), FUSED, "two_shot"),
    (re.compile(r"allnorm::owned_rows_kernel<.*Owned\)1"), FUSED, "two_shot, sharded"),
    (re.compile(r"allnorm::local(_rows)?_kernel<"), NORM, "allnorm local"),
    (re.compile(r"nccl\w*Kernel\w*_AllReduce", re.IGNORECASE), REDUCTION, "NCCL"),
    (re.compile(r"allreduce_fusion|moereduce_allreduce", re.IGNORECASE), FUSED, "another library"),
    (re.compile(r"cross_device_reduce|all_?reduce", re.IGNORECASE), REDUCTION, "custom all-reduce"),
    (re.compile(r"rms_?norm", re.IGNORECASE), NORM, "kernel"),
    # PyTorch's: the last argument says that it is an RMSNorm.
    (re.compile(r"(layer_norm_kernel|LayerNormForwardCUDAKernel)<[^<>]*\btrue>"), NORM, "PyTorch"),
    (re.compile(r"^triton_\w*rsqrt"), NORM, "compiled kernel"),
)


def kernel(name: str) -> tuple[str, str] | None:
    """Kind and name of a kernel, or None for one of another trade."""
    for pattern, kind, what in _KERNELS:
        if pattern.search(name):
            return kind, what
    return None


def is_norm_class(name: str) -> bool:
    """Whether modules of this class are RMSNorms."""
    return re.search(r"rms_?norm", name, re.IGNORECASE) is not None
