"""Announcements: the parts of a call that must be equal on all ranks, and their names in errors.

Fused calls announce a CallTag (csrc/protocol/call_tag.h), which holds some properties only as a
hash. Unfused and hierarchical calls announce an Announcement, which holds all of them. Errors
describe both with the same fields.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass

from allnorm import names
from allnorm.core import _native
from allnorm.core.prepared_call import PreparedCall

_OPS = {
    _native.ALL_REDUCE: "all_reduce",
    _native.ADD_RMS_NORM: "all_reduce_add_rms_norm",
    _native.ALL_GATHER_ROWS: "all_gather_rows",
    _native.RMS_NORM_SHARDED: "rms_norm_sharded",
    _native.HYPER_CONNECTION: "all_reduce_hyper_connection",
}
_REFUSED = -1
_WITHOUT_NORM = " without a second norm"
_RESIDUAL_DTYPE = "dtype of the residual"
# Indexed by the `op` of a CallShape.
_TAG_QUANTS = (
    *("", "", ""),
    *(f"groups of {size}" for size in names.GROUP_SIZES),
    *("per token", "per tensor"),
)
_TAG_OPS = (
    *("all_reduce", "all_gather_rows", "all_reduce_add_rms_norm"),
    *("all_reduce_add_rms_norm_quant" for _ in _TAG_QUANTS[3:]),
    f"all_reduce_add_rms_norm{_WITHOUT_NORM}",
    "all_reduce_add_rms_norm_quant",
)
_TAG_ALL_REDUCE, _TAG_NVFP4 = 0, 12
_TAG_ANNOUNCEMENT, _TAG_SLICES = 13, 14
_TAG_ALGORITHMS = (*names.FUSED, "two_shot with a sharded residual", "unknown")


def tag_fields(shape: int, num_tokens: int) -> dict[str, str]:
    """Returns the fields of a CallTag, keyed by name; see CallShape in csrc/protocol/call_tag.h."""
    op = shape >> 28
    if op == _TAG_ANNOUNCEMENT:
        return {"op": "a call through the process group"}
    if op == _TAG_SLICES:
        return {
            "op": "rms_norm_sharded",
            "num_tokens": str(num_tokens),
            "hidden_size": str(shape & 0xFFFFF),
            "dtype": (*names.DTYPES, "unknown dtype")[shape >> 20 & 3],
            "algorithm": _TAG_ALGORITHMS[shape >> 22 & 3],
            "numerics": names.NUMERICS[shape >> 24 & 3],
        }
    if op == _TAG_ALL_REDUCE and shape >> 26 & 1:
        return {**tag_fields(shape & ~(1 << 26), num_tokens), "op": "all_reduce_hyper_connection"}
    fields = {
        "op": _TAG_OPS[op] if op < len(_TAG_OPS) else f"op {op}",
        "num_tokens": str(num_tokens),
        "hidden_size": str(shape & 0xFFFFF),
        "dtype": (*names.DTYPES, "unknown dtype")[shape >> 20 & 3],
    }
    if op != 1:
        fields["algorithm"] = _TAG_ALGORITHMS[shape >> 22 & 3]
    if op >= 2:
        fields["numerics"] = names.NUMERICS[shape >> 24 & 3]
        fields["residual"] = "given" if shape >> 26 & 1 else "none"
    if 3 <= op < len(_TAG_QUANTS) or op == _TAG_NVFP4:
        fields["quantization"] = "nvfp4" if op == _TAG_NVFP4 else _TAG_QUANTS[op]
        fields["normed"] = "wanted" if shape >> 27 & 1 else "not wanted"
    return fields


def is_announcement(shape: int) -> bool:
    """Returns whether a CallTag belongs to a channel's announcement."""
    return shape >> 28 == _TAG_ANNOUNCEMENT


def describe(fields: dict[str, str]) -> str:
    """Formats a call, given its fields from `tag_fields` or from an Announcement."""
    rest = dict(fields)
    if len(rest) == 1:
        return rest["op"]
    text = f"{rest.pop('op')} of {rest.pop('num_tokens')}x{rest.pop('hidden_size')} "
    dtype = rest.pop("dtype")
    text += dtype
    if rest.get(_RESIDUAL_DTYPE) == dtype:
        del rest[_RESIDUAL_DTYPE]
    if rest.get("gather") == "True":
        del rest["gather"]
    if "algorithm" in rest:
        text += f" by {rest.pop('algorithm')}"
    if "numerics" in rest:
        text += f", numerics {rest.pop('numerics')}"
    if "residual" in rest:
        text += f", {'with' if rest.pop('residual') == 'given' else 'without'} residual"
    if "quantization" in rest:
        wanted = "with" if rest.pop("normed") == "wanted" else "without"
        text += f", {rest.pop('quantization')}, {wanted} normed"
    rest.pop("post norm", None)  # its eps implies it
    if rest.get("scale") == "1":
        del rest["scale"]
    return text + "".join(f", {name} {value}" for name, value in rest.items())


# Fields of _native.Call that may differ between ranks, and why. All other fields are compared,
# including any that are added to the C call later.
_CONTENTS = "an address: contents of tensors are not compared"
_PARTIAL = "how this rank computes its partial sums, which have the same shape on every rank"
_MEMORY = "the memory layout of this rank"
_SPREAD = "how a launch is distributed over this rank's GPU"
LOCAL = {
    **dict.fromkeys(("x", "residual_out", "quantized", "scale", "global_scale"), _CONTENTS),
    **dict.fromkeys(("top_k", "num_rows", "expert_padding", "shared"), _PARTIAL),
    **dict.fromkeys(("expert_index", "expert_weights"), _PARTIAL),
    **dict.fromkeys((name for name, *_ in _native.Call._fields_ if "stride" in name), _MEMORY),
    **dict.fromkeys(("scale_padding_rows", "num_sources", "first_scale_row"), _MEMORY),
    **dict.fromkeys((f"slice{i}_x" for i in range(_native.MAX_SLICES)), _CONTENTS),
    **dict.fromkeys((f"slice{i}_weight" for i in range(_native.MAX_SLICES)), _CONTENTS),
    **dict.fromkeys((f"slice{i}_out" for i in range(_native.MAX_SLICES)), _CONTENTS),
    **dict.fromkeys(("square_sums", "post", "mix"), _CONTENTS),
    **dict.fromkeys(("num_blocks", "cluster_size", "link_gbps", "stream"), _SPREAD),
    **dict.fromkeys(("prefetch", "prefetch_bytes"), "a hint, which changes no result"),
}
_TYPES = {str(name): type_ for name, type_, *_ in _native.Call._fields_ if name not in LOCAL}
FIELDS = tuple(_TYPES)
"""The compared fields of _native.Call; an Announcement has one word for each."""
_READ: dict[str, Callable[[PreparedCall], int]] = {
    "algorithm": lambda prepared: names.REQUESTS.index(prepared.plan.algorithm),
    # Not whether its address is set: the address is 0 for memory without rows.
    "out": lambda prepared: any(r is not None and r.field == "out" for r in prepared.results),
}
"""Functions for the fields that cannot be read from the C call."""


@dataclass(frozen=True)
class Announcement:
    """A call as integers, which ranks compare before they use the process group.

    Attributes:
        words: one per name in FIELDS: an integer, the bits of a float32, or 1 for a given tensor.
    """

    words: tuple[int, ...]

    @classmethod
    def of(cls, prepared: PreparedCall) -> Announcement:
        """Returns the announcement of a bound call."""
        return cls(tuple(_word(prepared, name) for name in FIELDS))

    @classmethod
    def of_refusal(cls) -> Announcement:
        """Returns the announcement of a rank that refuses its call."""
        return cls((_REFUSED,) * len(FIELDS))

    def __getitem__(self, field: str) -> int:
        """Returns the word that holds a field, given its name in FIELDS."""
        return self.words[FIELDS.index(field)]

    @property
    def is_refusal(self) -> bool:
        """Returns whether the rank refuses its call."""
        return self["op"] == _REFUSED

    def tagged(self) -> dict[str, str]:
        """Returns the fields that `tag_fields` returns for this call, except the algorithm."""
        fields = {
            "op": _OPS[self["op"]]
            + ("_quant" if self["quant"] else "")
            + (_WITHOUT_NORM if self["flags"] & _native.NO_NORM else ""),
            "num_tokens": str(self["num_tokens"]),
            "hidden_size": str(self["hidden_size"]),
            "dtype": names.DTYPES[self["dtype"]],
        }
        if self["op"] == _native.RMS_NORM_SHARDED:
            fields["numerics"] = names.NUMERICS[self["numerics"]]
        if self["op"] == _native.ADD_RMS_NORM:
            fields["numerics"] = names.NUMERICS[self["numerics"]]
            fields["residual"] = "given" if self["residual"] else "none"
        if self["quant"]:
            kind = names.QUANTS[self["quant"] - 1]
            groups = f"groups of {self['group_size']}"
            fields["quantization"] = groups if self["group_size"] else kind.replace("_", " ")
            fields["normed"] = "wanted" if self["out"] else "not wanted"
        return fields

    def hashed(self) -> dict[str, str]:
        """Returns the fields that a CallTag holds only as a hash, or a fault does not record."""
        if self["op"] == _native.RMS_NORM_SHARDED:
            slices = range(self["num_slices"])
            weights = (names.DTYPES[self[f"slice{i}_weight_dtype"]] for i in slices)
            return {
                "columns of the tensors": " + ".join(
                    str(self[f"slice{i}_local_size"]) for i in slices
                ),
                "eps": _text_of(self["eps"]),
                "weight_bias": _text_of(self["weight_bias"]),
                "dtypes of the weights": ", ".join(weights),
            }
        if self["op"] == _native.HYPER_CONNECTION:
            wide = self["flags"] & _native.FLOAT32_RESIDUAL
            return {
                "streams": str(self["num_streams"]),
                _RESIDUAL_DTYPE: "float32" if wide else names.DTYPES[self["dtype"]],
            }
        if self["op"] != _native.ADD_RMS_NORM:
            return {}
        fields = {
            "eps": _text_of(self["eps"]),
            "weight_bias": _text_of(self["weight_bias"]),
            "dtype of the weight": names.DTYPES[self["weight_dtype"]],
        }
        if self["residual"]:
            wide = self["flags"] & _native.FLOAT32_RESIDUAL
            fields[_RESIDUAL_DTYPE] = "float32" if wide else names.DTYPES[self["dtype"]]
        if self["quant"]:
            fields["format of the scales"] = names.SCALE_FORMATS[self["scale_format"]]
            swizzled = self["flags"] & _native.SWIZZLED_SCALES
            fields["layout of the scales"] = names.SWIZZLED if swizzled else "not swizzled"
        if self["flags"] & _native.RESIDUAL_SHARDED:
            fields["gather"] = str(not self["flags"] & _native.NO_GATHER)
        fields["post norm"] = "given" if self["post_weight"] else "none"
        if self["post_weight"]:
            fields["eps of the post norm"] = _text_of(self["post_eps"])
            fields["weight_bias of the post norm"] = _text_of(self["post_weight_bias"])
            fields["dtype of its weight"] = names.DTYPES[self["post_weight_dtype"]]
        fields["scale"] = _text_of(self["sum_scale"])
        return fields

    def described(self) -> dict[str, str]:
        """Returns all fields, keyed by their names in error messages."""
        if self.is_refusal:
            return {"op": "no call, it has refused it"}
        algorithm = names.REQUESTS[self["algorithm"]]
        if self["flags"] & _native.RESIDUAL_SHARDED:
            algorithm += " with a sharded residual"
        by = {} if self["op"] == _native.ALL_GATHER_ROWS else {"algorithm": algorithm}
        return {**self.tagged(), **by, **self.hashed()}

    def __str__(self) -> str:
        return describe(self.described())

    def differences(self, rank: int, other: Announcement, peer: int) -> str:
        """Describes how this call, made by `rank`, differs from `peer`'s; empty after a refusal."""
        if self.is_refusal or other.is_refusal:
            return ""
        raw = [dict(zip(FIELDS, map(str, call.words), strict=True)) for call in (self, other)]
        return differences(self.described(), rank, other.described(), peer) or differences(
            raw[0], rank, raw[1], peer
        )


def differences(mine: dict[str, str], rank: int, theirs: dict[str, str], peer: int) -> str:
    """Returns a sentence that lists the fields in which two calls differ; empty if none do."""
    texts = [
        f"{name} is {text} on rank {rank} and {theirs[name]} on rank {peer}"
        for name, text in mine.items()
        if name in theirs and theirs[name] != text
    ]
    return f"What differs: {'; '.join(texts)}. " if texts else ""


def _word(prepared: PreparedCall, name: str) -> int:
    if name in _READ:
        return int(_READ[name](prepared))
    value, type_ = getattr(prepared.native, name), _TYPES[name]
    if type_ is ctypes.c_float:
        return int(struct.unpack("=I", struct.pack("=f", value))[0])
    return int(bool(value)) if type_ is ctypes.c_void_p else int(value)


def _text_of(bits: int) -> str:
    """Formats a float32 with the fewest digits that identify it."""
    number = struct.unpack("=f", struct.pack("=I", bits))[0]
    texts = (f"{number:.{digits}g}" for digits in range(1, 9))
    exact = (text for text in texts if ctypes.c_float(float(text)).value == number)
    return next(exact, f"{number:.9g}")
