"""Reference implementation of all kernels in plain PyTorch, following the numerics page.

The functions take the inputs of all ranks, do not communicate, and have bit-identical results on
CPU and CUDA tensors. Kernels are compared with them bit for bit; only NaN payloads may differ.

In all docstrings ``T`` is the dtype of `x` and ``f(.)`` the exact conversion to float32. Every
arithmetic operation is one float32 operation, rounded to nearest even.
"""

from allnorm.names import NUMERICS
from allnorm.names import REQUESTS as ALGORITHMS
from allnorm.reference.arithmetic import DTYPES, fma, sqrt, square_sum
from allnorm.reference.experts import expert_sum
from allnorm.reference.fp8 import add_rms_norm_quant, all_reduce_add_rms_norm_quant, quantize
from allnorm.reference.norm import add_rms_norm, all_reduce, all_reduce_add_rms_norm
from allnorm.reference.sharded_norm import rms_norm_sharded
from allnorm.reference.shards import all_gather_rows, row_shard
from allnorm.reference.stream_input import hyper_connection_input
from allnorm.reference.streams import all_reduce_hyper_connection

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
    "all_reduce_hyper_connection",
    "expert_sum",
    "fma",
    "hyper_connection_input",
    "quantize",
    "rms_norm_sharded",
    "row_shard",
    "sqrt",
    "square_sum",
]
