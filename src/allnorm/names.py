"""The names that calls, tables and commands take: every list of them, once, and their check.

Codes of the C ABI are positions in these tuples (`src/allnorm/core/_native.py`).
"""

from __future__ import annotations

FUSED = ("one_shot", "two_shot")
# Of ranks that are one island, and of those that are several.
ALGORITHMS = (*FUSED, "unfused")
BETWEEN_ISLANDS = ("hierarchical", "unfused")
# What a caller may ask for.
REQUESTS = ("auto", *ALGORITHMS, "hierarchical")

# The public calls: those among ranks, then those of one rank.
COLLECTIVES = (
    "all_reduce",
    "all_reduce_add_rms_norm",
    "all_reduce_add_rms_norm_quant",
    "all_gather_rows",
)
OPS = (*COLLECTIVES, "add_rms_norm", "add_rms_norm_quant")

DTYPES = ("float32", "float16", "bfloat16")
NUMERICS = ("rounded", "unrounded", "transformers", "vllm")

QUANTS = ("per_group", "per_token", "per_tensor", "nvfp4")
GROUP_SIZES = (16, 32, 64, 128, 256, 512)
TOP_K = tuple(range(1, 17))  # rows of experts that a token's partial sum can be made of
SWIZZLED = "swizzled_128x4"
SCALE_LAYOUTS = ("row_major", "column_major", "column_major_tma", SWIZZLED)
NVFP4_LAYOUTS = ("row_major", SWIZZLED)
SCALE_FORMATS = ("float32", "ue8m0", "ue8m0_packed")

# What follows the sum, as tables tell calls apart.
EPILOGUES = ("all_reduce", "norm", *QUANTS)


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raises ValueError unless `value` is one of `choices`."""
    # Only of these types is a comparison a bool: arrays compare element by element.
    if not isinstance(value, str | int) or value not in choices:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(repr, choices))}.")
