"""What every kernel of allnorm computes, in plain PyTorch: the numerics page, step by step.

The functions take the inputs of all ranks, communicate nothing, and run on CPU and CUDA tensors
with the same bits. Kernels are compared with them bit for bit; only the payload of a NaN is free.

Throughout, ``T`` is the dtype of `x`, ``f(.)`` the exact conversion to float32, and every
arithmetic operation is one float32 operation rounded to nearest even.
"""

from allnorm.names import NUMERICS
from allnorm.names import REQUESTS as ALGORITHMS
from allnorm.reference.arithmetic import DTYPES, fma, sqrt, square_sum
from allnorm.reference.experts import expert_sum
from allnorm.reference.fp8 import add_rms_norm_quant, all_reduce_add_rms_norm_quant, quantize
from allnorm.reference.norm import add_rms_norm, all_reduce, all_reduce_add_rms_norm
from allnorm.reference.shards import all_gather_rows, row_shard

__all__ = [
    "ALGORITHMS",
    "DTYPES",
    "NUMERICS",
    "add_rms_norm",
    "add_rms_norm_quant",
    "all_gather_rows",
    "all_reduce",
    "all_reduce_add_rms_norm",
    "all_reduce_add_rms_norm_quant",
    "expert_sum",
    "fma",
    "quantize",
    "row_shard",
    "sqrt",
    "square_sum",
]
