"""The names that calls, tables and commands accept, and a function that checks them.

The codes of the C ABI are indices into these tuples (`src/allnorm/core/_native.py`).
"""

from __future__ import annotations

FUSED = ("one_shot", "two_shot")
# Algorithms for ranks in a single island, and for ranks in multiple islands.
ALGORITHMS = (*FUSED, "unfused")
BETWEEN_ISLANDS = ("hierarchical", "unfused")
REQUESTS = ("auto", *ALGORITHMS, "hierarchical")
"""Values of the argument `algorithm`."""

# The public calls: first the collectives, then the calls that run on one rank.
COLLECTIVES = (
    "all_reduce",
    "all_reduce_add_rms_norm",
    "all_reduce_add_rms_norm_quant",
    "all_gather_rows",
    "rms_norm_sharded",
    "all_reduce_hyper_connection",
    "all_reduce_hyper_connection_input",
)
OPS = (*COLLECTIVES, "add_rms_norm", "add_rms_norm_quant", "quantize")

DTYPES = ("float32", "float16", "bfloat16")
NUMERICS = ("rounded", "unrounded", "transformers", "vllm")
"""Values of the argument `numerics`: where a norm rounds."""

QUANTS = ("per_group", "per_token", "per_tensor", "nvfp4")
GROUP_SIZES = (16, 32, 64, 128, 256, 512)
TOP_K = tuple(range(1, 17))  # supported numbers of experts per token
SWIZZLED = "swizzled_128x4"
SCALE_LAYOUTS = ("row_major", "column_major", "column_major_tma", SWIZZLED)
NVFP4_LAYOUTS = ("row_major", SWIZZLED)
SCALE_FORMATS = ("float32", "ue8m0", "ue8m0_packed")

# Epilogues in tuning tables.
EPILOGUES = ("all_reduce", "norm", *QUANTS)


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raises ValueError unless `value` is one of `choices`."""
    # Check the type first, because arrays compare element by element.
    if not isinstance(value, str | int) or value not in choices:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(repr, choices))}.")
